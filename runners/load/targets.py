"""Which of an artifact's targets to run, decided without jax: its environment must be set before it is imported."""

import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ling3export.artifacts.schema import Target
from ling3export.errors import ArtifactError, Ling3Error, listed
from ling3export.runners.load.environment import prepare_cpu

# What shows that a platform is there: a device file, and a package that drives it.
SIGNS = {
    "tpu": (("/dev/accel0", "/dev/vfio/0"), ("libtpu",)),
    "cuda": (("/dev/nvidia0", "/dev/nvidiactl"), ("jax_cuda13_plugin", "jax_cuda12_plugin")),
}
TPU_DEVICES = ("accel*", "vfio/*")  # below /dev, by any name that a TPU host may give them
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


def choose_target(targets: Mapping[str, Target], wanted: str | None, here: list[str], hosts: int = 1) -> str:
    """The target to run: ``wanted``, or the only one that fits this machine.

    A target fits if its platform is here and it was built for as many hosts. Those of an accelerator that is here go
    before those of the CPU, which is everywhere.

    Args:
        targets: The manifest's.
        wanted: ``cpu-tp16``, or as a build spells it: ``cpu@16``, ``cpu``.
        here: ``platforms_here()``.
        hosts: How many run together.

    Raises:
        ArtifactError: None fits, more than one does, or ``wanted`` is not among them.
    """
    names = sorted(targets)
    if wanted is not None:
        return named_target(names, wanted)
    for platform in here:
        fits = [name for name in names if targets[name].platform == platform and targets[name].processes == hosts]
        if len(fits) > 1:
            raise ArtifactError(
                f"target: expected one that fits this machine ({platform}), found {len(fits)}: {listed(fits)}",
                f"choose one: --target {fits[0]}",
            )
        if fits:
            return fits[0]
    started = {targets[name].processes for name in names if targets[name].platform in here}
    counts = {name: targets[name].processes for name in names}
    there = listed([f"{name} ({counts[name]} hosts)" if counts[name] > 1 else name for name in names])
    raise ArtifactError(
        f"target: expected one for {' or '.join(here) or 'a platform of JAX_PLATFORMS'} on {_hosts(hosts)}, "
        f"found {there}, in the manifest",
        on_all(max(started))
        if started
        else f"add one for this machine: ling3export build --into ARTIFACT --target {here[0] if here else 'cpu'}"
        if hosts == 1
        else "start it on as many hosts as a target was built for",
    )


def named_target(names: Iterable[str], wanted: str) -> str:
    """The one of ``names`` that a user means by ``cpu-tp16``, ``cpu@16`` or ``cpu``.

    Raises:
        ArtifactError: None, or several.
    """
    text, there = wanted.replace("@tp", "@").replace("@", "-tp").replace(":", "-"), sorted(names)
    found = [text] if text in there else [name for name in there if name.rpartition("-tp")[0] == text]
    if len(found) != 1:
        what = "none of that name" if not found else f"{len(found)}: {listed(found)}"
        raise ArtifactError(f"target `{wanted}`: expected one of {listed(there)}, found {what}, in the manifest")
    return found[0]


def on_all(hosts: int) -> str:
    """The hint for a target of ``hosts`` hosts that was started on another number."""
    if hosts == 1:
        return "start it on one host alone, or build for yours: --target cpu:4x4 is 4 hosts of 4 devices"
    return f"start the command on each of its {hosts} hosts: --coordinator HOST:PORT --num-hosts {hosts} --host-id I"


def check_hosts(name: str, target: Target, here: list[str], hosts: int) -> None:
    """Refuses a target that was built for another number of hosts; one for another platform is left to its verdict.

    Raises:
        ArtifactError: It was built for another number; the message names both.
    """
    built = target.processes
    if built != hosts and target.platform in here:
        raise ArtifactError(
            f"target `{name}`: expected the {_hosts(built)} that it was built for, found {_hosts(hosts)}",
            on_all(built),
        )


def _hosts(count: int) -> str:
    return "one host" if count == 1 else f"{count} hosts"


def _may_be(pattern: str) -> bool:
    return next(Path("/dev").glob(pattern), None) is not None


def prepare(target: Target) -> None:
    """Sets the environment that ``target`` needs before jax starts.

    Raises:
        Ling3Error: jax runs already, with too few devices.
    """
    if target.platform == "tpu" and not any(map(_may_be, TPU_DEVICES)):
        # There is none, and the verdict will say so: libtpu would look for one, with a page of its own messages.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if target.platform != "cpu":
        return
    devices = max(target.mesh.devices) + 1 if target.processes == 1 else target.mesh.hosts.count(0)
    try:
        prepare_cpu(devices)
    except Ling3Error:
        jax = sys.modules.get("jax")
        if jax is None or jax.local_device_count("cpu") < devices:
            raise
