"""Decides what the devices do next: admission, chunked prefill, decode, preemption. Knows no jax.

Policy. Requests are admitted in order of arrival, once a slot and the pages of their prompt are free. While there is
both prefill and decode work the two take turns, so neither waits for more than one call of the other. A prefill call
takes chunks of as many sequences as fit, oldest first, at the smallest padding that holds all the work, else the
largest. A decode call takes all running sequences at the smallest padding that holds them; more than the largest holds
take turns. Pages are taken as sequences grow. When none is left, the youngest sequence gives its own back and starts
again later from its prompt and the tokens it has: the oldest always goes on, so nothing deadlocks.

The next call is dispatched before the last one's tokens are read: decode takes its token from the devices. What was
dispatched for a sequence that turns out to have ended is dropped unread.
"""

from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from ling3export.runners.allocator import Allocator
from ling3export.runners.counters import Counters
from ling3export.runners.sequence import Sequence

Fields = dict[str, np.ndarray]
Handle = Any  # an array that may still be being computed


class Backend(Protocol):
    """What runs the programs. Calls return at once; only ``read`` waits."""

    def step(self, phase: str, padding: int, fields: Mapping[str, np.ndarray]) -> Handle:
        """``prefill`` or ``decode`` at ``padding``: logits ``[rows, vocab]``."""

    def sample(self, logits: Handle, rows: int, fields: Mapping[str, np.ndarray]) -> Handle:
        """Tokens ``[rows]``, also left in the state for the next decode."""

    def read(self, handle: Handle) -> np.ndarray:
        """Waits for an array."""


@dataclass(frozen=True)
class Shapes:
    """What the artifact's programs take.

    Attributes:
        prefill: Paddings in token slots, ascending.
        decode: Paddings in sequences, ascending.
        chunk: Token slots a chunk.
        max_pages: Columns of a page table.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    chunk: int
    max_pages: int

    @classmethod
    def of(cls, target: dict[str, Any]) -> "Shapes":
        """Those of a manifest's target."""
        paddings: dict[str, list[int]] = {"prefill": [], "decode": [], "sample": []}
        for cell in target["cells"].values():
            paddings[cell["phase"]].append(cell["padding"])
        prefill, decode = (tuple(sorted(paddings[phase])) for phase in ("prefill", "decode"))
        return cls(prefill, decode, target["state"]["chunk"], target["state"]["max_pages"])


class Emitted(NamedTuple):
    """A token that was read, and the text that became certain with it."""

    sequence: Sequence
    token: int
    text: str


class _Call(NamedTuple):
    """A call whose tokens were not read yet: which sequence each sampled row belongs to."""

    rows: list[tuple[int, Sequence]]
    tokens: Handle
    logits: Handle


class Scheduler:
    """Runs sequences on a backend.

    Args:
        backend: Runs the programs.
        shapes: Of the programs.
        allocator: Slots and pages.
        ahead: Calls that may be dispatched before the tokens of an earlier one are read; 0 reads each at once.
    """

    def __init__(self, backend: Backend, shapes: Shapes, allocator: Allocator, *, ahead: int = 1) -> None:
        self.counters = Counters()
        self._backend = backend
        self._shapes = shapes
        self._allocator = allocator
        self._ahead = ahead
        self._waiting: list[Sequence] = []  # by arrival
        self._prefilling: list[Sequence] = []  # by arrival
        self._running: deque[Sequence] = deque()  # who decoded longest ago comes first
        self._flight: deque[_Call] = deque()
        self._emitted: list[Emitted] = []
        self._decoded_last = False

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._waiting or self._prefilling or self._running or self._flight)

    def submit(self, sequence: Sequence) -> None:
        """Queues a new sequence behind those that arrived before it."""
        self.counters.tokens_in += sequence.length
        self._queue(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is; what it holds is free at once."""
        if not sequence.over:
            sequence.stop_reason = "cancelled"
            self._leave(sequence)

    def step(self) -> list[Emitted]:
        """Dispatches one call, and reads the oldest outstanding one where enough are in flight.

        Returns:
            The tokens that were read, in order.
        """
        self._admit()
        turns = (self._decode, self._prefill) if not self._decoded_last else (self._prefill, self._decode)
        dispatched = turns[0]() or turns[1]()
        while len(self._flight) > (self._ahead if dispatched else 0):
            self._collect()
        emitted, self._emitted = self._emitted, []
        return emitted

    def _queue(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=attrgetter("index"))

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            sequence.lease = self._allocator.admit(min(sequence.known + 1, sequence.stored_in_the_end))
            if sequence.lease is None:
                return
            self._waiting.pop(0)
            insort(self._prefilling, sequence, key=attrgetter("index"))

    def _prefill(self) -> bool:
        """Dispatches a prefill call; False if there is nothing to prefill."""
        if not self._prefilling:
            return False
        chunk, paddings = self._shapes.chunk, self._shapes.prefill
        padding = fitting(chunk * sum(-(-s.unstored // chunk) for s in self._prefilling), paddings)
        count = padding // chunk
        fields = {name: np.zeros(count, np.int32) for name in ("chunk_slot", "chunk_start", "chunk_len", "fresh")}
        fields["tokens"] = np.zeros(padding, np.int32)
        fields["page_table"] = np.zeros((count, self._shapes.max_pages), np.int32)
        done: list[tuple[int, Sequence]] = []
        n = used = 0
        for sequence in list(self._prefilling):
            stop = min(sequence.known, sequence.stored + (count - n) * chunk)
            used += stop - sequence.stored
            for start in range(sequence.stored, stop, chunk):
                fill_chunk(fields, n, chunk, sequence, start, min(start + chunk, stop))
                n += 1
            sequence.stored = stop
            if stop == sequence.known:
                done.append((n - 1, sequence))
                self._prefilling.remove(sequence)
                self._running.append(sequence)
            if n == count:
                break
        self._decoded_last = False
        self.counters.count("prefill", padding, used)
        logits = self._backend.step("prefill", padding, fields)
        if done:
            self._sample(logits, count, done)
        return True

    def _decode(self) -> bool:
        """Dispatches a decode call; False if nothing can decode."""
        rows = self._rows_to_decode()
        if not rows:
            return False
        padding = fitting(len(rows), self._shapes.decode)
        fields = {name: np.zeros(padding, np.int32) for name in ("slot", "position", "token")}
        fields["page_table"] = np.zeros((padding, self._shapes.max_pages), np.int32)
        places = self._allocator.rows([lease for _, lease in rows], padding)
        placed = []
        for place, (sequence, lease) in zip(places, rows, strict=True):
            fields["slot"][place] = lease.slot
            fields["position"][place] = sequence.stored
            fields["token"][place] = -1  # the one that was sampled last is on the devices
            fields["page_table"][place, : len(lease.pages)] = lease.pages
            sequence.stored += 1
            self._running.remove(sequence)
            self._running.append(sequence)
            placed.append((place, sequence))
        self._decoded_last = True
        self.counters.count("decode", padding, len(rows))
        self._sample(self._backend.step("decode", padding, fields), padding, placed)
        return True

    def _rows_to_decode(self) -> list[tuple[Sequence, Any]]:
        """Sequences of the next decode call with their leases, each grown by the position that the call stores."""
        ready = [s for s in self._running if s.sampled < s.limit][: self._shapes.decode[-1]]
        for sequence in sorted(ready, key=attrgetter("index")):  # the oldest first: it never has to give way
            if sequence.lease is not None:
                self._grow(sequence)
        return [(s, s.lease) for s in ready if s.lease is not None]

    def _grow(self, sequence: Sequence) -> None:
        """Gets the page of the next position; takes it from the youngest sequence if need be, which may be this one."""
        while sequence.lease is not None and not self._allocator.grow(sequence.lease, sequence.stored + 1):
            if self._flight:  # whoever turns out to have ended frees pages; and only what is known can start again
                while self._flight:
                    self._collect()
                continue
            self._preempt(max((*self._prefilling, *self._running), key=attrgetter("index")))

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preempted += 1
        self._leave(sequence)
        sequence.stored = 0
        self._queue(sequence)

    def _sample(self, logits: Handle, rows: int, sequences: list[tuple[int, Sequence]]) -> None:
        """Dispatches the sampling of the rows that end what is known of their sequences."""
        integers = {name: np.zeros(rows, np.int32) for name in ("slot", "position", "top_k")}
        seed = np.zeros(rows, np.uint32)
        temperature, top_p = np.zeros(rows, np.float32), np.ones(rows, np.float32)
        for row, sequence in sequences:
            sampling = sequence.request.sampling
            assert sequence.lease is not None
            integers["slot"][row] = sequence.lease.slot
            integers["position"][row] = sequence.stored
            integers["top_k"][row] = sampling.top_k
            temperature[row], top_p[row], seed[row] = sampling.temperature, sampling.top_p, sampling.seed
            sequence.sampled += 1
        fields = {**integers, "temperature": temperature, "top_p": top_p, "seed": seed.view(np.int32)}
        self.counters.count("sample", rows, len(sequences))
        tokens = self._backend.sample(logits, rows, fields)
        wanted = any(sequence.request.logits for _, sequence in sequences)
        self._flight.append(_Call(sequences, tokens, logits if wanted else None))

    def _collect(self) -> None:
        """Reads the oldest call in flight."""
        call = self._flight.popleft()
        tokens = self._backend.read(call.tokens)
        logits = None
        for row, sequence in call.rows:
            if sequence.over:
                continue
            taken_from = None
            if sequence.request.logits:
                logits = self._backend.read(call.logits) if logits is None else logits
                taken_from = logits[row].copy()
            token = int(tokens[row])
            text = sequence.accept(token, taken_from)
            self.counters.tokens_out += 1
            self._emitted.append(Emitted(sequence, token, text))
        for _, sequence in call.rows:
            if sequence.over and sequence.lease is not None:
                self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of every queue and its lease back."""
        for queue in (self._waiting, self._prefilling, self._running):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.lease is not None:
            self._allocator.release(sequence.lease)
            sequence.lease = None


def fitting(work: int, paddings: tuple[int, ...]) -> int:
    """The smallest padding that holds ``work``, else the largest."""
    return next((padding for padding in paddings if padding >= work), paddings[-1])


def fill_chunk(fields: Fields, n: int, chunk: int, sequence: Sequence, start: int, stop: int) -> None:
    """Puts tokens ``start`` to ``stop`` of a sequence into chunk ``n`` of a prefill call."""
    lease = sequence.lease
    assert lease is not None
    fields["tokens"][n * chunk : n * chunk + stop - start] = sequence.tokens(start, stop)
    fields["chunk_slot"][n] = lease.slot
    fields["chunk_start"][n] = start
    fields["chunk_len"][n] = stop - start
    fields["fresh"][n] = start == 0
    fields["page_table"][n, : len(lease.pages)] = lease.pages
