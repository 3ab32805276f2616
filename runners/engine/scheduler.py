"""Decides what the devices do next: admission, chunked prefill, decode, preemption. Knows no jax and no clock.

Policy. Requests are admitted in order of arrival, once a slot and the pages of their prompt are free. While there is
both prefill and decode work the two take turns, call by call: a running sequence never waits for more than one prefill
call between two decode calls, and the oldest prompt never for more than one decode call between two of its own. A
prefill call takes chunks of as many sequences as fit, oldest first, at the padding at which a token costs least; while
sequences decode, none that is longer than pays (``Shapes.paying``), so that they wait less. A decode call takes all
running sequences at the smallest padding that holds them; more than the largest holds take turns. Pages are taken as
sequences grow. When none is left, the youngest of those who hold what is wanted gives its pages back, and starts again
later from its prompt and the tokens it has: the oldest always goes on, so nothing deadlocks.

Sequences that score are admitted among the others, take their turn with prefill, and are packed into calls of score
programs: whether the next such call prefills or scores is decided by the oldest sequence that waits for either. Nobody
decodes them; they end when their last call is read.

The next call is dispatched before the last one's tokens are read: decode takes its token from the devices. What was
dispatched for a sequence that turns out to have ended is dropped unread.

Every decision follows from what was submitted, cancelled and sampled, in which order: hosts that are given the same
make the same calls. Times are noted, never asked for.
"""

from bisect import insort
from collections import deque
from operator import attrgetter
from typing import NamedTuple

from ling3export.runners.engine.backend import Backend, Call, Handle, Row
from ling3export.runners.engine.block_manager import Allocator, Lease
from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.inputs import PrefillFields, Shapes, decode_fields, sample_fields
from ling3export.runners.engine.score_inputs import ScoreFields, take_scores
from ling3export.runners.engine.sequence import CallNote, Sequence, now


class Emitted(NamedTuple):
    """A token that was read, and the text that became certain with it."""

    sequence: Sequence
    token: int
    text: str


class Scheduler:
    """Runs sequences on a backend.

    Args:
        backend: Runs the programs.
        shapes: Of the programs.
        allocator: Slots and pages.
        ahead: Calls that may be dispatched before an earlier one was waited for; 0 waits for each at once.
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
        self._flight: deque[Call] = deque()
        self._emitted: list[Emitted] = []
        self._scored: list[Sequence] = []
        self._decoded_last = False

    @property
    def waiting(self) -> int:
        """Sequences that hold nothing yet."""
        return len(self._waiting)

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
        """Dispatches one call, and waits for the oldest outstanding one where enough are in flight.

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

    def take_scored(self) -> list[Sequence]:
        """Sequences whose scores became complete since this was asked last."""
        scored, self._scored = self._scored, []
        return scored

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
        """Dispatches a prefill call, or one that scores; False if there is nothing for either."""
        if not self._prefilling:
            return False
        if self._prefilling[0].scoring:
            self._score([s for s in self._prefilling if s.scoring])
            return True
        chunk, waiting = self._shapes.chunk, [s for s in self._prefilling if not s.scoring]
        padding = self._shapes.paying(
            chunk * sum(-(-s.unstored // chunk) for s in waiting),
            beside_decode=any(s.sampled < s.limit for s in self._running),
        )
        call, at = PrefillFields(padding, self._shapes), now()
        done: list[Row] = []
        used = 0
        for sequence in waiting:
            if not call.free:
                break
            taken, note = self._put(sequence, call, CallNote(at, "prefill", padding, 0))
            used += taken
            if sequence.unstored:
                sequence.calls.append(note)
                continue
            done.append(Row(call.last, sequence, note))
            self._prefilling.remove(sequence)
            self._running.append(sequence)
        self._decoded_last = False
        self.counters.count("prefill", padding, used)
        logits = self._backend.step("prefill", padding, call.fields)
        if done:
            self._sample(logits, padding // chunk, done)
        else:
            self._flight.append(Call([], None, logits))
        return True

    def _score(self, waiting: list[Sequence]) -> None:
        """Dispatches a call that scores."""
        chunk = self._shapes.chunk
        padding = self._shapes.scoring(chunk * sum(-(-s.unstored // chunk) for s in waiting))
        call, at = ScoreFields(padding, self._shapes), now()
        used = 0
        for sequence in waiting:
            if not call.free:
                break
            taken, note = self._put(sequence, call, CallNote(at, "score", padding, 0))
            used += taken
            sequence.calls.append(note)
            if not sequence.unstored:
                self._prefilling.remove(sequence)
        self._decoded_last = False
        self.counters.count("score", padding, used)
        out = self._backend.score(padding, call.fields)
        self._flight.append(Call([], out["logprob"], out["best"], call.parts))

    def _put(self, sequence: Sequence, call: PrefillFields, note: CallNote) -> tuple[int, CallNote]:
        """Puts as much of a sequence into a call as fits: how many tokens, and the note of it."""
        assert sequence.lease is not None
        taken = call.add(sequence, sequence.lease)
        if sequence.started is None:
            sequence.started = note.at
            self.counters.queued(note.at - sequence.arrived)
        sequence.stored += taken
        return taken, note._replace(tokens=taken)

    def _decode(self) -> bool:
        """Dispatches a decode call; False if no sequence waits for one."""
        rows = self._rows_to_decode()
        if not rows:
            return False
        padding, at = rows[0][0], now()
        placed = [(place, sequence, lease) for _, place, sequence, lease in rows]
        fields = decode_fields(placed, padding, self._shapes)
        chosen = {sequence for _, sequence, _ in placed}
        for sequence in chosen:
            sequence.stored += 1
        # Those of this call go behind those that found no room in it, in the order that they had.
        self._running = deque(
            [*(s for s in self._running if s not in chosen), *(sequence for _, sequence, _ in placed)]
        )
        self._decoded_last = True
        self.counters.count("decode", padding, len(rows))
        note = CallNote(at, "decode", padding, 1)
        logits = self._backend.step("decode", padding, fields)
        self._sample(logits, padding, [Row(place, sequence, note) for place, sequence, _ in placed])
        return True

    def _rows_to_decode(self) -> list[tuple[int, int, Sequence, Lease]]:
        """The next decode call: its padding, and of each row its place, sequence and lease, already grown."""
        ready = [(s, s.lease) for s in self._running if s.lease is not None and s.sampled < s.limit]
        room = self._allocator.rows([lease for _, lease in ready], self._shapes.decode[-1])
        chosen = [s for (s, _), place in zip(ready, room, strict=True) if place is not None]
        for sequence in sorted(chosen, key=attrgetter("index")):  # the oldest first: it never has to give way
            if sequence.lease is not None:
                self._grow(sequence)
        left = [(s, s.lease) for s in chosen if s.lease is not None]
        for padding in self._shapes.decode:
            places = self._allocator.rows([lease for _, lease in left], padding)
            if None not in places:
                break
        rows = zip(places, left, strict=True)
        return [(padding, place, s, lease) for place, (s, lease) in rows if place is not None]

    def _grow(self, sequence: Sequence) -> None:
        """Gets the page of the next position; takes it from the youngest sequence if need be, which may be this one."""
        while sequence.lease is not None and not self._allocator.grow(sequence.lease, sequence.stored + 1):
            if self._flight:  # whoever turns out to have ended frees pages; and only what is known can start again
                while self._flight:
                    self._collect()
                continue
            holders = [
                s for s in (*self._prefilling, *self._running)
                if s is sequence or (s.lease is not None and self._allocator.blocks(s.lease, sequence.lease))
            ]  # fmt: skip
            self._preempt(max(holders, key=attrgetter("index")))

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preempted += 1
        self._leave(sequence)
        sequence.stored = 0
        self._queue(sequence)

    def _sample(self, logits: Handle, count: int, rows: list[Row]) -> None:
        """Dispatches the sampling of the rows that end what is known of their sequences."""
        fields = sample_fields([(row.place, row.sequence) for row in rows], count)
        for row in rows:
            row.sequence.sampled += 1
        self.counters.count("sample", count, len(rows))
        tokens = self._backend.sample(logits, count, fields)
        wanted = any(row.sequence.request.logits for row in rows)
        self._flight.append(Call(rows, tokens, logits if wanted else None))

    def _collect(self) -> None:
        """Waits for the oldest call in flight, and reads its tokens."""
        call = self._flight.popleft()
        if call.parts:
            for sequence in take_scores(call.parts, self._backend.read(call.tokens), self._backend.read(call.logits)):
                self._scored.append(sequence)
                self._leave(sequence)
            return
        if not call.rows:
            self._backend.wait(call.logits)
            return
        tokens, at = self._backend.read(call.tokens), now()
        logits = None
        for place, sequence, note in call.rows:
            if sequence.over:
                continue
            taken_from = None
            if sequence.request.logits:
                logits = self._backend.read(call.logits) if logits is None else logits
                taken_from = logits[place].copy()
            token = int(tokens[place])
            sequence.calls.append(note)
            text = sequence.accept(token, at, taken_from)
            self.counters.tokens_out += 1
            self._emitted.append(Emitted(sequence, token, text))
        for _, sequence, _ in call.rows:
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
