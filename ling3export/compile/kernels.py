"""Compiles the native kernels: one library for a target, in the folder of its programs."""

import platform
import subprocess
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import write_new
from ling3export.artifacts.schema import KERNELS
from ling3export.cache.cells import Cells
from ling3export.foundation.errors import PlanError
from ling3export.plan.kernels import FLAGS, HINT, NO_COMPILER, SOURCES, ZIG, Level, compiler, level_of

LIMIT = 900  # seconds; g++ takes some 15, ziglang two minutes or more at first, when it makes its own library


def put_library(folder: Path, kernels: str, cells: Cells, make: Callable[[], bytes]) -> None:
    """Writes the library of ``kernels``, the name in a geometry, into ``folder`` unless it is there.

    Args:
        make: ``library_of(kernels)`` in a process that can be ended.

    Raises:
        PlanError: The kernels are of another version, there is no compiler, or it fails.
        ArtifactError: The disk is full.
    """
    if (folder / KERNELS).exists():
        return
    _, command = _compiler(kernels)
    fields = {
        "kernels": kernels,
        "machine": platform.machine(),
        "headers": _headers()[1],
        "compiler": [*command, _run([*command, "--version"])],
    }
    write_new(folder / KERNELS, cells.file(fields, make))


def _compiler(kernels: str) -> tuple[Level, list[str]]:
    level, command = level_of(kernels), compiler()
    if command is None:
        raise PlanError(f"kernels: {NO_COMPILER}", HINT)
    return level, command


def _headers() -> tuple[str, str]:
    """The folder of the headers of XLA's foreign function interface, and their version."""
    import jax.ffi

    return jax.ffi.include_dir(), version("jaxlib")


def library_of(kernels: str) -> bytes:
    """The library of ``kernels``; the errors are those of :func:`put_library`."""
    level, command = _compiler(kernels)
    return compiled(command, level)


def compiled(command: list[str], level: Level) -> bytes:
    """The library of a level by any compiler."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / KERNELS
        flags = [ZIG.get(flag, flag) if "ziglang" in command else flag for flag in level.flags]
        _run([*command, *FLAGS, *flags, "-I", _headers()[0], *map(str, SOURCES), "-o", str(out)])
        return out.read_bytes()


def _run(command: list[Any]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlanError(
            f"kernels: expected {command[0]} to run, found: {error}", "or build with --kernels off"
        ) from None
    if done.returncode:
        reason = "\n".join(done.stderr.splitlines()[:5])
        raise PlanError(
            f"kernels: expected {command[0]} to compile them, found: {reason}", "or build with --kernels off"
        )
    return done.stdout
