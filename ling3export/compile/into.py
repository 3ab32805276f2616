"""``build --into ARTIFACT``: more targets for an artifact that is there, over the weights that it has.

Programs need only the configuration, which the manifest has. The files that the manifest names are checked first: no
new manifest vouches for damaged files. New files get names that no manifest has yet, then the manifest is replaced by
rename. So a kill at any moment leaves the old artifact or the new one; the next addition removes the rest.

``--score-paddings`` replaces a target by one with the same programs and score programs. The old programs are copied,
and the new ones compiled, so the same sources and compilers must have made both.
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
    write_new,
    writing,
)
from ling3export.artifacts.manifest import MANIFEST, read_checked, read_manifest, recorded_files
from ling3export.artifacts.schema import KERNELS, STATE, Manifest, Target
from ling3export.artifacts.signing import read_trusted
from ling3export.artifacts.staging import adding
from ling3export.cache.cells import SUFFIXES, Built, Cells, opened, summary
from ling3export.cache.store import DEFAULT_USE, CacheUse
from ling3export.compile.build import Reporter, announced, compiling, complete
from ling3export.compile.pool import BuildOutcome
from ling3export.compile.replay import changes_since
from ling3export.foundation.errors import PlanError, listed
from ling3export.model.geometry import CHUNK
from ling3export.plan.options import AS_STORED, Options, check_paddings
from ling3export.plan.plan import Plan, make_plans
from ling3export.plan.recorded import config_of, options_of, plan_of, shared
from ling3export.verify.verify import check_digests

SIZING = ("memory_fraction", "state_memory")  # what sized the pools, so that a target that is added is sized alike
SCORE = "--score-paddings"
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
    prove: bool | None = None,
) -> tuple[Manifest, list[str]]:
    """Adds the targets of ``options`` to ``artifact``.

    Args:
        artifact: The folder.
        options: The targets; values that all targets share come from the artifact.
        chosen: Names of the options that the user gave: one that contradicts the artifact is refused.
        report: Gets progress and notes.
        force: Replace targets that are there.
        cache: See :func:`~ling3export.compile.build.build`.
        prove: See :func:`~ling3export.compile.build.build`.

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
        plans = announced(_plans(artifact, manifest, options, chosen, force), report)
        report.note(signed[0])
        check_digests(artifact, manifest)
        _remove_unnamed(artifact, manifest)
        kept = {} if force else manifest.targets
        taken = {name: _copied(artifact, staging, name, kept.get(name)) for name in (p.target.name for p in plans)}
        with compiling(config_of(manifest), options, plans, staging, cells, report, taken) as compiled:
            outcomes = compiled()
        written = _take_in(staging, artifact, manifest, outcomes, report, cells, prove)
        cells_of = [(name, cell) for name in taken for cell in written.targets[name].cells.values()]
        report.note(summary((cell for name, cell in cells_of if cell.name not in taken[name]), cache))
        return written, list(taken)


def _plans(artifact: Path, manifest: Manifest, options: Options, chosen: set[str], force: bool) -> list[Plan]:
    """The plans of new targets, and of present ones that get score programs."""
    scored, targets = options.score_paddings, manifest.targets
    if scored and options.afd:
        raise PlanError("--afd: expected no --score-paddings with it and --into, found both", "add one at a time")
    if scored and not {"targets", "tp"} & chosen:
        return [extended(manifest, name, scored) for name in targets]
    plans = make_plans(config_of(manifest), options)
    if not force and scored:
        return [extended(manifest, p.target.name, scored) if p.target.name in targets else p for p in plans]
    doubled = [plan.target.name for plan in plans if plan.target.name in targets]
    if doubled and not force:
        raise PlanError(
            f"--target: expected targets that `{artifact.name}` does not have, found {listed(doubled)} in it",
            "replace them with --force",
        )
    return plans


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


def extended(manifest: Manifest, name: str, paddings: Sequence[int]) -> Plan:
    """The plan of a target that is there, with score programs of more ``paddings``.

    Raises:
        PlanError: It has them already, or was built by other sources or compilers than these.
    """
    plan, record = plan_of(manifest, name), manifest.targets[name]
    check_paddings(paddings, SCORE, CHUNK)
    if doubled := [str(padding) for padding in paddings if padding in plan.score_paddings]:
        raise PlanError(f"{SCORE}: expected paddings that `{name}` does not have, found {listed(doubled)} in it")
    if changed := changes_since(manifest, plan):
        raise PlanError(
            f"{SCORE}: expected `{name}` built with what builds here, found {listed(changed)}",
            f"build all its programs again: --target {record.text}@{record.tp} --force",
        )
    return replace(plan, score_paddings=tuple(sorted({*plan.score_paddings, *paddings})))


def _copied(artifact: Path, staging: Path, name: str, target: Target | None) -> dict[str, Built]:
    """Copies the programs that a target has; returns them as a compiler gives them."""
    folder = staging / "programs" / name
    folder.mkdir(parents=True)
    if target is None:
        return {}
    for file, other in ((KERNELS, target.kernels), (STATE, target.state_program)):
        if other is not None:
            write_new(folder / file, read_checked(artifact, other))
    for cell in target.cells.values():
        for suffix, record in zip(SUFFIXES, (cell.stablehlo, cell.exec, cell.graph), strict=True):
            if record is not None:
                write_new(folder / f"{cell.name}.{suffix}", read_checked(artifact, record))
    return {key: Built(cell, target.requires, target.mesh) for key, cell in target.cells.items()}


def _take_in(
    staging: Path,
    artifact: Path,
    manifest: Manifest,
    outcomes: Sequence[BuildOutcome],
    report: Reporter,
    cells: Cells,
    prove: bool | None,
) -> Manifest:
    """Moves the programs in, measures receipts, and replaces the manifest."""
    sync_tree(staging)
    moved: dict[str, str] = {}
    try:
        for name in (outcome.plan.target.name for outcome in outcomes):
            moved[name] = _free_name(artifact, name)
            rename(staging / "programs" / name, artifact / "programs" / moved[name])
        sync_folder(artifact / "programs")
        written = complete(artifact, manifest, outcomes, report, cells, moved, prove=prove)
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
