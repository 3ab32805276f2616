"""Compares an artifact's digests, and runs its vectors through every target that this machine can run."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling3export.artifacts.calibration import Calibration, beside, write_calibration
from ling3export.artifacts.files import refuse_links
from ling3export.artifacts.manifest import file_records, read_checked, recorded_files
from ling3export.artifacts.receipts import NO_WEIGHTS, PORTABLE, error_columns, times_table, told
from ling3export.artifacts.records import to_json
from ling3export.artifacts.schema import Manifest, PortableReceipts, Receipts, Target
from ling3export.artifacts.signing import read_trusted
from ling3export.artifacts.store import Store
from ling3export.foundation.errors import ArtifactError, MisfitError, listed
from ling3export.foundation.tables import aligned, footnotes
from ling3export.machine.targets import platforms_here
from ling3export.verify.engine import DEFAULT_BYTES, EngineReceipt, engine_apart
from ling3export.verify.measure import measure_apart, time_target

if TYPE_CHECKING:
    from ling3export.runners.hosts.hosts import Hosts


@dataclass(frozen=True)
class Result:
    """The result of ``ling3export verify``."""

    files: int  # how many digests of files agreed
    shards: int  # how many of weight shards
    targets: dict[str, Receipts | str]  # by name its receipts, or why it could not run here
    times: tuple[Calibration, Target] | None = None  # with --time: what was measured of the one target
    engines: Mapping[str, EngineReceipt] = field(default_factory=dict)  # by target, what the engine answers

    @property
    def passed(self) -> bool:
        """Whether every cell that runs here is within its tolerance, and so are the engine's answers."""
        cells = all(result.passed for result in self.targets.values() if isinstance(result, Receipts))
        return cells and all(receipt.passed for receipt in self.engines.values())

    @property
    def record(self) -> dict[str, Any]:
        """The result as JSON."""
        targets: dict[str, dict[str, Any]] = {
            name: {"reason": result} if isinstance(result, str) else to_json(result) | {"passed": result.passed}
            for name, result in self.targets.items()
        }
        for name, receipt in self.engines.items():
            targets[name]["engine"] = asdict(receipt) | {"passed": receipt.passed}
        times = {} if self.times is None else {"times": to_json(self.times[0])}
        return {"files": self.files, "shards": self.shards, "targets": targets, "passed": self.passed} | times

    def table(self) -> str:
        """Each target's cells, the worst error first, and what the errors mean."""
        lines = [f"digests: {self.files} files and {self.shards} weight shards agree"]
        for name, result in self.targets.items():
            if isinstance(result, str):
                lines.append(f"{name}: not run here: {result}")
                continue
            portable = isinstance(result, PortableReceipts)
            rows: list[tuple[str, ...]] = [("cell", "status", "median", "worst", "absolute", "positions")]
            for cell, row in sorted(result.cells.items(), key=lambda item: -item[1].relative):
                errors = error_columns(cell, result)
                rows.append((cell, row.status, *errors, f"{row.absolute:.1e}", str(row.positions)))
            lines += [f"{name}{f', {PORTABLE}' * portable}:", *aligned(rows), *footnotes(told(result))]
            for what, value in result.agreement.items():
                lines.append(f"  {what.replace('_', ' ')}: {value:.2e}")
            if name in self.engines:
                lines += footnotes(self.engines[name].lines())
        if self.times is not None:
            lines += times_table(*self.times)
        return "\n".join(lines)


def check_digests(artifact: Path, manifest: Manifest, target: str | None = None) -> tuple[int, int]:
    """Compares every file and every weight shard with the manifest; returns how many there are of each.

    Args:
        target: Programs of all other targets may be missing.

    Raises:
        ArtifactError: One is missing, damaged, or reached through a symbolic link.
    """
    refuse_links(artifact, recorded_files(manifest))
    others = {
        record.path for name, other in manifest.targets.items() if target not in (None, name) for record in other.files
    }
    files = [
        record
        for record in file_records(manifest)
        if record.path not in others or os.path.lexists(artifact / record.path)
    ]
    for record in files:
        read_checked(artifact, record)
    index = manifest.weights.index
    Store(artifact, index).check_many((name, 0, None) for name in index)
    return len(files), sum(len(tensor.sha256) for tensor in index.values())


def _not_here(target: Target, proven: bool) -> str | None:
    """Why a target cannot be measured on this machine; None if it can. ``proven``: its portable programs were run."""
    hosts, platforms = target.processes, platforms_here()
    if target.platform in platforms and (hosts == 1 or target.platform == "cpu"):
        return None
    status = " and ".join(sorted({cell.status for cell in target.cells.values()})) + f" ({PORTABLE})" * proven
    wanted = f"{target.tp} devices of {target.text} on {hosts} host{'s' * (hosts > 1)}"
    return f"{status}; it needs {wanted}, found {' and '.join(platforms)} in one process"


def time_artifact(
    artifact: Path,
    target: str | None,
    hosts: "Hosts | None" = None,
    report: Callable[[str], None] = lambda text: None,
    *,
    traces: Path | None = None,
) -> Result:
    """Checks every digest, runs one target's vectors in this process, times its cells, and records the times.

    Args:
        target: None for the only one that fits this machine.
        hosts: This process's place among several; each of them calls this, and host 0 records.
        report: Receives a line about the signature, and one about the record.
        traces: A folder for a profiler's trace of each cell.

    Raises:
        ArtifactError: A file is damaged, or no target or several fit this machine.
    """
    manifest = read_trusted(artifact, report)
    calibration = time_target(artifact, target, manifest, hosts, traces)
    files, shards = check_digests(artifact, manifest, calibration.target)
    if hosts is None or hosts.number == 0:
        write_calibration(beside(artifact), calibration)
        report(f"wrote {beside(artifact)}")
    times = calibration, manifest.targets[calibration.target]
    return Result(files, shards, {calibration.target: calibration.receipts}, times)


def verify_artifact(
    artifact: Path,
    target: str | None,
    *,
    run: bool = True,
    portable: bool = False,
    engine: bool | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Result:
    """Checks every digest, then measures every target that runs here; at least one where any has a platform of here.

    Args:
        artifact: The folder.
        target: Only this one; None for all.
        run: Whether to measure; otherwise nothing of the artifact is executed.
        portable: Measure the portable programs of every target, compiled for this processor, instead of executables.
        engine: Also judge the answers of the whole engine; None if the weights are small.
        report: Told who signed it.

    Raises:
        MisfitError: No target of this platform fits this machine.
        ArtifactError: A file is damaged, or there is no such target.
    """
    manifest = read_trusted(artifact, report)
    names = list(manifest.targets) if target is None else [target]
    if unknown := [name for name in names if name not in manifest.targets]:
        known = listed(list(manifest.targets))
        raise ArtifactError(f"target `{unknown[0]}`: the artifact has only {known}, in {artifact}")
    files, shards = check_digests(artifact, manifest, target)
    targets: dict[str, Receipts | str] = {}
    misfits: list[MisfitError] = []
    for name in names:
        proven = name in (manifest.vectors.portable or {})
        reason = None if portable else _not_here(manifest.targets[name], proven) if run else "--no-run"
        if not manifest.has_weights:
            reason = NO_WEIGHTS
        try:
            targets[name] = reason or measure_apart(artifact, name, manifest, portable=portable)
        except MisfitError as error:  # built on another machine, next to one that was built for this one
            misfits.append(error)
            targets[name] = error.message.partition("\nhint: ")[0]
    if misfits and not any(isinstance(result, Receipts) for result in targets.values()):
        raise misfits[0]
    wanted = manifest.weights.nbytes <= DEFAULT_BYTES if engine is None else engine
    in_one_process = [name for name in targets if manifest.targets[name].processes == 1 and not portable]
    able = [name for name in in_one_process if wanted and isinstance(targets[name], Receipts)]
    return Result(files, shards, targets, engines={name: engine_apart(artifact, name) for name in able})
