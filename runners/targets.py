"""Which of an artifact's targets to run, decided without jax: its environment must be set before it is imported."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from ling3export.errors import ArtifactError, Ling3Error, listed
from ling3export.runners.environment import prepare_cpu

Target = dict[str, Any]  # a manifest's record of one target

# What shows that a platform is there: a device file, and a package that drives it.
SIGNS = {
    "tpu": (("/dev/accel0", "/dev/vfio/0"), ("libtpu",)),
    "cuda": (("/dev/nvidia0", "/dev/nvidiactl"), ("jax_cuda13_plugin", "jax_cuda12_plugin")),
}
NAMES = {"gpu": "cuda"}  # jax's device platform → the manifest's


def platforms_here() -> list[str]:
    """Platforms that this machine can run, accelerators first; JAX_PLATFORMS narrows them."""
    there = [
        platform
        for platform, (files, packages) in SIGNS.items()
        if any(Path(file).exists() for file in files) and any(importlib.util.find_spec(name) for name in packages)
    ]
    chosen = [NAMES.get(name, name) for name in os.environ.get("JAX_PLATFORMS", "").split(",") if name]
    return [platform for platform in (*there, "cpu") if not chosen or platform in chosen]


def choose_target(targets: dict[str, Target], wanted: str | None, here: list[str]) -> str:
    """The target to run: ``wanted``, or the only one that fits this machine.

    A target fits if its platform is here and it runs in one process. Those of an accelerator that is here go before
    those of the CPU, which is everywhere.

    Args:
        targets: The manifest's.
        wanted: ``cpu-tp16``, or as a build spells it: ``cpu@16``, ``cpu``.
        here: ``platforms_here()``.

    Raises:
        ArtifactError: None fits, more than one does, or ``wanted`` is not among them.
    """
    names = sorted(targets)
    if wanted is not None:
        text = wanted.replace("@tp", "@").replace("@", "-tp").replace(":", "-")
        found = [text] if text in targets else [name for name in names if name.rpartition("-tp")[0] == text]
        if len(found) != 1:
            what = "none of that name" if not found else f"{len(found)}: {listed(found)}"
            raise ArtifactError(f"target `{wanted}`: expected one of {listed(names)}, found {what}, in the manifest")
        return found[0]
    for platform in here:
        fits = [name for name in names if targets[name]["platform"] == platform and targets[name]["processes"] == 1]
        if len(fits) > 1:
            raise ArtifactError(
                f"target: expected one that fits this machine ({platform}), found {len(fits)}: {listed(fits)}",
                f"choose one: --target {fits[0]}",
            )
        if fits:
            return fits[0]
    hosts = {name: targets[name]["processes"] for name in names}
    there = listed([f"{name} ({hosts[name]} hosts)" if hosts[name] > 1 else name for name in names])
    raise ArtifactError(
        f"target: expected one for {' or '.join(here) or 'a platform of JAX_PLATFORMS'} on one host, "
        f"found {there}, in the manifest",
        f"add one for this machine: ling3export build --into ARTIFACT --target {here[0] if here else 'cpu'}",
    )


def prepare(target: Target) -> None:
    """Sets the environment that ``target`` needs before jax starts.

    Raises:
        Ling3Error: jax runs already, with too few devices.
    """
    if target["platform"] != "cpu":
        return
    devices = max(target["mesh"]["devices"]) + 1
    try:
        prepare_cpu(devices)
    except Ling3Error:
        jax = sys.modules.get("jax")
        if jax is None or jax.local_device_count("cpu") < devices:
            raise
