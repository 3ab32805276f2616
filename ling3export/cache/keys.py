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
MODEL = "model/**/*.py"
# Every module that a compiling process imports besides: they lower, compile, and say what a program costs.
LOWERING = (
    "artifacts/*.py", "compile/accelerators.py", "compile/lower.py", "cost/*.py", "foundation/*.py", "machine/*.py",
    "plan/targets.py",
)  # fmt: skip
TRACING = ("flax", "ml_dtypes", "numpy")  # packages that take part in tracing, besides jax and jaxlib


@dataclass(frozen=True)
class Sources:
    """The sources that decide programs.

    Attributes:
        model: The sha256 of all sources of the model.
        lowering: The sha256 of all that trace, lower, compile and price.
        stamps: The size and the times of each file, by its path below the package.
    """

    model: str
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

    def digest(*patterns: str) -> str:
        return sha256_of({name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in _files(*patterns)})

    return Sources(digest(MODEL), digest(*LOWERING), stamps)


def _files(*patterns: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


def _stamps() -> dict[str, str]:
    stats = {name: (ROOT / name).stat() for name in _files(MODEL, *LOWERING)}
    return {name: f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}" for name, stat in stats.items()}


def toolchain(target: TargetSpec) -> dict[str, str]:
    """The version of each package that decides a program for ``target``."""
    compilers = {"tpu": ("libtpu",), "cuda": CUDA_PACKAGES}
    names = ["jax", "jaxlib", *compilers.get(target.platform, ())]
    return {name: metadata.version(name) for name in names}


def fingerprint(config: Config, plan: Plan) -> str:
    """The sha256 of everything that decides a target's programs; targets with the same one have the same programs."""
    return sha256_of(
        {
            "config": config.semantic(),
            "plan": plan.record(),
            "target": asdict(plan.target),
            "sources": [sources().model, sources().lowering],
            "toolchain": toolchain(plan.target),
            "flags": environment.compiler_flags(),
        }
    )


def cell_fields(config: Config, plan: Plan, cell: PlannedCell) -> dict[str, Any]:
    """Everything that decides one cell and is known before tracing.

    Of the plan only the geometry counts: another padding of the same build changes nothing.
    """
    return {
        "cell": asdict(cell),
        "config": config.semantic(),
        "plan": asdict(plan.geometry),
        "target": asdict(plan.target) | _host(plan.target),
        "sources": [sources().model, sources().lowering],
        "toolchain": toolchain(plan.target) | {name: metadata.version(name) for name in TRACING},
        "flags": environment.compiler_flags(),
    }


def program_fields(
    target: TargetSpec, lowering: str, modules: dict[str, str], devices: dict[str, Any], priced: Any = None
) -> dict[str, Any]:
    """Everything that decides what a compiler makes of a lowered program, and what a build records of it.

    Args:
        target: The machine.
        lowering: As in ``Sources``.
        modules: The sha256 of the text of each module that is compiled, by name.
        devices: The devices' kind, their ids in order, and the number of their processes.
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
