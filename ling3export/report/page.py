"""``ling3export report``: an artifact's manifest as one HTML page that refers to nothing outside itself."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jinja2

from ling3export.artifacts.files import replace_file
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import Cell, Manifest, Receipts, Target
from ling3export.cost.estimates import UNKNOWN
from ling3export.cost.operations import KINDS
from ling3export.errors import ArtifactError
from ling3export.plan.chips import CHIPS, Chip
from ling3export.report.figures import MEMORY, Bars, Estimated, estimated, figures, memory_parts, si, times
from ling3export.verify.receipts import ERROR_COLUMNS, error_columns, explained

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
    replace_file(page, render(manifest).encode())
    return page


@dataclass(frozen=True)
class Shown:
    """One target of the page: its records, and facts about its machine where a table has them."""

    name: str
    target: Target
    receipts: Receipts | None

    @cached_property
    def chip(self) -> Chip | None:
        """The accelerator; None for cpu."""
        return CHIPS.get((self.target.platform, self.target.kind or ""))

    @cached_property
    def cells(self) -> list[Cell]:
        """Prefill, score, decode, then the rest; ascending paddings."""
        order = {"prefill": 0, "score": 1, "decode": 2}
        return sorted(self.target.cells.values(), key=lambda cell: (order.get(cell.phase, 3), cell.padding))

    @cached_property
    def estimated(self) -> Estimated:
        """Cells with the compiler's estimate and the roofline bound."""
        return estimated(self.cells)

    @cached_property
    def figures(self) -> dict[str, Bars | None]:
        """The figures by name."""
        return figures(self.cells, self.target.tp, self.chip)

    @property
    def together(self) -> int:
        """Bytes on one device with every program loaded, while the one with the largest temporaries runs."""
        parts = [memory_parts(cell, self.target.tp) for cell in self.cells]
        held = sum(max(part[kind] for part in parts) for kind in MEMORY if kind != "code")
        return held + sum(part["code"] for part in parts)


def render(manifest: Manifest) -> str:
    """The page. It depends on the manifest only: no clock, no path.

    Everything from the manifest is escaped: the checkpoint's name comes from whoever made it.
    """
    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    engine.filters |= {"si": si, "times": times, "explained": explained, "errors": error_columns, "parts": memory_parts}
    shown = [Shown(name, target, manifest.vectors.receipts.get(name)) for name, target in manifest.targets.items()]
    page = engine.get_template("report.html").render(
        manifest=manifest, targets=shown, kinds=KINDS, memory=MEMORY, errors=ERROR_COLUMNS, unknown=UNKNOWN
    )
    return f"{page}\n"
