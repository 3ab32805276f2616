"""Whether a compiled program fits this machine and may be deserialized, decided from the manifest alone.

PJRT checks next to nothing, and a file that does not fit can end the process inside C++. So every cell gets a verdict:
OPTIMAL (its executable fits), RECOMPILE (only its portable program will do, compiled here), or UNSUPPORTED.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ling3export.artifacts.calibration import Measuring
from ling3export.artifacts.schema import Mesh, Requirements, Target
from ling3export.foundation.errors import ArtifactError, MisfitError, listed
from ling3export.machine import environment
from ling3export.machine.targets import NAMES, on_all, platforms_here

POLICIES = ("prebuilt-only", "allow-compile")
# The digests that a loader checks: programs leaves out the weights, copy checks and uses a copy of them in memory.
CHECKS = ("all", "programs", "copy")

CPUINFO = Path("/proc/cpuinfo")


class VerdictStatus(Enum):
    """The results of a comparison, from best to worst."""

    OPTIMAL = "OPTIMAL"
    RECOMPILE = "RECOMPILE"
    UNSUPPORTED = "UNSUPPORTED"


@dataclass(frozen=True)
class JaxRuntime:
    """The properties of a machine that executables depend on, as jax reports them.

    Attributes:
        platform: jax's name: ``cpu``, ``gpu`` or ``tpu``.
        plugins: The platform's compiler packages, with their versions.
        machine: Operating system and instruction set, such as ``linux-x86_64``.
        processes: Number of processes that run together.
        cpu_features: Processor features that compiled code may depend on.
        devices: Ids of the devices of all processes.
        coords: Coordinates of each device within its slice; empty if it has none.
        memory: Bytes of one device; None if it does not report them.
    """

    platform: str
    jaxlib: str
    plugins: Mapping[str, str]
    device_kind: str
    machine: str
    processes: int
    cpu_features: Sequence[str]
    devices: Sequence[int]
    coords: Sequence[Sequence[int]] = ()
    memory: int | None = None

    @classmethod
    def here(cls) -> "JaxRuntime":
        """The properties of this process; starts jax's backend."""
        import jax
        import jaxlib

        devices = jax.devices()
        platform = environment.platform_of(devices[0])
        try:
            memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        except (NotImplementedError, RuntimeError):  # a plugin counts no memory; jax's own errors are RuntimeErrors
            memory = None
        return cls(
            platform,
            jaxlib.__version__,
            environment.plugins(platform),
            devices[0].device_kind,
            environment.machine(),
            jax.process_count(),
            environment.cpu_features(),
            [device.id for device in devices],
            [list(getattr(device, "coords", None) or ()) for device in devices],
            memory,
        )


@dataclass(frozen=True)
class Verdict:
    """Whether a cell runs on this machine.

    Attributes:
        cell: ``prefill@16``.
        reason: The difference between the cell's requirements and the machine; empty for OPTIMAL.
        hint: The remedy; None means to build for this machine.
    """

    cell: str
    status: VerdictStatus
    reason: str = ""
    hint: str | None = None


def judge(target: Target, runtime: JaxRuntime) -> dict[str, Verdict]:
    """A verdict for every cell of a target on a machine."""
    impossible, hint = _impossible(target, runtime)
    if impossible:
        return {name: Verdict(name, VerdictStatus.UNSUPPORTED, impossible, hint) for name in target.cells}
    unfit = next(misfits(target.requires, target.mesh, runtime), None)
    missing = f"the artifact has no executable for {target.text}"
    reasons = {name: missing if cell.exec is None else unfit for name, cell in target.cells.items()}
    return {
        name: Verdict(name, VerdictStatus.RECOMPILE, reason) if reason else Verdict(name, VerdictStatus.OPTIMAL)
        for name, reason in reasons.items()
    }


def _impossible(target: Target, runtime: JaxRuntime) -> tuple[str, str | None]:
    """(why not even the portable programs run here, empty if they might; what to do about it, if that is special)."""
    platform = NAMES.get(runtime.platform, runtime.platform)
    if target.platform != platform:
        return f"platform: built for {target.platform}, found {platform}", None
    if target.processes != runtime.processes:
        wanted = target.processes
        return f"hosts: built for {wanted} (a process on each), found {runtime.processes}", on_all(wanted)
    if len(runtime.devices) < target.tp:
        return f"devices: built for {target.tp}, found {len(runtime.devices)}", None
    return "", None


def enforce(verdicts: dict[str, Verdict], policy: str, target: str, artifact: str) -> list[Verdict]:
    """Applies the policy: which cells are to be compiled here.

    Args:
        policy: ``prebuilt-only`` (a cell that needs compiling is an error) or ``allow-compile``.

    Returns:
        The verdicts that are RECOMPILE; none under ``prebuilt-only``.

    Raises:
        MisfitError: A cell cannot run here, or not under this policy; with what was wanted, what was found, and the
            command that fixes it.
        ArtifactError: There is no such policy.
    """
    if policy not in POLICIES:
        raise ArtifactError(f"program policy: expected {' or '.join(POLICIES)}, found {policy}")
    unsupported = [verdict for verdict in verdicts.values() if verdict.status is VerdictStatus.UNSUPPORTED]
    if unsupported:
        platform = (platforms_here() or ["cpu"])[0]
        add = f"add a target for this machine: ling3export build --into {artifact} --target {platform}"
        raise MisfitError(
            f"target `{target}`: expected programs that run here, found {_told(unsupported)}, in {artifact}",
            unsupported[0].hint or add,
        )
    recompile = [verdict for verdict in verdicts.values() if verdict.status is VerdictStatus.RECOMPILE]
    if recompile and policy == "prebuilt-only":
        raise MisfitError(
            f"target `{target}`: expected compiled programs that fit, found {_told(recompile)}, in {artifact}",
            "compile the portable programs here (once; they are kept in the user's cache): --programs allow-compile; "
            "or build the artifact on this machine with this jaxlib",
        )
    return recompile


def _told(verdicts: list[Verdict]) -> str:
    """The verdicts, all of one status, in one phrase that says equal reasons once."""
    reasons: dict[str, list[str]] = {}
    for verdict in verdicts:
        reasons.setdefault(verdict.reason, []).append(verdict.cell)
    status = verdicts[0].status.value
    return "; ".join(f"{status} {listed(cells)} ({reason})" for reason, cells in reasons.items())


def executable_fits(requires: Requirements, mesh: Mesh) -> str | None:
    """Why an executable for ``mesh`` must not be given to the deserializer here; None if nothing speaks against it.

    PJRT itself checks next to nothing: another jaxlib's file can abort the process, another processor's runs until its
    first unknown instruction, another topology's fails obscurely. The caller checks digests.
    """
    return next(misfits(requires, mesh, JaxRuntime.here()), None)


def misfits(requires: Requirements, mesh: Mesh, runtime: JaxRuntime) -> Iterator[str]:
    """Everything that speaks against an executable for ``mesh`` on a machine.

    Compared are, in this order: platform; jaxlib and the platform's own compiler packages, exactly; kind of device;
    operating system and instruction set; number of processes; the processor's features, where a superset will do; the
    devices' ids.
    """
    wanted = requires.plugins or {}
    comparisons: list[tuple[str, Any, Any]] = [
        ("platform", requires.platform, runtime.platform),
        ("jaxlib", requires.jaxlib, runtime.jaxlib),
        *(
            (name, wanted.get(name, "none"), runtime.plugins.get(name, "none"))
            for name in sorted({*wanted, *runtime.plugins})
        ),
        ("device kind", requires.device_kind, runtime.device_kind),
        ("machine", requires.machine or runtime.machine, runtime.machine),
        ("processes", mesh.processes, runtime.processes),
    ]
    for what, expected, actual in comparisons:
        if expected != actual:
            yield f"{what}: built for {expected}, found {actual}"
    missing = sorted(set(requires.cpu_features or ()) - set(runtime.cpu_features))
    if missing:
        yield f"processor: built for {listed(missing)}, which this one lacks"
    absent = [str(number) for number in mesh.devices if number not in runtime.devices]
    if absent:
        yield f"devices: built for {len(mesh.devices)}, found {len(runtime.devices)} (without ids {listed(absent)})"


def measuring() -> Measuring:
    """This machine as calibrations name it; starts jax's backend."""
    runtime = JaxRuntime.here()
    rows = dict(line.partition(":")[::2] for line in CPUINFO.read_text().splitlines()) if CPUINFO.exists() else {}
    processor = next((value.strip() for name, value in rows.items() if name.strip() == "model name"), "unknown")
    return Measuring(
        *(runtime.platform, runtime.device_kind, len(runtime.devices), runtime.processes, runtime.machine),
        *(processor, environment.cores(), {"jaxlib": runtime.jaxlib, **runtime.plugins}),
    )
