"""Decides what the devices do next: admission, chunked prefill, decode, preemption. Knows no jax and no clock.

Policy. Requests are admitted in their order, once a slot and the pages of their prompt are free: those of the lowest
``priority`` first, and among equals by turn: the number of their call plus their place in it. So a later call waits for
a row or two of a large one, and a row for at most as many later calls as its place. "Oldest" below is the first in this
order, "youngest" the last. A running request is not stopped for a waiting one. While there is
both prefill and decode work the two take turns, call by call: a running sequence never waits for more than one prefill
call between two decode calls, and the oldest prompt never for more than one decode call between two of its own. A
prefill call takes chunks of the sequences that fit, oldest first, at the padding at which a token costs least; while
sequences decode, no longer call than pays (``Shapes.cheapest_padding``), so that they wait less. A decode call takes
all running sequences at the smallest padding that holds them; more than the largest holds take turns. Pages are taken
as sequences grow. When none is left, the prefix cache gives up its own, then the youngest holder gives its pages back.
It goes on later from its state, which is kept in host memory, or starts again from its prompt and the tokens it has,
where the artifact has no programs that move states. The oldest always goes on: nothing deadlocks.

Sequences that score are admitted among the others, take their turn with prefill, and are packed into calls of score
programs: whether the next such call prefills or scores is decided by the oldest sequence that waits for either. They
are never decoded, and end when their last call is read.

Every decision follows from what was submitted, removed and sampled, in which order: hosts that are given the same
make the same calls. Times are noted, never asked for.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from operator import attrgetter

from ling3export.artifacts.paddings import Shapes
from ling3export.runners.engine.coordinator import PrefixCacheCoordinator
from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.inputs import Span, fitting
from ling3export.runners.engine.outputs import ScheduledRow, ScheduledSpan, SchedulerOutput
from ling3export.runners.engine.sequence import DispatchedCall, Sequence, Status, now
from ling3export.runners.state.block_manager import BlockManager

ORDER = attrgetter("order")  # by priority, then by turn
Settle = Callable[[], bool]  # reads all calls in flight, which may end sequences; False if there were none


class Scheduler:
    """The queues of sequences, and what is taken from them next."""

    def __init__(
        self, shapes: Shapes, blocks: BlockManager, counters: Counters, coordinator: PrefixCacheCoordinator
    ) -> None:
        self._shapes, self._blocks = shapes, blocks
        self._counters, self._coordinator = counters, coordinator
        self._waiting: list[Sequence] = []  # in their order
        self._prefilling: list[Sequence] = []  # in their order
        self._running: deque[Sequence] = deque()  # the one that decoded longest ago comes first
        self._decoded_last = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    def runs_besides(self, excluded: Callable[[Sequence], bool]) -> bool:
        """Whether any sequence has begun that is not excluded."""
        return any(not excluded(sequence) for queue in (self._running, self._prefilling) for sequence in queue)

    def submit(self, sequence: Sequence) -> None:
        """Queues a new sequence, after those of its priority that arrived before it."""
        self._coordinator.enter(sequence)
        self._wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence that ended out of every queue; what it holds is free at once."""
        self._dequeue(sequence)
        self._coordinator.leave(sequence)

    def schedule(self, settle: Settle, holds: Callable[[Sequence], bool]) -> SchedulerOutput:
        """Decides the next call, which counts as dispatched from now on.

        Args:
            settle: Called where pages run out: a sequence that turns out to have ended frees its own, and only tokens
                that were read can be prefilled again.
            holds: Whether a running sequence sits out this step.
        """
        output = SchedulerOutput(at=now())
        self._admit(output)
        if self._decoded_last:
            scheduled = self._prefill(output) or self._decode(output, settle, holds)
        else:
            scheduled = self._decode(output, settle, holds) or self._prefill(output)
        if not scheduled:
            output.before = self._coordinator.take_moves()
        return output

    def _admit(self, output: SchedulerOutput) -> None:
        admitted = []
        while self._waiting and self._coordinator.admit(self._waiting[0]):
            sequence = self._waiting.pop(0)
            admitted.append((sequence.slot, sequence.request.sampling))
            if sequence.num_computed_tokens and sequence.generated and sequence.num_tokens_to_prefill == 1:
                sequence.next_token = sequence.generated[-1]  # its state was kept
                sequence.status = Status.RUNNING
                self._running.append(sequence)
            else:
                sequence.status = Status.PREFILLING
                insort(self._prefilling, sequence, key=ORDER)
        output.admitted = admitted

    def _prefill(self, output: SchedulerOutput) -> bool:
        """A prefill or a score call, whichever the oldest sequence waits for; False if none waits."""
        if not self._prefilling:
            return False
        chunk, scores = self._shapes.chunk, self._prefilling[0].scoring
        waiting = [s for s in self._prefilling if s.scoring == scores]
        work = chunk * sum(-(-self._coordinator.reach(s) // chunk) for s in waiting)
        if scores:
            output.phase, output.padding = "score", self._shapes.scoring(work)
        else:
            beside_decode = any(s.num_sampled < s.max_new_tokens for s in self._running)
            output.phase = "prefill"
            output.padding = self._shapes.cheapest_padding(work, beside_decode=beside_decode)
        output.cell = f"{output.phase}@{output.padding}"
        output.before = self._coordinator.take_moves()
        output.spans = spans = self._pack(output, waiting)
        self._prefilling = [s for s in self._prefilling if s.num_tokens_to_prefill]
        self._decoded_last = False
        rows = []
        for sequence, span, row in spans:
            tokens = len(span.tokens)
            call = DispatchedCall(output.at, output.phase, output.padding, tokens)
            if not sequence.num_tokens_to_prefill:
                sequence.status = Status.RUNNING
            if scores or sequence.num_tokens_to_prefill:
                sequence.calls.append(call)
                continue
            self._running.append(sequence)
            sequence.num_sampled += 1
            last, position = row + (tokens - 1) // chunk, sequence.num_computed_tokens
            rows.append(ScheduledRow(sequence, last, span.slot, position, call))
        output.rows = rows
        output.processed = [row for row in rows if row.sequence.logits_processor is not None]
        self._coordinator.prefilled([prompt_span.sequence for prompt_span in spans])
        output.after = self._coordinator.take_moves()
        return True

    def _pack(self, output: SchedulerOutput, waiting: list[Sequence]) -> list[ScheduledSpan]:
        """Takes chunks of the sequences, one after the other, until a call is full; they then count as computed."""
        chunk, spans, row = self._shapes.chunk, list[ScheduledSpan](), 0
        for sequence in waiting:
            start, room = sequence.num_computed_tokens, output.padding - row * chunk
            if room < chunk:
                break
            stop = start + min(self._coordinator.reach(sequence), room)
            following = sequence.next_tokens(start, stop) if sequence.scoring else ()
            span = Span(sequence.slot, start, sequence.tokens(start, stop), following)
            spans.append(ScheduledSpan(sequence, span, row))
            row += -(-(stop - start) // chunk)
            if sequence.started is None:
                sequence.started = output.at
                self._counters.started += 1
            sequence.num_computed_tokens = stop
            new = max(0, min(stop, sequence.num_prompt_tokens) - sequence.num_prefilled)  # 0 where it starts again
            sequence.num_prefilled += new
            self._counters.tokens_in += new
        return spans

    def _decode(self, output: SchedulerOutput, settle: Settle, holds: Callable[[Sequence], bool]) -> bool:
        """A decode call; False if no sequence waits for one."""
        taken = self._decodable(settle, holds)
        if not taken:
            return False
        output.before = self._coordinator.take_moves()
        output.phase, output.padding = "decode", fitting(len(taken), self._shapes.decode)
        output.cell = f"decode@{output.padding}"
        call, rows = DispatchedCall(output.at, "decode", output.padding, 1), []
        for row, sequence in enumerate(taken):
            sequence.num_computed_tokens += 1
            sequence.num_sampled += 1
            slot, position = sequence.slot, sequence.num_computed_tokens
            rows.append(ScheduledRow(sequence, row, slot, position, call, sequence.next_token))
            sequence.next_token = -1
        output.rows = rows
        output.processed = [row for row in rows if row.sequence.logits_processor is not None]
        # The sequences of this call go after those that found no room in it; both keep their order.
        if len(taken) < len(self._running):
            left = set(self._running).difference(taken)
            self._running = deque([*(s for s in self._running if s in left), *taken])
        self._decoded_last = True
        self._coordinator.decoded(taken)
        output.after = self._coordinator.take_moves()
        return True

    def _decodable(self, settle: Settle, holds: Callable[[Sequence], bool]) -> list[Sequence]:
        """The sequences of the next decode call, each with a page for its next position."""
        ready = [s for s in self._running if s.num_sampled < s.max_new_tokens and not holds(s)]
        ready = ready[: self._shapes.decode[-1]]
        for sequence in sorted(ready, key=ORDER):  # the oldest first: it never has to give way
            self._grow(sequence, settle)
        return [s for s in ready if s.table is not None]

    def _grow(self, sequence: Sequence, settle: Settle) -> None:
        """Gets the page of the next position; takes it from the youngest sequence if need be, which may be this one."""
        while sequence.table is not None and not self._blocks.grow(sequence.table, sequence.num_computed_tokens + 1):
            if self._coordinator.evict() or settle():
                continue
            holders = [
                s
                for s in (*self._prefilling, *self._running)
                if s is sequence
                or (
                    not s.awaits_mask
                    and s.table is not None
                    and self._blocks.could_free_page_for(s.table, sequence.table)
                )
            ]
            self._preempt(max(holders, key=ORDER))

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.preempted += 1
        self._coordinator.preempt(sequence)
        self._dequeue(sequence)
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=ORDER)

    def _dequeue(self, sequence: Sequence) -> None:
        queues = {Status.WAITING: self._waiting, Status.PREFILLING: self._prefilling, Status.RUNNING: self._running}
        queue = queues.get(sequence.status, [])
        if sequence in queue:  # one that scores is in none once its last call is dispatched
            queue.remove(sequence)
