"""Digests that say when programs may be shared: the fingerprint of a build and the ABI of a state."""

import hashlib
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import ling3export
from ling3export.artifacts.manifest import sha256_of
from ling3export.model.config import Config
from ling3export.model.state import state_arrays
from ling3export.plan import Plan
from ling3export.targets import Target

# What decides a program besides the model's sources.
LOWERING_SOURCES = ("lower.py", "accelerators.py")


def sources_digest() -> str:
    """sha256 over the sources that decide what a program computes: ``model/`` and the lowering."""
    root = Path(ling3export.__file__).parent
    files = sorted((root / "model").glob("*.py")) + [root / name for name in LOWERING_SOURCES]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def toolchain(target: Target) -> dict[str, str]:
    """Versions that decide a program for ``target``."""
    names = ["jax", "jaxlib", *(["libtpu"] if target.platform == "tpu" else [])]
    return {name: metadata.version(name) for name in names}


def fingerprint_fields(config: Config, plan: Plan) -> dict[str, Any]:
    """Everything whose change means other programs, by name (so that a miss can be explained)."""
    return {
        "config": config.semantic(),
        "plan": plan.record(),
        "target": asdict(plan.target),
        "sources": sources_digest(),
        "toolchain": toolchain(plan.target),
        "flags": {},
    }


def fingerprint(config: Config, plan: Plan) -> str:
    """sha256 of the canonical JSON of :func:`fingerprint_fields`."""
    return sha256_of(fingerprint_fields(config, plan))


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
