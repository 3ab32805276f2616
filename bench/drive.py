"""Drives a loaded target by hand: fixed slots, pages in order, greedy; no scheduler between the clock and the steps."""

from collections.abc import Sequence
from typing import Any

from ling3export.artifacts.schema import Target
from ling3export.runners.engine.inputs import (
    DecodeRow,
    SampleRow,
    Span,
    decode_fields,
    prefill_fields,
    sample_fields,
)
from ling3export.runners.load.model_runner import ModelRunner


class Driver:
    """A model runner and where its sequences stand.

    Args:
        runner: Ready to run.
        target: The manifest's.

    Attributes:
        paddings: Of each phase, ascending.
        logits: What the last call returned.
    """

    def __init__(self, runner: ModelRunner, target: Target) -> None:
        self.runner = runner
        self.logits: Any = None
        self._state = target.state
        self.paddings = {phase: list(target.paddings(phase)) for phase in ("prefill", "decode", "sample")}

    @property
    def longest(self) -> int:
        """Tokens for which each of the slots has pages."""
        state = self._state
        return min(state.max_pages, state.pages // state.slots) * state.page_size

    def smallest(self, phase: str, count: int) -> int:
        """The smallest padding of ``phase`` that holds ``count``."""
        return next(padding for padding in self.paddings[phase] if padding >= count)

    def _pages(self, slot: int, tokens: int) -> range:
        """The pages of a slot whose first ``tokens`` tokens are stored."""
        first = (slot - 1) * (self.longest // self._state.page_size) + 1
        return range(first, first - (-tokens // self._state.page_size))

    def prefill(self, slot: int, tokens: Sequence[int], start: int = 0, padding: int | None = None) -> Any:
        """Puts ``tokens`` behind ``start`` earlier ones of ``slot`` in one call, and takes the next one, unread."""
        chunk, end = self._state.chunk, start + len(tokens)
        padding = padding or self.smallest("prefill", len(tokens))
        span = Span(slot, start, tokens, self._pages(slot, end))
        fields = prefill_fields(padding, [span], chunk, self._state.max_pages)
        self.logits = self.runner.step("prefill", padding, fields)
        return self.sample(self.logits, padding // chunk, {(len(tokens) - 1) // chunk: (slot, end)})

    def decode(self, padding: int, positions: dict[int, int]) -> Any:
        """One token of each slot, at its position; tokens that were taken before come from the state. Unread."""
        rows = {
            row: DecodeRow(slot, position, self._pages(slot, position + 1))
            for row, (slot, position) in enumerate(positions.items())
        }
        self.logits = self.runner.step("decode", padding, decode_fields(padding, rows, self._state.max_pages))
        taken = {row: (slot, at + 1) for row, (slot, at) in enumerate(positions.items())}
        return self.sample(self.logits, padding, taken)

    def sample(self, logits: Any, rows: int, taken: dict[int, tuple[int, int]]) -> Any:
        """Greedy tokens of the rows ``{row: (slot, position)}``, unread; the other rows are padding."""
        fields = sample_fields(rows, {row: SampleRow(slot, position) for row, (slot, position) in taken.items()})
        return self.runner.sample(logits, rows, fields)
