"""``build --replay CELL``: one cell again, alone, with everything that its compiler says.

A cell of an artifact is built as the manifest says, in a folder of its own, and its portable program is compared with
the recorded one; the artifact stays as it is. If there is no artifact, since its build failed, the options say what to
build. The cell then goes into the cache, where the next build finds it.
"""

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ling3export.artifacts.manifest import MANIFEST, file_record, named_target
from ling3export.artifacts.program_records import Program
from ling3export.artifacts.schema import FileRecord, Manifest
from ling3export.artifacts.signing import read_trusted
from ling3export.cache.cells import Cells, opened
from ling3export.cache.keys import fingerprint, toolchain
from ling3export.cache.store import CacheUse
from ling3export.compile.pool import Compilers
from ling3export.foundation.errors import ArtifactError, PlanError, listed
from ling3export.foundation.tables import readable
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import Plan, as_stored, make_plans
from ling3export.plan.recorded import config_of, plan_of
from ling3export.plan.targets import check_toolchain

HARMLESS = "; harmless, for the portable program is the same: a compiler may order the same code differently"


def replay(
    artifact: Path,
    text: str,
    cache: CacheUse,
    checkpoint: Path,
    options: Options,
    report: Callable[[str], None],
    ignore: Sequence[str] = (),
) -> tuple[list[str], bool]:
    """Builds the cell ``text`` of ``artifact`` again; of an artifact that is not there, as the options say.

    Args:
        artifact: The artifact, or the folder that the failed build was to make.
        text: ``decode@16``, or ``cpu@16/decode@16`` where there are several targets.
        cache: Gets the cell of a build that failed. Nothing is read from it.
        checkpoint: That build's; only config.json is read.
        options: That build's.
        report: Gets a line that says who signed the artifact, and one when a compiler begins and ends.
        ignore: Fields of config.json to ignore.

    Returns:
        Lines for the user, and whether the cell equals the recorded one, if there is one.

    Raises:
        ArtifactError: The artifact is damaged, no trusted key has signed it, or it has no such target.
        ConfigError: There is neither an artifact nor a config.json.
        PlanError: There is no such cell, or it does not build.
    """
    target, _, cell = text.rpartition("/")
    if (artifact / MANIFEST).is_file():
        manifest = read_trusted(artifact, report)
        return _recorded(manifest, _target(manifest.targets, target), cell, report)
    config = Config.from_path(checkpoint, ignore)
    plans = {plan.target.name: plan for plan in make_plans(config, as_stored(options, checkpoint))}
    cells = opened(replace(cache, policy="redo" if cache.writes else "off"), lambda text: None)
    with tempfile.TemporaryDirectory() as folder:
        _, spent = _build(plans[_target(plans, target)], config, cell, Path(folder), report, cells)
    kept = "in the cache: the same build again takes it" if cache.writes else f"not kept: --cache {cache.policy}"
    return [spent, kept], True


def _target(targets: Collection[str], wanted: str) -> str:
    if not wanted and len(targets) > 1:
        raise ArtifactError(
            f"--replay: expected TARGET/CELL, for there are {len(targets)} targets, found no target",
            f"one of {listed(sorted(targets))}",
        )
    return named_target(targets, wanted or next(iter(targets)))


def _build(
    plan: Plan, config: Config, cell: str, folder: Path, report: Callable[[str], None], cells: Cells | None = None
) -> tuple[Program, str]:
    """Builds one cell into ``folder`` and shows its compiler's stderr; the line says how long that took."""
    name = plan.target.name
    planned = [row for row in plan.cells if row.name == cell]
    if not planned:
        names = listed([row.name for row in plan.cells], 12)
        raise PlanError(f"--replay: expected a cell of {name}: {names}; found `{cell}`")
    check_toolchain(plan.target)
    outcome = Compilers(plan, config, folder, 1, cells, shown=True, tell=report).run(planned, lambda cell, built: None)
    if failure := outcome.failures.get(cell):
        raise PlanError(f"programs: expected {name} {cell} to build, found: {failure.error}", failure.hint)
    program = outcome.built[cell].program
    lowered, compiled = program.lower_seconds, program.compile_seconds
    spent = f"built in {lowered + compiled:.1f} s (lowered in {lowered:.1f}, compiled in {compiled:.1f})"
    return program, f"{name} {cell}: {spent}"


def _recorded(manifest: Manifest, name: str, cell: str, report: Callable[[str], None]) -> tuple[list[str], bool]:
    """Builds a cell of an artifact, and compares it with the one that is there."""
    plan, target = plan_of(manifest, name), manifest.targets[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "programs" / "replayed"
        folder.mkdir(parents=True)
        program, spent = _build(plan, config_of(manifest), cell, folder, report)
        old = target.cells[cell]
        portable, executable = (
            file_record(Path(temporary), f"programs/replayed/{cell}.{suffix}") for suffix in ("stablehlo", "exec")
        )
        same = portable.sha256 == old.stablehlo.sha256
        lines = [spent, f"  stablehlo    {_compared(portable, old.stablehlo)}"]
        if not same:
            changed = changes_since(manifest, plan)
            unchanged = "neither sources nor toolchain changed since: report this"
            lines.append(f"               {f'it was built with {listed(changed)}' if changed else unchanged}")
        harmless = same and old.exec is not None and executable.sha256 != old.exec.sha256
        lines.append(f"  executable   {_compared(executable, old.exec)}{HARMLESS * harmless}")
        both = [readable(cell.memory.temporaries) for cell in (program, old)]
        lines.append(f"  temporaries  {both[0]}, recorded {both[1]}")
    return lines, same


def changes_since(manifest: Manifest, plan: Plan) -> list[str]:
    """Packages whose versions differ from those of a target's build; without any, sources or flags that differ."""
    target, now = manifest.targets[plan.target.name], toolchain(plan.target)
    before = target.toolchain
    changed = [
        f"{name} {before.get(name)}, here {now.get(name)}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
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
