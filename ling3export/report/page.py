"""``ling3export report``: an artifact's manifest as one HTML page that refers to nothing outside itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ling3export.artifacts.files import replace_file
from ling3export.artifacts.manifest import read_manifest
from ling3export.cost.operations import KINDS
from ling3export.errors import ArtifactError
from ling3export.report.data import MEMORY, Target, Work, si, targets, times
from ling3export.report.figures import Bars, Point, Roofline, bars, roofline

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Figures:
    """The figures of one target; None where its compiler says nothing of the matter."""

    memory: Bars
    roofline: Roofline | None
    time: Bars | None
    bytes: Bars | None
    collectives: Bars | None


def write_report(artifact: Path, destination: Path | None = None, *, force: bool = False) -> Path:
    """Writes the report of an artifact.

    Args:
        artifact: Its folder; only the manifest is read.
        destination: The page; None is ``NAME.report.html`` beside ``NAME.ling3``.
        force: Replace a file that is there.

    Returns:
        Where it was written.

    Raises:
        ArtifactError: There is no artifact, the page would lie in it or over something, or it cannot be written.
    """
    manifest = read_manifest(artifact)
    folder = artifact.resolve()
    page = destination or folder.with_name(f"{folder.name.removesuffix('.ling3')}.report.html")
    if page.resolve().is_relative_to(folder):
        raise ArtifactError(
            f"report `{page.name}`: expected a place outside of the artifact, found one in it, {folder}",
            "an artifact holds what its manifest names, and nothing else",
        )
    if page.exists() and not force:
        raise ArtifactError(
            f"report `{page.name}`: expected a free name, found one that exists, in {page.parent}",
            "choose another name, or replace it with --force",
        )
    replace_file(page, render(manifest).encode())
    return page


def render(manifest: Mapping[str, Any]) -> str:
    """The page. It depends on the manifest only: no clock, no path.

    Everything from the manifest is escaped: the checkpoint's name comes from whoever made it.
    """
    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    engine.filters |= {"si": si, "times": times}
    shown = [(target, figures(target)) for target in targets(manifest)]
    return engine.get_template("report.html").render(manifest=manifest, shown=shown, kinds=KINDS, memory=MEMORY) + "\n"


def figures(target: Target) -> Figures:
    """Lays out what is known of a target."""
    limit = None if target.chip is None else (float(target.chip.memory), f"memory {si(target.chip.memory, 'B')}")
    memory = bars(MEMORY, [(cell.name, [cell.memory[kind] for kind in MEMORY]) for cell in target.cells], "B", limit)
    return Figures(memory, _roofline(target), _time(target), _bytes(target), _collectives(target))


def _roofline(target: Target) -> Roofline | None:
    points = [point for name, work, flops in _worked(target) for point in _points(name, work, flops)]
    if target.chip is None or not points:
        return None
    return roofline(points, target.chip.bandwidth, target.chip.flops)


def _worked(target: Target) -> list[tuple[str, Work, float]]:
    return [(cell.name, work, cell.flops or 0.0) for cell, work in target.estimated]


def _points(name: str, work: Work, flops: float) -> list[Point]:
    """The work that must be done, and the work that the program does, both at the estimated time."""
    points = []
    needed = sum(work.floor_bytes.values())
    if work.floor_flops and needed:
        points.append(Point(name, "needed", work.floor_flops / needed, work.floor_flops / work.seconds))
    if flops > 0 and work.moved:
        points.append(Point(name, "does", flops / work.moved, flops / work.seconds))
    return points


def _time(target: Target) -> Bars | None:
    rows = [(cell.name, [work.by_kind.get(kind, 0.0) for kind in KINDS]) for cell, work in target.estimated]
    return bars(KINDS, rows, "s") if any(sum(values) for _, values in rows) else None


def _bytes(target: Target) -> Bars | None:
    """Two bars a cell: what must move, by what it is; what the program moves."""
    names = list(dict.fromkeys(kind for _, work in target.estimated for kind in work.floor_bytes))
    rows: list[tuple[str, list[float]]] = []
    for cell, work in target.estimated:
        rows.append((f"{cell.name} must", [*(work.floor_bytes.get(name, 0) for name in names), 0]))
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
