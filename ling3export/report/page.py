"""``ling3export report``: an artifact's manifest as one HTML page that refers to nothing outside itself."""

from pathlib import Path
from typing import Any

import jinja2

from ling3export.artifacts.calibration import Calibration, found_beside
from ling3export.artifacts.files import replace_file
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.receipts import ERROR_COLUMNS, error_columns, ordered, told
from ling3export.artifacts.schema import Manifest
from ling3export.cost.chips import CHIPS
from ling3export.cost.estimates import UNKNOWN
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.hlo import KINDS
from ling3export.report.figures import MEMORY, estimated, figures, memory_parts, si, times

TEMPLATES = Path(__file__).parent / "templates"


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
    replace_file(page, render(manifest, *found_beside(artifact, manifest)).encode())
    return page


def render(manifest: Manifest, calibration: Calibration | None = None, note: str | None = None) -> str:
    """The page. It depends on the manifest and the calibration beside it only: no clock, no path.

    ``note`` says why a calibration that is there is not shown.

    Everything from the manifest is escaped: the checkpoint's name comes from whoever made it.
    """
    filters = {"si": si, "times": times, "told": told, "errors": error_columns, "parts": memory_parts}
    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    engine.filters.update(filters)
    page = engine.get_template("report.html").render(
        manifest=manifest,
        targets=[_shown(manifest, name) for name in manifest.targets],
        kinds=KINDS,
        memory=MEMORY,
        errors=ERROR_COLUMNS,
        unknown=UNKNOWN,
        calibration=calibration,
        note=note,
        measured=[] if calibration is None else ordered(calibration),
    )
    return f"{page}\n"


def _shown(manifest: Manifest, name: str) -> dict[str, Any]:
    """A target as the template takes it."""
    target = manifest.targets[name]
    order = {"prefill": 0, "score": 1, "decode": 2, "sample": 3}
    cells = sorted(target.cells.values(), key=lambda cell: (order.get(cell.phase, 4), cell.padding))
    chip = CHIPS.get((target.platform, target.kind or ""))
    parts = [memory_parts(cell, target.tp) for cell in cells]
    # Every program is loaded at once, and the one with the largest temporaries runs.
    together = sum((sum if kind == "code" else max)(part[kind] for part in parts) for kind in MEMORY)
    return {
        "name": name,
        "target": target,
        "receipts": manifest.measured(name),
        "executed": name in manifest.vectors.receipts,
        "cells": cells,
        "chip": chip,
        "estimated": estimated(cells),
        "figures": figures(cells, target.tp, chip),
        "together": together,
    }
