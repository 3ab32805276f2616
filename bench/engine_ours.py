"""Tokens/s of many requests at once: ``python -m bench.engine_ours engine|naive|'no overlap' ARTIFACT IN OUT COUNTS``.

The naive loop is the same programs without the engine: one request after the other, smallest paddings, each token read
before the next step.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def speed(answer: Callable[[list[list[int]]], Any], count: int, prompt: int, tokens: int, vocabulary: int) -> float:
    """Tokens/s of ``count`` requests, the better of two rounds."""
    rng = np.random.default_rng(count)
    seconds = []
    for _ in range(2):
        prompts = rng.integers(0, vocabulary, (count, prompt)).tolist()
        started = time.perf_counter()
        answer(prompts)
        seconds.append(time.perf_counter() - started)
    return count * tokens / min(seconds)


def main() -> None:
    arm, folder = sys.argv[1], Path(sys.argv[2])
    prompt, tokens = int(sys.argv[3]), int(sys.argv[4])
    counts = [int(count) for count in sys.argv[5].split(",")]
    if arm == "naive":
        from ling3export.runners.load.loader import load

        loaded = load(folder, report=lambda text: None)
        from bench.drive import Driver

        driver = Driver(loaded.runner, loaded.record)

        def one_by_one(prompts: list[list[int]]) -> None:
            for ids in prompts:
                driver.runner.read(driver.prefill(1, ids))
                for position in range(len(ids), len(ids) + tokens - 1):
                    driver.runner.read(driver.decode(driver.smallest("decode", 1), {1: position}))

        vocabulary = loaded.manifest.vocab_size
        found = {c: speed(one_by_one, c, prompt, tokens, vocabulary) for c in counts}
    else:
        from ling3export.runners.engine.engine import Engine

        with Engine(folder, overlap=arm == "engine", report=lambda text: None) as engine:
            engine.settle()
            vocabulary = engine.manifest.vocab_size

            def all_of_them(prompts: list[list[int]]) -> None:
                engine.generate(prompts, max_tokens=tokens, ignore_eos=True)

            found = {c: speed(all_of_them, c, prompt, tokens, vocabulary) for c in counts}
            assert engine.stats()["compile_events"] == 0
    print(json.dumps(found))


if __name__ == "__main__":
    main()
