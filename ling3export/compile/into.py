"""``build --into ARTIFACT``: more targets for an artifact that is there, over the weights that it has.

Programs need only the configuration, which the manifest has. The files that the manifest names are checked first: no
new manifest vouches for damaged files. New files get names that no manifest has yet, then the manifest is replaced by
rename. So a kill at any moment leaves the old artifact or the new one; the next addition removes the rest.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ling3export.artifacts.files import (
    leftovers,
    refuse_links,
    remove,
    remove_tree,
    rename,
    sync_folder,
    sync_tree,
    try_writing,
    writing,
)
from ling3export.artifacts.manifest import MANIFEST, read_manifest, recorded_files
from ling3export.artifacts.schema import Manifest
from ling3export.artifacts.signing import read_trusted
from ling3export.artifacts.staging import adding
from ling3export.cache.cells import Cells, opened, summary
from ling3export.cache.store import DEFAULT_USE, CacheUse
from ling3export.compile.build import Reporter, announced, compiling, complete
from ling3export.compile.pool import BuildOutcome
from ling3export.foundation.errors import PlanError, listed
from ling3export.plan.options import AS_STORED, Options
from ling3export.plan.plan import make_plans
from ling3export.plan.recorded import config_of, options_of, shared
from ling3export.verify.verify import check_digests

SIZING = ("memory_fraction", "state_memory")  # what sized the pools, so that a target that is added is sized alike
TARGET_FOLDER = re.compile(r"(cpu|cuda|tpu)[\w.-]*-tp\d+(\.\d+)?")  # a target's name, or what `_free_name` makes of it
PROGRAM_FILE = re.compile(r"[a-z_]+@\d+\.(stablehlo|exec|hlo\.xz)|kernels\.so|state\.exec")


def add_targets(
    artifact: Path,
    options: Options,
    chosen: set[str],
    report: Reporter,
    *,
    force: bool = False,
    cache: CacheUse = DEFAULT_USE,
) -> tuple[Manifest, list[str]]:
    """Adds the targets of ``options`` to ``artifact``.

    Args:
        options: The targets; values that all targets share come from the artifact.
        chosen: Names of the options that the user gave: one that contradicts the artifact is refused.
        force: Replace targets that are there.

    Returns:
        The manifest, and the names of the added targets.

    Raises:
        Ling3Error: The artifact is as before.
    """
    cells, signed = opened(cache, report.note), list[str]()
    with adding(artifact) as staging:
        manifest = read_trusted(artifact, signed.append)
        refuse_links(artifact, [*recorded_files(manifest), "programs"])
        programs = artifact / "programs"
        for path, folder in ((artifact / MANIFEST, artifact), (programs, programs)):  # before any work
            with writing(path):
                for left in leftovers(folder / "trial"):
                    remove(left)
                try_writing(folder)
        _check_shared(options, chosen, manifest, artifact)
        recorded = {name: getattr(manifest.plan, name) for name in SIZING if name not in chosen}
        options = replace(options_of(manifest, options), **recorded)
        plans = make_plans(config_of(manifest), options)
        doubled = [plan.target.name for plan in plans if plan.target.name in manifest.targets]
        if doubled and not force:
            raise PlanError(
                f"--target: expected targets that `{artifact.name}` does not have, found {listed(doubled)} in it",
                "replace them with --force",
            )
        announced(plans, report)
        report.note(signed[0])
        check_digests(artifact, manifest)
        _remove_unnamed(artifact, manifest)
        with compiling(config_of(manifest), options, plans, staging, cells, report) as compiled:
            outcomes = compiled()
        written = _take_in(staging, artifact, manifest, outcomes, report, cells)
        names = [plan.target.name for plan in plans]
        report.note(summary((cell for name in names for cell in written.targets[name].cells.values()), cache))
        return written, names


def _check_shared(options: Options, chosen: set[str], manifest: Manifest, artifact: Path) -> None:
    for name, wanted in shared(manifest).items():
        value = getattr(options, name)
        if name in chosen and value not in (wanted, AS_STORED):
            shown = [",".join(map(str, row)) if isinstance(row, tuple) else row for row in (wanted, value)]
            raise PlanError(
                f"--{name.replace('_', '-')}: expected {shown[0]}, which the targets of `{artifact.name}` share, "
                f"found {shown[1]}",
                "leave it out, or build another artifact",
            )


def _take_in(
    staging: Path, artifact: Path, manifest: Manifest, outcomes: Sequence[BuildOutcome], report: Reporter, cells: Cells
) -> Manifest:
    """Moves the programs in, measures receipts, and replaces the manifest."""
    sync_tree(staging)
    moved: dict[str, str] = {}
    try:
        for name in (outcome.plan.target.name for outcome in outcomes):
            moved[name] = _free_name(artifact, name)
            rename(staging / "programs" / name, artifact / "programs" / moved[name])
        sync_folder(artifact / "programs")
        written = complete(artifact, manifest, outcomes, report, cells, moved)
    except BaseException:
        if read_manifest(artifact).sha256 == manifest.sha256:
            for programs in moved.values():
                remove_tree(artifact / "programs" / programs, artifact)
        raise
    _remove_unnamed(artifact, written)
    return written


def _free_name(artifact: Path, target: str) -> str:
    """A folder of ``programs/`` that does not exist: the old manifest names the files of a target that is replaced."""
    names = [target, *(f"{target}.{number}" for number in range(2, 10**6))]
    return next(name for name in names if not os.path.lexists(artifact / "programs" / name))


def _remove_unnamed(artifact: Path, manifest: Manifest) -> None:
    """Removes folders of programs that a killed addition or a replacement left: the manifest does not name them.

    A folder goes only if it and all its files have names that a build gives; links are never followed. A folder that
    cannot be removed stays, and readers tolerate it.
    """
    named = {Path(path).parts[1] for path in recorded_files(manifest) if path.startswith("programs/")}
    with suppress(OSError):
        for folder in (artifact / "programs").iterdir():
            if folder.name not in named and TARGET_FOLDER.fullmatch(folder.name):
                with suppress(OSError):
                    if all(PROGRAM_FILE.fullmatch(file) for file in os.listdir(folder)):
                        remove_tree(folder, artifact)
