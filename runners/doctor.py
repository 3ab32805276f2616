"""What this machine is, every way in which it is not what a target of an artifact wants, and what mends each.

jax starts in a process of its own, and may fail there.
"""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from ling3export.artifacts.files import REBUILD, try_writing, user_cache
from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.extras import install, installed
from ling3export.machine import environment
from ling3export.machine.promise import promise, rebuild, today
from ling3export.machine.targets import SIGNS, on_all, platforms_here
from ling3export.machine.verdict import JaxRuntime, VerdictStatus, judge, misfits

NEEDED = ("jax", "jaxlib", "numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2", "flatbuffers")
EXTRA = ("libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt", "uvicorn", "h11")
VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_VISIBLE", "NVIDIA_VISIBLE", "LING3_CACHE", "OPENBLAS_", "NPROC")
DRIVER = Path("/proc/driver/nvidia/version")
START_TIMEOUT = 120.0  # seconds
SAID = 600  # characters of what a failed start said
PROBE = """
import json
from dataclasses import asdict
from ling3export.machine.verdict import JaxRuntime
print("\\n" + json.dumps(asdict(JaxRuntime.here())))
"""


@dataclass(frozen=True)
class MachineReport:
    """What a machine has.

    Attributes:
        cores: That this process may use.
        memory: Bytes of all memory, and of what is available.
        packages: Versions of the packages that matter; None for one that is not installed.
        variables: Environment variables that decide what jax does.
        signs: For each kind of accelerator, whether its device files and its packages are there.
        platforms: That a target would be chosen for, accelerators first.
        cache: Why the user's cache folder cannot be written; None where it can.
        runtime: What jax found, or why it did not start.
    """

    cores: int
    memory: tuple[int, int]
    packages: dict[str, str | None]
    variables: dict[str, str]
    signs: dict[str, tuple[bool, bool]]
    platforms: list[str]
    cache: str | None
    runtime: JaxRuntime | str


class Severity(Enum):
    """What follows from a fault."""

    NOTE = "note"  # it runs
    COMPILE = "compile"  # it runs with --programs allow-compile
    FAULT = "fault"  # it does not run


@dataclass(frozen=True)
class Fault:
    """Something that is not as it should be: what, and what mends it."""

    severity: Severity
    what: str
    mend: str


def look(cpu_devices: int = 1) -> MachineReport:
    """Looks at this machine; jax is started with so many virtual devices where it runs on the processor."""
    return MachineReport(
        cores=environment.cores(),
        memory=environment.memory()[:2],
        packages={name: installed(name) for name in (*NEEDED, *EXTRA)},
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        signs={
            name: (any(Path(file).exists() for file in files), any(find_spec(each) is not None for each in names))
            for name, (files, names) in SIGNS.items()
        },
        platforms=platforms_here(),
        cache=_cache_fault(),
        runtime=start_jax(cpu_devices),
    )


def start_jax(cpu_devices: int, timeout: float = START_TIMEOUT, probe: str = PROBE) -> JaxRuntime | str:
    """Starts jax in a process of its own; what it found, or why it did not start."""
    variables = dict(os.environ)
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if "cpu" in platforms_here()[:1]:
        variables |= {"JAX_NUM_CPU_DEVICES": str(cpu_devices), "NPROC": str(cpu_devices + 2), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", probe]
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s"
    said = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"signal {-done.returncode}: {' '.join(said[-3:])}"[:SAID]
    try:
        return JaxRuntime(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return (said[-1] if said else f"exit code {done.returncode}")[:SAID]


def facts(machine: MachineReport) -> list[tuple[str, str]]:
    """(what, how it is) of a machine, for people."""
    installed = [f"{name} {version}" for name, version in machine.packages.items() if version is not None]
    system, release = environment.machine(), f"{platform.release()}, Python {sys.version.split()[0]}"
    total, free = machine.memory
    lines = [
        ("machine", f"{system}, {machine.cores} cores, {release}"),
        ("memory", f"{free / 1e9:.1f} GB available of {total / 1e9:.1f} GB"),
        ("processor", " ".join(environment.cpu_features()) or "features unknown"),
        ("packages", ", ".join(installed)),
        ("platforms", ", ".join(machine.platforms) or "none of JAX_PLATFORMS"),
        ("devices", _devices(machine.runtime)),
        ("variables", " ".join(f"{name}={value}" for name, value in machine.variables.items()) or "none"),
    ]
    if DRIVER.exists():
        lines.append(("driver", DRIVER.read_text().splitlines()[0]))
    return lines


def _devices(runtime: JaxRuntime | str) -> str:
    if isinstance(runtime, str):
        return f"jax did not start: {runtime}"
    ids = [*runtime.devices]
    memory = "" if runtime.memory is None else f", {runtime.memory / 1e9:.1f} GB each"
    where = f", at {runtime.coords}" if any(runtime.coords) else ""
    hosts = f", {runtime.processes} processes" if runtime.processes > 1 else ""
    return f"{len(ids)} × {runtime.device_kind} ({runtime.platform}), ids {ids}{where}{memory}{hosts}"


def _cache_fault() -> str | None:
    """Why the cache folder cannot be written; nothing is made."""
    folder = user_cache()
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    try:
        try_writing(there)
    except OSError as error:
        return f"{error.strerror}, at {there}"
    return None


def exit_code(faults: Sequence[Fault]) -> int:
    """0 where everything fits, 3 where the portable programs have to be compiled here, 1 where nothing runs."""
    severities = {fault.severity for fault in faults}
    return 1 if Severity.FAULT in severities else 3 if Severity.COMPILE in severities else 0


def of_machine(machine: MachineReport) -> Iterator[Fault]:
    """What is wrong with a machine whatever it is to run."""
    jax, jaxlib = machine.packages["jax"], machine.packages["jaxlib"]
    for name in NEEDED:
        if machine.packages[name] is None:
            yield Fault(Severity.FAULT, f"package `{name}`: expected it installed, found none", install())
    if jax and jaxlib and jax != jaxlib:
        what = f"jax: expected the version of jaxlib, {jaxlib}, found {jax}"
        yield Fault(Severity.FAULT, what, f"pip install jax=={jaxlib} jaxlib=={jaxlib}")
    for name, (device, package) in machine.signs.items():
        if device and not package:
            what = f"{name}: found the device and none of {', '.join(SIGNS[name][1])}"
            yield Fault(Severity.NOTE, what, install(name))
    flags = machine.variables.get("XLA_FLAGS", "")
    if flags and not flags.startswith("-") and not Path(flags).is_file():
        yield Fault(Severity.FAULT, f"XLA_FLAGS: expected flags or a file of them, found `{flags}`", "unset XLA_FLAGS")
    if "xla_tpu" in flags:
        mend = "move them to LIBTPU_INIT_ARGS; unset XLA_FLAGS"
        yield Fault(Severity.FAULT, "XLA_FLAGS: expected none of TPU's flags, which end the process, found some", mend)
    if isinstance(machine.runtime, str) and jax and jaxlib:
        what = f"jax: expected it to start, found {machine.runtime}"
        yield Fault(Severity.FAULT, what, _mend_start(machine, machine.runtime))
    if machine.cache is not None:
        what = f"cache folder: expected one to write into, found {machine.cache}"
        yield Fault(Severity.NOTE, what, "export LING3_CACHE=FOLDER, one that can be written")


def of_target(manifest: Manifest, name: str, machine: MachineReport, artifact: Path) -> Iterator[Fault]:
    """What a target requires and the machine lacks; the verdicts are the loader's."""
    target, here = manifest.targets[name], machine.runtime
    build = f"ling3export build --into {artifact} --target {target.platform}"
    if target.platform not in machine.platforms:
        yield _absent(target, machine, artifact)
        return
    if isinstance(here, str):
        return  # told of the machine
    if target.processes > 1 and here.processes == 1:  # the other hosts are assumed to be equal
        count = target.mesh.hosts.count(0)
        if len(here.devices) < count:
            what = f"devices: built for {count} on each host, found {len(here.devices)}"
            yield Fault(Severity.FAULT, what, build)
            return
        together = f"hosts: this is one of the {target.processes} that run together"
        yield Fault(Severity.NOTE, together, on_all(target.processes))
        here = replace(here, processes=target.processes, devices=target.mesh.devices)
    verdicts = judge(target, here).values()
    impossible = {each.reason: each.hint for each in verdicts if each.status is VerdictStatus.UNSUPPORTED}
    for reason, hint in impossible.items():
        yield Fault(Severity.FAULT, reason, hint or build)
    if impossible:
        return
    differences = list(misfits(target.requires, target.mesh, here))
    for text in differences:
        yield Fault(Severity.COMPILE, text, _mend(text, target, build))
    if not differences and any(each.status is VerdictStatus.RECOMPILE for each in verdicts):
        yield Fault(
            Severity.COMPILE, "executables: expected them in the artifact, found portable programs alone", build
        )
    promised, day = promise(target), today()
    if day > promised.until:
        yield Fault(
            Severity.NOTE if not differences else Severity.COMPILE,
            f"EXPIRED: {promised.told(day)}",
            rebuild(target, str(artifact)),
        )
    yield from _memory(manifest, target, machine, here)


def of_files(manifest: Manifest, name: str, artifact: Path) -> Iterator[Fault]:
    """Files that are missing or have another size; digests are not read."""
    wanted = dict(manifest.weights.files)
    wanted |= {file.path: file.bytes for file in (*manifest.targets[name].files, *manifest.tokenizer)}
    for path, size in wanted.items():
        try:
            found = (artifact / path).stat().st_size
        except OSError as error:
            yield Fault(Severity.FAULT, f"file `{path}`: expected it readable, found {error.strerror}", REBUILD)
            continue
        if found != size:
            yield Fault(Severity.FAULT, f"file `{path}`: expected {size:,} bytes, found {found:,}", REBUILD)


def _memory(manifest: Manifest, target: Target, machine: MachineReport, here: JaxRuntime) -> Iterator[Fault]:
    if target.platform == "cpu":  # weights are mapped files
        needed = target.state_bytes + max((cell.memory.passing for cell in target.cells.values()), default=0)
        needed, free, where = needed * target.tp // target.processes, machine.memory[1], "memory"
    else:
        needed, free = max(cell.memory.peak for cell in target.cells.values()), here.memory or 0
        where = "memory of a device"
    if 0 < free < needed:
        what = f"{where}: expected {needed / 1e9:.2f} GB for state and programs, found {free / 1e9:.2f} GB"
        smaller = max(1, math.floor(manifest.plan.max_running * free / needed))
        yield Fault(Severity.FAULT, what, f"build for fewer sequences: --max-running {smaller}, or a smaller --context")


def _absent(target: Target, machine: MachineReport, artifact: Path) -> Fault:
    """Why a target's platform is not among this machine's."""
    chosen = machine.variables.get("JAX_PLATFORMS", "")
    device, package = machine.signs.get(target.platform, (True, True))
    if device and package and chosen:
        what = f"JAX_PLATFORMS: expected {target.platform} among them, found {chosen}"
        return Fault(Severity.FAULT, what, "unset JAX_PLATFORMS")
    if device and not package:
        what = f"platform: built for {target.platform}, found the device without its packages"
        return Fault(Severity.FAULT, what, install(target.platform))
    what = f"platform: built for {target.platform}, found {', '.join(machine.platforms) or 'none'}"
    there = machine.platforms[0] if machine.platforms else "cpu"
    return Fault(Severity.FAULT, what, f"ling3export build --into {artifact} --target {there}")


def _mend(text: str, target: Target, build: str) -> str:
    """The command that makes executables fit again."""
    what, requires = text.partition(":")[0], target.requires
    if what == "jaxlib":
        return f"pip install jax=={requires.jaxlib} jaxlib=={requires.jaxlib}"
    if what in (requires.plugins or {}):
        return f"pip install {what}=={(requires.plugins or {})[what]}"
    return on_all(target.processes) if what == "processes" else build


def _mend_start(machine: MachineReport, said: str) -> str:
    if "already in use" in said or "lockfile" in said:
        return "end the process that holds the accelerator, then start again"
    broken = [name for name in machine.packages if machine.packages[name] and name.startswith(("libtpu", "jax-cuda"))]
    if broken and "tpu" not in machine.platforms and "cuda" not in machine.platforms:
        return f"pip uninstall {' '.join(broken)}"
    jaxlib = machine.packages["jaxlib"]
    return f"pip install --force-reinstall jax=={jaxlib} jaxlib=={jaxlib} {' '.join(broken)}".strip()
