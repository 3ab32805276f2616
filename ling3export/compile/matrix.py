"""All cells of all targets, built so that one that fails loses none of the others; and the table that tells of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling3export.cache.programs import CELL, PROGRAM
from ling3export.compile.pool import Compilers
from ling3export.cost.estimates import peak_bytes
from ling3export.errors import ArtifactError, PlanError
from ling3export.model.config import Config
from ling3export.plan.plan import Cell, Plan
from ling3export.pricing.memory import check_memory

COLUMNS = ("cell", "status", "seconds", "program", "peak a device", "collectives", "estimate", "worst error")


@dataclass(frozen=True)
class Outcome:
    """What became of a target's cells.

    Attributes:
        plan: Its plan.
        records: By cell, of those that were built.
        failures: By cell, of those that were not: ``error``, ``hint``, ``kind`` (the error's class, where known).
    """

    plan: Plan
    records: dict[str, dict[str, Any]]
    failures: dict[str, dict[str, Any]]


def compile_all(plans: Sequence[Plan], compilers: Sequence[Compilers], advance: Callable[[], None]) -> list[Outcome]:
    """Builds every cell of every plan.

    Args:
        plans: Of the targets.
        compilers: Of each.
        advance: Called as each cell ends well.
    """
    return [
        Outcome(plan, *compiler.run(plan.cells, _counted(advance)))
        for plan, compiler in zip(plans, compilers, strict=True)
    ]


def _counted(advance: Callable[[], None]) -> Callable[[Cell, dict[str, Any]], None]:
    return lambda cell, record: advance()


def check(config: Config, outcomes: Sequence[Outcome], kept: bool, failed: Callable[[], None]) -> None:
    """Refuses a build in which a cell failed, or whose cells a device cannot hold.

    Args:
        config: The model.
        outcomes: Of every target.
        kept: Whether the cells that were built are in the cache.
        failed: Notes what was asked for; called if it is a cell's fault, and not the disk's.

    Raises:
        PlanError: Names each failed cell with its reason, up to three.
        ArtifactError: The disk is full.
    """
    failures = {
        (outcome.plan.target.name, cell): each for outcome in outcomes for cell, each in outcome.failures.items()
    }
    if not failures:
        for outcome in outcomes:
            check_memory(config, outcome.plan, outcome.records)
        return
    several = len(outcomes) > 1
    named = {f"{target} {cell}" if several else cell: each for (target, cell), each in failures.items()}
    text = "; ".join(f"{name}: {each['error']}" for name, each in list(named.items())[:3])
    count = sum(len(outcome.plan.cells) for outcome in outcomes)
    message = f"programs: expected {count} cells to build, {len(failures)} did not: {text}"
    hints = [each["hint"] for each in named.values() if each.get("hint")][:1]
    if any(each.get("kind") == ArtifactError.__name__ for each in named.values()):
        raise ArtifactError(message, *hints)  # no room on the disk: nothing is left there
    failed()
    if len(failures) < count:
        where = "are in the cache: the same build again takes them" if kept else "are lost without --cache on"
        hints.append(f"the {count - len(failures)} others {where}")
    target, cell = next(iter(failures))
    hints.append(f"to build one alone and see all that its compiler says: --replay {f'{target}/' * several}{cell}")
    raise PlanError(message, "; ".join(hints))


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
