"""Which of an artifact's targets to run, decided without jax: what jax needs in the environment depends on it."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from ling3export.artifacts.manifest import named_target
from ling3export.artifacts.schema import Target
from ling3export.foundation.errors import ArtifactError, listed
from ling3export.machine.environment import prepare_cpu

# Signs that a platform is present: a device file, and a package that drives it.
SIGNS = {
    "tpu": (("/dev/accel0", "/dev/vfio/0"), ("libtpu",)),
    "cuda": (("/dev/nvidia0", "/dev/nvidiactl"), ("jax_cuda13_plugin", "jax_cuda12_plugin")),
}
TPU_DEVICES = ("accel*", "vfio/*")  # below /dev, by any name that a TPU host may give them
NAMES = {"gpu": "cuda"}  # jax's device platform → the manifest's


def platforms_here() -> list[str]:
    """Platforms that this machine can run, accelerators first; only those of JAX_PLATFORMS where that is set."""
    platforms = [
        platform
        for platform, (files, packages) in SIGNS.items()
        if any(Path(file).exists() for file in files) and any(importlib.util.find_spec(name) for name in packages)
    ]
    chosen = [NAMES.get(name, name) for name in os.environ.get("JAX_PLATFORMS", "").split(",") if name]
    return [platform for platform in (*platforms, "cpu") if not chosen or platform in chosen]


def choose_target(targets: Mapping[str, Target], wanted: str | None, platforms: list[str], hosts: int = 1) -> str:
    """The target to run: ``wanted``, or the only one that fits this machine.

    A target fits if its platform is here and it was built for as many hosts. Targets of an accelerator that is here
    come before those of the CPU, which is everywhere.

    Args:
        wanted: ``cpu-tp16``, or as a build spells it: ``cpu@16``, ``cpu``.
        hosts: How many run together.

    Raises:
        ArtifactError: None fits, or more than one does. Or ``wanted`` is not among them, or was built for another
            number of hosts; one for a platform that is not here is left to its verdict.
    """
    names = sorted(targets)
    if wanted is not None:
        name = named_target(names, wanted)
        built = targets[name].processes
        if built != hosts and targets[name].platform in platforms:
            raise ArtifactError(
                f"target `{name}`: expected the {_hosts(built)} that it was built for, found {_hosts(hosts)}",
                on_all(built),
            )
        return name
    for platform in platforms:
        fits = [name for name in names if targets[name].platform == platform and targets[name].processes == hosts]
        if len(fits) > 1:
            raise ArtifactError(
                f"target: expected one that fits this machine ({platform}), found {len(fits)}: {listed(fits)}",
                f"choose one: --target {fits[0]}",
            )
        if fits:
            return fits[0]
    counts = {name: targets[name].processes for name in names}
    available = listed([f"{name} ({counts[name]} hosts)" if counts[name] > 1 else name for name in names])
    if runnable := [counts[name] for name in names if targets[name].platform in platforms]:
        hint = on_all(max(runnable))
    elif hosts == 1:
        platform = platforms[0] if platforms else "cpu"
        hint = f"add one for this machine: ling3export build --into ARTIFACT --target {platform}"
    else:
        hint = "start it on as many hosts as a target was built for"
    raise ArtifactError(
        f"target: expected one for {' or '.join(platforms) or 'a platform of JAX_PLATFORMS'} on {_hosts(hosts)}, "
        f"found {available}, in the manifest",
        hint,
    )


def on_all(hosts: int) -> str:
    """The hint for a target of ``hosts`` hosts that was started on another number of hosts."""
    if hosts == 1:
        return "start it on one host alone, or build for yours: --target cpu:4x4 is 4 hosts of 4 devices"
    return f"start the command on each of its {hosts} hosts: DIST_INIT_ADDR=HOST:PORT NNODES={hosts} NODE_RANK=I"


def _hosts(count: int) -> str:
    return "one host" if count == 1 else f"{count} hosts"


def prepare(target: Target) -> None:
    """Sets the environment that ``target`` needs before jax starts.

    Raises:
        Ling3Error: jax runs already, with too few devices.
    """
    if target.platform == "tpu" and not any(any(Path("/dev").glob(pattern)) for pattern in TPU_DEVICES):
        # Without a TPU the verdict refuses the target; but libtpu would look for one, with a page of its own messages.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if target.platform == "cpu":
        prepare_cpu(max(target.mesh.devices) + 1 if target.processes == 1 else target.mesh.hosts.count(0))
