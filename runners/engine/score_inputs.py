"""The calls of score programs: prefill's fields with the tokens that are to be scored, and whose slots are whose."""

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ling3export.runners.engine.inputs import PrefillFields, Shapes

if TYPE_CHECKING:
    from ling3export.runners.engine.block_manager import Lease
    from ling3export.runners.engine.sequence import Sequence


class ScoredPart(NamedTuple):
    """Of one sequence, the positions of some tokens from ``start`` on, in the token slots from ``slot`` on."""

    sequence: "Sequence"
    start: int
    slot: int
    tokens: int


class ScoreFields(PrefillFields):
    """The fields of one score call, filled chunk by chunk.

    Attributes:
        parts: Of the sequences that were added.
    """

    def __init__(self, padding: int, shapes: Shapes) -> None:
        super().__init__(padding, shapes)
        self.fields["next_token"] = np.full(padding, -1, np.int32)
        self.parts: list[ScoredPart] = []

    def add(self, sequence: "Sequence", lease: "Lease") -> int:
        """As of prefill."""
        start, slot = sequence.stored, (self._count - self.free) * self._chunk
        taken = super().add(sequence, lease)
        first = sequence.request.score_from
        assert first is not None
        for position in range(max(start, first - 1), start + taken):
            self.fields["next_token"][slot + position - start] = sequence.request.prompt_ids[position + 1]
        self.parts.append(ScoredPart(sequence, start, slot, taken))
        return taken


def take_scores(parts: Many[ScoredPart], logprob: np.ndarray, best: np.ndarray) -> "list[Sequence]":
    """Hands what a call said to its sequences; returns those that are complete."""
    complete = []
    for part in parts:
        if part.sequence.over:
            continue
        slots = slice(part.slot, part.slot + part.tokens)
        if part.sequence.accept_scores(part.start, logprob[slots].tolist(), best[slots].tolist()):
            complete.append(part.sequence)
    return complete
