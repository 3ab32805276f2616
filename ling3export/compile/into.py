"""``build --into ARTIFACT``: more targets for an artifact that is there, over the weights that it has.

Programs need the configuration alone, which the manifest has; a checkpoint is only compared. Files are added first,
under names that no manifest knows yet, then the manifest is replaced by rename: killed at any moment, the artifact
loads as before or with the new targets. What a killed addition leaves is removed by the next.
"""

import copy
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import sync_folder, sync_tree, try_writing, writing
from ling3export.artifacts.manifest import MANIFEST, read_manifest, write_manifest
from ling3export.artifacts.staging import adding
from ling3export.cache.cells import Cells, opened, summary
from ling3export.cache.keys import toolchain
from ling3export.cache.use import DEFAULT_USE, CacheUse
from ling3export.checkpoint.checkpoint import Checkpoint
from ling3export.checkpoint.convert import store_bytes
from ling3export.checkpoint.same_weights import differing_tensors
from ling3export.compile.build import Reporter, receipts, target_record
from ling3export.compile.failed import forget_failure, note_failure
from ling3export.compile.matrix import COLUMNS, Outcome, check, compile_all, outcome_rows
from ling3export.compile.pool import Compilers
from ling3export.compile.score_into import Extending, extended
from ling3export.errors import CheckpointError, PlanError, listed
from ling3export.plan.options import SHARED, Options
from ling3export.plan.plan import Plan, make_plans
from ling3export.plan.toolchain import check_toolchain
from ling3export.pricing.recorded import config_fields, config_of, options_of, score_paddings


def add_targets(
    artifact: Path, options: Options, given: set[str], report: Reporter, *, checkpoint: Path | None = None,
    force: bool = False, ignore: Sequence[str] = (), cache: CacheUse = DEFAULT_USE,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Adds the targets of ``options`` to ``artifact``.

    Args:
        artifact: The folder.
        options: What to build; what all targets share comes from the artifact.
        given: Names of the options that the user gave: one that contradicts the artifact is refused.
        report: Told of every stage.
        checkpoint: Compared with what the artifact was built from; not needed.
        force: Replace targets that are there.
        ignore: Fields of the checkpoint's config.json to ignore.
        cache: How compiled programs of earlier builds are used.

    Returns:
        The manifest, and the names of the added targets.

    Raises:
        Ling3Error: The artifact is as before.
    """
    with adding(artifact) as staging, opened(cache, report.note) as cells:
        manifest = read_manifest(artifact)
        _check_writable(artifact)
        if checkpoint is not None:
            _check_source(Checkpoint.open(checkpoint, ignore=ignore), manifest, artifact, report)
        _check_shared(options, given, manifest, artifact)
        recorded = {name: manifest["plan"][name] for name in ("memory_fraction", "state_memory") if name not in given}
        options = replace(options_of(manifest, options), **recorded)
        plans = _plans(artifact, manifest, options, given, force)
        for plan in plans:
            check_toolchain(plan.target)
            for note in plan.named_notes:
                report.note(note)
        _remove_unnamed(artifact, manifest)
        outcomes = _compile(staging, artifact, manifest, plans, options, report, cells, force)
        written = _take_in(staging, artifact, manifest, outcomes, report)
        names = [plan.target.name for plan in plans]
        made = {
            name: {c: row for c, row in written["targets"][name]["cells"].items() if force or c not in there}
            for name in names for there in [manifest["targets"].get(name, {"cells": {}})["cells"]]
        }  # fmt: skip
        report.note(summary({name: written["targets"][name] | {"cells": new} for name, new in made.items()}, cache))
        return written, names


def _check_writable(artifact: Path) -> None:
    """Refuses, before any work, an artifact that cannot take in what would be compiled.

    Raises:
        ArtifactError: As the write itself would.
    """
    with writing(artifact / MANIFEST):
        try_writing(artifact)
    with writing(artifact / "programs"):
        try_writing(artifact / "programs")


def _plans(artifact: Path, manifest: dict[str, Any], options: Options, given: set[str], force: bool) -> list[Plan]:
    """Of new targets; and of those that are there, where score programs are added to them."""
    scored, there = options.score_paddings, manifest["targets"]
    if scored and not {"targets", "tp"} & given:
        return [extended(manifest, name, scored) for name in there]
    plans = make_plans(config_of(manifest), options)
    if not force and scored:
        return [extended(manifest, p.target.name, scored) if p.target.name in there else p for p in plans]
    doubled = [plan.target.name for plan in plans if plan.target.name in there]
    if doubled and not force:
        raise PlanError(
            f"--target: expected targets that `{artifact.name}` does not have, found {listed(doubled)} in it",
            "replace them with --force",
        )
    return plans


def _check_source(source: Checkpoint, manifest: dict[str, Any], artifact: Path, report: Reporter) -> None:
    wanted = config_of(manifest).semantic()
    other = [field for field, value in source.config.semantic().items() if wanted[field] != value]
    if other:
        raise CheckpointError(
            f"checkpoint `{source.path.name}`: expected the config that `{artifact.name}` was built from, "
            f"found another {listed(other)}, in {source.path}"
        )
    recorded, found = manifest["source"]["digests"], source.digests()
    differing = [f"`{name}`" for name in sorted({*recorded, *found}) if recorded.get(name) != found.get(name)]
    if not differing:  # of the shards these are the headers' digests: two fine-tunings have the same
        dtype = manifest["plan"]["dtype"]
        report.start("compare", store_bytes(source.config, dtype))
        index = manifest["weights"]["index"]
        differing = differing_tensors(source, index, dtype, lambda amount: report.advance("compare", amount))
    if differing:
        raise CheckpointError(
            f"checkpoint `{source.path.name}`: expected the files and weights that `{artifact.name}` was built from, "
            f"found another {listed(differing)}, in {source.path}",
            "the artifact's weights stay as they are: leave the checkpoint out, or build another artifact",
        )


def _check_shared(options: Options, given: set[str], manifest: dict[str, Any], artifact: Path) -> None:
    for name in SHARED:
        value, recorded = getattr(options, name), manifest["plan"][name]
        wanted = tuple(recorded) if isinstance(recorded, list) else recorded
        if name in given and value != wanted:
            shown = [",".join(map(str, each)) if isinstance(each, tuple) else each for each in (wanted, value)]
            raise PlanError(
                f"--{name.replace('_', '-')}: expected {shown[0]}, which the targets of `{artifact.name}` share, "
                f"found {shown[1]}",
                "leave it out, or build another artifact",
            )


def _compile(
    staging: Path, artifact: Path, manifest: dict[str, Any], plans: Sequence[Plan], options: Options, report: Reporter,
    cells: Cells, force: bool,
) -> list[Outcome]:  # fmt: skip
    raw, config = config_fields(manifest), config_of(manifest)
    compilers: list[Compilers] = []
    for plan in plans:
        programs = staging / "programs" / plan.target.name
        programs.mkdir(parents=True)
        job = (plan, raw, (), programs, options.jobs, cells)
        there = manifest["targets"].get(plan.target.name)
        if there is not None and not force:
            compilers.append(Extending(*job, artifact=artifact, cells=there["cells"]))
        else:
            compilers.append(Compilers(*job))
    report.start("programs", sum(len(plan.cells) for plan in plans))
    try:
        outcomes = compile_all(plans, compilers, lambda: report.advance("programs", 1))
    except BaseException:
        for each in compilers:
            each.stop()
        raise
    if any(outcome.failures for outcome in outcomes):
        report.table(COLUMNS, outcome_rows(staging, outcomes))
    check(config, outcomes, cells.kept, lambda: note_failure(artifact, raw, (), options, outcomes))
    return outcomes


def _take_in(
    staging: Path, artifact: Path, manifest: dict[str, Any], outcomes: Sequence[Outcome], report: Reporter
) -> dict[str, Any]:
    """Moves the programs in, runs what runs here, and replaces the manifest."""
    config, body = config_of(manifest), copy.deepcopy(manifest)
    sync_tree(staging)
    moved: list[Path] = []
    try:
        for outcome in outcomes:
            name = outcome.plan.target.name
            programs = artifact / "programs" / _free_name(artifact, name)
            (staging / "programs" / name).rename(programs)
            moved.append(programs)
            record = target_record(artifact, config, outcome.plan, outcome.records, f"programs/{programs.name}")
            body["targets"][name] = record
            body["vectors"]["receipts"].pop(name, None)
            body["producer"] = {**toolchain(outcome.plan.target), **body["producer"]}
            others = [note for note in body["notes"] if not note.startswith(f"{name}: ")]
            body["notes"] = [*others, *outcome.plan.named_notes]
        body["plan"]["targets"] = list(body["targets"])
        body["plan"]["score_paddings"] = list(score_paddings(next(iter(body["targets"].values()))))
        body["vectors"]["receipts"] |= receipts(artifact, body, [outcome.plan for outcome in outcomes], report)
        sync_folder(artifact / "programs")
        written = write_manifest(artifact, body)
    except BaseException:
        if read_manifest(artifact)["sha256"] == manifest["sha256"]:
            for programs in moved:
                shutil.rmtree(programs, ignore_errors=True)
        raise
    forget_failure(artifact)
    _remove_unnamed(artifact, written)
    return written


def _free_name(artifact: Path, target: str) -> str:
    """A folder of ``programs/`` that does not exist: the old manifest names the files of a target that is replaced."""
    names = [target, *(f"{target}.{number}" for number in range(2, 10**6))]
    return next(name for name in names if not (artifact / "programs" / name).exists())


def _remove_unnamed(artifact: Path, manifest: dict[str, Any]) -> None:
    """Removes folders of programs that the manifest does not name: what a killed addition or a replacement left."""
    cells = [cell for target in manifest["targets"].values() for cell in target["cells"].values()]
    named = {Path(cell[tier]["path"]).parts[1] for cell in cells for tier in ("stablehlo", "exec") if tier in cell}
    for folder in (artifact / "programs").iterdir():
        if folder.name not in named:
            shutil.rmtree(folder, ignore_errors=True)
