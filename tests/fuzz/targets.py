"""Targets by name, with their cases in `make test` (more for cheap ones) and the further cases of `make extras`."""

from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path

from tests.fuzz.harness import Case, Target


def of(name: str) -> Target:
    """A target by its module and function.

    The module is imported when the target starts: some of the others need jax.
    """

    def target(folder: Path) -> AbstractContextManager[Case]:
        module, _, function = name.partition(".")
        started: AbstractContextManager[Case] = getattr(import_module(f"tests.fuzz.{module}"), function)(folder)
        return started

    return target


TARGETS = {
    "manifest": (of("artifact_cases.manifests"), 50),
    "calibration": (of("artifact_cases.calibrations"), 100),
    "recompiled": (of("artifact_cases.recompiled"), 15),
    "portable": (of("artifact_cases.portable"), 150),
    "tokenizer": (of("artifact_cases.tokenizers"), 150),
    "catalog": (of("catalog_cases.catalogs"), 80),
    "signatures": (of("catalog_cases.signatures"), 100),
    "config": (of("build_cases.configs"), 150),
    "shard": (of("build_cases.shards"), 200),
    "forms": (of("build_cases.forms"), 150),
    "index": (of("build_cases.indexes"), 150),
    "answers": (of("answer_cases.answers"), 1000),
    "prompts": (of("runner_cases.prompts"), 150),
    "together": (of("runner_cases.together"), 20),
    "evaluation": (of("runner_cases.evaluations"), 100),
    "tasks": (of("runner_cases.tasks"), 100),
    "cache": (of("build_cases.caches"), 30),
    "body": (of("network_cases.bodies"), 150),
    "greeting": (of("network_cases.greetings"), 6),
    "request": (of("network_cases.requests"), 100),
    "object": (of("transfer_cases.objects"), 150),
    "pull": (of("transfer_cases.pulls"), 60),
    "hlo": (of("graph_cases.optimized_programs"), 300),
    "stablehlo": (of("graph_cases.portable_programs"), 150),
    "packed": (of("graph_cases.packed_texts"), 300),
    "summaries": (of("graph_cases.summaries"), 300),
    "budgets": (of("graph_cases.budgets"), 300),
    "saved": (of("transfer_cases.saved"), 150),
    "trace": (of("trace_cases.traces"), 300),
}

EXTRAS = {"together": range(20, 180), "greeting": range(6, 20)}  # further cases, which take a minute
