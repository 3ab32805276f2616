"""A calibration for people: tables, and a page that refers to nothing outside itself."""

from typing import NamedTuple

from ling3export.artifacts.calibration import Calibration, Times
from ling3export.artifacts.schema import Target
from ling3export.foundation.operations import COLLECTIVES, KINDS
from ling3export.foundation.tables import aligned
from ling3export.runners.calibrate.pages import SHARED, template
from ling3export.runners.calibrate.receipts import ERROR_COLUMNS, error_columns, explained

COLUMNS = ("measured", "ms", "device ms", "dispatch ms", "estimate ms", "bound ms")
ORDER = ("prefill", "score", "decode")


class Bar(NamedTuple):
    """One bar of a figure: what it shows, and how long it is, in seconds."""

    what: str
    seconds: float


def milliseconds(seconds: float | None) -> str:
    """Three digits behind the point; a dash for what nobody knows."""
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def ordered(found: Calibration) -> list[tuple[str, Times]]:
    """Cells by phase and padding, those that compute tokens first."""

    def place(item: tuple[str, Times]) -> tuple[int, str, int]:
        phase, _, padding = item[0].partition("@")
        return ORDER.index(phase) if phase in ORDER else len(ORDER), phase, int(padding or 0)

    return sorted(found.cells.items(), key=place)


def table(found: Calibration, target: Target) -> list[str]:
    """Times of every cell of ``target``, and what they are, as lines."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for name, each in ordered(found):
        measured = map(milliseconds, (each.median, each.device, each.dispatch))
        wanted = f"{target.cells[name].at_least}{milliseconds(each.estimate)}"
        rows.append((name, *measured, wanted, milliseconds(each.bound)))
    return [
        *aligned(rows),
        f"  medians on {found.machine}, {found.made}; decoding sequences have {found.tokens_a_sequence} tokens each",
    ]


def executed(found: Calibration) -> list[str]:
    """Receipts of every cell, as lines."""
    rows: list[tuple[str, ...]] = [("executed", "status", *ERROR_COLUMNS)]
    for name, _ in ordered(found):
        rows.append((name, found.receipts.cells[name].status, *error_columns(name, found.receipts)))
    return [*aligned(rows), f"  {explained(found.receipts.tolerance)}"]


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
    text = template(SHARED, "calibration.html", ms=milliseconds).render(
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
