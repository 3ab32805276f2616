"""Process start to first token at TP=16: the artifact against the same steps under jit, cold and with a warm cache."""

from pathlib import Path
from typing import Any

from bench.inputs import CACHE, artifact, checkpoint, fresh, last_line, run
from bench.report import machine, medians, show, table

# The persistent cache as it serves best: everything is kept, and nothing in its keys names its folder.
CACHE_SETTINGS = {
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
PREPARATION = "program preparation"
BARS = {"jit, cold": 10.0, "jit, warm cache": 3.0}
STAGES = (
    *("interpreter", "manifest", "imports", "backend", PREPARATION),
    *("programs", "weights", "check", "state", "first step", "whole"),
)


def measure(given: Path | None, rounds: int) -> dict[str, Any]:
    """Seconds of every stage of every arm, medians of ``rounds``; every start is a process of its own.

    The stages of the artifact's start overlap. So its program preparation is measured by itself in another process,
    with nothing beside it; ``programs`` is what the start itself waited for them.
    """
    source = checkpoint(given)
    built = artifact(source, "startup", ["--tp", 16])
    warm = {"JAX_COMPILATION_CACHE_DIR": str(fresh(CACHE / "jax-cache")), **CACHE_SETTINGS}
    arms: dict[str, tuple[str, dict[str, str]]] = {
        "artifact": ("aot", {}),
        "programs": ("programs", {}),
        "jit, cold": ("jit", {"JAX_ENABLE_COMPILATION_CACHE": "false"}),
        "jit, warm cache": ("jit", warm),
    }

    def start(arm: str) -> dict[str, Any]:
        name, environment = arms[arm]
        return last_line(run(["bench.start", name, built, source], **environment))

    start("artifact")  # warms the page cache
    cells = start("jit, warm cache")["compiles"]  # fills the compilation cache
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            runs[arm].append(start(arm))
    _check(runs, cells)
    seconds = {arm: medians([each["seconds"] for each in found]) for arm, found in runs.items()}
    alone = seconds.pop("programs")
    seconds["artifact"][PREPARATION] = alone[PREPARATION]
    cpu = {arm: medians([each["cpu"] for each in found]) for arm, found in runs.items()}
    cpu["artifact"][PREPARATION] = cpu.pop("programs")[PREPARATION]
    return {
        "benchmark": "startup",
        "machine": machine(),
        "checkpoint": source.name,
        "cells": cells,
        "rounds": rounds,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "programs_alone": alone,
        "ratios": {arm: seconds[arm][PREPARATION] / alone[PREPARATION] for arm in BARS},
        "cpu_ratios": {arm: cpu[arm][PREPARATION] / cpu["artifact"][PREPARATION] for arm in BARS},
        "whole_ratios": {arm: seconds[arm]["whole"] / seconds["artifact"]["whole"] for arm in BARS},
    }


def _check(runs: dict[str, list[dict[str, Any]]], cells: int) -> None:
    """Every arm is what it says: nothing compiled, everything compiled, everything from the cache; one token for all.

    Raises:
        AssertionError: One is not.
    """
    assert all(each["compiles"] == each["traces"] == 0 for each in runs["artifact"]), runs["artifact"]
    assert all(each["compiles"] == cells and each["cache_hits"] == 0 for each in runs["jit, cold"]), runs["jit, cold"]
    assert all(each["cache_hits"] == cells for each in runs["jit, warm cache"]), runs["jit, warm cache"]
    tokens = {each["token"] for arm, found in runs.items() if arm != "programs" for each in found}
    assert len(tokens) == 1, f"first token: expected the same from every arm, found {tokens}"


def main(given: Path | None, rounds: int) -> dict[str, Any]:
    """Measures and prints."""
    result = measure(given, rounds)
    wall, cpu = result["seconds"], result["cpu_seconds"]
    rows = [[stage, *(each.get(stage) for each in wall.values())] for stage in STAGES]
    rows += [[f"{stage}, cpu", *(each.get(stage) for each in cpu.values())] for stage in (PREPARATION, "whole")]
    kinds = ("ratios", "cpu_ratios", "whole_ratios")
    faster = [
        [f"artifact against {arm}", f"{bar:g}", *(result[kind][arm] for kind in kinds)] for arm, bar in BARS.items()
    ]
    title = (
        f"Start to first token, {result['checkpoint']}, TP=16, {result['cells']} cells, medians of {rounds}, "
        f"load average {result['machine']['load_average'][0]}"
    )
    head = ["times faster", "bar", PREPARATION, "in cpu seconds", "whole start"]
    show(title, [table(["seconds", *wall], rows), table(head, faster)], result)
    return result
