"""The engine against a naive loop and transformers' generate; and what a long prompt does to who is running."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.inputs import ROOT, artifact, last_line, run, spawn
from bench.report import machine, medians, say, show, table

PARITY = ROOT / ".venv-parity" / "bin" / "python"
SCRIPT = ROOT / "tests" / "support" / "parity" / "hf_generate.py"
DEMO = ROOT / "ling3export" / "demo"
PROMPT, ANSWER = 64, 64  # tokens
Flat = dict[str, float]


def theirs(source: Path, counts: Sequence[int], threads: int) -> Flat:
    """Tokens/s of transformers' generate, one batch of each size."""
    command: list[Any] = [
        PARITY,
        SCRIPT,
        source,
        "--threads",
        threads,
        "--prompt",
        PROMPT,
        "--answer",
        ANSWER,
        "--batches",
        ",".join(map(str, counts)),
    ]
    say(f"$ {' '.join(str(part) for part in command)}")
    return dict(last_line(spawn(command, {"OMP_NUM_THREADS": str(threads)})))


def measure(
    given: Path | None, rounds: int, *, tps: Sequence[int], counts: Sequence[int], peer: bool
) -> dict[str, Any]:
    """Medians of ``rounds``; in each round every arm has its turn in a fresh process."""
    source, threads = (given or DEMO).resolve(), len(os.sched_getaffinity(0))
    built = {
        tp: artifact(source, f"engine-tp{tp}", ["--paddings", "16,128,512", "--decode-paddings", "1,16,64", "--tp", tp])
        for tp in tps
    }
    speeds: dict[str, list[Flat]] = {}
    gaps: dict[str, list[Flat]] = {}
    for _ in range(rounds):
        for tp, folder in built.items():
            for arm in ("engine", "no overlap", "naive"):
                found = last_line(run(["bench.engine_ours", arm, folder, PROMPT, ANSWER, ",".join(map(str, counts))]))
                speeds.setdefault(f"tp{tp} {arm}", []).append(found)
            for arm, flat in last_line(run(["bench.engine_gap", folder])).items():
                gaps.setdefault(f"tp{tp} {arm}", []).append(flat)
        if peer:
            speeds.setdefault("transformers", []).append(theirs(source, counts, threads))
    return {
        "benchmark": "engine",
        "machine": machine(),
        "checkpoint": source.name,
        "rounds": rounds,
        "threads": threads,
        "tokens_per_second": {arm: medians(found) for arm, found in speeds.items()},
        "gaps_ms": {arm: medians(found) for arm, found in gaps.items()},
    }


def main(given: Path | None, rounds: int, **options: Any) -> dict[str, Any]:
    """Measures and prints."""
    result = measure(given, rounds, **options)
    speeds, gaps = result["tokens_per_second"], result["gaps_ms"]
    counts = [str(count) for count in options["counts"]]
    columns = list(next(iter(gaps.values())))
    show(
        f"Engine on {result['checkpoint']}, bf16, {result['threads']} threads, medians of {result['rounds']}, load "
        f"average {result['machine']['load_average'][0]}",
        [
            table(
                [f"tokens/s, {PROMPT} in, {ANSWER} out, requests at once", *counts],
                [[arm, *(flat.get(count) for count in counts)] for arm, flat in speeds.items()],
            ),
            table(
                ["a 4,000-token prompt arrives beside 8 running, ms", *columns],
                [[arm, *flat.values()] for arm, flat in gaps.items()],
            ),
        ],
        result,
    )
    return result
