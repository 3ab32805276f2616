"""A replica for ``bench fleet``: ``python -m bench.fleet_ours ARTIFACT SPEED [CORE…]``; a line of JSON on stdin is an
order. SPEED is ``[CALL, TOKEN, ROW]``, the milliseconds of a device that computes in the processor's place (``Speed``),
or ``null``. Cores that are named are its own.

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
from typing import Any, ClassVar, NamedTuple
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


class Speed(NamedTuple):
    """Milliseconds of a device's calls, sampling included: of each call, and more for its padding.

    Attributes:
        call: Of each.
        token: More for each padded token of a prefill call.
        row: More for each row of a decode call.
    """

    call: float
    token: float
    row: float

    def seconds(self, phase: str, padding: int) -> float:
        """Those of a call."""
        return (self.call + padding * (self.token if phase == "prefill" else self.row)) / 1e3


class Device:
    """A model runner in whose place a device seems to compute, one call after the other.

    The programs run on the processor. Who waits for what a call gives sleeps until the device would have it. It begins
    a call when that is dispatched, or when it has done the one before. So the host is as idle as beside an accelerator.

    Args:
        runner: Runs the programs, in less time than the device.
        speed: Of the device.
    """

    def __init__(self, runner: Any, speed: Speed) -> None:
        self._runner, self._speed = runner, speed
        self._free = 0.0  # when the device has done all that it was given
        self._due: dict[int, float] = {}  # when it has an array that is waited for, by the array's id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, phase: str, padding: int, fields: Any) -> Any:
        """Dispatches a call."""
        self._free = max(self._free, now()) + self._speed.seconds(phase, padding)
        logits = self._runner.step(phase, padding, fields)
        self._due[id(logits)] = self._free
        return logits

    def sample(self, logits: Any, rows: int, fields: Any) -> Any:
        """Tokens, which are there when the call is done; nobody waits for its logits then."""
        due = self._due.pop(id(logits), self._free)
        tokens = self._runner.sample(logits, rows, fields)
        self._due[id(tokens)] = due
        return tokens

    def read(self, array: Any) -> Any:
        """Waits for an array, and fetches it."""
        found = self._runner.read(array)
        self._sleep(array)
        return found

    def wait(self, array: Any) -> None:
        """Waits until an array is computed."""
        self._runner.wait(array)
        self._sleep(array)

    def _sleep(self, array: Any) -> None:
        time.sleep(max(0.0, self._due.pop(id(array), 0.0) - now()))


class Watched(Scheduler):
    """Notes of each call its cell, what it held, and for how long the engine had it.

    That is from its dispatch, or from the end of the call before it if that came later, until its tokens were read.
    """

    notes: ClassVar[list[Note]] = []
    speed: ClassVar[Speed | None] = None  # of a device in the processor's place

    def __init__(self, backend: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(backend if self.speed is None else Device(backend, self.speed), *arguments, **named)
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
    artifact, speed, *cores = sys.argv[1:]
    Watched.speed = Speed(*given) if (given := json.loads(speed)) else None
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores})
    with (
        mock.patch.object(scheduler, "Scheduler", Watched),
        Engine(artifact, prefix_cache=False, report=lambda text: None) as engine,
    ):
        engine.settle()
        engine.generate([[1, 2, 3]], max_tokens=4)
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(obeyed(engine, json.loads(line))), flush=True)
        assert engine.stats()["compile_events"] == 0


if __name__ == "__main__":
    main()
