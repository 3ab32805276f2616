"""``build --into ARTIFACT --score-paddings N,...`` for targets that are there: their programs, and score's besides.

Such a target is replaced by one that has the same programs and more: what it had is taken over, byte by byte, and only
what is missing is compiled. So it was made by the same sources and compilers, or it is refused.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import writing
from ling3export.artifacts.manifest import read_checked
from ling3export.cache.keys import fingerprint, toolchain
from ling3export.compile.pool import Compilers, Done
from ling3export.errors import PlanError, listed
from ling3export.model.geometry import CHUNK
from ling3export.plan.options import check_paddings
from ling3export.plan.plan import Cell, Plan
from ling3export.pricing.recorded import config_of, plan_of

OPTION = "--score-paddings"
MANIFEST_FIELDS = ("status", "stablehlo", "exec")  # of a cell, which no compiler's record has


def extended(manifest: dict[str, Any], name: str, paddings: Sequence[int]) -> Plan:
    """The plan of a target that is there, with more score programs.

    Args:
        manifest: The artifact's.
        name: The target.
        paddings: Of the new programs.

    Raises:
        PlanError: It has them already, or was built by other sources or compilers than these.
    """
    plan, record = plan_of(manifest, name), manifest["targets"][name]
    check_paddings(paddings, OPTION, CHUNK)
    if doubled := [str(padding) for padding in paddings if padding in plan.score_paddings]:
        raise PlanError(f"{OPTION}: expected paddings that `{name}` does not have, found {listed(doubled)} in it")
    wanted, here = record["toolchain"], toolchain(plan.target)
    changed = [f"{package} {wanted[package]}, here {here.get(package)}" for package in wanted
               if wanted[package] != here.get(package)]  # fmt: skip
    if not changed and fingerprint(config_of(manifest), plan) != record["fingerprint"]:
        changed = ["other sources of the model or of the lowering, or other flags"]
    if changed:
        raise PlanError(
            f"{OPTION}: expected `{name}` built with what builds here, found {listed(changed)}",
            f"build all its programs again: --target {record['target']}@{record['tp']} --force",
        )
    return replace(plan, score_paddings=tuple(sorted({*plan.score_paddings, *paddings})))


class Extending(Compilers):
    """Compilers of a target that is there: what it has is copied, the rest is compiled.

    Args:
        compilers: As of :class:`Compilers`.
        artifact: The folder.
        cells: The manifest's, of the target.
    """

    def __init__(self, *compilers: Any, artifact: Path, cells: dict[str, dict[str, Any]]) -> None:
        super().__init__(*compilers)
        self._artifact, self._there = artifact, cells

    def run(self, cells: Sequence[Cell], done: Done) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """As :meth:`Compilers.run`.

        Raises:
            ArtifactError: A program that is there is damaged.
        """
        taken = {}
        for cell in cells:
            if cell.name in self._there:
                taken[cell.name] = self._copied(cell)
                done(cell, taken[cell.name])
        built, failed = super().run([cell for cell in cells if cell.name not in taken], done)
        return taken | built, failed

    def _copied(self, cell: Cell) -> dict[str, Any]:
        record = self._there[cell.name]
        for tier in ("stablehlo", "exec"):
            data, path = read_checked(self._artifact, record[tier]), self._folder / f"{cell.name}.{tier}"
            with writing(path, len(data)):
                path.write_bytes(data)
        return {key: value for key, value in record.items() if key not in MANIFEST_FIELDS}
