"""The page of a calibration, which refers to nothing outside itself."""

from pathlib import Path
from typing import NamedTuple

from ling3export.artifacts.calibration import Calibration, Times
from ling3export.artifacts.receipts import ERROR_COLUMNS, error_columns, explained, milliseconds, ordered
from ling3export.artifacts.schema import Target
from ling3export.foundation.hlo import COLLECTIVES, KINDS
from ling3export.foundation.pages import template

TEMPLATES = Path(__file__).parent / "templates"


class Bar(NamedTuple):
    """One bar of a figure: what it shows, and how long it is, in seconds."""

    what: str
    seconds: float


def kinds(found: Calibration, target: Target) -> list[tuple[str, list[tuple[str, float | None, float | None]]]]:
    """By cell the kinds of work with the seconds that operations took on a device, and those of the estimate."""
    shown = []
    for name, each in ordered(found):
        estimate = target.cells[name].estimate
        wanted = {} if estimate is None else estimate.by_kind
        spent = each.by_kind or {}
        names = [kind for kind in (*KINDS, COLLECTIVES, "unknown") if kind in spent or kind in wanted]
        shown.append((name, [(kind, spent.get(kind), wanted.get(kind)) for kind in names]))
    return [(name, rows) for name, rows in shown if rows]


def bars(each: Times) -> list[Bar]:
    """The bars of a cell: estimate, measured, on the device alone, bound; without those that nobody knows."""
    found = {"estimate": each.estimate, "measured": each.median, "on the device": each.device, "bound": each.bound}
    return [Bar(what, seconds) for what, seconds in found.items() if seconds is not None]


def page(found: Calibration, target: Target) -> str:
    """An HTML page of the calibration.

    Args:
        found: What was measured.
        target: The manifest's record of the target.
    """
    cells = ordered(found)
    receipts = [(name, found.receipts.cells[name].status, *error_columns(name, found.receipts)) for name, _ in cells]
    collectives = {name: sum(each.count for each in target.cells[name].collectives.values()) for name, _ in cells}
    text = template(TEMPLATES, "calibration.html", ms=milliseconds).render(
        found=found,
        cells=[(name, each, bars(each)) for name, each in cells],
        kinds=kinds(found, target),
        receipts=receipts,
        errors=ERROR_COLUMNS,
        explained=explained(found.receipts.tolerance),
        collectives=collectives,
        between=COLLECTIVES,
        at_least={name: target.cells[name].at_least for name, _ in cells},
    )
    return f"{text}\n"
