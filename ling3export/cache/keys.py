"""Cache keys: everything that decides a cell, or what a compiler makes of a lowered program, as named fields."""

import functools
import hashlib
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ling3export
from ling3export.artifacts.records import sha256_of
from ling3export.machine import environment
from ling3export.model.config import Config
from ling3export.plan.plan import Plan, PlannedCell
from ling3export.plan.targets import CUDA_PACKAGES, TargetSpec

ROOT = Path(ling3export.__file__).parent
# The model, and every other module that a compiling process imports.
SOURCES = "model/**/*.py artifacts/*.py compile/accelerators.py compile/lower.py cost/*.py foundation/*.py".split()
SOURCES += "machine/*.py plan/targets.py".split()
SOURCES += [f"graph/{name}.py" for name in ("context", "flops", "hlo", "native", "optimized", "record")]
TRACING = ("flax", "ml_dtypes", "numpy")  # packages that take part in tracing, besides jax and jaxlib


@dataclass(frozen=True)
class Sources:
    """The sources that decide programs.

    Attributes:
        stamps: The size and the times of each file, by its path below the package.
    """

    model: str  # the sha256 of all of them
    lowering: str
    stamps: dict[str, str]

    def changed(self) -> list[str]:
        """Files that were written since. A file that was changed and restored counts: nobody can set its ctime."""
        now = _stamps()
        return sorted(name for name in self.stamps.keys() | now.keys() if self.stamps.get(name) != now.get(name))


@functools.cache
def sources() -> Sources:
    """The sources as this process first sees them."""
    stamps = _stamps()  # before the bytes are read: a change in between is noticed
    digests = {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in stamps}
    model = {name: digests.pop(name) for name in stamps if name.startswith("model/")}
    return Sources(sha256_of(model), sha256_of(digests), stamps)


def _stamps() -> dict[str, str]:
    stats = {path.relative_to(ROOT).as_posix(): path.stat() for pattern in SOURCES for path in ROOT.glob(pattern)}
    return {name: f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}" for name, stat in stats.items()}


def toolchain(target: TargetSpec) -> dict[str, str]:
    """The version of each package that decides a program for ``target``."""
    compilers = {"tpu": ("libtpu",), "cuda": CUDA_PACKAGES}
    names = ["jax", "jaxlib", *compilers.get(target.platform, ())]
    return {name: metadata.version(name) for name in names}


def fingerprint(config: Config, plan: Plan) -> str:
    """The sha256 of everything that decides a target's programs; targets with the same one have the same programs."""
    return sha256_of(_decided(config, plan.target) | {"plan": plan.record(), "target": asdict(plan.target)})


def cell_fields(config: Config, plan: Plan, cell: PlannedCell) -> dict[str, Any]:
    """Everything that decides one cell and is known before tracing.

    Only the plan's geometry counts: another padding of the same build changes nothing.
    """
    return _decided(config, plan.target) | {
        "cell": asdict(cell),
        "plan": asdict(plan.geometry),
        "target": asdict(plan.target) | _host(plan.target),
        "tracing": {name: metadata.version(name) for name in TRACING},
    }


def _decided(config: Config, target: TargetSpec) -> dict[str, Any]:
    return {
        "config": config.semantic(),
        "sources": [sources().model, sources().lowering],
        "toolchain": toolchain(target),
        "flags": environment.compiler_flags(),
    }


def program_fields(
    target: TargetSpec, lowering: str, modules: dict[str, str], devices: dict[str, Any], priced: Any = None
) -> dict[str, Any]:
    """Everything that decides the executable of a lowered program, and its record.

    Args:
        modules: The sha256 of each module that is compiled, by name.
        devices: Their kind, their ids in order, and the number of their processes.
        priced: Inputs of the estimates of an accelerator's cell; None for cpu.
    """
    return {
        "modules": modules,
        "target": asdict(target) | _host(target) | {"devices": devices},
        "options": {"donate": [1]},
        "priced": priced,
        "sources": lowering,
        "toolchain": toolchain(target),
        "flags": environment.compiler_flags(),
    }


def _host(target: TargetSpec) -> dict[str, Any]:
    """This machine's processor, for which XLA compiles a cpu target; empty for other targets."""
    if target.platform != "cpu":
        return {}
    return {"machine": environment.machine(), "cpu_features": environment.cpu_features()}
