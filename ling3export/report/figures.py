"""Where everything of a report's figures lies; the templates draw it as SVG.

Drawn by us and not by a plotting library: bars and one plot with two logarithmic axes, whose colours come from the
page's style sheet, so that one file reads in a light scheme, in a dark one and on paper, and whose parts keep names for
tests and screen readers. matplotlib writes fixed colours into its SVG, and text as outlines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ling3export.report.data import si, tick

WIDTH = 760.0
ROW, BAR = 30.0, 18.0
LETTER = 8.2  # of a 12 px letter, generously
LABELS, TOTALS, AXIS = 150.0, 84.0, 26.0


@dataclass(frozen=True)
class Segment:
    """A part of a bar; ``series`` is the number of its colour, ``text`` what it says when pointed at."""

    x: float
    width: float
    series: int
    text: str


@dataclass(frozen=True)
class Row:
    """A bar with its label to the left and its sum to the right."""

    label: str
    y: float
    segments: tuple[Segment, ...]
    end: float
    total: str


@dataclass(frozen=True)
class Bars:
    """Horizontal bars made of segments.

    Attributes:
        series: Names, in the order of the colours.
        rows: From the top.
        ticks: Position and text.
        height: Of the whole figure.
        limit: Position and text of a line that no bar may cross; None without, or where it lies outside.
    """

    series: tuple[str, ...]
    rows: tuple[Row, ...]
    ticks: tuple[tuple[float, str], ...]
    height: float
    limit: tuple[float, str] | None = None
    width: float = WIDTH

    @property
    def marks(self) -> int:
        """How many shapes show data."""
        return sum(len(row.segments) for row in self.rows)


def bars(
    series: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]], unit: str,
    limit: tuple[float, str] | None = None,
) -> Bars:  # fmt: skip
    """Lays out bars.

    Args:
        series: Names of the segments.
        rows: Label of each bar, and a value a series.
        unit: Of the values.
        limit: A value that bars may reach, with its name; drawn if the bars come near it.
    """
    largest = max([sum(values) for _, values in rows] + [0.0]) or 1.0
    if limit is not None and limit[0] <= 2 * largest:
        largest = max(largest, limit[0])
    else:
        limit = None
    step = _step(largest / 4)
    scale = (WIDTH - LABELS - TOTALS) / largest
    laid = []
    for index, (label, values) in enumerate(rows):
        x, segments = LABELS, []
        for number, (name, value) in enumerate(zip(series, values, strict=True)):
            if value > 0:
                segments.append(Segment(x, max(value * scale, 0.5), number, f"{name}: {si(value, unit)}"))
                x += value * scale
        laid.append(Row(label, index * ROW + 6, tuple(segments), x, si(sum(values), unit)))
    ticks = [(LABELS + n * step * scale, tick(n * step, unit)) for n in range(math.floor(largest / step + 1e-9) + 1)]
    line = None if limit is None else (LABELS + limit[0] * scale, limit[1])
    return Bars(tuple(series), tuple(laid), tuple(ticks), len(rows) * ROW + AXIS, line)


def _step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


@dataclass(frozen=True)
class Point:
    """A cell in the plot: ``needed`` work, or the work that its program ``does``."""

    label: str
    kind: str
    intensity: float
    rate: float


@dataclass(frozen=True)
class Placed:
    """A point with its position, that of its label, and what it says when pointed at."""

    point: Point
    x: float
    y: float
    label_x: float
    label_y: float
    text: str


@dataclass(frozen=True)
class Roofline:
    """FLOP/s against FLOP a byte, both logarithmic, below the roof of a chip."""

    points: tuple[Placed, ...]
    roof: tuple[tuple[float, float], ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    left: float = 92.0
    right: float = WIDTH - 20
    top: float = 14.0
    bottom: float = 372.0
    width: float = WIDTH
    height: float = 420.0

    @property
    def marks(self) -> int:
        """How many shapes show data: points and the roof."""
        return len(self.points) + 1


def roofline(points: Sequence[Point], bandwidth: float, flops: float) -> Roofline:
    """Lays out the plot.

    Args:
        points: Of positive intensity and rate.
        bandwidth: Bytes a second.
        flops: Operations a second.
    """
    ridge = flops / bandwidth
    low_x, high_x = _decades([p.intensity for p in points] + [ridge, 4 * ridge])
    low_y, high_y = _decades([p.rate for p in points] + [flops, bandwidth * 10.0**low_x])
    empty = Roofline((), (), (), ())

    def at_x(value: float) -> float:
        return empty.left + (math.log10(value) - low_x) / (high_x - low_x) * (empty.right - empty.left)

    def at_y(value: float) -> float:
        return empty.bottom - (math.log10(value) - low_y) / (high_y - low_y) * (empty.bottom - empty.top)

    start, end = 10.0**low_x, 10.0**high_x
    roof = ((at_x(start), at_y(bandwidth * start)), (at_x(ridge), at_y(flops)), (at_x(end), at_y(flops)))
    placed: list[Placed] = []
    boxes = [(at_x(p.intensity) - 6, at_y(p.rate) - 6, 12.0, 12.0) for p in points]
    for point in points:
        x, y = at_x(point.intensity), at_y(point.rate)
        label_x, label_y, box = _free(x, y, len(point.label) * LETTER, boxes, empty)
        boxes.append(box)
        what = "what must be done" if point.kind == "needed" else "what the program does"
        text = f"{point.label}, {what}: {si(point.rate, 'FLOP/s')} at {point.intensity:.3g} FLOP a byte"
        placed.append(Placed(point, x, y, label_x, label_y, text))
    return Roofline(
        tuple(placed), roof,
        tuple((at_x(10.0**n), f"{10.0**n:g}") for n in range(low_x, high_x + 1)),
        tuple((at_y(10.0**n), tick(10.0**n, "FLOP/s")) for n in range(low_y, high_y + 1)),
    )  # fmt: skip


Box = tuple[float, float, float, float]  # left, top, width, height


def _free(x: float, y: float, width: float, boxes: Sequence[Box], plot: Roofline) -> tuple[float, float, Box]:
    """Where a label of this width fits beside a point; far below it if nowhere near."""
    offsets = [(9.0, 4.0), (-9.0 - width, 4.0), (9.0, 16.0), (9.0, -8.0), (-9.0 - width, 16.0), (-9.0 - width, -8.0)]
    offsets += [(9.0, 4.0 + 14 * n) for n in range(2, 12)]
    tried = [(x + dx, y + dy, (x + dx, y + dy - 10, width, 12.0)) for dx, dy in offsets]
    within = [each for each in tried if plot.left <= each[0] <= plot.right - width and plot.top < each[1] < plot.bottom]
    return next((each for each in within if not any(_meet(each[2], box) for box in boxes)), (within or tried)[-1])


def _meet(left: Box, right: Box) -> bool:
    return all(left[i] < right[i] + right[i + 2] and right[i] < left[i] + left[i + 2] for i in (0, 1))


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)
