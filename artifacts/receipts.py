"""Receipts and measured times as tables for people, with footnotes."""

from ling3export.artifacts.calibration import Calibration
from ling3export.artifacts.schema import PortableReceipts, Receipts, Target, Tolerance
from ling3export.foundation.errors import listed
from ling3export.foundation.phases import MOVING, ON_LOGITS
from ling3export.foundation.tables import aligned, footnotes

COLUMNS = ("measured", "ms", "estimate ms", "bound ms")
EXACT = tuple(f"{phase}@" for phase in (*ON_LOGITS, *MOVING))
ERROR_COLUMNS = ("median error", "worst error")
PORTABLE = "stablehlo, on cpu"
NO_WEIGHTS = "no weights"  # why the cells of programs alone are not run


def error_columns(cell: str, receipts: Receipts | None) -> tuple[str, str]:
    """A cell's receipt for the ERROR_COLUMNS of a table; the judged error stands next to its tolerance.

    Args:
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
    """Notes below a table of receipts: the meaning of the errors, and the portable programs that ran."""
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
            "judged: rounding may send one token to another expert, which moves its position far"
        )
    return f"{errors}; the worst may be up to {tolerance.bound:.1e} (float32)"


def times_table(record: Calibration, target: Target) -> list[str]:
    """The measured times of every cell of ``target``, as lines, with their conditions below."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for name, cell in target.cells.items():
        bound = None if cell.floor is None else cell.floor.seconds
        estimate = f"{cell.at_least}{_milliseconds(cell.estimated_seconds)}"
        rows.append((name, _milliseconds(record.cells[name].median), estimate, _milliseconds(bound)))
    conditions = (
        f"ms is the median of the calls as the host sees them, on {record.machine}, {record.made}; decoding sequences "
        f"have {record.tokens_a_sequence} tokens each"
    )
    return [*aligned(rows), *footnotes([conditions])]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"
