"""Drives a loaded target by hand: fixed slots, pages in order, greedy; no scheduler between the clock and the steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ling3export.runners.load.model_runner import Device


class Driver:
    """A device and where its sequences stand.

    Args:
        device: Ready to run.
        record: The manifest's record of its target.

    Attributes:
        paddings: Of each phase, ascending.
        logits: What the last call returned.
    """

    def __init__(self, device: Device, record: dict[str, Any]) -> None:
        self.device = device
        self.logits: Any = None
        self._state = record["state"]
        self.paddings = {
            phase: sorted(cell["padding"] for cell in record["cells"].values() if cell["phase"] == phase)
            for phase in ("prefill", "decode", "sample")
        }

    @property
    def longest(self) -> int:
        """Tokens for which each of the slots has pages."""
        state = self._state
        return min(state["max_pages"], state["pages"] // state["slots"]) * state["page_size"]

    def smallest(self, phase: str, count: int) -> int:
        """The smallest padding of ``phase`` that holds ``count``."""
        return next(padding for padding in self.paddings[phase] if padding >= count)

    def _table(self, slot: int, tokens: int) -> np.ndarray:
        """The page table row of a slot whose first ``tokens`` tokens are stored."""
        each = self.longest // self._state["page_size"]
        used = -(-tokens // self._state["page_size"])
        row = np.zeros(self._state["max_pages"], np.int32)
        row[:used] = (slot - 1) * each + 1 + np.arange(used)
        return row

    def prefill(self, slot: int, tokens: Sequence[int], start: int = 0, padding: int | None = None) -> Any:
        """Puts ``tokens`` behind ``start`` earlier ones of ``slot`` in one call, and takes the next one, unread."""
        chunk, count = self._state["chunk"], len(tokens)
        padding = padding or self.smallest("prefill", count)
        rows = padding // chunk
        used = -(-count // chunk)
        fields = {
            "tokens": np.zeros(padding, np.int32),
            "page_table": np.zeros((rows, self._state["max_pages"]), np.int32),
            **{name: np.zeros(rows, np.int32) for name in ("chunk_slot", "chunk_start", "chunk_len", "fresh")},
        }
        fields["tokens"][:count] = tokens
        fields["chunk_slot"][:used] = slot
        fields["chunk_start"][:used] = start + chunk * np.arange(used)
        fields["chunk_len"][:used] = np.minimum(chunk, count - chunk * np.arange(used))
        fields["fresh"][0] = start == 0
        fields["page_table"][:used] = self._table(slot, start + count)
        self.logits = self.device.step("prefill", padding, fields)
        return self.sample(self.logits, rows, {used - 1: (slot, start + count)})

    def decode(self, padding: int, positions: dict[int, int]) -> Any:
        """One token of each slot, at its position; tokens that were taken before come from the state. Unread."""
        fields = {
            "slot": np.zeros(padding, np.int32),
            "position": np.zeros(padding, np.int32),
            "page_table": np.zeros((padding, self._state["max_pages"]), np.int32),
            "token": np.full(padding, -1, np.int32),
        }
        for row, (slot, position) in enumerate(positions.items()):
            fields["slot"][row], fields["position"][row] = slot, position
            fields["page_table"][row] = self._table(slot, position + 1)
        self.logits = self.device.step("decode", padding, fields)
        taken = {row: (slot, at + 1) for row, (slot, at) in enumerate(positions.items())}
        return self.sample(self.logits, padding, taken)

    def sample(self, logits: Any, rows: int, taken: dict[int, tuple[int, int]]) -> Any:
        """Greedy tokens of the rows ``{row: (slot, position)}``, unread; the other rows are padding."""
        fields = {name: np.zeros(rows, np.int32) for name in ("slot", "position", "top_k", "seed")}
        fields |= {"temperature": np.zeros(rows, np.float32), "top_p": np.ones(rows, np.float32)}
        for row, (slot, position) in taken.items():
            fields["slot"][row], fields["position"][row] = slot, position
        return self.device.sample(logits, rows, fields)
