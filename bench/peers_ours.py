"""Tokens/s through ``Engine`` with its defaults: ``python -m bench.peers_ours ARTIFACT PREFILLS COUNTS``; as JSON.

Decode is what COUNTS sequences get from the moment at which all have their first token until the end: prompts are
prefilled before. Prefill is the time until the first token of one prompt. Medians of REPEATS, after one call that is
dropped.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.inputs import numbers

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine

REPEATS, PROMPT, ANSWER = 3, 16, 49


def step_ms(engine: "Engine", prompts: list[list[int]], answer: int) -> float:
    """Milliseconds of a decode step, from the moment at which all prompts have their first token of ``answer``."""
    done = engine.generate(prompts, max_tokens=answer, ignore_eos=True)
    return (max(each.e2e_ms for each in done) - max(each.ttft_ms for each in done)) / (answer - 1)


def main() -> None:
    from ling3export.runners.engine.engine import Engine

    folder, lengths, counts = Path(sys.argv[1]), numbers(sys.argv[2]), numbers(sys.argv[3])
    dice = np.random.default_rng(0)
    found: dict[str, float] = {}
    with Engine(folder, report=lambda text: None) as engine:
        engine.settle()

        def prompts(count: int, length: int) -> list[list[int]]:
            return dice.integers(0, engine.manifest.vocab_size, (count, length)).tolist()

        for length in lengths:
            seconds = [engine.generate(prompts(1, length), max_tokens=1)[0].ttft_ms / 1e3 for _ in range(REPEATS + 1)]
            found[f"prefill {length}"] = length / statistics.median(seconds[1:])
        for count in counts:
            speeds = []
            for _ in range(REPEATS + 1):
                speeds.append(1e3 * count / step_ms(engine, prompts(count, PROMPT), ANSWER))
            found[f"decode {count}"] = statistics.median(speeds[1:])
        assert engine.stats()["compile_events"] == 0
    print(json.dumps(found))


if __name__ == "__main__":
    main()
