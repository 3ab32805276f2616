"""A decode step of two artifacts in turn, in one process: so other work on the machine meets both alike."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.peers_ours import step_ms
from bench.report import machine, say, show, table
from ling3export.runners.engine.engine import Engine

PROMPT, ANSWER = 8, 9  # tokens


def main(first: Path, second: Path, rounds: int, counts: Sequence[int]) -> None:
    """Prints for each count both medians, both fastest steps, and the median of the rounds' ratios."""
    rows, result = [], {}
    with Engine(first, report=say) as one, Engine(second, report=say) as two:
        one.settle()
        two.settle()
        for count in counts:
            runs = []
            for number in range(rounds):
                prompts = np.random.default_rng(number).integers(0, one.manifest.vocab_size, (count, PROMPT)).tolist()
                runs.append([step_ms(engine, prompts, ANSWER) for engine in (one, two)])
            pairs = np.array(runs[1:] or runs)  # the first warms up
            ratio = statistics.median((pairs[:, 0] / pairs[:, 1]).tolist())
            rows.append([count, *np.median(pairs, 0).tolist(), *pairs.min(0).tolist(), ratio])
            result[f"decode {count}"] = {"ms": pairs.tolist(), "ratio": ratio}
    head = ["sequences", "first ms", "second ms", "first, fastest", "second, fastest", "first / second"]
    show(f"a decode step of {first} and of {second}, in turn", [table(head, rows)], {"machine": machine()} | result)
