"""Compares an artifact's digests, and runs its vectors through every target that this machine can run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import refuse_links
from ling3export.artifacts.manifest import read_checked, read_manifest, recorded_files
from ling3export.artifacts.store import Store
from ling3export.errors import ArtifactError, listed
from ling3export.runners.load.targets import platforms_here
from ling3export.tables import aligned
from ling3export.verify.measure import measure_apart
from ling3export.verify.receipts import ERROR_COLUMNS, error_columns, explained


@dataclass(frozen=True)
class Result:
    """What ``ling3export verify`` found.

    Attributes:
        record: JSON values: by target either its receipts or why it could not run here.
        passed: Every digest agreed and every cell that runs here is within its tolerance.
    """

    record: dict[str, Any]
    passed: bool

    def table(self) -> str:
        """Each target's cells, the worst error first, and what the errors mean."""
        lines = [f"digests: {self.record['files']} files and {self.record['slabs']} weight slabs agree"]
        for name, target in self.record["targets"].items():
            if "reason" in target:
                lines.append(f"{name}: not run here: {target['reason']}")
                continue
            rows: list[tuple[str, ...]] = [("cell", "status", *ERROR_COLUMNS, "absolute", "positions")]
            for cell, row in sorted(target["cells"].items(), key=lambda item: -item[1]["relative"]):
                errors = error_columns(cell.partition("@")[0], row, target["tolerance"])
                rows.append((cell, row["status"], *errors, f"{row['absolute']:.1e}", str(row["positions"])))
            lines += [f"{name}:", *aligned(rows), f"  {explained(target['tolerance'])}"]
            for what, value in target["agreement"].items():
                lines.append(f"  {what.replace('_', ' ')}: {value:.2e}")
        return "\n".join(lines)


def check_digests(artifact: Path, manifest: dict[str, Any]) -> tuple[int, int]:
    """Compares every file and every weight slab with the manifest; returns how many there are of each.

    Raises:
        ArtifactError: One is missing, damaged, or reached through a symbolic link.
    """
    refuse_links(artifact, recorded_files(manifest))
    cells = [cell for target in manifest["targets"].values() for cell in target["cells"].values()]
    files = [cell[tier] for cell in cells for tier in ("stablehlo", "exec") if tier in cell]
    files += [*manifest["tokenizer"], manifest["vectors"]["expected"]]
    for record in files:
        read_checked(artifact, record)
    index = manifest["weights"]["index"]
    store = Store(artifact / "weights", index)
    store.check_layout()
    store.check_many((name, 0, None) for name in index)
    return len(files), sum(len(entry["sha256"]) for entry in index.values())


def _not_here(target: dict[str, Any]) -> str | None:
    """Why a target cannot be measured on this machine; None if it can."""
    hosts, here = target["processes"], platforms_here()
    if target["platform"] in here and (hosts == 1 or target["platform"] == "cpu"):
        return None
    statuses = sorted({cell["status"] for cell in target["cells"].values()})
    wanted = f"{target['tp']} devices of {target['target']} on {hosts} host{'s' * (hosts > 1)}"
    return f"{' and '.join(statuses)}; it needs {wanted}, found {' and '.join(here)} in one process"


def verify_artifact(artifact: Path, target: str | None) -> Result:
    """Checks every digest, then measures every target that runs here.

    Args:
        artifact: The folder.
        target: Only this one; None for all.

    Raises:
        ArtifactError: A file is damaged, or there is no such target.
    """
    manifest = read_manifest(artifact)
    names = list(manifest["targets"]) if target is None else [target]
    if unknown := [name for name in names if name not in manifest["targets"]]:
        there = listed(list(manifest["targets"]))
        raise ArtifactError(f"target `{unknown[0]}`: expected one of {there}, found none of that name, in {artifact}")
    files, slabs = check_digests(artifact, manifest)
    targets: dict[str, Any] = {}
    for name in names:
        reason = _not_here(manifest["targets"][name])
        targets[name] = measure_apart(artifact, name, manifest) if reason is None else {"reason": reason}
    passed = all(row.get("passed", True) for row in targets.values())
    return Result({"files": files, "slabs": slabs, "targets": targets, "passed": passed}, passed)
