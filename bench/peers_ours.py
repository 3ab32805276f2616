"""Tokens/s through ``Engine`` with its defaults: ``python -m bench.peers_ours ARTIFACT PREFILLS COUNTS``; as JSON.

Decode measures COUNTS sequences from the moment at which all have their first token until the end: prompts are
prefilled before. Prefill is the time until the first token of one prompt. Medians of REPEATS, after one call that is
dropped. A plain read of the same weights, in GB/s, follows in the same process.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.inputs import numbers
from bench.peers import READ

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine

REPEATS, PROMPT, ANSWER = 3, 16, 49
PART, MOST = 16 << 20, 1 << 30  # bytes that a thread of a plain read takes at a time, and bytes in total


def step_ms(engine: "Engine", prompts: list[list[int]], answer: int) -> float:
    """Milliseconds of a decode step, from the moment at which all prompts have their first token of ``answer``."""
    done = engine.generate(prompts, max_tokens=answer, ignore_eos=True)
    return (max(request.e2e_ms for request in done) - max(request.ttft_ms for request in done)) / (answer - 1)


def plain_read(files: Iterable[Path]) -> float:
    """GB/s at which all cores read ``files``, mapped and in memory: the best of REPEATS after a dropped one."""
    parts: list[np.ndarray] = []
    for file in files:
        mapped = np.memmap(file, np.uint8, "r")
        parts += (mapped[at : at + PART].view(np.uint64) for at in range(0, len(mapped) - PART, PART))
    parts, seconds = parts[: MOST // PART], []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for _ in range(REPEATS + 1):
            started = time.perf_counter()
            list(threads.map(np.max, parts))
            seconds.append(time.perf_counter() - started)
    return len(parts) * PART / min(seconds[1:]) / 1e9


def main() -> None:
    from ling3export.runners.engine.engine import Engine

    folder, lengths, counts = Path(sys.argv[1]), numbers(sys.argv[2]), numbers(sys.argv[3])
    dice = np.random.default_rng(0)
    results: dict[str, float] = {}
    with Engine(folder, report=lambda text: None) as engine:
        engine.settle()

        def prompts(count: int, length: int) -> list[list[int]]:
            return dice.integers(0, engine.manifest.vocab_size, (count, length)).tolist()

        for length in lengths:
            seconds = [engine.generate(prompts(1, length), max_tokens=1)[0].ttft_ms / 1e3 for _ in range(REPEATS + 1)]
            results[f"prefill {length}"] = length / statistics.median(seconds[1:])
        for count in counts:
            speeds = []
            for _ in range(REPEATS + 1):
                speeds.append(1e3 * count / step_ms(engine, prompts(count, PROMPT), ANSWER))
            results[f"decode {count}"] = statistics.median(speeds[1:])
        assert engine.stats()["compile_events"] == 0
        results[READ] = plain_read((folder / "weights").iterdir())
    print(json.dumps(results))


if __name__ == "__main__":
    main()
