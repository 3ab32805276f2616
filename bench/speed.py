"""Tokens/s of an artifact's steps against Hugging Face transformers on the same cores, arms interleaved."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.inputs import ROOT, artifact, checkpoint, last_line, run, spawn
from bench.report import machine, medians, say, show, table

PREFILL = 512
PADDINGS = "16,128,512"
PARITY = ROOT / ".venv-parity" / "bin" / "python"
SCRIPT = ROOT / "tests" / "support" / "parity" / "hf_speed.py"
Flat = dict[str, float]


def ours(built: Path, context: int) -> Flat:
    """Seconds of every step, bandwidth and dispatch, by name."""
    found = last_line(run(["bench.speed_ours", built, context]))
    flat = {f"prefill@{padding}": row["seconds"] for padding, row in found["prefill"].items()}
    for padding, row in found["decode"].items():
        flat[f"decode@{padding}"] = row["seconds"]
        flat[f"decode@{padding} rows"] = row["rows"]
        flat[f"decode@{padding} bytes"] = row["weight_bytes"]
    return flat | {
        "bandwidth": found["read_bandwidth"],
        "dispatch returned": found["dispatch"]["returned_seconds"],
        "dispatch done": found["dispatch"]["done_seconds"],
    }


def theirs(source: Path, experts: str, context: int, batches: Sequence[int], threads: int) -> Flat | None:
    """Seconds of transformers' prefill and decode steps; None where it fails (memory, at full size)."""
    command: list[Any] = [
        PARITY,
        SCRIPT,
        source,
        "--threads",
        threads,
        "--prefill",
        PREFILL,
        "--context",
        context,
        "--batches",
        ",".join(str(batch) for batch in batches),
        *([] if experts == "default" else ["--experts", experts]),
    ]
    say(f"$ {' '.join(str(part) for part in command)}")
    try:
        output = spawn(command, {"OMP_NUM_THREADS": str(threads)})
    except subprocess.CalledProcessError as error:
        say(f"transformers with {experts} experts: exit code {error.returncode}")
        return None
    found = last_line(output.replace("\n", " "))
    return {f"prefill@{PREFILL}": found["prefill"]["seconds"]} | {
        f"decode@{row['batch']}": row["seconds"] for row in found["decode"]
    }


def measure(
    given: Path | None,
    rounds: int,
    *,
    context: int,
    tps: Sequence[int],
    batches: Sequence[int],
    peers: Sequence[str],
    max_running: int,
    kernels: Sequence[str],
) -> dict[str, Any]:
    """Medians of ``rounds`` of every arm; in each round every arm has its turn in a fresh process."""
    source, threads = checkpoint(given), len(os.sched_getaffinity(0))
    decode = sorted({*batches, 1, 16, max_running})
    options: list[Any] = [
        "--paddings",
        PADDINGS,
        "--decode-paddings",
        ",".join(str(b) for b in decode if b <= max_running),
    ]
    options += ["--max-running", max_running, "--context", max(1024, context + 256)]
    built = {
        f"tp{tp}" + (f" {each}" if each != "auto" else ""): artifact(
            source, f"speed-tp{tp}-{each}", ["--tp", tp, "--kernels", each, *options]
        )
        for tp in tps
        for each in kernels
    }
    runs: dict[str, list[Flat]] = {}
    for _ in range(rounds):
        for arm, folder in built.items():
            runs.setdefault(arm, []).append(ours(folder, context))
        for peer in peers:
            if None not in runs.get(peer, []) and (found := theirs(source, peer, context, batches, threads)):
                runs.setdefault(peer, []).append(found)
    seconds = {arm: medians(found) for arm, found in runs.items()}
    return {
        "benchmark": "speed",
        "machine": machine(),
        "checkpoint": source.name,
        "rounds": rounds,
        "threads": threads,
        "context": context,
        "seconds": seconds,
        "ratios": {
            peer: {step: seconds[peer][step] / seconds["tp1"][step] for step in seconds[peer] if step in seconds["tp1"]}
            for peer in peers
            if peer in seconds and "tp1" in seconds
        },
    }


def tokens(step: str, flat: Flat) -> float:
    """How many tokens a step takes or makes."""
    return flat.get(f"{step} rows", float(step.partition("@")[2]))


def main(given: Path | None, rounds: int, **options: Any) -> dict[str, Any]:
    """Measures and prints."""
    result = measure(given, rounds, **options)
    seconds = result["seconds"]
    peers = [peer for peer in options["peers"] if peer in seconds]
    sides = [arm for arm in seconds if arm not in peers]
    steps = [name for name in seconds[sides[0]] if "@" in name and " " not in name]
    rows = []
    for step in steps:
        count = tokens(step, seconds[sides[0]])
        speeds = [count / seconds[arm][step] if step in seconds[arm] else None for arm in (*sides, *peers)]
        rows.append([step, *speeds, *(result["ratios"].get(peer, {}).get(step) for peer in peers)])
    head = ["tokens/s", *sides, *(f"transformers, {peer}" for peer in peers), *(f"tp1 / {peer}" for peer in peers)]
    roof = []
    for arm in sides:
        flat = seconds[arm]
        for step in (step for step in steps if step.startswith("decode")):
            reached = flat[f"{step} bytes"] / flat[step]
            roof.append(
                [
                    f"{arm} {step}",
                    flat[f"{step} bytes"] / 1e6,
                    flat[step] * 1e3,
                    reached / 1e9,
                    100 * reached / flat["bandwidth"],
                ]
            )
    overhead = [
        [
            arm,
            seconds[arm]["dispatch returned"] * 1e6,
            seconds[arm]["dispatch done"] * 1e6,
            seconds[arm]["bandwidth"] / 1e9,
        ]
        for arm in sides
    ]
    show(
        f"Steps of {result['checkpoint']}, bf16, {result['threads']} threads, decode at a context of "
        f"{result['context']}, medians of {rounds}, load average {result['machine']['load_average'][0]}",
        [
            table(head, rows),
            table(["weights read once", "MB", "ms a step", "GB/s", "% of read bandwidth"], roof),
            table(["a step without work", "returned, µs", "done, µs", "read bandwidth, GB/s"], overhead),
        ],
        result,
    )
    return result
