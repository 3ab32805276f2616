"""A replica for ``bench fleet``: ``python -m bench.fleet_ours ARTIFACT``; a line of JSON on stdin is an order.

An order has the moment (``time.monotonic``) at which all replicas begin. ``cell`` runs calls of one kind until
``until``; ``trace`` submits requests at their times, and answers when each one's tokens came.
"""

import json
import sys
import time
from typing import Any

import numpy as np

from ling3export.runners.engine.engine import Engine

ANSWER = 24  # tokens of a request whose steps are timed


def prompt(engine: Engine, tokens: int, number: int) -> list[int]:
    """Ids that begin like those of no other number."""
    return np.random.default_rng(number).integers(0, engine.manifest.vocab_size, tokens).tolist()


def timed(engine: Engine, phase: str, size: int, until: float) -> float:
    """Seconds of a call: of ``decode`` with ``size`` sequences, of ``prefill`` of ``size`` tokens."""
    largest = max(engine.manifest.targets[engine.target].paddings("prefill"))
    found: list[float] = []
    while not found or time.monotonic() < until:
        if phase == "decode":
            asks = [engine.request(prompt(engine, 16, n), ANSWER, ignore_eos=True) for n in range(size)]
            ends = [one.token_ms for one in engine.complete(asks)]
            # All of them run from the last one's first token until the first one's last.
            first, last = max(times[0] for times in ends), min(times[-1] for times in ends)
            steps = sum(first < at <= last for at in ends[0])
            found.append((last - first) / 1e3 / steps)
        else:  # many are packed into the largest calls; one alone takes the padding of its own
            count = 8 if size == largest else 1
            began = time.perf_counter()
            engine.complete([engine.request(prompt(engine, size, n), 1, ignore_eos=True) for n in range(count)])
            found.append((time.perf_counter() - began) / count)
    return float(np.median(found))


def traced(engine: Engine, trace: list[list[float]], start: float) -> list[list[float]]:
    """Submits each ``[second, prompt, answer]``; for each the seconds of its first and its last token."""
    asks = [
        engine.request(prompt(engine, int(tokens), n), int(answer), ignore_eos=True)
        for n, (_, tokens, answer) in enumerate(trace)
    ]
    handles, moments = [], []
    for (at, _, _), ask in zip(trace, asks, strict=True):
        time.sleep(max(0.0, start + at - time.monotonic()))
        moments.append(time.monotonic() - start)
        handles += engine.submit(ask)
    done = [handle.result() for handle in handles]
    return [[at + one.ttft_ms / 1e3, at + one.e2e_ms / 1e3] for at, one in zip(moments, done, strict=True)]


def main() -> None:
    """Answers orders until stdin ends."""
    with Engine(sys.argv[1], prefix_cache=False, report=lambda text: None) as engine:
        engine.generate([[1, 2, 3]], max_tokens=4)
        print("ready", flush=True)
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            time.sleep(max(0.0, order["start"] - time.monotonic()))
            if "cell" in order:
                found: Any = timed(engine, order["cell"][0], order["cell"][1], order["until"])
            else:
                found = traced(engine, order["trace"], order["start"])
            print(json.dumps(found), flush=True)
        assert engine.stats()["compile_events"] == 0


if __name__ == "__main__":
    main()
