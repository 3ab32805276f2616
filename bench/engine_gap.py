"""Gaps between the tokens of running sequences while a long prompt arrives: ``python -m bench.engine_gap ARTIFACT``.

Eight sequences decode; then a prompt of 4,000 tokens comes. The policy is measured beside two others: turns with the
padding that pays best whoever waits, and prefill first (no decode call while there is a prompt to prefill).
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from ling3export.artifacts.paddings import Shapes
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Completion, Request
from ling3export.runners.engine.scheduler import Scheduler

RUNNING, LONG, OUT, HEAD = 8, 4000, 400, 40


def gaps(engine: Engine) -> dict[str, float]:
    """Milliseconds between tokens, before the prompt and beside it, and the prompt's time to its first token."""
    rng = np.random.default_rng(0)
    vocabulary = engine.manifest.vocab_size

    def asked(length: int, tokens: int) -> Request:
        return Request(tuple(rng.integers(0, vocabulary, length).tolist()), tokens, ignore_eos=True)

    running = engine.submit(*(asked(16, OUT) for _ in range(RUNNING)))
    started = time.perf_counter()
    while not engine.stats()["tokens_out"] >= RUNNING * HEAD:
        time.sleep(0.005)
    arrival = 1e3 * (time.perf_counter() - started)
    (long,) = engine.submit(asked(LONG, 2))
    first = long.result().ttft_ms
    done = [handle.result() for handle in running]
    before, during = split(done, arrival, arrival + first)
    return {
        "p50 before": float(np.percentile(before, 50)),
        "p50": float(np.percentile(during, 50)),
        "p99": float(np.percentile(during, 99)),
        "max": max(during),
        "tokens meanwhile": len(during) / RUNNING,
        "its first token": first,
    }


def split(done: list[Completion], start: float, end: float) -> tuple[list[float], list[float]]:
    """Gaps that ended before ``start``, and those that overlap ``start`` to ``end``; the first few are warming up."""
    before, during = [], []
    for one in done:
        for at, gap in zip(one.token_ms[1:], one.gaps_ms, strict=True):
            if at < start:
                before.append(gap)
            elif at - gap < end:
                during.append(gap)
    return before[RUNNING:], during


def prefill_first(scheduler: Scheduler) -> None:
    """No turns: decode waits until nothing is left to prefill."""
    decode = scheduler._decode
    scheduler._decode = lambda: False if scheduler._prefilling else decode()  # type: ignore[method-assign]


def longest_calls(scheduler: Scheduler) -> None:
    """The same calls, whether sequences wait for them or not."""
    shapes = scheduler._shapes
    scheduler._shapes = Patientless(shapes.prefill, shapes.decode, shapes.chunk, shapes.costs)


class Patientless(Shapes):
    """Chooses as if nobody waited."""

    def cheapest_padding(self, work: int, *, beside_decode: bool = False) -> int:
        return super().cheapest_padding(work)


def main() -> None:
    arms = {"policy": None, "longest calls": longest_calls, "prefill first": prefill_first}
    found = {}
    with Engine(Path(sys.argv[1]), report=lambda text: None) as engine:
        engine.settle()
        assert engine._loop._core is not None
        scheduler = engine._loop._core.scheduler
        engine.generate([[1] * 600], max_tokens=4)
        for arm, change in arms.items():
            kept = scheduler._shapes, scheduler._decode
            scheduler.counters.tokens_out = 0
            if change is not None:
                change(scheduler)
            found[arm] = gaps(engine)
            scheduler._shapes, scheduler._decode = kept  # type: ignore[method-assign]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
