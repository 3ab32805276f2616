"""Decides what the devices do next: admission, chunked prefill, decode, preemption. Knows no jax and no clock.

Policy. Requests are admitted in order of arrival, once a slot and the pages of their prompt are free. While there is
both prefill and decode work the two take turns, call by call: a running sequence never waits for more than one prefill
call between two decode calls, and the oldest prompt never for more than one decode call between two of its own. A
prefill call takes chunks of as many sequences as fit, oldest first, at the padding at which a token costs least; while
sequences decode, none that is longer than pays (``Shapes.cheapest_padding``), so that they wait less. A decode call
takes all running sequences at the smallest padding that holds them; more than the largest holds take turns. Pages are
taken as sequences grow. When none is left, the prefix cache gives up its own, then the youngest of those who hold what
is wanted gives its pages back. It goes on later from its state, which is kept in host memory, or starts again from its
prompt and the tokens it has, where the artifact has no programs that move states. The oldest always goes on: nothing
deadlocks.

Sequences that score are admitted among the others, take their turn with prefill, and are packed into calls of score
programs: whether the next such call prefills or scores is decided by the oldest sequence that waits for either. They
are never decoded, and end when their last call is read.

The next call is dispatched before the last one's tokens are read: decode takes its token from the devices. What was
dispatched for a sequence that turns out to have ended is dropped unread.

What is done for one sequence alone (its mask and edits, what a token does to its text and its grammar, its scores)
may raise whatever it likes: that sequence ends with RequestBroken, and the others go on. An error of the backend, or of
what sequences share, ends the step.

Every decision follows from what was submitted, cancelled and sampled, in which order: hosts that are given the same
make the same calls. Times are noted, never asked for.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ling3export.artifacts.paddings import Shapes
from ling3export.runners.engine.block_manager import BlockManager
from ling3export.runners.engine.choice import Asked, adjust_inputs, rank_fields
from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.handle import GrammarFailed, LogitsError, RequestFailed, broken
from ling3export.runners.engine.inputs import GREEDY, Span, decode_fields, fitting, prefill_fields, sample_fields
from ling3export.runners.engine.request import Likely
from ling3export.runners.engine.reuse import PrefixCacheCoordinator, StateTransfer
from ling3export.runners.engine.sequence import Call, Sequence, now
from ling3export.runners.load.segments import PendingSave
from ling3export.runners.state.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from ling3export.runners.transfer.prefix_store import FollowingStore, PrefixStore

Pending = Any  # an array that may still be being computed
BY_ARRIVAL = attrgetter("number")


class Backend(StateTransfer, Protocol):
    """What the scheduler needs of a model runner. Calls return at once; only ``read`` and ``wait`` wait."""

    def step(self, phase: str, padding: int, fields: Mapping[str, np.ndarray]) -> Pending:
        """Runs ``prefill`` or ``decode`` at ``padding``: logits ``[rows, vocab]``."""

    def score(self, padding: int, fields: Mapping[str, np.ndarray]) -> Mapping[str, Pending]:
        """Runs ``score`` at ``padding``: ``logprob`` and ``best`` of each padded token."""

    def sample(self, logits: Pending, rows: int, fields: Mapping[str, np.ndarray]) -> Pending:
        """Tokens ``[rows]``, also left in the state for the next decode."""

    def adjust(
        self,
        logits: Pending,
        rows: int,
        fields: Mapping[str, np.ndarray],
        edits: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        token: Pending = None,
    ) -> Mapping[str, Pending]:
        """Runs ``logits_processor``: ``logits`` to sample from; how likely ``token`` is, and the most likely ones."""

    def read(self, array: Pending) -> np.ndarray:
        """Waits for an array, and fetches it."""

    def wait(self, array: Pending) -> None:
        """Waits until an array is computed."""


class Part(NamedTuple):
    """What a prefill or score call takes of one sequence: ``span``, in the chunks of the call from ``row`` on."""

    sequence: Sequence
    span: Span
    row: int
    call: Call


class Row(NamedTuple):
    """A row of a call that samples a token for a sequence."""

    row: int
    sequence: Sequence
    call: Call


class Sampled(NamedTuple):
    """A call of ``cell`` in flight that samples. One in the middle of a prompt samples no row, and has no tokens."""

    cell: str
    rows: list[Row]
    tokens: Pending
    logits: Pending
    likely: Mapping[str, Pending] | None = None  # what ``logits_processor`` says of the tokens, where a row asks for it


class Scored(NamedTuple):
    """A call of ``cell`` in flight that scores: log-probabilities and best tokens, of each padded token."""

    cell: str
    parts: list[Part]
    logprob: Pending
    best: Pending
    best_logprob: Pending = None  # score programs of older artifacts do not give it


class Emitted(NamedTuple):
    """A token that was read, and the text that became certain with it."""

    sequence: Sequence
    token: int
    text: str
    likely: Likely | None = None


class Scheduler:
    """Runs sequences on a backend.

    Args:
        backend: Runs the programs.
        shapes: The paddings of the programs.
        blocks: Slots and pages.
        vocab_size: Token ids are below it; a sequence that samples another fails.
        ahead: Calls that may be dispatched before an earlier one was waited for; 0 waits for each at once.
        counters: Those of an earlier scheduler, to go on with.
        cache: Keeps beginnings of sequences for others; None shares nothing.
        supports_state_copy: Whether the artifact has the programs that move states.
        store: Keeps what the cache knows in a folder; None where nothing does.
        save_async: Starts to save a sequence's state in the prefill call that ends its prompt, and says whether it did;
            None where states are saved afterwards.

    Attributes:
        counters: What was done.
        doing: The cell whose call a step dispatches or waits for, and since when; None between steps.
    """

    def __init__(
        self,
        backend: Backend,
        shapes: Shapes,
        blocks: BlockManager,
        vocab_size: int,
        *,
        ahead: int = 1,
        counters: Counters | None = None,
        cache: PrefixCache | None = None,
        supports_state_copy: bool = False,
        store: "PrefixStore | FollowingStore | None" = None,
        save_async: Callable[[PendingSave], bool] | None = None,
    ) -> None:
        self._save_async = save_async
        self.counters = Counters() if counters is None else counters
        self.doing: tuple[str, float] | None = None
        self._vocab_size = vocab_size
        self._backend = backend
        self._shapes = shapes
        self._blocks = blocks
        self._ahead = ahead
        self._reuse = PrefixCacheCoordinator(
            backend, blocks, self.counters, cache, supports_state_copy=supports_state_copy, store=store
        )
        self._sampling = np.full(len(blocks.page_table), GREEDY)  # how the tokens of each state slot are sampled
        self._waiting: list[Sequence] = []  # by arrival
        self._prefilling: list[Sequence] = []  # by arrival
        self._running: deque[Sequence] = deque()  # the one that decoded longest ago comes first
        self._flight: deque[Sampled | Scored] = deque()
        self._emitted: list[Emitted] = []
        self._ended: list[Sequence] = []
        self._decoded_last = False

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._waiting or self._prefilling or self._running or self._flight)

    def submit(self, sequence: Sequence) -> None:
        """Queues a new sequence behind those that arrived before it; tokens that it comes with count as read now."""
        for token, said in () if sequence.transferred is None else sequence.transferred.tokens:
            try:
                likely = None if said is None or sequence.request.logprobs is None else Likely(*said)
                text = sequence.accept(token, now(), None, likely)
            except BaseException as error:
                return self.fail(sequence, broken(sequence.request, "its token to be taken", error))
            self._emitted.append(Emitted(sequence, token, text, likely))
            sequence.sampled += 1
            if sequence.over:
                return self._end(sequence)
        insort(self._waiting, sequence, key=BY_ARRIVAL)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is; what it holds is free at once."""
        if not sequence.over:
            sequence.stop_reason = "cancelled"
            self._leave(sequence)

    def save(self, sequence: Sequence) -> None:
        """Ends a sequence where it is, once what was dispatched for it is read; its state is taken along."""
        sequence.saved = True
        while self._flight:
            self._collect()
        if not sequence.over:
            sequence.stop_reason = "saved"
            self._end(sequence)

    def step(self) -> list[Emitted]:
        """Dispatches one call, and waits for the oldest outstanding one where enough are in flight.

        Returns:
            The tokens that were read, in order.
        """
        self._admit()
        kinds = (self._decode, self._prefill) if not self._decoded_last else (self._prefill, self._decode)
        dispatched = kinds[0]() or kinds[1]()
        while len(self._flight) > (self._ahead if dispatched else 0):
            self._collect()
        emitted, self._emitted = self._emitted, []
        self.doing = None
        return emitted

    def take_ended(self) -> list[Sequence]:
        """Sequences that ended by themselves since this was asked last: cancelled ones are not among them."""
        ended, self._ended = self._ended, []
        return ended

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            if not self._reuse.admit(sequence):
                return
            how = sequence.request.sampling
            self._sampling[sequence.slot] = how.temperature, how.top_k, how.top_p, how.seed
            self._waiting.pop(0)
            if sequence.stored and sequence.generated and sequence.unstored == 1:  # its state was kept
                sequence.fed = sequence.generated[-1]
                self._running.append(sequence)
            else:
                insort(self._prefilling, sequence, key=BY_ARRIVAL)

    def _prefill(self) -> bool:
        """Dispatches a prefill or a score call, whichever the oldest sequence waits for; False if none waits."""
        if not self._prefilling:
            return False
        chunk, scores = self._shapes.chunk, self._prefilling[0].scoring
        waiting = [s for s in self._prefilling if s.scoring == scores]
        work = chunk * sum(-(-self._reuse.reach(s) // chunk) for s in waiting)
        if scores:
            phase, padding = "score", self._shapes.scoring(work)
        else:
            beside_decode = any(s.sampled < s.limit for s in self._running)
            phase, padding = "prefill", self._shapes.cheapest_padding(work, beside_decode=beside_decode)
        cell, parts = f"{phase}@{padding}", self._pack(phase, padding, waiting)
        self._prefilling = [s for s in self._prefilling if s.unstored]
        self._decoded_last = False
        self.counters.count(cell, padding, sum(part.call.tokens for part in parts))
        self.doing = cell, parts[0].call.at
        spans = [part.span for part in parts]
        fields = prefill_fields(padding, spans, chunk, self._blocks.page_table, score=scores)
        if scores:
            for part in parts:
                part.sequence.calls.append(part.call)
            out = self._backend.score(padding, fields)
            self._reuse.prefilled([part.sequence for part in parts])
            self._flight.append(Scored(cell, parts, out["logprob"], out["best"], out.get("best_logprob")))
            return True
        rows = []
        for sequence, span, row, call in parts:
            if sequence.unstored:
                sequence.calls.append(call)
            else:
                self._running.append(sequence)
                rows.append(Row(row + (len(span.tokens) - 1) // chunk, sequence, call))
                if self._save_async is not None and sequence.request.do_remote_decode:
                    pages = sequence.stored_pages(self._blocks.page_size)
                    sequence.saved_early = self._save_async(
                        PendingSave(sequence.number, sequence.request, sequence.slot, pages)
                    )
        logits = self._backend.step(phase, padding, fields)
        self._reuse.prefilled([part.sequence for part in parts])
        if rows:
            self._sample(cell, logits, padding // chunk, rows)
        else:
            self._flight.append(Sampled(cell, [], None, logits))
        return True

    def _pack(self, phase: str, padding: int, waiting: list[Sequence]) -> list[Part]:
        """Takes chunks of the sequences, one after the other, until a call is full; they then count as stored."""
        chunk, at = self._shapes.chunk, now()
        parts, row = [], 0
        for sequence in waiting:
            start, room = sequence.stored, padding - row * chunk
            if room < chunk:
                break
            stop = start + min(self._reuse.reach(sequence), room)
            following = sequence.next_tokens(start, stop) if sequence.scoring else ()
            span = Span(sequence.slot, start, sequence.tokens(start, stop), following)
            if sequence.started is None:
                sequence.started = at
                self.counters.queued(at - sequence.arrived)
            sequence.stored = stop
            new = max(0, min(stop, sequence.length) - sequence.prefilled)  # 0 where it starts again
            sequence.prefilled += new
            self.counters.tokens_in += new
            parts.append(Part(sequence, span, row, Call(at, phase, padding, stop - start)))
            row += -(-(stop - start) // chunk)
        return parts

    def _decode(self) -> bool:
        """Dispatches a decode call; False if no sequence waits for one."""
        taken = self._decodable()
        if not taken:
            return False
        padding = fitting(len(taken), self._shapes.decode)
        cell, call = f"decode@{padding}", Call(now(), "decode", padding, 1)
        slots, positions = [s.slot for s in taken], [s.stored for s in taken]
        fields = decode_fields(padding, slots, positions, self._blocks.page_table, [s.fed for s in taken])
        for sequence in taken:
            sequence.stored += 1
            sequence.fed = -1
        # The sequences of this call go behind those that found no room in it; both keep their order.
        if len(taken) < len(self._running):
            left = set(self._running).difference(taken)
            self._running = deque([*(s for s in self._running if s in left), *taken])
        self._decoded_last = True
        self.counters.count(cell, padding, len(taken))
        self.doing = cell, call.at
        logits = self._backend.step("decode", padding, fields)
        self._reuse.decoded(taken)
        self._sample(cell, logits, padding, [Row(row, sequence, call) for row, sequence in enumerate(taken)])
        return True

    def _decodable(self) -> list[Sequence]:
        """The sequences of the next decode call, each with a page for its next position."""
        ready = [s for s in self._running if s.sampled < s.limit][: self._shapes.decode[-1]]
        for sequence in sorted(ready, key=BY_ARRIVAL):  # the oldest first: it never has to give way
            self._grow(sequence)
        return [s for s in ready if s.table is not None]

    def _grow(self, sequence: Sequence) -> None:
        """Gets the page of the next position; takes it from the youngest sequence if need be, which may be this one."""
        while sequence.table is not None and not self._blocks.grow(sequence.table, sequence.stored + 1):
            if self._reuse.evict():
                continue
            if self._flight:
                # A sequence that turns out to have ended frees its pages. And only known tokens can be prefilled again.
                while self._flight:
                    self._collect()
                continue
            holders = [
                s
                for s in (*self._prefilling, *self._running)
                if s is sequence or (s.table is not None and self._blocks.blocks(s.table, sequence.table))
            ]
            self._preempt(max(holders, key=BY_ARRIVAL))

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preempted += 1
        self._reuse.keep(sequence)
        self._dequeue(sequence)
        insort(self._waiting, sequence, key=BY_ARRIVAL)

    def _sample(self, cell: str, logits: Pending, count: int, rows: list[Row]) -> None:
        """Dispatches the sampling of the rows that end what is known of their sequences."""
        if any(row.sequence.choice is not None and row.sequence.choice.waits for row in rows):
            # What may follow depends on tokens that were not read: they are, and masks are filled, while the call runs.
            while self._flight:
                self._collect()
            self.doing = cell, now()
        asking = self._asking(row for row in rows if not row.sequence.over)
        rows = [row for row in rows if not row.sequence.over]
        if not rows:
            self._flight.append(Sampled(cell, [], None, logits))
            return
        sequences = [row.sequence for row in rows]
        slots, positions = [s.slot for s in sequences], [s.stored for s in sequences]
        # Rows ascend: these are the first ones, or some of many. numpy takes a slice in a third of a list's time.
        places = slice(len(rows)) if rows[-1].row < len(rows) else [row.row for row in rows]
        fields = sample_fields(count, places, slots, positions, self._sampling)
        for sequence in sequences:
            sequence.sampled += 1
        self.counters.count(f"sample@{count}", count, len(rows))
        if asking:
            self.counters.count(f"logits_processor@{count}", count, len(asking))
            fitted, edits, mask = adjust_inputs(count, self._vocab_size, asking)
            changed = self._backend.adjust(logits, count, fitted, edits, mask)["logits"]
        else:
            changed = logits
        tokens = self._backend.sample(changed, count, fields)
        kept = any(s.request.logits for s in sequences)
        self._flight.append(
            Sampled(cell, rows, tokens, logits if kept else None, self._ranked(logits, count, rows, tokens))
        )

    def _asking(self, rows: Iterable[Row]) -> dict[int, Asked]:
        """What rows ask for beyond a token; a sequence for which that cannot be said ends."""
        asking = {}
        for row, sequence, _ in rows:
            if (choice := sequence.choice) is not None:
                try:
                    asking[row] = Asked(choice.edits, choice.mask(self._vocab_size))
                except BaseException as error:
                    self.fail(sequence, broken(sequence.request, "its next token to be restricted", error))
        return asking

    def _ranked(self, logits: Pending, count: int, rows: list[Row], tokens: Pending) -> Mapping[str, Pending] | None:
        """How likely the tokens are, and the most likely ones, where a sequence asks for it."""
        wanted = {row.row: row.sequence.request.logprobs for row in rows if row.sequence.request.logprobs is not None}
        if not wanted:
            return None
        self.counters.count(f"logits_processor@{count}", count, len(wanted))
        fields = rank_fields(count, list(wanted), list(wanted.values()))
        return self._backend.adjust(logits, count, fields, token=tokens)

    def _collect(self) -> None:
        """Waits for the oldest call in flight, and takes what it brought."""
        call = self._flight.popleft()
        self.doing = call.cell, now()
        if isinstance(call, Scored):
            self._take_scores(call)
        elif call.rows:
            self._take_tokens(call)
        else:
            self._backend.wait(call.logits)

    def _take_scores(self, call: Scored) -> None:
        logprob, best = self._backend.read(call.logprob), self._backend.read(call.best)
        best_logprob = None if call.best_logprob is None else self._backend.read(call.best_logprob)
        for sequence, span, row, _ in call.parts:
            if sequence.over:
                continue
            at = row * self._shapes.chunk
            taken = slice(at, at + len(span.tokens))
            first = max((sequence.request.score_from or 0) - 1, span.start)  # behind it is the first token to score
            finite = np.isfinite(logprob[taken][first - span.start :])
            if not finite.all():
                self.fail(sequence, unusable(sequence, "NaN or infinity", first + int(finite.argmin()) + 1))
                continue
            those = None if best_logprob is None else best_logprob[taken].tolist()
            try:
                over = sequence.accept_scores(span.start, logprob[taken].tolist(), best[taken].tolist(), those)
            except BaseException as error:
                self.fail(sequence, broken(sequence.request, "its scores to be taken", error))
                continue
            if over:
                self._end(sequence)

    def _take_tokens(self, call: Sampled) -> None:
        tokens, at = self._backend.read(call.tokens).tolist(), now()
        logits = None if call.logits is None else self._backend.read(call.logits)
        names = ("logprob", "top_token", "top_logprob") if call.likely is not None else ()
        said = {name: self._backend.read(call.likely[name]).tolist() for name in names if call.likely is not None}
        for row, sequence, made in call.rows:
            if sequence.over:
                continue
            token = tokens[row]
            if not 0 <= token < self._vocab_size:
                # Sample programs give -1; those of artifacts that were built before give another that is none.
                found = "NaN or infinity" if token == -1 else f"token {token} of {self._vocab_size}"
                self.fail(sequence, unusable(sequence, found, sequence.known))
                continue
            sequence.calls.append(made)
            try:
                likely = None
                if sequence.request.logprobs is not None:
                    top = zip(said["top_token"][row], said["top_logprob"][row], strict=True)
                    likely = Likely(said["logprob"][row], tuple(top)[: sequence.request.logprobs])
                taken_from = logits[row].copy() if logits is not None and sequence.request.logits else None
                text = sequence.accept(token, at, taken_from, likely)
                why = "" if sequence.choice is None else sequence.choice.error
            except BaseException as error:
                self.fail(sequence, broken(sequence.request, "its token to be taken", error))
                continue
            self.counters.tokens_out += 1
            self._reuse.read(sequence)
            self._emitted.append(Emitted(sequence, token, text, likely))
            if why:
                found = f"{sequence.request.name}: expected a grammar that can be followed, found: {why}"
                self.fail(sequence, GrammarFailed(found, "it is too complex; ask for less at once"))
            elif sequence.stop_reason is not None:
                self._end(sequence)

    def fail(self, sequence: Sequence, error: RequestFailed) -> None:
        """Ends a sequence by itself, with an error that is its own."""
        sequence.stop_reason = "failed"
        sequence.error = error
        self.counters.failed += 1
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        if sequence.error is None:
            if (sequence.request.do_remote_decode and not sequence.saved_early) or sequence.saved:
                self._reuse.take(sequence)
            self._reuse.publish(sequence)
        self._leave(sequence)
        self._ended.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of every queue, and its slot and pages back."""
        self._dequeue(sequence)
        self._reuse.leave(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        for queue in (self._waiting, self._prefilling, self._running):
            if sequence in queue:
                queue.remove(sequence)


def unusable(sequence: Sequence, found: str, position: int) -> LogitsError:
    """The error of a sequence from whose logits no token can be taken."""
    return LogitsError(
        f"logits of {sequence.request.name}: expected finite numbers, found {found}, at position {position}",
        "some weight is not finite, or a number left its range: `ling3export verify` compares the programs",
    )
