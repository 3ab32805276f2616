"""What a report shows of a target beyond its records: sizes in readable units, and figures of horizontal bars.

The templates draw the bars as HTML with the page's own style sheet, not with a plotting library: so one file reads in a
light scheme, in a dark one and on paper.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ling3export.artifacts.program_records import Estimate, RooflineBound
from ling3export.artifacts.schema import Cell
from ling3export.cost.chips import Chip
from ling3export.foundation.hlo import KINDS

MEMORY = ("weights", "state", "temporaries", "outputs", "other arguments", "code")
PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
Estimated = list[tuple[Cell, Estimate, RooflineBound]]


def si(value: float, unit: str) -> str:
    """Three significant digits and a decimal prefix: ``2.14 ms``, ``1.35 GB``."""
    if value == 0:
        return f"0 {unit}"
    # What rounds to 1000 takes the next prefix.
    prefix = next((each for each, scale in PREFIXES.items() if abs(value) >= 0.9995 * scale), "n")
    scaled = value / PREFIXES[prefix]
    exponent = int(f"{scaled:.2e}".partition("e")[2])  # of the rounded number
    return f"{scaled:.{max(0, 2 - exponent)}f} {prefix}{unit}"


def times(ratio: float) -> str:
    """``2.35 times``; a ratio to nearly nothing is ``over 1,000 times``."""
    if ratio >= 1000:
        return "over 1,000 times"
    return f"{ratio:,.0f} times" if ratio >= 100 else f"{ratio:.3g} times"


def estimated(cells: Iterable[Cell]) -> Estimated:
    """The cells whose compiler estimates their time, each with its estimate and its roofline bound."""
    return [(cell, cell.estimate, cell.floor) for cell in cells if cell.estimate is not None and cell.floor is not None]


def memory_parts(cell: Cell, tp: int) -> dict[str, int]:
    """Bytes on one device while a cell runs, by MEMORY; they add up to its peak.

    Weights and state follow from their shapes, the rest is what the compiler says. ``other arguments`` are the batch,
    and what layouts add to the shapes of weights and state.

    Args:
        cell: The cell.
        tp: The devices that share the model.
    """
    sizes = {"params": 0, "state": 0, "batch": 0}
    for leaf in cell.inputs:
        sizes[leaf.group] += leaf.nbytes // tp ** sum(axis is not None for axis in leaf.spec)
    weights, state, memory = sizes["params"], sizes["state"], cell.memory
    other = memory.arguments - weights - state
    parts = (weights, state, memory.temporaries, memory.outputs - memory.alias, other, memory.code)
    return dict(zip(MEMORY, parts, strict=True))


@dataclass(frozen=True)
class Bars:
    """A figure of horizontal bars that are made of segments."""

    series: tuple[str, ...]  # names of the segments, in the order of their colours
    rows: list[tuple[str, list[float]]]  # from the top: the label of a bar, and a value for each segment
    unit: str  # the unit of the values
    limit: tuple[float, str] | None = None  # a value that bars may reach, and its name; None where there is none

    @property
    def full(self) -> tuple[float, str]:
        """The value of the full width, and its name: the longest bar, or the limit if that bar comes near it."""
        longest = max((sum(values) for _, values in self.rows), default=0.0) or 1.0
        if self.limit is not None and longest <= self.limit[0] <= 2 * longest:
            return self.limit
        return longest, ""

    @property
    def marks(self) -> int:
        """How many shapes show data."""
        return sum(value > 0 for _, values in self.rows for value in values)


def figures(cells: list[Cell], tp: int, chip: Chip | None) -> dict[str, Bars | None]:
    """The figures of a target by name; None where its compiler says nothing of the matter.

    Args:
        cells: The target's, in the order of the bars.
        tp: Its devices.
        chip: Facts about its machine; None where no table has them.
    """
    limit = None if chip is None else (float(chip.memory), "the device's memory")
    held: list[tuple[str, list[float]]] = [(cell.name, [*memory_parts(cell, tp).values()]) for cell in cells]
    found = estimated(cells)
    shown = {cell.name: f"{cell.name} {cell.at_least}".strip() for cell, _, _ in found}
    bound = [
        (shown[cell.name], [min(least.seconds, each.seconds), max(0.0, each.seconds - least.seconds)])
        for cell, each, least in found
    ]
    time = [(shown[cell.name], [each.by_kind.get(kind, 0.0) for kind in KINDS]) for cell, each, _ in found]
    return {
        "memory": Bars(MEMORY, held, "B", limit),
        "bound": Bars(("the roofline bound", "the estimate beyond it"), bound, "s") if found else None,
        "time": Bars(KINDS, time, "s") if any(sum(values) for _, values in time) else None,
        "bytes": _bytes(found) if found else None,
        "collectives": _collectives(cells),
    }


def _bytes(found: Estimated) -> Bars:
    """Two bars a cell: the bytes that must move, by what they are, and the bytes that the program moves."""
    names = tuple(dict.fromkeys(kind for _, _, bound in found for kind in bound.bytes))
    rows: list[tuple[str, list[float]]] = []
    for cell, each, bound in found:
        rows.append((f"{cell.name} must", [*(bound.bytes.get(name, 0) for name in names), 0]))
        if each.memory_bytes is not None:
            rows.append((f"{cell.name} does", [*(0 for _ in names), each.memory_bytes]))
    return Bars((*names, "the program"), rows, "B")


def _collectives(cells: list[Cell]) -> Bars | None:
    """Bytes by kind; None where bytes are not known or nothing is sent."""
    sent = [(cell.name, {kind: each.bytes or 0 for kind, each in cell.collectives.items()}) for cell in cells]
    kinds = tuple(dict.fromkeys(kind for _, sizes in sent for kind, size in sizes.items() if size))
    rows: list[tuple[str, list[float]]] = [(name, [sizes.get(kind, 0) for kind in kinds]) for name, sizes in sent]
    return Bars(tuple(kind.replace("_", "-") for kind in kinds), rows, "B") if kinds else None
