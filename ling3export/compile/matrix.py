"""The table that tells of a build's cells."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ling3export.cache.cells import CELL, PROGRAM
from ling3export.compile.pool import Outcome
from ling3export.cost.estimates import peak_bytes

COLUMNS = ("cell", "status", "seconds", "program", "peak a device", "collectives", "estimate", "worst error")


def row(
    name: str, status: str, record: dict[str, Any] | None = None, size: int | None = None, error: float | None = None
) -> tuple[str, ...]:
    """A line of the table; of a cell that failed only name and status are known.

    Args:
        name: Target and cell.
        status: A word or two; of a program from the cache it becomes ``cached``.
        record: The compiler's record.
        size: Bytes of both tiers.
        error: The worst relative error of its receipts.
    """
    if record is None:
        return (name, status, *["-"] * (len(COLUMNS) - 2))
    seconds = record.get("estimated_seconds")
    # Recorded are those of the build that made it; a cell of the cache cost this one none, a program no compiling.
    origin = record.get("origin", {}).get("from")
    cached = origin in (CELL, PROGRAM)
    spent = record["lower_seconds"] + (0 if cached else record["compile_seconds"])
    return (
        name,
        status.replace("compiled", "cached") if cached else status,
        "-" if origin == CELL else f"{spent:.1f}",
        "-" if size is None else f"{size / 1e6:.2f} MB",
        f"{peak_bytes(record['memory']) / 1e6:,.1f} MB",
        str(collectives(record)),
        "-" if seconds is None else f"{1e3 * seconds:.3f} ms",
        "-" if error is None else f"{error:.1e}",
    )


def collectives(record: dict[str, Any]) -> int:
    """How many a program has; a compiler's estimate counts them as often as they run, with bytes."""
    return sum(each["count"] if isinstance(each, dict) else each for each in record["collectives"].values())


def outcome_rows(folder: Path, outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The table of a build that failed: every cell in the order in which they started."""
    rows = []
    for outcome in outcomes:
        target = outcome.plan.target.name
        for cell in outcome.plan.cells:
            name = f"{target} {cell.name}"
            if cell.name in outcome.failures:
                rows.append(row(name, "failed"))
            elif cell.name in outcome.records:
                files = [folder / "programs" / target / f"{cell.name}.{tier}" for tier in ("stablehlo", "exec")]
                size = sum(file.stat().st_size for file in files)
                rows.append(row(name, "compiled", outcome.records[cell.name], size))
            else:
                rows.append(row(name, "not started"))
    return rows


def manifest_rows(manifest: dict[str, Any], names: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """The table of an artifact's cells; of the targets ``names`` alone if they are given."""
    rows = []
    for name, target in manifest["targets"].items():
        receipts = manifest["vectors"]["receipts"].get(name, {}).get("cells", {})
        for cell, record in target["cells"].items() if names is None or name in names else ():
            size = record["exec"]["bytes"] + record["stablehlo"]["bytes"]
            error = receipts.get(cell, {}).get("relative")
            rows.append(row(f"{name} {cell}", record["status"], record, size, error))
    return rows
