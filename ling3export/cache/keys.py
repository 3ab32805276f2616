"""Cache keys: what decides a build, a cell or a compiled program, as named fields with their sha256.

The fields are kept with the digest, so that a difference can be explained. The sources that decide a program are found
by following imports, so that no list can forget one.
"""

import ast
import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import ling3export
from ling3export.artifacts.records import sha256_of
from ling3export.foundation.sources import IMPORTED
from ling3export.machine import environment
from ling3export.model.config import Config
from ling3export.plan.plan import Plan, PlannedCell
from ling3export.plan.targets import CUDA_PACKAGES, TargetSpec

# Packages that take part in tracing, besides jax and jaxlib, which stand in every key.
TRACING = ("flax", "ml_dtypes", "numpy")
ROOT = Path(ling3export.__file__).parent
# What traces, lowers and compiles a cell, and what does it for accelerators. `compile/worker.py`, which calls them,
# decides nothing.
STARTS = {"lowering": "compile/lower.py", "accelerators": "compile/accelerators.py"}


def toolchain(target: TargetSpec) -> dict[str, str]:
    """The version of each package that decides a program for ``target``."""
    compilers = {"tpu": ("libtpu",), "cuda": CUDA_PACKAGES}
    names = ["jax", "jaxlib", *compilers.get(target.platform, ())]
    return {name: metadata.version(name) for name in names}


def fingerprint(config: Config, plan: Plan) -> str:
    """The sha256 of everything that decides a target's programs: targets that agree in it have the same ones."""
    return sha256_of(
        {
            "config": config.semantic(),
            "plan": plan.record(),
            "target": asdict(plan.target),
            "sources": sha256_of(deciding(plan.target)),
            "toolchain": toolchain(plan.target),
            "flags": environment.compiler_flags(),
        }
    )


def cell_fields(config: Config, plan: Plan, cell: PlannedCell) -> dict[str, Any]:
    """Everything that decides one cell and is known before anything is traced.

    The plan counts only as far as a program is compiled for it: another padding beside this one changes nothing.
    """
    return {
        "cell": asdict(cell),
        "config": config.semantic(),
        "plan": asdict(plan.geometry),
        "target": asdict(plan.target) | _host(plan.target),
        "sources": deciding(plan.target),
        "toolchain": toolchain(plan.target) | {name: metadata.version(name) for name in TRACING},
        "flags": environment.compiler_flags(),
    }


def program_fields(target: TargetSpec, modules: dict[str, str], devices: dict[str, Any], priced: Any) -> dict[str, Any]:
    """Everything that decides what a compiler makes of a lowered program, and what a build records of it.

    Args:
        target: The machine.
        modules: The sha256 of each module that is compiled, by name.
        devices: The devices' kind, their ids in order, and how many processes have them.
        priced: What the estimates of an accelerator's cell are made from besides the program; None for cpu.
    """
    return {
        "modules": modules,
        "target": asdict(target) | _host(target) | {"devices": devices},
        "options": {"donate": [1]},
        "priced": priced,
        "sources": below_model(deciding(target)),  # model/ counts through the modules alone
        "toolchain": toolchain(target),
        "flags": environment.compiler_flags(),
    }


def _host(target: TargetSpec) -> dict[str, Any]:
    """This machine's processor, for which XLA compiles a cpu target; empty for targets that do not depend on it."""
    if target.platform != "cpu":
        return {}
    return {"machine": environment.machine(), "cpu_features": environment.cpu_features()}


def source_digests() -> dict[str, dict[str, str]]:
    """The sha256 of every source that decides a program, by its path below the package; of what was imported, if known.

    Returns:
        ``model``: all files of ``model/``. ``lowering`` and ``accelerators``: those of STARTS and all that they import
        from this package, directly or not, apart from what the groups before have.
    """
    return _source_digests(len(IMPORTED))


def deciding(target: TargetSpec) -> dict[str, dict[str, str]]:
    """The groups of sources that decide a program for ``target``: all, for cpu without ``accelerators``."""
    groups = source_digests()
    return {name: groups[name] for name in groups if name != "accelerators" or target.platform != "cpu"}


def below_model(groups: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """The files of all ``groups`` but ``model``."""
    return {name: digest for group in groups if group != "model" for name, digest in groups[group].items()}


def imported() -> dict[str, str]:
    """The sha256 of the sources that this compiling process has imported, by their paths below the package."""
    return {Path(path).relative_to(ROOT).as_posix(): digest for path, digest in IMPORTED.items()}


def changed(sources: Mapping[str, str]) -> list[str]:
    """Which of the sources that decide programs a compiling process imported with other bytes than are known here."""
    known = {name: digest for group in source_digests().values() for name, digest in group.items()}
    return sorted(name for name, digest in sources.items() if known.get(name, digest) != digest)


@functools.cache
def _source_digests(_: int) -> dict[str, dict[str, str]]:
    seen = set((ROOT / "model").rglob("*.py"))
    found = {"model": _digests(seen)}
    for name, start in STARTS.items():
        followed = _followed([ROOT / start])
        found[name] = _digests(followed - seen)
        seen |= followed
    return found


def _digests(files: set[Path]) -> dict[str, str]:
    def digest(file: Path) -> str:
        return IMPORTED.get(str(file)) or hashlib.sha256(file.read_bytes()).hexdigest()

    return {file.relative_to(ROOT).as_posix(): digest(file) for file in sorted(files)}


def _followed(files: list[Path]) -> set[Path]:
    """``files`` and every file of this package that they import, directly or not, and inside of functions too."""
    found: set[Path] = set()
    while files:
        file = files.pop()
        if file not in found:
            found.add(file)
            files += [path for name in _imports(ast.parse(file.read_bytes())) if (path := _file(name))]
    return found


def _imports(node: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports, without those that only a type checker reads.

    ``from a import b`` gives both ``a`` and ``a.b``, which may be a module.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield str(child.module)
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from _imports(child)


def _file(name: str) -> Path | None:
    """The source of a module of this package; None for any other name."""
    package, *parts = name.split(".")
    path = ROOT.joinpath(*parts).with_suffix(".py")
    return path if package == ROOT.name and parts and path.is_file() else None
