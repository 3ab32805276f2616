"""Rows that wait for the masks of their grammars, and the time that a step may spend on them.

A mask depends on the row's last token, so the host fills it after that token was read, while the devices compute the
row's logits. A step fills masks for STEP_SECONDS. While sequences without a grammar run, all grammars together get only
SHARE of the engine's time; a mask that took longer is paid back before the next one. A row that did not get its mask
keeps its logits and sits out the next steps: its token is sampled as soon as its mask is filled. Other rows do not wait
for it.
"""

import json
import time
from collections.abc import Callable
from typing import NamedTuple

from ling3export.runners.engine.handle import GrammarFailed, RequestFailed, broken
from ling3export.runners.engine.logits_processor import RESTRICTING, LogitsProcessorState
from ling3export.runners.engine.outputs import DeviceArray, ScheduledRow, SchedulerOutput
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.hosts.channel import Channel

STEP_SECONDS = 0.005  # that a step spends on masks; llguidance's limits bound one mask to about 0.02
SHARE = 0.25  # of the engine's time, for masks and accepted tokens of grammars while other sequences run
DEADLINE = 10.0  # seconds that a row waits for its mask before its request is refused
SLOW = 0.001  # seconds of a sequence's last mask from which its grammar counts as slow
MAX_CALLS = 4  # whose logits, [rows, vocab], are kept; then sequences with a grammar wait before their next call


class WaitingRow(NamedTuple):
    """A row with logits, but without its mask."""

    output: SchedulerOutput
    logits: DeviceArray
    row: ScheduledRow
    since: float

    @property
    def sequence(self) -> Sequence:
        return self.row.sequence

    @property
    def processor(self) -> LogitsProcessorState:
        assert self.sequence.logits_processor is not None
        return self.sequence.logits_processor


class MaskQueue:
    """The rows that wait for their masks, the oldest first.

    Args:
        channel: To the other hosts, which fill the masks that host 0 filled; None on one host.
    """

    def __init__(
        self, vocab_size: int, fail: Callable[[Sequence, RequestFailed], None], channel: Channel | None = None
    ) -> None:
        self._vocab_size, self._fail, self._channel = vocab_size, fail, channel
        self._rows: list[WaitingRow] = []
        self._credit, self._counted = 0.0, time.monotonic()  # seconds for grammars, and when they were last counted

    def __bool__(self) -> bool:
        return bool(self._rows)

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence takes part in no call for now.

        It waits for a mask, or would soon, and the logits of enough calls are kept. Fast grammars wait for no slow one.
        """
        if not sequence.has_grammar:
            return False
        calls, processor = len({id(row.output) for row in self._rows}), sequence.logits_processor
        slow = processor is not None and processor.slow
        return sequence.awaits_mask or calls >= (MAX_CALLS // 2 if slow else MAX_CALLS)

    def add(self, output: SchedulerOutput, logits: DeviceArray) -> None:
        """Takes the rows that have a grammar out of a call."""
        now = time.monotonic()
        for row in output.processed:
            if row.sequence.has_grammar and not row.sequence.finished:
                row.sequence.awaits_mask = True
                self._rows.append(waiting := WaitingRow(output, logits, row, now))
                self._credit -= waiting.processor.accept_seconds
        output.rows = [row for row in output.rows if not row.sequence.awaits_mask]
        output.processed = [row for row in output.processed if not row.sequence.awaits_mask]

    def fill(self, *, others: bool) -> list[WaitingRow]:
        """Fills masks, and returns their rows; refuses those that waited too long.

        Args:
            others: Whether sequences without a grammar run. If none do, each step fills at least one mask.
        """
        self._rows = [row for row in self._rows if not row.sequence.finished]
        if not self._rows:
            return []
        decided = self._fill_by_time(others) if self._channel is None or self._channel.leads else None
        if self._channel is not None:  # time decides, and all hosts have to decide alike, so host 0 does
            shared = json.loads(self._channel.shared(b"" if decided is None else json.dumps(decided).encode()))
            for place in shared[0] if decided is None else ():
                self._fill_row(self._rows[place])
            decided = shared
        assert decided is not None
        (filled, slow, late), rows = decided, self._rows
        for place in filled:
            rows[place].processor.slow = place in slow
        for place in late:
            message = f"{rows[place].sequence.request.name}: the grammar's allowed tokens took over {DEADLINE:g} s"
            self._fail(rows[place].sequence, GrammarFailed(message, "use a less ambiguous grammar, or a smaller n"))
        return self._take([rows[place] for place in filled])

    def _fill_by_time(self, others: bool) -> tuple[list[int], list[int], list[int]]:
        """Places of the rows with filled masks, of rows that took more than SLOW, and of late rows."""
        begun = time.monotonic()
        self._credit = min(STEP_SECONDS, self._credit + SHARE * (begun - self._counted)) if others else STEP_SECONDS
        self._counted, budget = begun, self._credit
        late = [place for place, row in enumerate(self._rows) if begun - row.since > DEADLINE]
        waiting = [place for place in range(len(self._rows)) if place not in late]
        filled = list[int]()
        for place in sorted(waiting, key=lambda place: self._rows[place].processor.fill_seconds):
            if time.monotonic() - begun + self._rows[place].processor.fill_seconds > budget:
                break
            self._fill_row(self._rows[place])
            filled.append(place)
        if waiting and waiting[0] not in filled and budget > 0:  # the oldest row, so that each gets its mask
            self._fill_row(self._rows[waiting[0]])
            filled.append(waiting[0])
        self._credit -= time.monotonic() - begun
        slow = [place for place in filled if self._rows[place].processor.fill_seconds > SLOW]
        return filled, slow, late

    def _fill_row(self, row: WaitingRow) -> None:
        try:
            row.processor.fill(self._vocab_size)
        except BaseException as error:
            self._fail(row.sequence, broken(row.sequence.request, RESTRICTING, error))

    def _take(self, rows: list[WaitingRow]) -> list[WaitingRow]:
        for row in rows:
            row.sequence.awaits_mask = False
        self._rows = [row for row in self._rows if row.sequence.awaits_mask and not row.sequence.finished]
        return [row for row in rows if not row.sequence.finished]
