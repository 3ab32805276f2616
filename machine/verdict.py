"""May a compiled program be given to the deserializer here? Decided before it is, from the manifest alone.

PJRT checks next to nothing, and a file that does not fit can end the process inside C++. So every cell gets a verdict:
OPTIMAL (its executable fits), RECOMPILE (only its portable program will do, compiled here), or UNSUPPORTED.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ling3export.artifacts.schema import Mesh, Requirements, Target
from ling3export.foundation.errors import ArtifactError, MisfitError, listed
from ling3export.machine import environment
from ling3export.machine.targets import NAMES, on_all

POLICIES = ("prebuilt-only", "allow-compile")
# Whose digests a loader checks: programs leaves out the weights, copy checks and uses a copy of them in memory.
CHECKS = ("all", "programs", "copy")


class Status(Enum):
    """The ladder's three rungs."""

    OPTIMAL = "OPTIMAL"
    RECOMPILE = "RECOMPILE"
    UNSUPPORTED = "UNSUPPORTED"


@dataclass(frozen=True)
class Machine:
    """What jax finds here.

    Attributes:
        platform: ``cpu``, ``tpu`` or ``cuda``, the manifest's names.
        devices: How many, over all processes.
        processes: How many run together.
    """

    platform: str
    devices: int
    processes: int


@dataclass(frozen=True)
class Verdict:
    """What can be done with a cell here, and why it is not better.

    Attributes:
        cell: ``prefill@16``.
        status: The rung.
        reason: What was built for and what was found; empty for OPTIMAL.
        hint: What to do about it, where that is not to build for this machine.
    """

    cell: str
    status: Status
    reason: str = ""
    hint: str | None = None


def judge(target: Target, here: Machine, misfit: Callable[[Requirements, Mesh], str | None]) -> dict[str, Verdict]:
    """A verdict for every cell of a target.

    Args:
        target: The manifest's.
        here: This machine.
        misfit: Why executables with these requirements, for these devices, must not be loaded here, or None
            (``executable_fits``).
    """
    impossible, hint = _impossible(target, here)
    if impossible:
        return {name: Verdict(name, Status.UNSUPPORTED, impossible, hint) for name in target.cells}
    unfit = misfit(target.requires, target.mesh)
    missing = f"executable: built for {target.text}, found none in the artifact"
    reasons = {name: missing if cell.exec is None else unfit for name, cell in target.cells.items()}
    return {
        name: Verdict(name, Status.RECOMPILE, reason) if reason else Verdict(name, Status.OPTIMAL)
        for name, reason in reasons.items()
    }


def _impossible(target: Target, here: Machine) -> tuple[str, str | None]:
    """(why not even the portable programs run here, empty if they might; what to do about it, if that is special)."""
    if target.platform != here.platform:
        return f"platform: built for {target.platform}, found {here.platform}", None
    if target.processes != here.processes:
        wanted = target.processes
        return f"hosts: built for {wanted} (a process on each), found {here.processes}", on_all(wanted)
    if here.devices < target.tp:
        return f"devices: built for {target.tp}, found {here.devices}", None
    return "", None


def enforce(verdicts: dict[str, Verdict], policy: str, target: str, artifact: str) -> list[Verdict]:
    """Applies the policy: which cells are to be compiled here.

    Args:
        verdicts: By cell.
        policy: ``prebuilt-only`` (a cell that needs compiling is an error) or ``allow-compile``.
        target: Its name, for messages.
        artifact: Its folder, for messages.

    Returns:
        The verdicts that are RECOMPILE; none under ``prebuilt-only``.

    Raises:
        MisfitError: A cell cannot run here, or not under this policy; with what was wanted, what was found, and the
            command that fixes it.
        ArtifactError: There is no such policy.
    """
    if policy not in POLICIES:
        raise ArtifactError(f"program policy: expected {' or '.join(POLICIES)}, found {policy}")
    unsupported = [verdict for verdict in verdicts.values() if verdict.status is Status.UNSUPPORTED]
    if unsupported:
        add = f"add a target for this machine: ling3export build --into {artifact} --target TARGET"
        raise MisfitError(
            f"target `{target}`: expected programs that run here, found {_told(unsupported)}, in {artifact}",
            unsupported[0].hint or add,
        )
    recompile = [verdict for verdict in verdicts.values() if verdict.status is Status.RECOMPILE]
    if recompile and policy == "prebuilt-only":
        raise MisfitError(
            f"target `{target}`: expected compiled programs that fit, found {_told(recompile)}, in {artifact}",
            "compile the portable programs here (once; they are cached beside the artifact): --programs allow-compile; "
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


def machine_here() -> Machine:
    """What jax finds here; starts its backend."""
    import jax

    devices = jax.devices()
    platform = devices[0].platform
    return Machine(NAMES.get(platform, platform), len(devices), jax.process_count())


@dataclass(frozen=True)
class Seen:
    """What a machine has of what executables depend on, in a manifest's words."""

    platform: str
    jaxlib: str
    plugins: Mapping[str, str]
    device_kind: str
    machine: str
    processes: int
    cpu_features: Sequence[str]
    devices: Sequence[int]


def seen_here() -> Seen:
    """This machine; starts jax's backend."""
    import jax
    import jaxlib

    devices = jax.devices()
    platform = environment.platform_of(devices[0])
    return Seen(
        platform,
        jaxlib.__version__,
        environment.plugins(platform),
        devices[0].device_kind,
        environment.machine(),
        jax.process_count(),
        environment.cpu_features(),
        [device.id for device in devices],
    )


def executable_fits(requires: Requirements, mesh: Mesh) -> str | None:
    """Why an executable for ``mesh`` must not be given to the deserializer here; None if nothing speaks against it.

    PJRT itself checks next to nothing: another jaxlib's file can abort the process, another processor's runs until its
    first unknown instruction, another topology's fails obscurely. The caller checks digests.
    """
    return next(misfits(requires, mesh, seen_here()), None)


def misfits(requires: Requirements, mesh: Mesh, seen: Seen) -> Iterator[str]:
    """Everything that speaks against an executable for ``mesh`` on a machine.

    Compared are, in this order: platform; jaxlib and the platform's own compiler packages, exactly; kind of device;
    operating system and instruction set; number of processes; the processor's features, where a superset will do; the
    devices' ids.
    """
    wanted = requires.plugins or {}
    comparisons: list[tuple[str, Any, Any]] = [
        ("platform", requires.platform, seen.platform),
        ("jaxlib", requires.jaxlib, seen.jaxlib),
        *(
            (name, wanted.get(name, "none"), seen.plugins.get(name, "none"))
            for name in sorted({*wanted, *seen.plugins})
        ),
        ("device kind", requires.device_kind, seen.device_kind),
        ("machine", requires.machine or seen.machine, seen.machine),
        ("processes", mesh.processes, seen.processes),
    ]
    for what, expected, found in comparisons:
        if expected != found:
            yield f"{what}: built for {expected}, found {found}"
    missing = sorted(set(requires.cpu_features or ()) - set(seen.cpu_features))
    if missing:
        yield f"processor: built for {listed(missing)}, which this one lacks"
    absent = [str(number) for number in mesh.devices if number not in seen.devices]
    if absent:
        yield f"devices: built for {len(mesh.devices)}, found {len(seen.devices)} (without ids {listed(absent)})"
