"""The figures of a report: horizontal bars, as shares of a full width, which the templates draw as HTML.

They are drawn with the page's own style sheet and not by a plotting library: so one file reads in a light scheme, in a
dark one and on paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ling3export.cost.operations import KINDS
from ling3export.report.data import MEMORY, Target, si


@dataclass(frozen=True)
class Segment:
    """A part of a bar: its share of the full width in percent, the number of its colour, and its text."""

    share: float
    series: int
    text: str


@dataclass(frozen=True)
class Bar:
    """A bar with its label to the left and its sum to the right."""

    label: str
    segments: tuple[Segment, ...]
    total: str


@dataclass(frozen=True)
class Bars:
    """Bars made of segments.

    Attributes:
        series: Names of the segments, in the order of the colours.
        rows: From the top.
        full: What the full width stands for, in words.
    """

    series: tuple[str, ...]
    rows: tuple[Bar, ...]
    full: str

    @property
    def marks(self) -> int:
        """How many shapes show data."""
        return sum(len(row.segments) for row in self.rows)


@dataclass(frozen=True)
class Figures:
    """The figures of one target; None where its compiler says nothing of the matter."""

    memory: Bars
    bound: Bars | None
    time: Bars | None
    bytes: Bars | None
    collectives: Bars | None


def bars(
    series: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]], unit: str,
    limit: tuple[float, str] | None = None,
) -> Bars:  # fmt: skip
    """Bars of which the longest, or the limit, has the full width.

    Args:
        series: Names of the segments.
        rows: The label of each bar, and a value for each name.
        unit: The unit of the values.
        limit: A value that bars may reach, with its name; it is the full width if the bars come near it.
    """
    largest = max([sum(values) for _, values in rows] + [0.0]) or 1.0
    full = f"the full width is {si(largest, unit)}"
    if limit is not None and largest <= limit[0] <= 2 * largest:
        largest, full = limit[0], f"the full width is {limit[1]}, {si(limit[0], unit)}"
    laid = []
    for label, values in rows:
        segments = tuple(
            Segment(100 * value / largest, number, f"{name}: {si(value, unit)}")
            for number, (name, value) in enumerate(zip(series, values, strict=True))
            if value > 0
        )
        laid.append(Bar(label, segments, si(sum(values), unit)))
    return Bars(tuple(series), tuple(laid), full)


def figures(target: Target) -> Figures:
    """The figures of what is known of a target."""
    limit = None if target.chip is None else (float(target.chip.memory), "the device's memory")
    memory = bars(MEMORY, [(cell.name, [cell.memory[kind] for kind in MEMORY]) for cell in target.cells], "B", limit)
    return Figures(memory, _bound(target), _time(target), _bytes(target), _collectives(target))


def _bound(target: Target) -> Bars | None:
    rows = [
        (cell.name, [min(work.bound_seconds, work.seconds), max(0.0, work.seconds - work.bound_seconds)])
        for cell, work in target.estimated
    ]
    return bars(("the roofline bound", "the estimate beyond it"), rows, "s") if rows else None


def _time(target: Target) -> Bars | None:
    rows = [(cell.name, [work.by_kind.get(kind, 0.0) for kind in KINDS]) for cell, work in target.estimated]
    return bars(KINDS, rows, "s") if any(sum(values) for _, values in rows) else None


def _bytes(target: Target) -> Bars | None:
    """Two bars a cell: what must move, by what it is; what the program moves."""
    names = list(dict.fromkeys(kind for _, work in target.estimated for kind in work.bound_bytes))
    rows: list[tuple[str, list[float]]] = []
    for cell, work in target.estimated:
        rows.append((f"{cell.name} must", [*(work.bound_bytes.get(name, 0) for name in names), 0]))
        if work.moved is not None:
            rows.append((f"{cell.name} does", [*(0 for _ in names), work.moved]))
    return bars([*names, "the program"], rows, "B") if rows else None


def _collectives(target: Target) -> Bars | None:
    """Bytes by kind; None where bytes are not known or nothing is sent."""
    kinds = list(dict.fromkeys(each.kind for cell in target.cells for each in cell.collectives if each.bytes))
    rows = [
        (cell.name, [sum(each.bytes or 0 for each in cell.collectives if each.kind == kind) for kind in kinds])
        for cell in target.cells
    ]
    return bars(kinds, rows, "B") if kinds else None
