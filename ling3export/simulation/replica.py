"""One replica in simulated time: the calls that the engine's scheduler would make, and how long they take.

The policy is that of ``runners/engine/scheduler.py``: prefill and decode take turns, prompts are packed oldest first at
the padding that pays, and each call is chosen while the one before it runs. Decode steps in which nothing begins or
ends are one event. Pages are counted as the tokens of prompt and answer, taken at admission: no sequence gives way.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import simpy

from ling3export.artifacts.paddings import Shapes


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """A request, and what became of it.

    Attributes:
        at: When it arrives, in seconds.
        prompt: Tokens.
        output: Tokens that it gets.
        prefix: Names what its first ``shared`` tokens have in common with those of others; -1 for nothing.
        shared: Tokens.
        first: When its first token came.
        last: When its last token came.
        cached: Tokens of the prompt that were not computed.
        where: The number of the replica that answers it.
        todo: Tokens of the prompt that are still to be computed.
    """

    at: float
    prompt: int
    output: int
    prefix: int = -1
    shared: int = 0
    first: float = 0.0
    last: float = 0.0
    cached: int = 0
    where: int = -1
    todo: int = 0


@dataclass(frozen=True)
class CallTimes:
    """What the calls of a replica take, and what it holds.

    Attributes:
        prefill: Seconds of a full call by padding in tokens, sampling included.
        decode: Seconds of a step by sequences in it, sampling included: at least at 1 and at ``slots``.
        slots: Sequences that run at once.
        tokens: That the pool holds.
        prefixes: Beginnings that the prefix cache holds; 0 where there is none.
        chunk: Padded tokens a chunk.
        costs: Of prefill calls, as the scheduler takes them (``Shapes``).
    """

    prefill: Mapping[int, float]
    decode: Mapping[int, float]
    slots: int
    tokens: float = float("inf")
    prefixes: int = 0
    chunk: int = 16
    costs: tuple[float, ...] = ()

    @cached_property
    def steps(self) -> list[float]:
        """Seconds of a decode step by the number of sequences, from 0: those of the next larger padding."""
        counts = sorted(self.decode)
        return [0.0, *(self.decode[counts[bisect_left(counts, rows)]] for rows in range(1, self.slots + 1))]

    @cached_property
    def shapes(self) -> Shapes:
        """The paddings as the scheduler knows them."""
        return Shapes(tuple(sorted(self.prefill)), tuple(sorted(self.decode)), self.chunk, self.costs)


@dataclass(slots=True)
class SimulatedCall:
    """A call, or several decode steps in which nothing begins or ends.

    Attributes:
        cell: The phase, and the padding or the number of sequences.
        seconds: Of one step.
        first: Requests whose first token it samples.
        ended: Requests whose last token it samples.
        steps: How many.
    """

    cell: tuple[str, int]
    seconds: float
    first: list[SimulatedRequest] = field(default_factory=list)
    ended: list[SimulatedRequest] = field(default_factory=list)
    steps: int = 1


class Replica:
    """Answers requests, in simulated time.

    Args:
        env: The clock.
        number: Its name.
        times: What its calls take.
        done: Told of each request that ended; of one whose prompt alone is computed here, once that is done.
        prefill_only: Whether other replicas do the decode steps.

    Attributes:
        live: The requests that it was given and that have not ended.
        seconds: How long it was busy.
    """

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        times: CallTimes,
        done: Callable[[SimulatedRequest], None],
        *,
        prefill_only: bool = False,
    ) -> None:
        self.env, self.number, self.times = env, number, times
        self.live: dict[SimulatedRequest, None] = {}
        self.seconds = 0.0
        self._done, self._prefill_only = done, prefill_only
        self._padding: dict[tuple[int, bool], int] = {}
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: deque[SimulatedRequest] = deque()
        # Running requests, by the step that samples their last token.
        self._ends: list[tuple[int, int, SimulatedRequest]] = []
        self._work = self._used = self._step = self._count = 0
        self._held = 0  # tokens
        self._decoded_last = False
        self._call: SimulatedCall | None = None  # that runs
        self._began = 0.0
        self._next: SimulatedCall | None = None
        self._epoch = 0  # of the event that ends the call; an older one says nothing
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    def take(self, *requests: SimulatedRequest) -> None:
        """Gets requests that arrive together; the prompt of one that has a first token was computed elsewhere."""
        for request in requests:
            request.where = self.number
            self.live[request] = None
        self._waiting += requests
        if self._call is None:
            self._advance()
        elif self._used - len(self._call.ended) < self.times.slots:
            self._cut()

    def _cut(self) -> None:
        """Ends a row of decode steps behind the one that is chosen already: something else may follow."""
        call = self._call
        assert call is not None
        if self._next is None:
            steps = min(call.steps, int((self.env.now - self._began) / call.seconds) + 1)
            self._step -= call.steps - steps
            call.steps = steps
            self._next = self._decode()
            self._end_after(self._began + steps * call.seconds - self.env.now)
        elif self._next.steps > 1:
            self._step -= self._next.steps - 1
            self._next.steps = 1

    def _end_after(self, seconds: float) -> None:
        self._epoch += 1
        event = self.env.timeout(max(0.0, seconds), self._epoch)
        event.callbacks.append(self._over)

    def _over(self, event: Any) -> None:
        if event.value != self._epoch:
            return
        call, now = self._call, self.env.now
        assert call is not None
        self.seconds += now - self._began
        for request in call.first:
            request.first = now
            if request.prefix >= 0 and self.times.prefixes:
                self._prefixes[request.prefix] = None
                while len(self._prefixes) > self.times.prefixes:
                    self._prefixes.popitem(last=False)
        self._used -= len(call.ended)
        for request in call.ended:
            self._held -= request.prompt + request.output
            del self.live[request]
            request.last = now
            self._done(request)
        self._advance()

    def _advance(self) -> None:
        """Begins the next call, and chooses the one behind it."""
        self._call, self._next = self._next or self._choose(), None
        if self._call is None:
            return
        self._began = self.env.now
        self._end_after(self._call.steps * self._call.seconds)
        if self._call.steps == 1:
            self._next = self._choose()

    def _choose(self) -> SimulatedCall | None:
        self._admit()
        if self._decoded_last:
            return self._prefill() or self._decode()
        return self._decode() or self._prefill()

    def _admit(self) -> None:
        times = self.times
        while self._waiting and self._used < times.slots:
            request = self._waiting[0]
            if self._used and self._held + request.prompt + request.output > times.tokens:
                return
            self._waiting.popleft()
            self._used += 1
            self._held += request.prompt + request.output
            if request.first:  # its prompt was computed elsewhere, and its first token comes on now
                request.first = self.env.now
                self._run(request, max(1, request.output - 1))
                continue
            request.todo = request.prompt
            if request.prefix in self._prefixes:
                self._prefixes.move_to_end(request.prefix)
                request.cached = min(request.shared, request.prompt - 1) // times.chunk * times.chunk
                request.todo -= request.cached
            self._prefilling.append(request)
            self._work += -(-request.todo // times.chunk) * times.chunk

    def _run(self, request: SimulatedRequest, tokens: int) -> None:
        self._count += 1
        heappush(self._ends, (self._step + tokens, self._count, request))

    def _decode(self) -> SimulatedCall | None:
        if not self._ends:
            return None
        rows, steps = len(self._ends), 1
        # A slot of the call that runs is free behind it.
        full = self._used == self.times.slots and not (self._call and self._call.ended)
        if not self._prefilling and (full or not self._waiting):
            steps = max(1, self._ends[0][0] - self._step - 1)
        self._step += steps
        self._decoded_last = True
        call = SimulatedCall(("decode", rows), self.times.steps[rows], steps=steps)
        while self._ends and self._ends[0][0] <= self._step:
            call.ended.append(heappop(self._ends)[2])
        return call

    def _prefill(self) -> SimulatedCall | None:
        if not self._prefilling:
            return None
        shapes = self.times.shapes
        chunk = shapes.chunk
        key = min(self._work, shapes.prefill[-1]), bool(self._ends)
        if (padding := self._padding.get(key, 0)) == 0:
            padding = self._padding[key] = shapes.cheapest_padding(key[0], beside_decode=key[1])
        call, room = SimulatedCall(("prefill", padding), self.times.prefill[padding]), padding
        self._decoded_last = False
        while self._prefilling and room >= chunk:
            request = self._prefilling[0]
            taken = min(-(-request.todo // chunk) * chunk, room)
            request.todo, room = max(0, request.todo - taken), room - taken
            self._work -= taken
            if request.todo:
                break
            self._prefilling.popleft()
            call.first.append(request)
            if self._prefill_only or request.output == 1:
                call.ended.append(request)
            else:
                self._run(request, request.output - 1)
        return call
