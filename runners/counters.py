"""What the runner did: calls and filling of each cell, tokens, compiling; times of each stage of a start."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    """What the scheduler did."""

    cells: dict[str, CellCounter] = field(default_factory=dict)
    tokens_in: int = 0
    tokens_out: int = 0
    preempted: int = 0

    def count(self, phase: str, padding: int, used: int) -> None:
        """Notes a call of ``phase@padding`` that filled ``used`` of its slots."""
        cell = self.cells.setdefault(f"{phase}@{padding}", CellCounter())
        cell.calls += 1
        cell.used += used
        cell.slots += padding

    def record(self) -> dict[str, Any]:
        """As JSON; ``padding_waste`` is the share of slots that held nothing."""
        cells = {
            name: {"calls": cell.calls, "padding_waste": round(1 - cell.used / cell.slots, 4)}
            for name, cell in sorted(self.cells.items())
        }
        return {
            "cells": cells,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "preempted": self.preempted,
        }


@dataclass
class Timings:
    """Seconds that each stage of a start took; stages in threads overlap.

    Attributes:
        seconds: By stage: ``imports``, ``programs``, ``weights``, ``check``, ``state``, ``first_step`` and so on.
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures a block; a stage that is entered again adds up."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
