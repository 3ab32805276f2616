"""What this machine is, found without trusting it: jax starts in a process of its own, and may fail there."""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ling3export.artifacts.files import try_writing, user_cache
from ling3export.machine import environment
from ling3export.machine.targets import SIGNS, platforms_here

PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2", "flatbuffers")
EXTRA = ("libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt", "uvicorn", "h11")
VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_VISIBLE", "NVIDIA_VISIBLE", "LING3_CACHE", "OPENBLAS_", "NPROC")
DRIVER = Path("/proc/driver/nvidia/version")
START_TIMEOUT = 120.0  # seconds
READ = 256 << 20  # bytes of a file that are read to measure the disk
SAID = 600  # characters of what a failed start said
# Nothing of ours: it has to work where our own imports fail.
PROBE = """
import json, jax, jaxlib
devices = jax.devices()
def limit(device):
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except Exception:
        return None
print("\\n" + json.dumps({
    "platform": devices[0].platform, "kind": devices[0].device_kind, "jaxlib": jaxlib.__version__,
    "processes": jax.process_count(), "ids": [device.id for device in devices],
    "coords": [list(getattr(device, "coords", None) or ()) for device in devices],
    "memory": limit(jax.local_devices()[0]),
}))
"""


@dataclass(frozen=True)
class Devices:
    """What jax found when it started.

    Attributes:
        platform: ``cpu``, ``gpu`` or ``tpu``.
        kind: What the devices call themselves.
        jaxlib: Its version.
        processes: How many run together.
        ids: Of the devices, in jax's order.
        coords: Of each device within its slice; empty where it has none.
        memory: Bytes of one device; None where it does not say.
    """

    platform: str
    kind: str
    jaxlib: str
    processes: int
    ids: list[int]
    coords: list[list[int]]
    memory: int | None


@dataclass(frozen=True)
class Disk:
    """Bytes a second that a file of the artifact was read with, from the disk and again from memory."""

    cold: float
    warm: float


@dataclass(frozen=True)
class Machine:
    """What a machine has.

    Attributes:
        python: Its version.
        system: Operating system and instruction set, such as ``linux-x86_64``.
        cores: That this process may use.
        features: Of the processor, those that compiled code may depend on.
        memory: Bytes of all memory, and of what is available.
        packages: Versions of the packages that matter; None for one that is not installed.
        variables: Environment variables that decide what jax does.
        signs: For each kind of accelerator, whether its device files and its packages are there.
        platforms: That a target would be chosen for, accelerators first.
        files: How many files a process may open.
        cache: Why the user's cache folder cannot be written; None where it can.
        driver: Of NVIDIA's cards.
        devices: What jax found, or why it did not start.
        disk: How fast the artifact's files are read; None where that was not measured.
    """

    python: tuple[int, int]
    system: str
    cores: int
    features: list[str]
    memory: tuple[int, int]
    packages: dict[str, str | None]
    variables: dict[str, str]
    signs: dict[str, tuple[bool, bool]]
    platforms: list[str]
    files: int
    cache: str | None
    driver: str | None
    devices: Devices | str
    disk: Disk | None = None


def look(cpu_devices: int = 1, *, start_timeout: float = START_TIMEOUT) -> Machine:
    """Looks at this machine.

    Args:
        cpu_devices: Virtual devices that jax is started with where it runs on the processor.
        start_timeout: Seconds that jax may take.
    """
    packages = {name: _version(name) for name in (*PACKAGES, *EXTRA)}
    signs = {
        name: (any(Path(file).exists() for file in files), any(find_spec(each) is not None for each in names))
        for name, (files, names) in SIGNS.items()
    }
    return Machine(
        python=sys.version_info[:2],
        system=environment.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        features=environment.cpu_features(),
        memory=environment.memory()[:2],
        packages=packages,
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        signs=signs,
        platforms=platforms_here(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cache=_cache_fault(),
        driver=DRIVER.read_text().splitlines()[0] if DRIVER.exists() else None,
        devices=start_jax(cpu_devices, start_timeout),
    )


def start_jax(cpu_devices: int, timeout: float = START_TIMEOUT, probe: str = PROBE) -> Devices | str:
    """Starts jax in a process of its own; what it found, or why it did not start."""
    variables = dict(os.environ)
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if "cpu" in platforms_here()[:1]:
        variables |= {"JAX_NUM_CPU_DEVICES": str(cpu_devices), "NPROC": str(cpu_devices + 2), "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe],
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s"
    said = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"signal {-done.returncode}: {' '.join(said[-3:])}"[:SAID]
    try:
        return Devices(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return (said[-1] if said else f"exit code {done.returncode}")[:SAID]


def read_speed(path: Path, most: int = READ) -> Disk | None:
    """How fast the begin of a file is read, once from the disk and once from memory; None where it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            speeds = []
            for _ in range(2):
                file.seek(0)
                started, size = time.perf_counter(), 0
                while size < most and (data := file.read(8 << 20)):
                    size += len(data)
                speeds.append(size / max(time.perf_counter() - started, 1e-9))
    except OSError:
        return None
    return Disk(*speeds)


def facts(machine: Machine) -> list[tuple[str, str]]:
    """(what, how it is) of a machine, for people."""
    installed = [f"{name} {version}" for name, version in machine.packages.items() if version is not None]
    total, free = machine.memory
    lines = [
        ("machine", f"{machine.system}, {machine.cores} cores, {platform.release()}, Python {sys.version.split()[0]}"),
        ("memory", f"{free / 1e9:.1f} GB available of {total / 1e9:.1f} GB"),
        ("processor", " ".join(machine.features) or "features unknown"),
        ("packages", ", ".join(installed)),
        ("platforms", ", ".join(machine.platforms) or "none of JAX_PLATFORMS"),
        ("devices", _shown(machine.devices)),
        ("variables", " ".join(f"{name}={value}" for name, value in machine.variables.items()) or "none"),
    ]
    if machine.driver:
        lines.append(("driver", machine.driver))
    if machine.disk:
        lines.append(("read speed", f"{machine.disk.cold / 1e9:.2f} GB/s, again {machine.disk.warm / 1e9:.2f} GB/s"))
    return lines


def _shown(devices: Devices | str) -> str:
    if isinstance(devices, str):
        return f"jax did not start: {devices}"
    memory = "" if devices.memory is None else f", {devices.memory / 1e9:.1f} GB each"
    where = f", at {devices.coords}" if any(devices.coords) else ""
    hosts = f", {devices.processes} processes" if devices.processes > 1 else ""
    return f"{len(devices.ids)} × {devices.kind} ({devices.platform}), ids {devices.ids}{where}{memory}{hosts}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cache_fault() -> str | None:
    """Why the cache folder cannot be written; nothing is made."""
    folder = user_cache()
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    try:
        try_writing(there)
    except OSError as error:
        return f"{error.strerror}, at {there}"
    return None
