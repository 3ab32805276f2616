"""Penalties, biases, grammars and least lengths of a sequence: edits of its logits, and masks of the allowed tokens."""

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from ling3export.runners.engine.inputs import Fields
from ling3export.runners.engine.request import Request
from ling3export.runners.text.grammar import Matcher

RESTRICTING = "its next token to be restricted"  # the step that an error interrupted
ROOM = 64  # edits that there is room for at first; doubled as often as it is needed


class LogitsProcessorState:
    """The edits and the mask of a sequence's next row, from the tokens that the host has read.

    An edit is a token, what its logit is scaled by, and what is added then: see ``logits_processor@R`` in FORMAT.md.

    Args:
        ends: Tokens that end the text: not allowed before the request's ``min_tokens``.

    Attributes:
        matcher: Follows the request's grammar; None where it has none.
        fill_seconds: The time that the last mask of the grammar took on this host.
        accept_seconds: The time that the grammar took for the last token.
        slow: Whether that was long on host 0.
    """

    def __init__(self, request: Request, matcher: Matcher | None, ends: Iterable[int] = ()) -> None:
        sampling = request.sampling
        self.matcher = matcher
        self.fill_seconds, self.accept_seconds, self.slow = 0.0, 0.0, False
        self._allowed: np.ndarray | None = None  # by the grammar, of the next row
        self._ends = np.array(sorted(ends), np.int64)
        self._to_wait = request.min_tokens  # tokens, before one of these may come
        self._how = sampling
        self._places: dict[int, int] = {}  # of the edit of each token
        self._counted: set[int] = set()  # tokens that were generated
        self._tokens = np.zeros(ROOM, np.int32)
        self._scales = np.ones(ROOM, np.float32)
        self._addends = np.zeros(ROOM, np.float32)
        for token, bias in sampling.logit_bias:
            place = self._place(token)
            self._addends[place] = bias
        if sampling.repetition_penalty != 1:
            for token in sorted(set(request.prompt_ids)):
                place = self._place(token)
                self._scales[place] = sampling.repetition_penalty

    @property
    def needs_tokens(self) -> bool:
        """Whether the next row depends on all tokens before it."""
        return self.matcher is not None or self._how.penalises or self._to_wait > 0

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
        return np.stack(
            [self._tokens[:count], self._scales[:count].view(np.int32), self._addends[:count].view(np.int32)]
        )

    def fill(self, vocab_size: int) -> np.ndarray:
        """Fills the grammar's mask of the next row, int32 ``[W]``; ``mask`` uses it."""
        assert self.matcher is not None
        begun = time.monotonic()
        words = self._allowed = np.zeros(-(-vocab_size // 32), np.int32)
        self.matcher.fill(words)
        self.fill_seconds = time.monotonic() - begun
        return words

    def mask(self, vocab_size: int) -> np.ndarray | None:
        """int32 ``[W]``, the bits of the tokens that may follow; None where any may."""
        waits = self._to_wait > 0
        if self.matcher is None and not waits:
            return None
        if self.matcher is None:
            bits = np.arange(32 * -(-vocab_size // 32)) < vocab_size
            words = np.packbits(bits, bitorder="little").view("<i4")
        else:
            words = self.fill(vocab_size) if self._allowed is None else self._allowed
        if waits:
            open_ended = words.copy()
            ends = self._ends[self._ends < vocab_size]
            np.bitwise_and.at(open_ended, ends // 32, ~(1 << ends % 32).astype(np.uint32).view(np.int32))
            words = open_ended if open_ended.any() else words  # a grammar's text may have come to its end
        return words

    def accept(self, token: int) -> None:
        sampling = self._how
        self._to_wait -= 1
        self._allowed = None
        if sampling.penalises:
            place, new = self._place(token), token not in self._counted
            self._counted.add(token)
            self._scales[place] = sampling.repetition_penalty
            self._addends[place] -= sampling.frequency_penalty + new * sampling.presence_penalty
        if self.matcher is not None:
            begun = time.monotonic()
            self.matcher.accept(token)
            self.accept_seconds = time.monotonic() - begun

    def _place(self, token: int) -> int:
        """The index of a token's edit. This may replace the arrays, so call it before writing to them."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(place, np.int32)])
            self._scales = np.concatenate([self._scales, np.ones(place, np.float32)])
            self._addends = np.concatenate([self._addends, np.zeros(place, np.float32)])
        self._tokens[place] = token
        return place


class LogitsEdits(NamedTuple):
    """Changes of one row of logits: edits int32 ``[3, n]``, and a mask int32 ``[W]`` or None."""

    edits: np.ndarray
    mask: np.ndarray | None


def adjust_inputs(
    count: int, vocab_size: int, wanted: Mapping[int, LogitsEdits]
) -> tuple[Fields, np.ndarray, np.ndarray]:
    """Fields, edits ``[3, count, n]`` and mask ``[count, W]`` of a ``logits_processor`` call before ``sample``."""
    fields = {name: np.zeros(count, np.int32) for name in ("edited", "masked", "top")}
    edits = np.zeros((3, count, max(of_row.edits.shape[1] for of_row in wanted.values())), np.int32)
    mask = np.zeros((count, -(-vocab_size // 32)), np.int32)
    for row, (edit, allowed) in wanted.items():
        fields["edited"][row] = edit.shape[1]
        edits[:, row, : edit.shape[1]] = edit
        if allowed is not None:
            fields["masked"][row] = 1
            mask[row] = allowed
    return fields, edits, mask


def rank_fields(count: int, rows: Many[int], wanted: Many[int]) -> Fields:
    """Fields of a ``logits_processor`` call after ``sample``: the most likely tokens of some rows."""
    fields = {name: np.zeros(count, np.int32) for name in ("edited", "masked", "top")}
    fields["top"][rows] = np.maximum(wanted, 1)
    return fields
