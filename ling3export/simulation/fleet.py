"""A fleet in simulated time: replicas that do both phases, or prefill and decode apart.

Requests whose prompts begin alike go to one replica while it is not much fuller than the others; all others go to the
emptier one of two.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import simpy

from ling3export.simulation.replica import CallTimes, Replica, SimulatedRequest

UNEVEN, SPARE = 1.5, 8  # a home replica with more than this times the mean load, and this many, is passed by


@dataclass(frozen=True)
class Fleet:
    """What is simulated.

    Attributes:
        times: What the calls of a replica take.
        both: Replicas that prefill and decode.
        prefill: Replicas that prefill alone; none without ``decode``.
        decode: Replicas that decode alone.
        handover: Seconds that the state of a sequence takes from a prefill to a decode replica.
        handover_token: And for each token of its prompt.
    """

    times: CallTimes
    both: int = 0
    prefill: int = 0
    decode: int = 0
    handover: float = 0.0
    handover_token: float = 0.0


@dataclass
class FleetResult:
    """What became of the requests: those that were answered, in the order of their ends."""

    ended: list[SimulatedRequest] = field(default_factory=list)

    @property
    def capacity(self) -> float:
        """Requests a second between a quarter and three quarters of the ends: for requests that all wait at once."""
        ends = [request.last for request in self.ended]
        low, high = len(ends) // 4, 3 * len(ends) // 4
        return (high - low) / (ends[high] - ends[low])

    def first_token(self) -> tuple[float, float]:
        """Median and p99 of the seconds until the first token."""
        return _median_and_p99([request.first - request.at for request in self.ended])

    def each_token(self) -> tuple[float, float]:
        """Median and p99 of the seconds for each token behind the first, by request."""
        behind = [request for request in self.ended if request.output > 1]
        return _median_and_p99([(request.last - request.first) / (request.output - 1) for request in behind])


def _median_and_p99(seconds: list[float]) -> tuple[float, float]:
    median, p99 = np.percentile(seconds or [0.0], (50, 99))
    return float(median), float(p99)


def simulate(fleet: Fleet, requests: Iterable[SimulatedRequest], seed: int = 0) -> FleetResult:
    """Runs a fleet until every request has ended.

    Args:
        fleet: The replicas.
        requests: In the order of their arrivals; they are filled in.
        seed: Of the choice of two replicas.
    """
    return _Run(fleet, iter(requests), seed).run()


class _Run:
    def __init__(self, fleet: Fleet, requests: Iterator[SimulatedRequest], seed: int) -> None:
        self._env, self._fleet, self._result = simpy.Environment(), fleet, FleetResult()
        self._random, self._requests = random.Random(seed), requests
        self._open, self._more = 0, True
        self._first = [self._replica(n, self._done) for n in range(fleet.both)]
        self._first += [self._replica(n, self._hand_over, prefill_only=True) for n in range(fleet.prefill)]
        self._second = [self._replica(fleet.prefill + n, self._done) for n in range(fleet.decode)]

    def _replica(self, number: int, done: Callable[[SimulatedRequest], None], *, prefill_only: bool = False) -> Replica:
        return Replica(self._env, number, self._fleet.times, done, prefill_only=prefill_only)

    def run(self) -> FleetResult:
        self._arrive()
        while self._more or self._open:
            self._env.step()
        return self._result

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._env.timeout(seconds).callbacks.append(lambda _: call())

    def _arrive(self) -> None:
        """Gives away what arrives now, and waits for the next."""
        while (request := next(self._requests, None)) is not None:
            self._open += 1
            if request.at > self._env.now:
                self._after(request.at - self._env.now, partial(self._arrived, request))
                return
            self._give(request)
        self._more = False

    def _arrived(self, request: SimulatedRequest) -> None:
        self._give(request)
        self._arrive()

    def _give(self, request: SimulatedRequest) -> None:
        if request.prefix >= 0:
            home = self._first[request.prefix % len(self._first)]
            if len(home.live) <= UNEVEN * self._open / len(self._first) + SPARE:
                return home.take(request)
        return self._emptier(self._first, request)

    def _emptier(self, replicas: list[Replica], request: SimulatedRequest) -> None:
        min(self._random.choices(replicas, k=2), key=lambda each: len(each.live)).take(request)

    def _hand_over(self, request: SimulatedRequest) -> None:
        seconds = self._fleet.handover + self._fleet.handover_token * request.prompt
        self._after(seconds, lambda: self._emptier(self._second, request))

    def _done(self, request: SimulatedRequest) -> None:
        self._open -= 1
        self._result.ended.append(request)
