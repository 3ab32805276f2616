"""Attention and FFN apart: what each phase takes, how long each side waits, and where the split would pay on paper."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from bench.inputs import artifact
from bench.report import machine, say, show, table
from ling3export.artifacts.manifest import read_manifest
from ling3export.checkpoint.synth import config_fields
from ling3export.cost.roofline import TOKENS, roofline_bound
from ling3export.model.config import Config
from ling3export.plan.chips import CHIPS
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from ling3export.runners.engine.inputs import decode_fields
from ling3export.runners.ffn import WAIT, WHOLE
from ling3export.runners.load.loader import load

RUNNER = (sys.executable, "-m", "ling3export.runners.cli")
PROMPT, ANSWER = 8, 32  # tokens
BATCHES, WIDTHS = (16, 64, 256, 1024), (512, 2048, 8192)  # sequences of an attention group, expert widths
LINKS = (25, 100, 400)  # GB/s of a group of 16 chips, each way
MOST = 8  # groups of a kind
WARM, STEPS = 4, 32  # fused steps that are not measured, and that are


def stats(text: str) -> dict[str, Any]:
    """What ``--stats`` printed."""
    line = next(line for line in text.splitlines() if line.startswith("stats: "))
    found: dict[str, Any] = json.loads(line.removeprefix("stats: "))
    return found


def run(folder: Path, sessions: int, workers: int, micro_batches: int) -> dict[str, Any]:
    """Attention processes and workers until each session has its answers; without workers one fused engine.

    Returns:
        Tokens of each session, and the stats of both sides; seconds from the first process's start to the last end.
    """
    manifest = read_manifest(folder)
    running, vocabulary = manifest.plan.max_running, manifest.vocab_size
    names = [f"bench-{time.monotonic_ns()}.{number}" for number in range(workers)]
    with tempfile.TemporaryDirectory() as place:
        commands = [
            [*RUNNER, "ffn-worker", folder, "--context", name, "--sessions", sessions, "--micro-batches", micro_batches,
             "--share", f"{number}/{workers}", "--stats", "--wait", 10 * WAIT]
            for number, name in enumerate(names)
        ]  # fmt: skip
        for session in range(sessions):
            prompts = Path(place, f"{session}.jsonl")
            ids = [[(7 * session + 3 * row + at) % vocabulary for at in range(PROMPT)] for row in range(running)]
            prompts.write_text("".join(json.dumps({"prompt_ids": each}) + "\n" for each in ids))
            ffn = [word for name in names for word in ("--ffn", name)]
            commands.append([*RUNNER, "generate", folder, "--prompt-file", prompts, "--max-tokens", ANSWER,
                             "--ignore-eos", "--stats", "--ffn-timeout", 10 * WAIT, *ffn])  # fmt: skip
        started = time.perf_counter()
        processes = [
            subprocess.Popen([str(word) for word in each], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for each in commands
        ]
        said = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == 0, errors
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "tokens": [out for out, _ in said[workers:]],
        "ffn": [stats(errors) for _, errors in said[:workers]],
        "attention": [stats(errors) for _, errors in said[workers:]],
    }


def fused_step(folder: Path) -> float:
    """Seconds of one ``decode`` with every row in use, until its logits are on the host: a mean, as phases are."""
    loaded = load(folder, check="programs", report=lambda _: None, phases=WHOLE)
    target, padding = loaded.record, loaded.record.paddings("decode")[-1]
    pages = -(-(PROMPT + ANSWER) // target.state.page_size)
    table = np.zeros((padding + 1, target.state.max_pages), np.int32)
    table[1:, :pages] = 1 + np.arange(padding * pages).reshape(padding, pages)
    rows, seconds = range(padding), []
    for step in range(WARM + STEPS):
        fields = decode_fields(padding, [1 + row for row in rows], [step % ANSWER] * padding, table, [1] * padding)
        started = time.perf_counter()
        loaded.runner.read(loaded.runner.step("decode", padding, fields))
        seconds.append(time.perf_counter() - started)
    return statistics.mean(seconds[WARM:])


def phases(found: dict[str, Any]) -> list[list[Any]]:
    """Rows of a table: side, phase, calls, µs a call, share of the side's time; the time is the decode steps' own."""
    rows = []
    for side, seen in (("attention", found["attention"][0]["split"]), ("FFN", found["ffn"][0])):
        seconds, calls = seen["seconds"], seen["calls"]
        whole = seconds.get("decode") or sum(seconds.values())
        for phase, spent in seconds.items():
            if phase != "decode":
                rows.append([side, phase, calls[phase], 1e6 * spent / calls[phase], f"{spent / whole:.0%}"])
        rows.append(
            [side, "bytes sent", calls.get("send_attn_output", calls.get("send_ffn_output")), None, seen["bytes_sent"]]
        )
    return rows


def measured(folder: Path, ways: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Each way's answers against one engine's, and its phases."""
    alone: list[dict[str, Any]] = []
    rows, tables, result = [], [], {}
    say("one fused decode step")
    with ProcessPoolExecutor(1, get_context("spawn")) as alone_in_process:
        fused_seconds = alone_in_process.submit(fused_step, folder).result()
    for sessions, workers, micro_batches in ways:
        while len(alone) < sessions:
            say(f"fused engine, prompts of session {len(alone)}")
            whole = run(folder, len(alone) + 1, 0, 0)
            alone.append(whole)
        say(f"{sessions}A{workers}F, {micro_batches} micro batches")
        found = run(folder, sessions, workers, micro_batches)
        fused = alone[sessions - 1]
        same = found["tokens"] == fused["tokens"]
        decoded = found["attention"][0]["split"]
        steps = decoded["calls"]["decode"]
        whole = decoded["seconds"]["decode"]
        waiting, step = decoded["seconds"]["recv_ffn_output"] / whole, whole / steps
        idle = found["ffn"][0]["seconds"]["recv_attn_output"] / sum(found["ffn"][0]["seconds"].values())
        name = f"{sessions}A{workers}F x {micro_batches}"
        rows.append(
            [
                name,
                "yes" if same else "NO",
                steps,
                1e3 * step,
                step / fused_seconds,
                f"{waiting:.0%}",
                f"{idle:.0%}",
                found["seconds"] / fused["seconds"],
            ]
        )
        tables.append(table([name, "phase", "calls", "µs a call", "share"], phases(found)))
        result[name] = {
            "same": same,
            "seconds": found["seconds"],
            "fused_seconds": fused["seconds"],
            "step_seconds": step,
            "fused_step_seconds": fused_seconds,
            "attention": decoded,
            "ffn": found["ffn"][0],
        }
    head = [
        "way",
        "tokens equal",
        "steps",
        "ms a step",
        "fused step = 1",
        "attention idle",
        "FFN idle",
        "whole run, fused = 1",
    ]
    tables = [table(["one fused decode step", "ms"], [["of all rows", 1e3 * fused_seconds]]), *tables]
    show("decode steps through FFN workers", [table(head, rows), *tables], {"machine": machine(), **result})
    assert all(each["same"] for each in result.values())
    return result


def paper() -> None:
    """At which batch, expert width and link speed the split would pay on v6e, by roofline bounds alone.

    Groups of 16 chips: A for attention, with ``batch`` sequences each, and F that share the experts. Enough micro
    batches are in flight to hide whatever is not the slowest of attention, experts and link. It is compared with as
    many chips and as many sequences in two forms that are not split: replicas, each with all experts; and experts
    spread over all groups, whose link is hidden as well. A and F are the best of 1 to 8.
    """
    full, rows, found = Config.from_dict(config_fields("full", {}), where="preset full"), [], []
    for width in WIDTHS:
        for batch in BATCHES:
            for link in LINKS:
                groups = [(a, f) for a in range(1, MOST + 1) for f in range(1, MOST + 1)]
                each = [priced(replace(full, moe_intermediate_size=width), batch, link, a, f) for a, f in groups]
                best = max(each, key=lambda row: min(row["replicas"], row["spread"]) / row["split"])
                gains = [best[name] / best["split"] for name in ("replicas", "spread")]
                parts = [1e6 * best[name] for name in ("attention", "experts", "link")]
                rows.append([width, batch, link, f"{best['A']}A{best['F']}F", *parts, *gains])
                found.append(
                    {
                        "width": width,
                        "batch": batch,
                        "GB/s": link,
                        "A": best["A"],
                        "F": best["F"],
                        "over_replicas": round(gains[0], 3),
                        "over_spread": round(gains[1], 3),
                    }
                )
    head = [
        "expert width",
        "sequences",
        "GB/s",
        "best",
        "attention µs",
        "experts µs",
        "link µs",
        "over replicas",
        "over spread experts",
    ]
    show(
        "one layer on v6e by roofline bounds, at equal chips and sequences: how much faster the split is",
        [table(head, rows)],
        {"chip": "v6e", "rows": found},
    )


def priced(config: Config, batch: int, link: float, attention: int, ffn: int) -> dict[str, Any]:
    """Seconds of one layer, split and in both other forms, and the parts of the split."""
    chip, geometry = CHIPS["tpu", "v6e"], make_plan(config, Options(), "tpu:v6e:4x4").geometry
    total, sequences = attention + ffn, attention * batch

    @cache
    def seconds(phase: str, padding: int) -> float:
        return roofline_bound(config, geometry, phase, padding, chip, TOKENS).seconds

    def experts(tokens: int, groups: int) -> float:
        """Of a group that has 1 / groups of the experts, as many of the pairs, and of the weights that they touch."""
        return seconds("experts", tokens * config.num_experts_per_tok) / groups

    share = -(-sequences // total)  # of a group that attends and has experts
    moved = batch * config.num_experts_per_tok * config.hidden_size * 2 / (link * 1e9)  # of an attention group
    parts = {
        "attention": seconds("attend", batch),
        "experts": experts(sequences, ffn),
        "link": moved * max(1.0, attention / ffn),
    }
    spread = max(seconds("attend", share) + experts(sequences, total), moved * share / batch * (total - 1) / total)
    return {
        "A": attention,
        "F": ffn,
        **parts,
        "split": max(parts.values()),
        "spread": spread,
        "replicas": seconds("attend", share) + experts(share, 1),
    }


def main(folder: Path | None, checkpoint: Path | None, ways: list[tuple[int, int, int]]) -> None:
    """Prints the table on paper, and unless ``ways`` is empty, what was measured."""
    paper()
    if ways:
        if folder is None:
            from bench.inputs import checkpoint as made

            most = max(sessions for sessions, _, _ in ways)
            options = ["--tp", 1, "--paddings", 16, "--decode-paddings", "2", "--max-running", 8, "--context", 512,
                       "--dtype", "float32", "--afd", most]  # fmt: skip
            folder = artifact(made(checkpoint), "afd", options)
        measured(folder, ways)
