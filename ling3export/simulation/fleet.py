"""A fleet in simulated time: a router before replicas that do both phases, or prefill and decode apart."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from ling3export.simulation.replica import Ask, Machine, Replica, Times

POLICIES = ("round_robin", "cache_aware")
UNEVEN, SPARE = 1.5, 8  # a home replica with more than this times the mean load, and this many, is passed by


@dataclass(frozen=True)
class Fleet:
    """What is simulated.

    Attributes:
        times: What the calls of a replica take: alone on its machine or, if there are more, with that many busy ones on
            the one machine of all.
        both: Replicas that prefill and decode.
        prefill: Replicas that prefill alone; none without ``decode``.
        decode: Replicas that decode alone.
        policy: ``round_robin``; or ``cache_aware``: prompts that begin alike go to one replica while it is not much
            fuller than the others, and whatever else to the emptier one of two.
        router_call: Seconds of the router for each request; it does one thing at a time.
        router_token: And for each token that it passes on.
        handover: Seconds that the state of a sequence takes from a prefill to a decode replica.
        handover_token: And for each token of its prompt.
        failures: Seconds between two failures of a replica, on average; 0 for none.
        restart: Seconds until a replica that failed is there again.
    """

    times: tuple[Times, ...]
    both: int = 0
    prefill: int = 0
    decode: int = 0
    policy: str = "round_robin"
    router_call: float = 0.0
    router_token: float = 0.0
    handover: float = 0.0
    handover_token: float = 0.0
    failures: float = 0.0
    restart: float = 0.0


@dataclass
class Outcome:
    """What became of the requests.

    Attributes:
        ended: Those that were answered, in the order of their ends.
        lost: How many were not.
        seconds: Until the last end.
        busy: The share of that time in which the replicas were busy, by kind.
        router: The same for the router.
        events: Of the simulation.
    """

    ended: list[Ask] = field(default_factory=list)
    lost: int = 0
    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    router: float = 0.0
    events: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of all answers, over the whole time."""
        return sum(ask.output for ask in self.ended) / self.seconds

    @property
    def capacity(self) -> float:
        """Requests a second between a quarter and three quarters of the ends: for requests that all wait at once."""
        ends = [ask.last for ask in self.ended]
        low, high = len(ends) // 4, 3 * len(ends) // 4
        return (high - low) / (ends[high] - ends[low])

    def first_token(self) -> tuple[float, float]:
        """Median and p99 of the seconds until the first token."""
        return _spread([ask.first - ask.at for ask in self.ended])

    def each_token(self) -> tuple[float, float]:
        """Median and p99 of the seconds for each token behind the first, by request."""
        return _spread([(ask.last - ask.first) / (ask.output - 1) for ask in self.ended if ask.output > 1])


def _spread(seconds: list[float]) -> tuple[float, float]:
    median, p99 = np.percentile(seconds or [0.0], (50, 99))
    return float(median), float(p99)


class _Run:
    def __init__(self, fleet: Fleet, asks: Iterator[Ask], seed: int) -> None:
        self.env, self.fleet, self.outcome = simpy.Environment(), fleet, Outcome()
        self.random, self._asks, self._turn = random.Random(seed), asks, 0
        self._router_free = self._router_seconds = 0.0
        self._open, self._more = 0, True
        one = Machine(*fleet.times) if len(fleet.times) > 1 else None
        kinds = [("both", fleet.both), ("prefill", fleet.prefill), ("decode", fleet.decode)]
        self.replicas: dict[str, list[Replica]] = {kind: [] for kind, _ in kinds}
        for kind, count in kinds:
            for _ in range(count):
                number = sum(map(len, self.replicas.values()))
                machine = one or Machine(*fleet.times)
                handed = self._hand_over if kind == "prefill" else None
                self.replicas[kind].append(Replica(self.env, number, machine, self._done, handed))
        self._first = self.replicas["both"] + self.replicas["prefill"]

    def run(self) -> Outcome:
        self._arrive()
        if self.fleet.failures:
            for replica in (each for kind in self.replicas.values() for each in kind):
                self._after(self.random.expovariate(1 / self.fleet.failures), self._fail, replica)
        while self._more or self._open:
            self.env.step()
            self.outcome.events += 1
        seconds = self.outcome.seconds = self.env.now
        for kind, replicas in self.replicas.items():
            if replicas:
                self.outcome.busy[kind] = sum(each.seconds for each in replicas) / len(replicas) / seconds
        self.outcome.router = self._router_seconds / seconds
        return self.outcome

    def _after(self, seconds: float, call: Callable[[Any], None], what: Any) -> None:
        self.env.timeout(seconds).callbacks.append(lambda _: call(what))

    def _arrive(self, _: object = None) -> None:
        """Sends what arrives now through the router, and waits for the next."""
        while (ask := next(self._asks, None)) is not None:
            self._open += 1
            if ask.at > self.env.now:
                self._after(ask.at - self.env.now, self._arrived, ask)
                return
            self._route(ask)
        self._more = False

    def _arrived(self, ask: Ask) -> None:
        self._route(ask)
        self._arrive()

    def _route(self, ask: Ask) -> None:
        service = self.fleet.router_call + self.fleet.router_token * ask.output
        if not service:
            return self._give(ask)
        self._router_seconds += service
        self._router_free = max(self._router_free, self.env.now) + service
        return self._after(self._router_free - self.env.now, self._give, ask)

    def _give(self, ask: Ask) -> None:
        replicas = self._first
        if self.fleet.policy == "cache_aware" and ask.prefix >= 0:
            home = replicas[ask.prefix % len(replicas)]
            if home.up and home.load <= UNEVEN * self._open / len(replicas) + SPARE:
                return home.take(ask)
        if self.fleet.policy == "cache_aware":
            return self._emptier(replicas, ask)
        for _ in replicas:
            replica = replicas[self._turn % len(replicas)]
            self._turn += 1
            if replica.up:
                return replica.take(ask)
        return self._done(ask, True)

    def _emptier(self, replicas: list[Replica], ask: Ask) -> None:
        some = [each for each in self.random.choices(replicas, k=2) if each.up] or [
            each for each in replicas if each.up
        ]
        if not some:
            return self._done(ask, True)
        return min(some, key=lambda each: each.load).take(ask)

    def _hand_over(self, ask: Ask) -> None:
        seconds = self.fleet.handover + self.fleet.handover_token * ask.prompt
        self._after(seconds, lambda each: self._emptier(self.replicas["decode"], each), ask)

    def _fail(self, replica: Replica) -> None:
        replica.fail()
        self._after(self.fleet.restart, self._return, replica)

    def _return(self, replica: Replica) -> None:
        replica.up = True
        self._after(self.random.expovariate(1 / self.fleet.failures), self._fail, replica)

    def _done(self, ask: Ask, lost: bool) -> None:
        self._open -= 1
        if lost:
            self.outcome.lost += 1
        else:
            self.outcome.ended.append(ask)


def simulate(fleet: Fleet, asks: Iterable[Ask], seed: int = 0) -> Outcome:
    """Runs a fleet until every request has ended.

    Args:
        fleet: The replicas.
        asks: Requests in the order of their arrivals; they are filled in.
        seed: Of failures, and of choices of the router.
    """
    return _Run(fleet, iter(asks), seed).run()
