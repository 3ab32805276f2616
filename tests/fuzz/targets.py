"""The targets by name with their cases in `make test`, more where a case is cheap; and more cases of `make extras`."""

from tests.fuzz import (
    answer_cases,
    artifact_cases,
    build_cases,
    catalog_cases,
    graph_cases,
    network_cases,
    runner_cases,
    trace_cases,
    transfer_cases,
)

TARGETS = {
    "manifest": (artifact_cases.manifests, 50),
    "calibration": (artifact_cases.calibrations, 100),
    "recompiled": (artifact_cases.recompiled, 15),
    "portable": (artifact_cases.portable, 150),
    "tokenizer": (artifact_cases.tokenizers, 150),
    "catalog": (catalog_cases.catalogs, 80),
    "signatures": (catalog_cases.signatures, 100),
    "config": (build_cases.configs, 150),
    "shard": (build_cases.shards, 200),
    "forms": (build_cases.forms, 150),
    "index": (build_cases.indexes, 150),
    "answers": (answer_cases.answers, 1000),
    "prompts": (runner_cases.prompts, 150),
    "together": (runner_cases.together, 20),
    "evaluation": (runner_cases.evaluations, 100),
    "tasks": (runner_cases.tasks, 100),
    "cache": (build_cases.caches, 30),
    "body": (network_cases.bodies, 150),
    "greeting": (network_cases.greetings, 6),
    "request": (network_cases.requests, 100),
    "object": (transfer_cases.objects, 150),
    "pull": (transfer_cases.pulls, 60),
    "hlo": (graph_cases.optimized_programs, 300),
    "stablehlo": (graph_cases.portable_programs, 150),
    "packed": (graph_cases.packed_texts, 300),
    "summaries": (graph_cases.summaries, 300),
    "budgets": (graph_cases.budgets, 300),
    "saved": (transfer_cases.saved, 150),
    "trace": (trace_cases.traces, 300),
}

EXTRAS = {"together": range(20, 180), "greeting": range(6, 20)}  # further cases, which take a minute
