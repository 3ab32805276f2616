"""``build --replay CELL``: one cell again, alone, with everything that its compiler says.

A cell of an artifact is built as the manifest says, in a folder of its own, and compared with what is recorded: bytes
of the portable program, receipts. The artifact stays as it is. A cell of a build that failed is built as was asked for,
and put into the cache if it succeeds, so that the same build again finds it; ``.NAME.ling3.failed.json`` beside the
artifact that did not come to be says what was asked for.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ling3export.artifacts.files import replace_file, writing
from ling3export.artifacts.manifest import (
    MANIFEST,
    file_record,
    named_target,
    read_checked,
    read_manifest,
    recorded_files,
)
from ling3export.artifacts.receipts import NO_WEIGHTS
from ling3export.artifacts.records import from_json, to_json
from ling3export.artifacts.schema import GIVERS, MOVING, SEGMENTS, SPLIT, Cell, FileRecord, Manifest, Program, Receipt
from ling3export.cache.cells import SUFFIXES, Cells, opened
from ling3export.cache.keys import fingerprint, toolchain
from ling3export.cache.use import CacheUse
from ling3export.compile.pool import Compilers, Outcome
from ling3export.foundation.errors import ArtifactError, ConfigError, PlanError, listed
from ling3export.foundation.strict_json import read_json
from ling3export.foundation.tables import readable
from ling3export.model.config import FIXED, Config
from ling3export.plan.options import Options
from ling3export.plan.plan import Plan, make_plans
from ling3export.plan.recorded import config_of, plan_of
from ling3export.plan.targets import check_toolchain
from ling3export.verify.measure import measure_apart


@dataclass(frozen=True)
class Failed:
    """A build that failed: enough to build one of its cells again."""

    config: Config  # the model
    options: Options  # the options of the build
    cells: dict[str, tuple[str, ...]]  # the names of the cells that failed, by target


def failed_path(artifact: Path) -> Path:
    """Where a failed build of ``artifact`` is described."""
    artifact = artifact.resolve()
    return artifact.parent / f".{artifact.name}.failed.json"


def note_failure(artifact: Path, config: Config, options: Options, outcomes: Sequence[Outcome]) -> None:
    """Describes a failed build of ``artifact``, whose lock is held, by rename."""
    failed = Failed(config, options, {each.plan.target.name: tuple(each.failures) for each in outcomes})
    replace_file(failed_path(artifact), json.dumps(to_json(failed)).encode())


def read_failure(artifact: Path) -> Failed | None:
    """The last build of ``artifact``; None where it did not fail, or its description is damaged."""
    try:
        failed = from_json(Failed, read_json(failed_path(artifact)))
        Config.from_dict({"model_type": "bailing_hybrid", **FIXED, **to_json(failed.config)})
    except (OSError, ValueError, ConfigError):
        return None
    return failed


def forget_failure(artifact: Path) -> None:
    """Removes the description once a build succeeded."""
    failed_path(artifact).unlink(missing_ok=True)


def replayable(path: Path) -> bool:
    """Whether ``path`` is an artifact, or was to become one."""
    return (path / MANIFEST).is_file() or failed_path(path).is_file()


def replay(artifact: Path, text: str, cache: CacheUse) -> tuple[list[str], bool]:
    """Builds the cell ``text`` of ``artifact`` again.

    Args:
        artifact: An artifact, or the name under which a build failed.
        text: ``decode@16``, or ``cpu@16/decode@16`` where there are several targets.
        cache: Where a cell of a failed build goes. Nothing is read from it.

    Returns:
        Lines for the user, and whether the cell is what is recorded, if anything is.

    Raises:
        ArtifactError: There is neither, or no such cell.
        PlanError: The cell does not build.
    """
    target, _, cell = text.rpartition("/")
    if (failed := read_failure(artifact)) is not None:
        if name := _failed(failed, target, cell):
            return _again(failed, name, cell, cache)
        if not (artifact / MANIFEST).is_file():
            return _again(failed, _target(failed.cells, target), cell, cache)
    manifest = read_manifest(artifact)
    return _recorded(artifact, manifest, _target(manifest.targets, target), cell)


def _failed(failed: Failed, target: str, cell: str) -> str | None:
    """The target whose cell ``cell`` failed, if there is one that ``target``, which may be empty, can mean."""
    found = [name for name, cells in failed.cells.items() if cell in cells]
    try:
        return _target(found, target) if found else None
    except ArtifactError:
        if target:
            return None
        raise


def _target(targets: Collection[str], wanted: str) -> str:
    if not wanted and len(targets) > 1:
        raise ArtifactError(
            f"--replay: expected TARGET/CELL, for there are {len(targets)} targets, found no target",
            f"one of {listed(sorted(targets))}",
        )
    return named_target(targets, wanted or next(iter(targets)))


def _build(plan: Plan, config: Config, cell: str, folder: Path, cells: Cells | None = None) -> tuple[Program, str]:
    """Builds one cell into ``folder``, its compiler's stderr being ours; a line says how long that took.

    Raises:
        PlanError: There is no such cell, or it does not build.
    """
    name = plan.target.name
    found = [each for each in plan.cells if each.name == cell]
    if not found:
        names = listed([each.name for each in plan.cells], 12)
        raise PlanError(f"--replay: expected a cell of {name}: {names}; found `{cell}`")
    check_toolchain(plan.target)
    outcome = Compilers(plan, config, folder, 1, cells, shown=True).run(found, lambda cell, built: None)
    if failure := outcome.failures.get(cell):
        raise PlanError(f"programs: expected {name} {cell} to build, found: {failure.error}", failure.hint)
    program = outcome.built[cell].program
    lowered, compiled = program.lower_seconds, program.compile_seconds
    spent = f"built in {lowered + compiled:.1f} s (lowered in {lowered:.1f}, compiled in {compiled:.1f})"
    return program, f"{name} {cell}: {spent}"


def _again(failed: Failed, name: str, cell: str, cache: CacheUse) -> tuple[list[str], bool]:
    """Builds a cell of a build that failed."""
    plan = next(plan for plan in make_plans(failed.config, failed.options) if plan.target.name == name)
    use = replace(cache, policy="redo" if cache.writes else "off")
    with opened(use, lambda text: None) as cells, tempfile.TemporaryDirectory() as folder:
        _, spent = _build(plan, failed.config, cell, Path(folder), cells)
    kept = "in the cache: the same build again takes it" if cache.writes else f"not kept: --cache {cache.policy}"
    return [spent, kept], True


def _recorded(artifact: Path, manifest: Manifest, name: str, cell: str) -> tuple[list[str], bool]:
    """Builds a cell of an artifact, and compares it with the one that is there."""
    plan, target = plan_of(manifest, name), manifest.targets[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "programs" / "replayed"
        folder.mkdir(parents=True)
        program, spent = _build(plan, config_of(manifest), cell, folder)
        old = target.cells[cell]
        portable, executable = (
            file_record(Path(temporary), f"programs/replayed/{cell}.{suffix}") for suffix in SUFFIXES
        )
        same = portable.sha256 == old.stablehlo.sha256
        lines = [spent, f"  stablehlo    {_compared(portable, old.stablehlo)}"]
        if not same:
            changed = changes_since(manifest, plan)
            unchanged = "neither sources nor toolchain changed since: report this"
            lines.append(f"               {f'it was built with {listed(changed)}' if changed else unchanged}")
        lines.append(f"  executable   {_compared(executable, old.exec)}")
        both = [readable(each.memory.temporaries) for each in (program, old)]
        lines.append(f"  temporaries  {both[0]}, recorded {both[1]}")
        expected = manifest.vectors.expected
        if not plan.target.runs_here or expected is None:
            return [*lines, f"  receipts     not run here: {NO_WEIGHTS if expected is None else old.status}"], same
        read_checked(artifact, expected)
        replayed = Cell(**vars(program) | {"status": old.status, "stablehlo": portable, "exec": executable})
        found = _receipt(artifact, Path(temporary), manifest, name, replayed)
    recorded = manifest.receipt(name, cell)
    known = "none recorded" if recorded is None else f"recorded {recorded.relative:.2e}"
    lines.append(f"  receipts     {found.status}: largest relative error {found.relative:.2e}, {known}")
    return lines, same and found.status == "passed"


def changes_since(manifest: Manifest, plan: Plan) -> list[str]:
    """What decides a target's programs and was other when they were built: packages, or else sources or flags."""
    target, here = manifest.targets[plan.target.name], toolchain(plan.target)
    before = target.toolchain
    changed = [
        f"{name} {before.get(name)}, here {here.get(name)}"
        for name in {**before, **here}
        if before.get(name) != here.get(name)
    ]
    if not changed and fingerprint(config_of(manifest), plan) != target.fingerprint:
        return ["other sources of the model or of the lowering, or other flags"]
    return changed


def _compared(new: FileRecord, old: FileRecord | None) -> str:
    if old is None:
        return f"{new.bytes:,} bytes, none recorded"
    if new.sha256 == old.sha256:
        return f"the recorded {old.bytes:,} bytes"
    return f"other bytes than recorded: {new.bytes:,}, recorded {old.bytes:,}"


def _receipt(artifact: Path, view: Path, manifest: Manifest, name: str, cell: Cell) -> Receipt:
    """Runs the vectors through one cell, and those that it needs, in a copy of as much of the artifact."""
    target = manifest.targets[name]
    needed = _needed(target.cells, cell)
    reduced = replace(target, cells={each.name: each for each in needed})
    for path in recorded_files(replace(manifest, targets={name: reduced}, tokenizer=())):
        copy = view / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        with writing(copy):
            try:
                os.link(artifact / path, copy)  # a second name, where both lie on one volume: weights may be large
            except OSError:
                shutil.copyfile(artifact / path, copy)
    reduced = replace(target, cells=reduced.cells | {cell.name: cell})
    return measure_apart(view, name, replace(manifest, targets={name: reduced})).cells[cell.name]


def _needed(cells: Mapping[str, Cell], cell: Cell) -> list[Cell]:
    """Cells that the receipts of ``cell`` run through: a decode starts from a prefill, a sample from logits."""
    smallest = min((each for each in cells.values() if each.phase == "prefill"), key=lambda each: each.padding)
    if cell.phase in ("prefill", "score"):
        return []
    if cell.phase in MOVING:
        return [each for each in cells.values() if each.phase in MOVING and each != cell]
    if cell.phase == "decode":
        return [smallest]
    if cell.phase in SPLIT:  # they are run together, and each needs some of every other phase
        return [smallest, *(each for each in cells.values() if each.phase in SPLIT and each != cell)]
    if cell.phase in SEGMENTS:
        together = (each for each in cells.values() if each.phase in SEGMENTS and each.padding == cell.padding)
        return [each for each in together if each != cell]
    giver = next(each for each in cells.values() if each.phase in GIVERS and each.rows == cell.padding)
    return [smallest, giver] if giver.phase == "decode" else [giver]
