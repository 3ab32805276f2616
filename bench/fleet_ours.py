"""A replica for ``bench fleet``: ``python -m bench.fleet_ours ARTIFACT [CORE…]``; a line of JSON on stdin is an order.
Cores that are named are its own.

An order has the moment (``time.monotonic``) at which all replicas begin. ``at_once`` keeps so many requests in the
engine until ``until``, and answers with the calls that it made; ``trace`` submits requests at their times, and answers
when each one's tokens came, and with the calls.
"""

import json
import os
import random
import sys
import time
from collections import deque
from typing import Any, ClassVar
from unittest import mock

import numpy as np

from ling3export.runners.engine import scheduler
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import RequestHandle
from ling3export.runners.engine.request import Request
from ling3export.runners.engine.scheduler import Emitted, Scheduler
from ling3export.runners.engine.sequence import now

PROMPT, ANSWER = (16, 400), (8, 64)  # tokens: the fewest and the most
Note = tuple[str, int, float]


class Watched(Scheduler):
    """Notes of each call its cell, what it held, and for how long the engine had it.

    That is from its dispatch, or from the end of the call before it if that came later, until its tokens were read.
    """

    notes: ClassVar[list[Note]] = []

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._due: deque[tuple[str, int, float]] = deque()
        self._held, self._began, self._over = 0, 0.0, 0.0

    def step(self) -> list[Emitted]:
        self._held, self._began = self._filled(), now()
        emitted = super().step()
        self._see()
        return emitted

    def _collect(self) -> None:
        self._see()
        cell, held, began = self._due.popleft()
        super()._collect()
        over = now()
        self.notes.append((cell, held, over - max(began, self._over)))
        self._over = over

    def _see(self) -> None:
        """Takes in the call that this step dispatched, if it has."""
        if len(self._flight) > len(self._due):
            self._due.append((self._flight[-1].cell, self._filled() - self._held, self._began))

    def _filled(self) -> int:
        """Tokens and rows of all calls so far that compute logits."""
        return sum(cell.used for name, cell in self.counters.cells.items() if name.startswith(("prefill", "decode")))


def lengths(rng: random.Random) -> tuple[int, int]:
    """Tokens of a prompt and of its answer."""
    return rng.randint(*PROMPT), rng.randint(*ANSWER)


def asked(engine: Engine, prompt: int, answer: int, number: int) -> Request:
    """A request of so many tokens, whose ids begin like those of no other number."""
    ids = np.random.default_rng(number).integers(0, engine.manifest.vocab_size, prompt).tolist()
    return engine.request(ids, answer, ignore_eos=True)


def kept(engine: Engine, at_once: int, until: float, seed: int) -> list[Note]:
    """The calls that were made while so many requests were there all the time."""
    rng, live, count = random.Random(seed), list[RequestHandle](), 0
    Watched.notes.clear()
    while time.monotonic() < until:
        while len(live) < at_once:
            live += engine.submit(asked(engine, *lengths(rng), count))
            count += 1
        live[0].result()
        live = [handle for handle in live if not handle.done]
    notes = [*Watched.notes]
    for handle in live:
        handle.cancel()
    for handle in live:
        handle.result()
    return notes


def traced(engine: Engine, trace: list[list[float]], start: float) -> tuple[list[list[float]], list[Note]]:
    """Submits each ``[second, prompt, answer]``: the seconds of each one's first and last token, and the calls."""
    Watched.notes.clear()
    asks = [asked(engine, int(prompt), int(answer), n) for n, (_, prompt, answer) in enumerate(trace)]
    handles, moments = [], []
    for (at, _, _), ask in zip(trace, asks, strict=True):
        time.sleep(max(0.0, start + at - time.monotonic()))
        moments.append(time.monotonic() - start)
        handles += engine.submit(ask)
    done = [handle.result() for handle in handles]
    ends = [[at + one.ttft_ms / 1e3, at + one.e2e_ms / 1e3] for at, one in zip(moments, done, strict=True)]
    return ends, [*Watched.notes]


def obeyed(engine: Engine, order: dict[str, Any]) -> Any:
    """What an order asks for."""
    time.sleep(max(0.0, order["start"] - time.monotonic()))
    if "trace" in order:
        return traced(engine, order["trace"], order["start"])
    return kept(engine, order["at_once"], order["until"], order["seed"])


def main() -> None:
    """Answers orders until stdin ends."""
    artifact, *cores = sys.argv[1:]
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores})
    with (
        mock.patch.object(scheduler, "Scheduler", Watched),
        Engine(artifact, prefix_cache=False, report=lambda text: None) as engine,
    ):
        engine.generate([[1, 2, 3]], max_tokens=4)
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(obeyed(engine, json.loads(line))), flush=True)
        assert engine.stats()["compile_events"] == 0


if __name__ == "__main__":
    main()
