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
class Ask:
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
class Times:
    """What the calls of a replica take, and what it holds.

    Attributes:
        prefill: Seconds of a full call by padding in tokens, sampling included.
        decode: Seconds of a step by sequences in it, sampling included: at least at 1 and at ``slots``.
        slots: Sequences that run at once.
        tokens: That the pool holds.
        prefixes: Beginnings that the prefix cache holds; 0 where there is none.
        chunk: Padded tokens a chunk.
        costs: Of prefill calls, as the scheduler takes them (``Shapes``).
        spared: By padding, the seconds by which a prefill call is shorter for each of its tokens that is padding.
        interpolated: Whether a step between two counts of sequences takes a time between; else that of the higher one.
    """

    prefill: Mapping[int, float]
    decode: Mapping[int, float]
    slots: int
    tokens: float = float("inf")
    prefixes: int = 0
    chunk: int = 16
    costs: tuple[float, ...] = ()
    spared: Mapping[int, float] = field(default_factory=dict)
    interpolated: bool = False

    def prefilled(self, padding: int, used: float) -> float:
        """Seconds of a prefill call that holds so many tokens."""
        return self.prefill[padding] - self.spared.get(padding, 0.0) * (padding - used)

    @cached_property
    def steps(self) -> list[float]:
        """Seconds of a decode step by the number of sequences, from 0."""
        counts = sorted(self.decode)
        found = [0.0]
        for rows in range(1, self.slots + 1):
            above = counts[bisect_left(counts, rows)]
            below = max((count for count in counts if count <= rows), default=above)
            share = (rows - below) / (above - below) if self.interpolated and above > below else 1.0
            found.append(self.decode[below] + share * (self.decode[above] - self.decode[below]))
        return found

    @cached_property
    def shapes(self) -> Shapes:
        """The paddings as the scheduler knows them."""
        return Shapes(tuple(sorted(self.prefill)), tuple(sorted(self.decode)), self.chunk, self.costs)


class Machine:
    """What replicas run on: how long their calls take where several of them run at once.

    Args:
        times: With one busy replica, with two, and so on; the last holds for more.
    """

    def __init__(self, *times: Times) -> None:
        self._times = times
        self.busy: dict[Replica, None] = {}  # those with a call that runs

    @property
    def shared(self) -> bool:
        """Whether a replica's calls depend on the others."""
        return len(self._times) > 1

    @property
    def times(self) -> Times:
        """Those that hold now."""
        return self._times[min(max(len(self.busy), 1), len(self._times)) - 1]

    def begins(self, replica: "Replica") -> None:
        """One more replica is busy: what is left of the others' calls takes longer."""
        self.busy[replica] = None
        self._retime(replica)

    def ends(self, replica: "Replica") -> None:
        """One less, if it was busy."""
        if replica in self.busy:
            del self.busy[replica]
            self._retime(replica)

    def _retime(self, cause: "Replica") -> None:
        for replica in self.busy if self.shared else ():
            if replica is not cause:
                replica.retime()


@dataclass(slots=True)
class Call:
    """A call, or several decode steps in which nothing begins or ends.

    Attributes:
        cell: The phase, and the padding or the number of sequences.
        seconds: Of one step.
        first: Requests whose first token it samples.
        ended: Requests whose last token it samples.
        steps: How many.
        used: Tokens of a prefill call that are no padding.
    """

    cell: tuple[str, int]
    seconds: float
    first: list[Ask] = field(default_factory=list)
    ended: list[Ask] = field(default_factory=list)
    steps: int = 1
    used: int = 0


class Replica:
    """Answers requests, in simulated time.

    Args:
        env: The clock.
        number: Its name.
        machine: What it runs on.
        prefilled: What becomes of a request whose prompt is computed where this replica does no decode steps.
        done: Told of each request that ended, and whether it was lost.
    """

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        machine: Machine,
        done: Callable[[Ask, bool], None],
        prefilled: Callable[[Ask], None] | None = None,
    ) -> None:
        self.env, self.number, self.machine = env, number, machine
        self._done, self._prefilled = done, prefilled
        self._shapes, self._padding = machine.times.shapes, dict[tuple[int, bool], int]()
        self.seconds = 0.0  # that it was busy
        self._epoch = 0
        self.up = True
        self._forget()

    def _forget(self) -> None:
        self.live: dict[Ask, None] = {}  # what it was given and has not ended
        self._waiting: deque[Ask] = deque()
        self._prefilling: deque[Ask] = deque()
        self._ends: list[tuple[int, int, Ask]] = []  # running requests, by the step that samples their last token
        self._work = self._used = self._step = self._count = 0
        self._held = 0  # tokens
        self._decoded_last = False
        self._call: Call | None = None  # that runs
        self._began = self._since = 0.0
        self._next: Call | None = None
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    @property
    def load(self) -> int:
        """Requests that it has."""
        return len(self.live)

    def take(self, *asks: Ask) -> None:
        """Gets requests that arrive together; the prompt of one that has a first token was computed elsewhere."""
        for ask in asks:
            ask.where = self.number
            self.live[ask] = None
        self._waiting += asks
        if self._call is None:
            self.machine.begins(self)
            self._advance()
        elif self._used - len(self._call.ended) < self.machine.times.slots:
            self._cut()

    def fail(self) -> None:
        """Loses what it has; takes nothing until ``up`` is set again."""
        self._epoch += 1
        self.up = False
        self.machine.ends(self)
        lost = [*self.live]
        self._forget()
        for ask in lost:
            self._done(ask, True)

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
        self.seconds += now - self._since
        for ask in call.first:
            ask.first = now
            if ask.prefix >= 0 and self.machine.times.prefixes:
                self._prefixes[ask.prefix] = None
                while len(self._prefixes) > self.machine.times.prefixes:
                    self._prefixes.popitem(last=False)
        self._used -= len(call.ended)
        for ask in call.ended:
            self._held -= ask.prompt + ask.output
            del self.live[ask]
            if self._prefilled is not None:
                self._prefilled(ask)
            else:
                ask.last = now
                self._done(ask, False)
        self._advance()

    def _advance(self) -> None:
        """Begins the next call, and chooses the one behind it."""
        call = self._next or self._choose()
        self._call, self._next = call, None
        if call is None:
            self.machine.ends(self)
            return
        self._began = self._since = self.env.now
        if self.machine.shared:  # it was chosen when others may not have run
            call.seconds = self._seconds(call)
        self._end_after(call.steps * call.seconds)
        if call.steps == 1:
            self._next = self._choose()

    def _seconds(self, call: Call) -> float:
        """Those of the call if nothing changes from now on."""
        times = self.machine.times
        phase, size = call.cell
        return times.prefilled(size, call.used) if phase == "prefill" else times.steps[size]

    def retime(self) -> None:
        """What is left of the call that runs takes another time from now on."""
        call, now = self._call, self.env.now
        assert call is not None
        left = (self._began + call.seconds - now) / call.seconds
        call.seconds = self._seconds(call)
        self._began = now - (1 - left) * call.seconds  # as if it had always taken this time
        self._end_after(left * call.seconds)

    def _choose(self) -> Call | None:
        self._admit()
        if self._decoded_last:
            return self._prefill() or self._decode()
        return self._decode() or self._prefill()

    def _admit(self) -> None:
        times = self.machine.times
        while self._waiting and self._used < times.slots:
            ask = self._waiting[0]
            if self._used and self._held + ask.prompt + ask.output > times.tokens:
                return
            self._waiting.popleft()
            self._used += 1
            self._held += ask.prompt + ask.output
            if ask.first:  # its prompt was computed elsewhere, and its first token comes on now
                ask.first = self.env.now
                self._run(ask, max(1, ask.output - 1))
                continue
            ask.todo = ask.prompt
            if ask.prefix in self._prefixes:
                self._prefixes.move_to_end(ask.prefix)
                ask.cached = min(ask.shared, ask.prompt - 1) // times.chunk * times.chunk
                ask.todo -= ask.cached
            self._prefilling.append(ask)
            self._work += -(-ask.todo // times.chunk) * times.chunk

    def _run(self, ask: Ask, tokens: int) -> None:
        self._count += 1
        heappush(self._ends, (self._step + tokens, self._count, ask))

    def _decode(self) -> Call | None:
        if not self._ends:
            return None
        rows, steps = len(self._ends), 1
        # A slot of the call that runs is free behind it.
        full = self._used == self.machine.times.slots and not (self._call and self._call.ended)
        if not self._prefilling and not self.machine.shared and (full or not self._waiting):
            steps = max(1, self._ends[0][0] - self._step - 1)
        self._step += steps
        self._decoded_last = True
        call = Call(("decode", rows), self.machine.times.steps[rows], steps=steps)
        while self._ends and self._ends[0][0] <= self._step:
            call.ended.append(heappop(self._ends)[2])
        return call

    def _prefill(self) -> Call | None:
        if not self._prefilling:
            return None
        chunk = self._shapes.chunk
        key = min(self._work, self._shapes.prefill[-1]), bool(self._ends)
        if (padding := self._padding.get(key, 0)) == 0:
            padding = self._padding[key] = self._shapes.cheapest_padding(key[0], beside_decode=key[1])
        call, room = Call(("prefill", padding), 0.0), padding
        self._decoded_last = False
        while self._prefilling and room >= chunk:
            ask = self._prefilling[0]
            before = -(-ask.todo // chunk) * chunk
            taken = min(before, room)
            ask.todo, room = max(0, ask.todo - taken), room - taken
            self._work -= taken
            call.used += taken
            if ask.todo:
                break
            self._prefilling.popleft()
            call.first.append(ask)
            if self._prefilled is not None or ask.output == 1:
                call.ended.append(ask)
            else:
                self._run(ask, ask.output - 1)
        call.seconds = self._seconds(call)
        return call
