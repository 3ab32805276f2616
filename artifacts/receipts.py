"""Receipts and calibrations as people read them: the columns of tables, and the lines below these."""

from ling3export.artifacts.calibration import Calibration, CellTimes
from ling3export.artifacts.schema import PortableReceipts, Receipts, Target, Tolerance
from ling3export.foundation.errors import listed
from ling3export.foundation.phases import GIVERS, MOVING, ON_LOGITS
from ling3export.foundation.tables import aligned, footnotes

COLUMNS = ("measured", "ms", "device ms", "dispatch ms", "estimate ms", "bound ms")
EXACT = tuple(f"{phase}@" for phase in (*ON_LOGITS, *MOVING))
ERROR_COLUMNS = ("median error", "worst error")
PORTABLE = "stablehlo, on cpu"
NO_WEIGHTS = "no weights"  # why the cells of programs alone are not run


def error_columns(cell: str, receipts: Receipts | None) -> tuple[str, str]:
    """A cell's receipt for the ERROR_COLUMNS of a table; the error that is judged stands beside its tolerance.

    Args:
        cell: The cell's name, ``decode@16``.
        receipts: Those of its target; None where no cell was run.
    """
    if receipts is None or cell not in receipts.cells:
        return "not run", "-"
    receipt, tolerance = receipts.cells[cell], receipts.tolerance
    if cell.startswith(EXACT):
        wrong = f"{receipt.absolute:.0f} of {receipt.positions} wrong"
        return ("exact" if receipt.status == "passed" else wrong), "-"
    median, worst = f"{receipt.median:.1e}", f"{receipt.relative:.1e}"
    if tolerance.measure == "median":
        return _beside(median, receipt.median, tolerance.bound), worst
    return median, _beside(worst, receipt.relative, tolerance.bound)


def _beside(text: str, error: float, bound: float) -> str:
    return f"{text} {'≤' if error <= bound else '>'} {bound:.1e}"


def told(receipts: Receipts) -> list[str]:
    """What stands below a table of receipts: what the errors are, and what ran of portable programs."""
    lines = [explained(receipts.tolerance)]
    if isinstance(receipts, PortableReceipts):
        lines.append(f"{PORTABLE} ({receipts.compiler}), virtual devices: no executable of the target ran")
        lacking = receipts.lacking.items()
        lines += [f"{cell}: not run: only an accelerator has {listed(list(calls))}" for cell, calls in lacking]
    return lines


def explained(tolerance: Tolerance) -> str:
    """A line that says what the errors of receipts are, and which of them is judged."""
    errors = "errors are relative L2 distances of a position's logits from the plain model's"
    if tolerance.measure == "median":
        return (
            f"{errors}; the median of all positions may be up to {tolerance.bound:.1e} (bfloat16). The worst is not "
            "judged: rounding that sends one token to another expert alone makes it up to 0.3"
        )
    return f"{errors}; the worst may be up to {tolerance.bound:.1e} (float32)"


def milliseconds(seconds: float | None) -> str:
    """Three digits behind the point; a dash for what nobody knows."""
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def ordered(found: Calibration) -> list[tuple[str, CellTimes]]:
    """Cells by phase and padding, those that compute tokens first."""

    def place(item: tuple[str, CellTimes]) -> tuple[int, str, int]:
        phase, _, padding = item[0].partition("@")
        return GIVERS.index(phase) if phase in GIVERS else len(GIVERS), phase, int(padding or 0)

    return sorted(found.cells.items(), key=place)


def table(found: Calibration, target: Target) -> list[str]:
    """Times of every cell of ``target``, and what they are, as lines."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for name, each in ordered(found):
        measured = map(milliseconds, (each.median, each.device, each.dispatch))
        wanted = f"{target.cells[name].at_least}{milliseconds(each.estimate)}"
        rows.append((name, *measured, wanted, milliseconds(each.bound)))
    said = [
        f"ms is the median of the calls as the host sees them, on {found.machine}, {found.made}; decoding sequences "
        f"have {found.tokens_a_sequence} tokens each"
    ]
    if slowed := [name for name, each in found.cells.items() if each.device is not None and each.device > each.median]:
        said.append(
            f"device ms were taken under a profiler, which slows calls: those above ms ({listed(slowed)}) say how the "
            "time is divided, not how long a call takes"
        )
    if ratios := [f"{name} {each.median / each.estimate:,.3g}" for name, each in ordered(found) if each.estimate]:
        said.append(f"calls took so many times the compiler's estimate: {', '.join(ratios)}")
    return [*aligned(rows), *footnotes(said)]


def executed(found: Calibration) -> list[str]:
    """Receipts of every cell, as lines."""
    rows: list[tuple[str, ...]] = [("executed", "status", *ERROR_COLUMNS)]
    for name, _ in ordered(found):
        rows.append((name, found.receipts.cells[name].status, *error_columns(name, found.receipts)))
    return [*aligned(rows), *footnotes([explained(found.receipts.tolerance)])]
