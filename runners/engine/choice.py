"""What a sequence asks of its rows beyond a token: other logits, and fewer tokens that may be taken."""

from collections.abc import Sequence as Many

import numpy as np

from ling3export.runners.engine.inputs import Fields
from ling3export.runners.engine.request import Request
from ling3export.runners.text.grammar import Matcher


class Choice:
    """The edits and the mask of a sequence's next row, from the tokens that the host has read.

    An edit is a token, what its logit is scaled by, and what is added then: see ``adjust@R`` in FORMAT.md.

    Args:
        request: What was asked.
        matcher: Follows the request's grammar; None where it has none.

    Attributes:
        matcher: The same.
        waits: Whether the next row depends on all tokens before it.
    """

    def __init__(self, request: Request, matcher: Matcher | None) -> None:
        how = request.sampling
        self.matcher = matcher
        self.waits = matcher is not None or how.penalises
        self._how = how
        self._places: dict[int, int] = {}  # of the edit of each token
        self._counted: set[int] = set()  # tokens that were generated
        self._tokens = np.zeros(64, np.int32)
        self._changes = np.tile(np.array([[1], [0]], np.float32), 64)  # scale and addend
        for token, bias in how.logit_bias:
            self._changes[1, self._place(token)] = bias
        if how.repetition_penalty != 1:
            for token in sorted(set(request.prompt_ids)):
                self._changes[0, self._place(token)] = how.repetition_penalty

    @property
    def over(self) -> bool:
        """Whether the grammar's text is complete, and nothing can follow."""
        return self.matcher is not None and self.matcher.over

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further; empty while it can."""
        return "" if self.matcher is None else self.matcher.error

    @property
    def edits(self) -> np.ndarray:
        """int32 ``[3, n]``: tokens, and the bits of scales and addends."""
        count = len(self._places)
        return np.stack([self._tokens[:count], *self._changes[:, :count].view(np.int32)])

    def accept(self, token: int) -> None:
        """Takes a token that was read."""
        how = self._how
        if how.penalises:
            place, new = self._place(token), token not in self._counted
            self._counted.add(token)
            self._changes[0, place] = how.repetition_penalty
            self._changes[1, place] -= how.frequency_penalty + new * how.presence_penalty
        if self.matcher is not None:
            self.matcher.accept(token)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            more = np.tile(np.array([[1], [0]], np.float32), place)
            self._tokens, self._changes = np.tile(self._tokens, 2), np.concatenate([self._changes, more], axis=1)
        self._tokens[place] = token
        return place


def adjust_inputs(
    count: int, vocab_size: int, rows: Many[int], choices: Many[Choice]
) -> tuple[Fields, np.ndarray, np.ndarray]:
    """Fields, edits ``[3, count, n]`` and mask ``[count, W]`` of an ``adjust`` call before ``sample``.

    Args:
        count: Rows of the call.
        vocab_size: Token ids are below it.
        rows: Which of them ask for something.
        choices: What each of these does.
    """
    fields = {name: np.zeros(count, np.int32) for name in ("edited", "masked", "top")}
    each = [choice.edits for choice in choices]
    edits = np.zeros((3, count, max(edit.shape[1] for edit in each)), np.int32)
    mask = np.zeros((count, -(-vocab_size // 32)), np.int32)
    for row, choice, edit in zip(rows, choices, each, strict=True):
        fields["edited"][row] = edit.shape[1]
        edits[:, row, : edit.shape[1]] = edit
        if choice.matcher is not None:
            fields["masked"][row] = 1
            choice.matcher.fill(mask[row])
    return fields, edits, mask


def rank_fields(count: int, rows: Many[int], wanted: Many[int]) -> Fields:
    """Fields of an ``adjust`` call behind ``sample``: the most likely tokens of some rows, 0 for their token alone."""
    fields = {name: np.zeros(count, np.int32) for name in ("edited", "masked", "top")}
    fields["top"][rows] = np.maximum(wanted, 1)
    return fields
