"""What an executable needs of the machine that runs it, and whether this one has it."""

import importlib.metadata
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib

from ling3export.errors import listed
from ling3export.runners.load import environment

# The packages that hold a platform's compiler, where that is not jaxlib itself.
PLUGINS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}
# XLA:CPU writes the features that it was allowed to use beside the code, as LLVM spells them: "+avx,+avx2,-amx-tile".
TARGET_FEATURES = re.compile(rb"\+[a-z0-9.-]+(?:,[+-][a-z0-9.-]+){8,}")


def toolchain() -> dict[str, Any]:
    """What decides, besides the program and the target, what the compiler makes. Starts no backend."""
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "plugins": plugins(*PLUGINS),
        "machine": environment.machine(),
        "cpu_features": environment.cpu_features(),
        "flags": {name: os.environ[name] for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS") if name in os.environ},
    }


def plugins(*platforms: str) -> dict[str, str]:
    """Installed compiler packages of ``platforms``, with their versions."""
    found = {}
    for name in (name for platform in platforms for name in PLUGINS.get(platform, ())):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def requirements(devices: Sequence[jax.Device], raw: Callable[[], bytes]) -> dict[str, Any]:
    """What an executable for ``devices`` needs, as JSON; ``raw`` gives its bytes, which are asked for on CPU only."""
    platform = _platform(devices[0])
    requires = {
        "jaxlib": jaxlib.__version__,
        "platform": platform,
        "device_kind": devices[0].device_kind,
        "devices": [device.id for device in devices],
        "processes": len({device.process_index for device in devices}),
    }
    if platform == "cpu":
        allowed = _features_in(raw())
        return {**requires, "machine": environment.machine(), "cpu_features": allowed}
    return {**requires, "plugins": plugins(platform)}


def _packages(expected: dict[str, str], found: dict[str, str]) -> list[tuple[str, str, str]]:
    """What to compare of the compiler's packages: each by its name."""
    return [(name, expected.get(name, "none"), found.get(name, "none")) for name in sorted({*expected, *found})]


def _platform(device: jax.Device) -> str:
    """``cpu``, ``gpu`` or ``tpu``: a device that is only described calls itself ``cuda``."""
    return "gpu" if device.platform == "cuda" else device.platform


def _features_in(raw: bytes) -> list[str]:
    """This processor's features that the compiler was allowed to use, which --xla_cpu_max_isa in XLA_FLAGS limits.

    They are read from the executable's own list; without one, all features of this processor.
    """
    names = environment.feature_names()
    lists = TARGET_FEATURES.findall(raw)
    used = {word[1:].decode() for words in lists for word in words.split(b",") if word.startswith(b"+")}
    return [name for name in environment.cpu_features() if not lists or names[name] in used]


def executable_fits(record: dict[str, Any]) -> str | None:
    """Why the executable of ``record`` must not be given to the deserializer here; None if nothing speaks against it.

    PJRT itself checks next to nothing: another jaxlib's file can abort the process, another processor's runs until its
    first unknown instruction, another topology's fails obscurely. So these are compared, in this order: platform;
    jaxlib and the platform's own compiler packages, exactly; kind of device; operating system and instruction set;
    number of processes; the processor's features, where a superset will do; the devices' ids. Starts jax's backend.
    Digests are the caller's part.
    """
    requires = record["requires"]
    devices = {device.id: device for device in jax.devices()}
    first = next(iter(devices.values()))
    comparisons: list[tuple[str, Any, Any]] = [
        ("platform", requires["platform"], _platform(first)),
        ("jaxlib", requires["jaxlib"], jaxlib.__version__),
        *_packages(requires.get("plugins", {}), plugins(_platform(first))),
        ("device kind", requires["device_kind"], first.device_kind),
        ("machine", requires.get("machine", environment.machine()), environment.machine()),
        ("processes", requires["processes"], jax.process_count()),
    ]
    for what, expected, found in comparisons:
        if expected != found:
            return f"{what}: built for {expected}, found {found}"
    missing = sorted(set(requires.get("cpu_features", ())) - set(environment.cpu_features()))
    if missing:
        return f"processor: built for {listed(missing)}, which this one lacks"
    absent = [str(number) for number in requires["devices"] if number not in devices]
    if absent:
        return f"devices: built for {len(requires['devices'])}, found {len(devices)} (without ids {listed(absent)})"
    return None
