"""Cost of a prefill token and of a decode step after long prompts, in our engine and in llama.cpp.

A checkpoint of full width and few layers, one sequence, random tokens. Compare ratios within one run.
"""

import json
import os
from pathlib import Path
from typing import Any

from bench.inputs import artifact, checkpoint, last_line, run, spawn
from bench.long_ours import ANSWER, SPAN
from bench.peers import gguf, read_once
from bench.report import machine, medians, say, show, table

OPTIONS = ["--tp", 1, "--max-running", 2, "--snapshots", 8, "--paddings", "16,512", "--decode-paddings", 1]
CONTEXT = 32768 + SPAN + 2 * ANSWER  # runs of shorter prompts use the same artifact
Flat = dict[str, float]


def llama(file: Path, sources: Path, lengths: list[int], threads: int) -> Flat:
    """Runs llama-bench, which fills the cache to a depth once for both measurements."""
    read_once(file)
    command = [sources / "build" / "bin" / "llama-bench", "-m", file, "-t", threads, "-r", 1, "-o", "json"]
    rows = json.loads(spawn([*command, "-p", SPAN, "-n", ANSWER, "-d", ",".join(map(str, lengths))], {}))
    return {f"{'prefill' if row['n_prompt'] else 'decode'} {row['n_depth']}": float(row["avg_ts"]) for row in rows}


def main(
    chosen: Path | None, layers: int, lengths: list[int], rounds: int, sources: Path | None, only: str | None = None
) -> dict[str, Any]:
    """Measures and prints medians. In each round every arm runs in turn, in a process of its own.

    Args:
        chosen: A checkpoint, or None for one of full width.
        layers: Layers of the default checkpoint.
        lengths: Tokens of the prompts, ascending.
        rounds: Number of rounds.
        sources: llama.cpp's folder; None leaves it out.
        only: ``ling3export`` or ``llama.cpp`` to measure only one of them.
    """
    context = max(CONTEXT, max(lengths) + SPAN + 2 * ANSWER)
    source, threads = checkpoint(chosen, "full", layers, context), len(os.sched_getaffinity(0))
    folder = artifact(source, f"long-{context}", [*OPTIONS, "--context", context])
    runs: dict[str, list[Flat]] = {}
    for _ in range(rounds):
        if only != "llama.cpp":
            read_once(folder)
            times: Flat = last_line(run(["bench.long_ours", folder, ",".join(map(str, lengths))]))
            runs.setdefault("ling3export", []).append(times)
        if sources is not None and only != "ling3export":
            runs.setdefault("llama.cpp", []).append(llama(gguf(source, sources), sources, lengths, threads))
        say(json.dumps({arm: times[-1] for arm, times in runs.items()}))
    speeds = {arm: medians(times) for arm, times in runs.items()}
    steps = [f"{kind} {length}" for kind in ("prefill", "decode") for length in lengths]
    growth = {arm: {step: flat[f"{step.split()[0]} {lengths[0]}"] / flat[step] for step in steps}
              for arm, flat in speeds.items()}  # fmt: skip
    environment = machine()
    result = {
        "benchmark": "long",
        "machine": environment,
        "checkpoint": source.name,
        "rounds": rounds,
        "threads": threads,
        "tokens_per_second": speeds,
        "times_the_first": growth,
    }
    show(
        f"{source.name}, bf16, {threads} threads, one sequence; prefill of {SPAN} tokens behind each length, and "
        f"decode behind it; medians of {rounds}, load average {environment['load_average'][0]}",
        [
            table(
                ["", *(f"{arm}, tokens/s" for arm in speeds), *(f"{arm}, times the first" for arm in speeds)],
                [[step, *(flat[step] for flat in (*speeds.values(), *growth.values()))] for step in steps],
            )
        ],
        result,
    )
    return result
