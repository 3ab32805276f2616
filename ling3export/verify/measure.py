"""Runs programs of an artifact on its vectors, and gives their receipts: the build side's one door to the runner.

A target is measured in a process of its own: the number of devices is fixed when jax starts. The portable programs of
another machine can be run: the very ``.stablehlo`` files of a target are compiled for as many virtual devices as it
has, and the vectors run through them. They hold every decision of ours; what stays unproven of a target is what its own
compiler makes of them.
"""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs
from msgspec.structs import replace

from ling3export.artifacts.calibration import Calibration
from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.records import from_json, to_json
from ling3export.artifacts.schema import FileRecord, Manifest, Mesh, PortableReceipts, Receipts, Target
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.extras import installed
from ling3export.foundation.phases import GIVERS, MOVING, ON_LOGITS, SPLIT
from ling3export.foundation.processes import LOOPBACK, START_TIMEOUT, Child, answer, free_port, replied
from ling3export.machine.targets import prepare
from ling3export.runners.hosts.hosts import Hosts

if TYPE_CHECKING:
    from ling3export.runners.load.loader import Loaded

MODULE = "ling3export.verify.measure"
# Portable programs are run a few times: compiling them with LLVM's optimization would take twice as long.
QUICK = "--xla_backend_optimization_level=0"
# Bytes of weights: a build does not run the portable programs of larger checkpoints.
DEFAULT_BYTES = 10**9
LARGEST_ID = 1 << 24  # of a token: a grammar's tokenizer has a row for each id


def check_tokenizer(folder: Path, records: Sequence[FileRecord]) -> None:
    """Reads an artifact's tokenizer files, and encodes, decodes and follows a grammar as the runner does.

    Raises:
        ArtifactError: One is no JSON, or no tokenizer that can be used.
    """
    from ling3export.runners.text.grammar import Grammars
    from ling3export.runners.text.tokenizer import TokenizerFiles

    files = TokenizerFiles(folder, records)
    eos = files.eos_token_ids()
    if files.exist:
        tokenizer = files.tokenizer("text")
        if (largest := tokenizer.largest_id) >= LARGEST_ID:
            raise ArtifactError(f"tokenizer: expected token ids below {LARGEST_ID:,}, found {largest:,}")
        if installed("llguidance"):
            Grammars(tokenizer, largest + 1, eos or {0})


@contextmanager
def _loaded(artifact: Path, **options: Any) -> "Iterator[Loaded]":
    """Loads a target. After the block it ends the other hosts."""
    from ling3export.runners.load.loader import load

    loaded = load(artifact, report=lambda _: None, **options)
    yield loaded
    if loaded.channel is not None:
        loaded.channel.finish()


def measure_target(artifact: Path, name: str, manifest: Manifest, hosts: Hosts | None = None) -> Receipts:
    """Loads one target and runs every vector through each of its cells.

    On several hosts every process calls it; the result of the first one counts.
    """
    from ling3export.runners.calibrate.vectors import measured

    with _loaded(artifact, target=name, check="programs", manifest=manifest, hosts=hosts) as loaded:
        return measured(loaded)


def time_target(
    artifact: Path, target: str | None, manifest: Manifest, hosts: Hosts | None, traces: Path | None = None
) -> Calibration:
    """Loads one target in this process, checks its digests, runs every vector, and times every cell.

    On several hosts every process calls it; the result of the first one counts. ``traces`` gets a trace of each cell.
    """
    from ling3export.runners.calibrate.times import timed
    from ling3export.runners.calibrate.vectors import measured

    with (
        _loaded(artifact, target=target, manifest=manifest, hosts=hosts) as loaded,
        loaded.channel.together() if loaded.channel else nullcontext(),
    ):
        inputs = loaded.runner.inputs = {}
        receipts = measured(loaded)
        loaded.runner.inputs = None
        return timed(loaded, inputs, receipts, traces)


def measure_apart(artifact: Path, target: str, manifest: Manifest, *, portable: bool = False) -> Receipts:
    """:func:`measure_target` in a fresh process; of several hosts, in one each. Or ``measure_portable``, in one.

    The manifest goes through a pipe: a build has none in the folder before its receipts are in it.

    Raises:
        MisfitError: The programs do not fit this machine.
        ArtifactError: The first process ended without a result; with what it said. It tells what went wrong with the
            others, too.
    """
    count = manifest.targets[target].processes if target in manifest.targets and not portable else 1
    address = f"{LOOPBACK}:{free_port()}"
    secret = secrets.token_hex(16)  # of these processes alone, among all of this machine
    job = {"artifact": str(artifact), "target": target, "manifest": to_json(manifest), "portable": portable}
    with ExitStack() as stack:
        children = [stack.enter_context(Child(MODULE, quick() if portable else {})) for _ in range(count)]
        for number, child in enumerate(children):
            hosts = asdict(Hosts(address, count, number, START_TIMEOUT, secret=secret)) if count > 1 else None
            child.send(job | {"hosts": hosts})
        reply = replied(children[0], f"vectors of `{target}`: expected to run, found")
        return from_json(PortableReceipts if portable else Receipts, reply["receipts"], free=True)


def quick() -> dict[str, str]:
    """Variables of a process that compiles portable programs: the user's flags, and no optimization by LLVM."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    return {"XLA_FLAGS": f"{flags} {QUICK}".strip()} if flags[:1] in ("", "-") else {}  # else the name of a file


def too_large(manifest: Manifest, name: str) -> str | None:
    """Why a target's portable programs are not run by default; None where they are."""
    weights, target = manifest.weights.nbytes, manifest.targets[name]
    if weights > DEFAULT_BYTES:
        return f"{weights / 1e9:.1f} GB of weights, more than {DEFAULT_BYTES / 1e9:g} GB"
    split = {array.name: any(axis is not None for axis in array.spec) for array in target.state.arrays}
    state = sum(array.nbytes * (1 if split[array.name] else target.tp) for array in target.state.arrays)
    if state > manifest.plan.state_memory:
        return f"{state / 1e9:.1f} GB of state on all devices, more than --state-memory"
    return None


def measure_portable(artifact: Path, name: str, manifest: Manifest) -> PortableReceipts:
    """Runs every vector through the portable programs of a target, compiled for this processor's virtual devices.

    Raises:
        ArtifactError: A program is damaged, does not compile here, or does not run.
    """
    target, left = on_processor(artifact, manifest.targets[name])
    from ling3export.runners.calibrate.vectors import measured

    manifest = replace(manifest, targets={name: target})
    with _loaded(artifact, target=name, programs="allow-compile", check="programs", manifest=manifest) as loaded:
        receipts = measured(loaded)
    return PortableReceipts(**structs.asdict(receipts), compiler=f"jaxlib {version('jaxlib')}", lacking=left)


def on_processor(artifact: Path, target: Target) -> tuple[Target, dict[str, tuple[str, ...]]]:
    """A target with the portable programs that run here, for as many virtual devices of this process, and the others.

    Call it before jax is imported. The others are cells, each with the custom calls that the processor lacks.
    """
    mesh = Mesh(target.mesh.axis, tuple(range(target.tp)), (0,) * target.tp)
    target = replace(target, platform="cpu", mesh=mesh, kernels=None, state_program=None)
    prepare(target)
    from ling3export.machine.portable import lacking

    calls = {name: lacking(read_checked(artifact, cell.stablehlo)) for name, cell in target.cells.items()}
    left = not_run(target, calls)
    cells = {name: replace(cell, exec=None, call=None) for name, cell in target.cells.items() if name not in left}
    return replace(target, cells=cells), left


def not_run(target: Target, calls: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The cells that cannot be run, and why: custom calls of their own, or of all cells that they need.

    Args:
        calls: By cell, the custom calls that the processor's compiler lacks.
    """

    def union(phases: tuple[str, ...], rows: int | None = None) -> tuple[str, ...]:
        cells = [cell for cell in target.cells.values() if cell.phase in phases and rows in (None, cell.rows)]
        return tuple(sorted({call for cell in cells for call in calls[cell.name]}))

    reasons = {}
    for name, cell in target.cells.items():
        needed = calls[name]
        if cell.phase in ON_LOGITS:
            needed += union(GIVERS, cell.rows)
        elif cell.phase in (*MOVING, *SPLIT):
            needed += union(MOVING if cell.phase in MOVING else (*SPLIT, "prefill"))
        elif cell.phase == "decode":
            needed += union(("prefill",))
        if needed:
            reasons[name] = tuple(sorted(set(needed)))
    return reasons


def measured_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measures one target for the process that started this one."""
    manifest, folder, name = from_json(Manifest, job["manifest"]), Path(job["artifact"]), job["target"]
    if job["portable"]:
        receipts: Receipts = measure_portable(folder, name, manifest)
    else:
        hosts = None if job["hosts"] is None else Hosts(**job["hosts"])
        receipts = measure_target(folder, name, manifest, hosts)
    return {"receipts": to_json(receipts)}


if __name__ == "__main__":
    answer(measured_job)
