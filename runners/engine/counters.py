"""Counters of the scheduler: calls and filling of each cell, tokens, hits of the prefix cache."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CellCounter:
    """How often a cell ran, and how well it was filled."""

    calls: int = 0
    used: int = 0
    slots: int = 0


@dataclass
class Counters:
    """The scheduler's counters. One thread counts; ``record`` may be called from any.

    Attributes:
        cells: A counter for each cell, by its name.
        tokens_in: Tokens of prompts whose prefill was dispatched, each counted once.
        tokens_out: Generated tokens that were read.
        preempted: How often a sequence gave its pages back to start again.
        failed: Requests that ended by an error of their own.
        started: Requests whose first call was dispatched.
        hits: Requests that the prefix cache had a beginning of.
        misses: The others, by reason.
        cached_tokens: Tokens of prompts that were not computed.
        snapshots: States that were kept.
    """

    cells: dict[str, CellCounter] = field(default_factory=dict)
    tokens_in: int = 0
    tokens_out: int = 0
    preempted: int = 0
    failed: int = 0
    started: int = 0
    hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    snapshots: int = 0

    def hit(self, tokens: int) -> None:
        """Notes a request whose first ``tokens`` were in the prefix cache."""
        self.hits += 1
        self.cached_tokens += tokens

    def missed(self, reason: str) -> None:
        """Notes a request that the prefix cache had nothing of."""
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def count(self, name: str, padding: int, used: int) -> None:
        """Notes a call of the cell ``name`` that filled ``used`` of its ``padding`` slots."""
        cell = self.cells.get(name)
        if cell is None:
            cell = self.cells[name] = CellCounter()
        cell.calls += 1
        cell.used += used
        cell.slots += padding

    def record(self) -> dict[str, Any]:
        """The counters as JSON; ``padding_waste`` is the share of padded tokens or rows that held nothing."""
        cells = {
            name: {"calls": cell.calls, "padding_waste": round(1 - cell.used / cell.slots, 4)}
            for name, cell in sorted(self.cells.copy().items())
        }
        return {
            "cells": cells,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "preempted": self.preempted,
            "failed": self.failed,
            "requests": self.started,
            "prefix_cache": {
                "hits": self.hits,
                "misses": self.misses.copy(),
                "cached_tokens": self.cached_tokens,
                "snapshots_taken": self.snapshots,
            },
        }
