"""Every way in which a machine is not what a target of an artifact wants, with the command that mends it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from ling3export.artifacts.files import REBUILD
from ling3export.artifacts.schema import Manifest, Target
from ling3export.machine import verdict
from ling3export.machine.environment import PLUGINS
from ling3export.machine.targets import NAMES, SIGNS, on_all
from ling3export.runners.doctor.machine import Devices, Machine

FILES = 1024  # files that a server wants to open
OLDEST = (3, 11)
NEEDED = ("numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2", "flatbuffers")
EXTRAS = {"tpu": "tpu", "cuda": "cuda"}


class Weight(Enum):
    """What follows from a fault."""

    NOTE = "note"  # it runs
    COMPILE = "compile"  # it runs with --programs allow-compile
    FAULT = "fault"  # it does not run


@dataclass(frozen=True)
class Fault:
    """Something that is not as it should be: what, and what mends it."""

    weight: Weight
    what: str
    mend: str


def exit_code(faults: Sequence[Fault]) -> int:
    """0 where everything fits, 3 where the portable programs have to be compiled here, 1 where nothing runs."""
    weights = {fault.weight for fault in faults}
    return 1 if Weight.FAULT in weights else 3 if Weight.COMPILE in weights else 0


def of_machine(machine: Machine) -> Iterator[Fault]:
    """What is wrong with a machine whatever it is to run."""
    if machine.python < OLDEST:
        found = ".".join(map(str, machine.python))
        yield Fault(Weight.FAULT, f"Python: expected 3.11 or newer, found {found}", "python3.13 -m venv .venv")
    jax, jaxlib = machine.packages.get("jax"), machine.packages.get("jaxlib")
    for name in ("jax", "jaxlib", *NEEDED):
        if machine.packages.get(name) is None:
            yield Fault(Weight.FAULT, f"package `{name}`: expected it installed, found none", "pip install ling3export")
    if jax and jaxlib and jax != jaxlib:
        what = f"jax: expected the version of jaxlib, {jaxlib}, found {jax}"
        yield Fault(Weight.FAULT, what, f"pip install jax=={jaxlib} jaxlib=={jaxlib}")
    for name, (device, package) in machine.signs.items():
        if device and not package:
            mend = f"pip install 'ling3export[{EXTRAS[name]}]'"
            yield Fault(Weight.NOTE, f"{name}: found the device and none of {', '.join(SIGNS[name][1])}", mend)
    flags = machine.variables.get("XLA_FLAGS", "")
    if flags and not flags.startswith("-") and not Path(flags).is_file():
        yield Fault(Weight.FAULT, f"XLA_FLAGS: expected flags or a file of them, found `{flags}`", "unset XLA_FLAGS")
    if "xla_tpu" in flags:
        mend = "move them to LIBTPU_INIT_ARGS; unset XLA_FLAGS"
        yield Fault(Weight.FAULT, "XLA_FLAGS: expected none of TPU's flags, which end the process, found some", mend)
    if isinstance(machine.devices, str) and jax and jaxlib:
        yield Fault(Weight.FAULT, f"jax: expected it to start, found {machine.devices}", _mend_start(machine))
    if machine.cache is not None:
        what = f"cache folder: expected one to write into, found {machine.cache}"
        yield Fault(Weight.NOTE, what, "export LING3_CACHE=FOLDER, one that can be written")
    if machine.files < FILES:
        what = f"open files: expected {FILES} or more for a server, found a limit of {machine.files}"
        yield Fault(Weight.NOTE, what, f"ulimit -n {FILES}")


def of_target(manifest: Manifest, name: str, machine: Machine, artifact: Path) -> Iterator[Fault]:
    """What a target requires and the machine lacks; the verdicts are the loader's."""
    target = manifest.targets[name]
    devices = machine.devices
    build = f"ling3export build --into {artifact} --target {target.platform}"
    if target.platform not in machine.platforms:
        yield from _absent(target, machine, artifact)
        return
    if isinstance(devices, str):
        return  # told of the machine
    platform = NAMES.get(devices.platform, devices.platform)
    seen = verdict.Seen(
        devices.platform,
        devices.jaxlib,
        _plugins(machine, devices.platform),
        devices.kind,
        machine.system,
        devices.processes,
        machine.features,
        devices.ids,
    )
    here = verdict.Machine(platform, len(devices.ids), devices.processes)
    if target.processes > 1 and devices.processes == 1:  # the other hosts are assumed to be equal
        count = target.mesh.hosts.count(0)
        if len(devices.ids) < count:
            what = f"devices: built for {count} on each host, found {len(devices.ids)}"
            yield Fault(Weight.FAULT, what, build)
            return
        yield Fault(
            Weight.NOTE, f"hosts: this is one of the {target.processes} that run together", on_all(target.processes)
        )
        seen = replace(seen, processes=target.processes, devices=target.mesh.devices)
        here = verdict.Machine(platform, target.tp, target.processes)
    verdicts = verdict.judge(target, here, lambda requires, mesh: next(verdict.misfits(requires, mesh, seen), None))
    impossible = {each.reason: each.hint for each in verdicts.values() if each.status is verdict.Status.UNSUPPORTED}
    for reason, hint in impossible.items():
        yield Fault(Weight.FAULT, reason, hint or build)
    if impossible:
        return
    differences = list(verdict.misfits(target.requires, target.mesh, seen))
    for text in differences:
        yield Fault(Weight.COMPILE, text, _mend(text, target, build))
    if not differences and any(each.status is verdict.Status.RECOMPILE for each in verdicts.values()):
        yield Fault(Weight.COMPILE, "executables: expected them in the artifact, found portable programs alone", build)
    yield from _memory(manifest, target, machine, devices)


def of_files(manifest: Manifest, name: str, artifact: Path) -> Iterator[Fault]:
    """Files that are missing or have another size; digests are not read."""
    target = manifest.targets[name]
    wanted = dict(manifest.weights.files)
    wanted |= {file.path: file.bytes for file in (*target.files, *manifest.tokenizer)}
    for path, size in wanted.items():
        try:
            found = (artifact / path).stat().st_size
        except OSError as error:
            yield Fault(Weight.FAULT, f"file `{path}`: expected it readable, found {error.strerror}", REBUILD)
            continue
        if found != size:
            yield Fault(Weight.FAULT, f"file `{path}`: expected {size:,} bytes, found {found:,}", REBUILD)


def memory_of(target: Target) -> int:
    """Bytes of one device that a target's state and its largest program take, without weights."""
    return target.state_bytes + max((cell.memory.passing for cell in target.cells.values()), default=0)


def _memory(manifest: Manifest, target: Target, machine: Machine, devices: Devices) -> Iterator[Fault]:
    if target.platform == "cpu":  # weights are mapped files
        needed, free, where = memory_of(target) * target.tp // target.processes, machine.memory[1], "memory"
    else:
        needed, free = max(cell.memory.peak for cell in target.cells.values()), devices.memory or 0
        where = "memory of a device"
    if 0 < free < needed:
        what = f"{where}: expected {needed / 1e9:.2f} GB for state and programs, found {free / 1e9:.2f} GB"
        plan = manifest.plan
        smaller = max(1, math.floor(plan.max_running * free / needed))
        yield Fault(Weight.FAULT, what, f"build for fewer sequences: --max-running {smaller}, or a smaller --context")


def _absent(target: Target, machine: Machine, artifact: Path) -> Iterator[Fault]:
    """Why a target's platform is not among this machine's."""
    chosen = machine.variables.get("JAX_PLATFORMS", "")
    device, package = machine.signs.get(target.platform, (True, True))
    if device and package and chosen:
        what = f"JAX_PLATFORMS: expected {target.platform} among them, found {chosen}"
        yield Fault(Weight.FAULT, what, "unset JAX_PLATFORMS")
    elif device and not package:
        what = f"platform: built for {target.platform}, found the device without its packages"
        yield Fault(Weight.FAULT, what, f"pip install 'ling3export[{EXTRAS[target.platform]}]'")
    else:
        what = f"platform: built for {target.platform}, found {', '.join(machine.platforms) or 'none'}"
        there = machine.platforms[0] if machine.platforms else "cpu"
        yield Fault(Weight.FAULT, what, f"ling3export build --into {artifact} --target {there}")


def _plugins(machine: Machine, platform: str) -> dict[str, str]:
    names = PLUGINS.get(platform, ())
    return {name: version for name in names if (version := machine.packages.get(name)) is not None}


def _mend(text: str, target: Target, build: str) -> str:
    """The command that makes executables fit again."""
    what = text.partition(":")[0]
    requires = target.requires
    if what == "jaxlib":
        return f"pip install jax=={requires.jaxlib} jaxlib=={requires.jaxlib}"
    if what in (requires.plugins or {}):
        return f"pip install {what}=={(requires.plugins or {})[what]}"
    if what == "processes":
        return on_all(target.processes)
    return build


def _mend_start(machine: Machine) -> str:
    said = str(machine.devices)
    if "already in use" in said or "lockfile" in said:
        return "end the process that holds the accelerator, then start again"
    broken = [name for name in machine.packages if machine.packages[name] and name.startswith(("libtpu", "jax-cuda"))]
    if broken and "tpu" not in machine.platforms and "cuda" not in machine.platforms:
        return f"pip uninstall {' '.join(broken)}"
    jaxlib = machine.packages.get("jaxlib")
    return f"pip install --force-reinstall jax=={jaxlib} jaxlib=={jaxlib} {' '.join(broken)}".strip()
