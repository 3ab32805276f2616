"""Digests that say when programs may be shared: of a build, of one cell, of one compiled program; the ABI of a state.

Each is the sha256 of the canonical JSON of named fields, so that a difference can be explained.
"""

import os
from dataclasses import asdict
from importlib import metadata
from typing import Any

from ling3export.artifacts.manifest import sha256_of
from ling3export.compile import sources
from ling3export.model.config import Config
from ling3export.model.state import state_arrays
from ling3export.plan.plan import Cell, Plan
from ling3export.plan.targets import Target
from ling3export.plan.toolchain import CUDA_PACKAGES
from ling3export.runners.load import environment

# Read by the compilers from the environment, which a build hands down.
FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
# Packages that take part in tracing. jax and jaxlib stand in every key.
TRACING = ("flax", "ml_dtypes", "numpy")


def sources_digest() -> str:
    """sha256 over the sources that decide what a program computes: ``model/`` and the lowering."""
    return sha256_of(sources.digests())


def toolchain(target: Target) -> dict[str, str]:
    """Versions that decide a program for ``target``."""
    compilers = {"tpu": ("libtpu",), "cuda": CUDA_PACKAGES}
    names = ["jax", "jaxlib", *compilers.get(target.platform, ())]
    return {name: metadata.version(name) for name in names}


def flags() -> dict[str, str]:
    """What the environment tells the compilers."""
    return {name: os.environ[name] for name in FLAGS if name in os.environ}


def fingerprint_fields(config: Config, plan: Plan) -> dict[str, Any]:
    """Everything whose change means other programs, by name (so that a miss can be explained)."""
    return {
        "config": config.semantic(),
        "plan": plan.record(),
        "target": asdict(plan.target),
        "sources": sources_digest(),
        "toolchain": toolchain(plan.target),
        "flags": flags(),
    }


def fingerprint(config: Config, plan: Plan) -> str:
    """sha256 of the canonical JSON of :func:`fingerprint_fields`."""
    return sha256_of(fingerprint_fields(config, plan))


def cell_fields(config: Config, plan: Plan, cell: Cell) -> dict[str, Any]:
    """Everything that decides one cell, known before anything is traced.

    Of the plan only what a program is compiled for: another padding beside it changes nothing.
    """
    return {
        "cell": asdict(cell),
        "config": config.semantic(),
        "plan": asdict(plan.geometry),
        "target": asdict(plan.target) | _host(plan.target),
        "sources": sources.digests(),
        "toolchain": toolchain(plan.target) | {name: metadata.version(name) for name in TRACING},
        "flags": flags(),
    }


def program_fields(target: Target, modules: dict[str, str], devices: dict[str, Any], priced: Any) -> dict[str, Any]:
    """Everything that decides what a compiler makes of a lowered program, and what a build records of it.

    Args:
        target: The machine.
        modules: Digests of what is compiled.
        devices: Kind, ids in order and processes of the devices.
        priced: What the estimates of an accelerator's cell are made from besides the program; None for cpu.
    """
    return {
        "modules": modules,
        "target": asdict(target) | _host(target) | {"devices": devices},
        "options": {"donate": [1]},
        "priced": priced,
        "sources": sources.digests()["lowering"],  # of model/ only what reached the program counts
        "toolchain": toolchain(target),
        "flags": flags(),
    }


def _host(target: Target) -> dict[str, Any]:
    """For cpu the compiler takes this machine's processor; other targets' programs do not depend on it."""
    if target.platform != "cpu":
        return {}
    return {"machine": environment.machine(), "cpu_features": environment.cpu_features()}


def state_abi(config: Config, plan: Plan) -> str:
    """Which runners may hand a sequence's state over: without pool sizes, row padding, sharding and TP."""
    sizes = {"slots", "pages"}
    rows = []
    for row in state_arrays(config, plan.geometry):
        shape = [size for size, axis in zip(row.shape, row.axes, strict=True) if axis not in sizes]
        if "row" in row.axes:
            shape[-1] = config.latent_dim
        rows.append({"name": row.name, "dtype": row.dtype, "axes": list(row.axes), "shape": shape})
    return sha256_of({"arrays": rows, "page_size": plan.geometry.page_size, "config": config.semantic()})
