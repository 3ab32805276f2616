"""Calls the steps of a loaded target without a scheduler, so that timings contain the steps only.

Slots are fixed, pages are in order and sampling is greedy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ling3export.artifacts.schema import Target
from ling3export.runners.engine.inputs import Span, decode_fields, prefill_fields, sample_fields
from ling3export.runners.load.model_runner import ModelRunner


class Driver:
    """A model runner and the positions of its sequences.

    Args:
        runner: A runner that is ready.
        target: The target in the manifest.

    Attributes:
        paddings: The paddings of each phase, ascending.
        logits: The logits of the last call.
    """

    def __init__(self, runner: ModelRunner, target: Target) -> None:
        self.runner = runner
        self.logits: Any = None
        self._state = state = target.state
        pages = self.longest // state.page_size
        self._pages = np.zeros((state.slots + 1, state.max_pages), np.int32)  # block table of each slot, pages in order
        self._pages[1:, :pages] = np.arange(1, state.slots * pages + 1).reshape(state.slots, pages)
        self.paddings = {phase: list(target.paddings(phase)) for phase in ("prefill", "decode", "sample")}

    @property
    def longest(self) -> int:
        """Longest sequence, in tokens, for which each of the slots has pages."""
        state = self._state
        return min(state.max_pages, state.pages // state.slots) * state.page_size

    def smallest(self, phase: str, count: int) -> int:
        """The smallest padding of ``phase`` that holds ``count`` tokens."""
        return next(padding for padding in self.paddings[phase] if padding >= count)

    def prefill(self, slot: int, tokens: Sequence[int], start: int = 0, padding: int | None = None) -> Any:
        """Prefills tokens after the ``start`` earlier ones of ``slot`` in one call; samples the next one, unread."""
        chunk, end = self._state.chunk, start + len(tokens)
        padding = padding or self.smallest("prefill", len(tokens))
        fields = prefill_fields(padding, [Span(slot, start, tokens)], chunk, self._pages)
        self.logits = self.runner.step("prefill", padding, fields)
        return self.sample(self.logits, padding // chunk, {(len(tokens) - 1) // chunk: (slot, end)})

    def decode(self, padding: int, positions: dict[int, int]) -> Any:
        """Decodes one token of each slot at its position, without reading it.

        Earlier sampled tokens come from the state.
        """
        fields = decode_fields(padding, list(positions), list(positions.values()), self._pages)
        self.logits = self.runner.step("decode", padding, fields)
        taken = {row: (slot, at + 1) for row, (slot, at) in enumerate(positions.items())}
        return self.sample(self.logits, padding, taken)

    def sample(self, logits: Any, rows: int, taken: dict[int, tuple[int, int]]) -> Any:
        """Samples greedy tokens of rows ``{row: (slot, position)}`` without reading them; other rows are padding."""
        slots, positions = zip(*taken.values(), strict=True)
        return self.runner.sample(logits, rows, sample_fields(rows, list(taken), slots, positions))
