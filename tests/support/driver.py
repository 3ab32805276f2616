"""Drives a loaded target by hand: fixed slots, pages in order, greedy; no scheduler between the clock and the steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ling3export.artifacts.schema import Target
from ling3export.runners.engine.inputs import Span, decode_fields, prefill_fields, sample_fields
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
        self._state = state = target.state
        pages = self.longest // state.page_size
        self._pages = np.zeros((state.slots + 1, state.max_pages), np.int32)  # of each slot, in order
        self._pages[1:, :pages] = np.arange(1, state.slots * pages + 1).reshape(state.slots, pages)
        self.paddings = {phase: list(target.paddings(phase)) for phase in ("prefill", "decode", "sample")}

    @property
    def longest(self) -> int:
        """Tokens for which each of the slots has pages."""
        state = self._state
        return min(state.max_pages, state.pages // state.slots) * state.page_size

    def smallest(self, phase: str, count: int) -> int:
        """The smallest padding of ``phase`` that holds ``count``."""
        return next(padding for padding in self.paddings[phase] if padding >= count)

    def prefill(self, slot: int, tokens: Sequence[int], start: int = 0, padding: int | None = None) -> Any:
        """Puts ``tokens`` behind ``start`` earlier ones of ``slot`` in one call, and takes the next one, unread."""
        chunk, end = self._state.chunk, start + len(tokens)
        padding = padding or self.smallest("prefill", len(tokens))
        fields = prefill_fields(padding, [Span(slot, start, tokens)], chunk, self._pages)
        self.logits = self.runner.step("prefill", padding, fields)
        return self.sample(self.logits, padding // chunk, {(len(tokens) - 1) // chunk: (slot, end)})

    def decode(self, padding: int, positions: dict[int, int]) -> Any:
        """One token of each slot, at its position; tokens that were taken before come from the state. Unread."""
        fields = decode_fields(padding, list(positions), list(positions.values()), self._pages)
        self.logits = self.runner.step("decode", padding, fields)
        taken = {row: (slot, at + 1) for row, (slot, at) in enumerate(positions.items())}
        return self.sample(self.logits, padding, taken)

    def sample(self, logits: Any, rows: int, taken: dict[int, tuple[int, int]]) -> Any:
        """Greedy tokens of the rows ``{row: (slot, position)}``, unread; the other rows are padding."""
        slots, positions = zip(*taken.values(), strict=True)
        return self.runner.sample(logits, rows, sample_fields(rows, list(taken), slots, positions))
