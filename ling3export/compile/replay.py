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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import replace_file, writing
from ling3export.artifacts.manifest import MANIFEST, file_record, read_checked, read_manifest
from ling3export.artifacts.schema import Cell, FileRecord, Manifest, Program, Receipt
from ling3export.cache.cells import Cells, opened
from ling3export.cache.keys import fingerprint, toolchain
from ling3export.cache.use import CacheUse
from ling3export.compile.pool import Compilers, Outcome
from ling3export.errors import ArtifactError, PlanError, listed
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import Plan, make_plans
from ling3export.plan.toolchain import check_toolchain
from ling3export.pricing.recorded import config_fields, config_of, plan_of
from ling3export.runners.load.targets import named_target
from ling3export.strict_json import read_json
from ling3export.tables import readable
from ling3export.verify.measure import measure_apart


@dataclass(frozen=True)
class Replayed:
    """What came of a cell.

    Attributes:
        lines: For the user.
        passed: It was built, and is what is recorded, if anything is.
    """

    lines: list[str]
    passed: bool


@dataclass(frozen=True)
class Request:
    """What a build was asked for: enough to build one of its cells again.

    Attributes:
        config: The content of config.json.
        ignore: Its fields that were ignored on request.
        options: The options of the build.
    """

    config: dict[str, Any]
    ignore: tuple[str, ...]
    options: Options


def failed_path(artifact: Path) -> Path:
    """Where a failed build of ``artifact`` is described."""
    artifact = artifact.resolve()
    return artifact.parent / f".{artifact.name}.failed.json"


def note_failure(artifact: Path, request: Request, outcomes: Sequence[Outcome]) -> None:
    """Describes a failed build of ``artifact``, whose lock is held, by rename."""
    failed = {each.plan.target.name: list(each.failures) for each in outcomes}
    replace_file(failed_path(artifact), json.dumps(asdict(request) | {"failed": failed}).encode())


def read_failure(artifact: Path) -> tuple[Request, dict[str, list[str]]] | None:
    """What a failed build of ``artifact`` was asked for, and the names of the cells that failed, by target.

    None where the last build did not fail, or its description is damaged.
    """
    try:
        record = read_json(failed_path(artifact))
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record["options"].items()
        }
        failed = {str(target): [str(cell) for cell in cells] for target, cells in record["failed"].items()}
        return Request(dict(record["config"]), tuple(record["ignore"]), Options(**options)), failed
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def forget_failure(artifact: Path) -> None:
    """Removes the description once a build succeeded."""
    failed_path(artifact).unlink(missing_ok=True)


def replayable(path: Path) -> bool:
    """Whether ``path`` is an artifact, or was to become one."""
    return (path / MANIFEST).is_file() or failed_path(path).is_file()


def replay(artifact: Path, text: str, cache: CacheUse) -> Replayed:
    """Builds the cell ``text`` of ``artifact`` again.

    Args:
        artifact: An artifact, or the name under which a build failed.
        text: ``decode@16``, or ``cpu@16/decode@16`` where there are several targets.
        cache: Where a cell of a failed build goes. Nothing is read from it.

    Raises:
        ArtifactError: There is neither, or no such cell.
        PlanError: The cell does not build.
    """
    target, _, cell = text.rpartition("/")
    if (failure := read_failure(artifact)) is not None:
        request, failed = failure
        if name := _failed(failed, target or None, cell):
            return _again(request, name, cell, cache)
        if not (artifact / MANIFEST).is_file():
            return _again(request, _target(failed, target or None), cell, cache)
    manifest = read_manifest(artifact)
    return _recorded(artifact, manifest, _target(manifest.targets, target or None), cell)


def _failed(failed: dict[str, list[str]], target: str | None, cell: str) -> str | None:
    """The target whose cell ``cell`` failed, if there is one that ``target`` may mean."""
    found = [name for name, cells in failed.items() if cell in cells]
    try:
        return _target(found, target) if found else None
    except ArtifactError:
        if target is None:
            raise
        return None


def _target(targets: Collection[str], wanted: str | None) -> str:
    if wanted is None and len(targets) > 1:
        raise ArtifactError(
            f"--replay: expected TARGET/CELL, for there are {len(targets)} targets, found no target",
            f"one of {listed(sorted(targets))}",
        )
    return named_target(targets, wanted or next(iter(targets)))


def _build(
    plan: Plan, config: dict[str, Any], ignore: Sequence[str], cell: str, folder: Path, cells: Cells | None = None
) -> Program:
    """Builds one cell into ``folder``; its compiler's stderr is ours.

    Raises:
        PlanError: There is no such cell, or it does not build.
    """
    found = [each for each in plan.cells if each.name == cell]
    if not found:
        names = listed([each.name for each in plan.cells], 12)
        raise PlanError(f"--replay: expected a cell of {plan.target.name}: {names}; found `{cell}`")
    check_toolchain(plan.target)
    outcome = Compilers(plan, config, ignore, folder, 1, cells, shown=True).run(found, lambda cell, built: None)
    if failure := outcome.failures.get(cell):
        message = f"programs: expected {plan.target.name} {cell} to build, found: {failure.error}"
        raise PlanError(message, failure.hint)
    return outcome.built[cell].program


def _seconds(name: str, cell: str, program: Program) -> str:
    lowered, compiled = program.lower_seconds, program.compile_seconds
    return f"{name} {cell}: built in {lowered + compiled:.1f} s (lowered in {lowered:.1f}, compiled in {compiled:.1f})"


def _again(request: Request, name: str, cell: str, cache: CacheUse) -> Replayed:
    """A cell of a build that failed."""
    config = Config.from_dict(request.config, ignore=request.ignore)
    plan = next(plan for plan in make_plans(config, request.options) if plan.target.name == name)
    use = replace(cache, policy="redo" if cache.writes else "off")
    with opened(use, lambda text: None) as cells, tempfile.TemporaryDirectory() as folder:
        record = _build(plan, request.config, request.ignore, cell, Path(folder), cells)
    kept = "in the cache: the same build again takes it" if cache.writes else f"not kept: --cache {cache.policy}"
    return Replayed([_seconds(name, cell, record), kept], True)


def _recorded(artifact: Path, manifest: Manifest, name: str, cell: str) -> Replayed:
    """A cell of an artifact."""
    plan, target = plan_of(manifest, name), manifest.targets[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "programs" / "replayed"
        folder.mkdir(parents=True)
        record = _build(plan, config_fields(manifest), [], cell, folder)
        old = target.cells[cell]
        portable, executable = (
            file_record(Path(temporary), f"programs/replayed/{cell}.{tier}") for tier in ("stablehlo", "exec")
        )
        same = portable.sha256 == old.stablehlo.sha256
        lines = [_seconds(name, cell, record), f"  stablehlo    {_compared(portable, old.stablehlo)}"]
        if not same:
            lines.append(f"               {_why(manifest, plan)}")
        lines.append(f"  executable   {_compared(executable, old.exec)}")
        both = [readable(each.memory.temporaries) for each in (record, old)]
        lines.append(f"  temporaries  {both[0]}, recorded {both[1]}")
        if not plan.target.runs_here:
            return Replayed([*lines, f"  receipts     not run here: {old.status}"], same)
        read_checked(artifact, manifest.vectors.expected)
        replayed = Cell(**vars(record), status=old.status, stablehlo=portable, exec=executable)
        found = _receipt(artifact, Path(temporary), manifest, name, replayed)
    recorded = manifest.receipt(name, cell)
    known = "none recorded" if recorded is None else f"recorded {recorded.relative:.2e}"
    lines.append(f"  receipts     {found.status}: largest relative error {found.relative:.2e}, {known}")
    return Replayed(lines, same and found.status == "passed")


def _compared(new: FileRecord, old: FileRecord | None) -> str:
    if old is None:
        return f"{new.bytes:,} bytes, none recorded"
    if new.sha256 == old.sha256:
        return f"the recorded {old.bytes:,} bytes"
    return f"other bytes than recorded: {new.bytes:,}, recorded {old.bytes:,}"


def _why(manifest: Manifest, plan: Plan) -> str:
    """Why a portable program is another than the recorded one."""
    recorded, here = manifest.targets[plan.target.name].toolchain, toolchain(plan.target)
    changed = [f"{name} {recorded.get(name)}, here {here[name]}" for name in here if recorded.get(name) != here[name]]
    if changed:
        return f"it was built with {listed(changed)}"
    if fingerprint(config_of(manifest), plan) != manifest.targets[plan.target.name].fingerprint:
        return "the sources of the model or of the lowering changed since"
    return "neither sources nor toolchain changed since: report this"


def _receipt(artifact: Path, view: Path, manifest: Manifest, name: str, cell: Cell) -> Receipt:
    """Runs the vectors through one cell, and those that it needs, in a copy of as much of the artifact."""
    target = manifest.targets[name]
    needed = [target.cells[each] for each in _needed(target.cells, cell)]
    cells = {each.name: each for each in (*needed, cell)}
    files = [file.path for each in needed for file in each.files] + [manifest.vectors.expected.path]
    for path in (*files, *manifest.weights.files):
        copy = view / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        with writing(copy):
            _link_or_copy(artifact / path, copy)
    reduced = replace(manifest, targets={name: replace(target, cells=cells)})
    return measure_apart(view, name, reduced).cells[cell.name]


def _link_or_copy(source: Path, copy: Path) -> None:
    """A second name of the file where both lie on one volume: weights may be large."""
    try:
        os.link(source, copy)
    except OSError:
        shutil.copyfile(source, copy)


def _needed(cells: Mapping[str, Cell], cell: Cell) -> list[str]:
    """Cells that the receipts of ``cell`` run through: a decode starts from a prefill, a sample from logits."""
    smallest = min((each for each in cells.values() if each.phase == "prefill"), key=lambda each: each.padding).name
    if cell.phase in ("prefill", "score"):
        return []
    if cell.phase == "decode":
        return [smallest]
    giver = next(each for each in cells.values() if each.phase != "sample" and each.rows == cell.padding)
    return [smallest, giver.name] if giver.phase == "decode" else [giver.name]
