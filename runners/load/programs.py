"""A target's programs: read by digest, judged, then loaded in threads or compiled where the policy allows."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.schema import Call, Cell, Executable, Target
from ling3export.errors import ArtifactError
from ling3export.runners import flight
from ling3export.runners.load.kernels import register
from ling3export.runners.load.verdict import Status, Verdict

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ling3export.runners.load.pjrt import Program
    from ling3export.runners.load.recompile import Compiled


def read_executables(folder: Path, target: Target, pool: ThreadPoolExecutor) -> dict[str, Future[bytes]]:
    """Starts reading and digesting a target's executables; returns a future for each cell that has one.

    A future raises ArtifactError where its file is missing or damaged.
    """
    files = {name: cell.exec for name, cell in target.cells.items()}
    return {name: pool.submit(read_checked, folder, file) for name, file in files.items() if file is not None}


def load_programs(
    folder: Path, executables: Mapping[str, Future[bytes]], target: Target, mesh: "Mesh", verdicts: dict[str, Verdict],
    compiled: "dict[str, Compiled]", pool: ThreadPoolExecutor,
) -> "dict[str, Future[Program]]":  # fmt: skip
    """Starts loading every cell, once every digest and every signature was found right.

    Args:
        folder: The artifact's.
        executables: What ``read_executables`` gave; all of them are waited for, also those that will not be used.
        target: The manifest's.
        mesh: Where to load.
        verdicts: By cell; the executables of OPTIMAL ones come from the artifact.
        compiled: The others, compiled here.
        pool: Where to load.

    Raises:
        ArtifactError: A file is missing or damaged, or a call contradicts its cell; nothing was deserialized.
    """
    from ling3export.runners.load.pjrt import load_executable

    read = {name: future.result() for name, future in executables.items()}
    parts = dict(compiled)
    for name, (_, executable) in compiled.items():
        _check_signature(name, target.cells[name], executable.call)
    for name, cell in target.cells.items():
        if verdicts[name].status is Status.OPTIMAL and cell.call is not None:
            parts[name] = read[name], Executable(target.requires, target.mesh, cell.call)

    if target.kernels is not None and any(verdict.status is Status.OPTIMAL for verdict in verdicts.values()):
        register(read_checked(folder, target.kernels), target.kernel_names)

    def load(name: str) -> "Program":
        raw, executable = parts[name]
        try:
            with flight.loading(f"program {name}"):
                return load_executable(raw, executable, mesh)
        except (RuntimeError, ValueError) as error:
            raise ArtifactError(
                f"program `{name}`: expected an executable that loads, found {error}",
                "build the artifact again, or compile the portable programs here: --programs allow-compile",
            ) from error

    largest_first = sorted(parts, key=lambda name: -len(parts[name][0]))
    return {name: pool.submit(load, name) for name in largest_first}


def _check_signature(name: str, cell: Cell, call: Call) -> None:
    """Refuses a program that was compiled here if its call is not its cell's: calling it would mix up arrays.

    Shapes and dtypes are compared here, shardings by jax.
    """
    for side, rows, called in (("inputs", cell.inputs, call.inputs), ("outputs", cell.outputs, call.outputs)):
        if [(row.shape, row.dtype) for row in rows] != [(row.shape, row.dtype) for row in called]:
            raise ArtifactError(
                f"program `{name}`: expected {len(rows)} {side} as its cell lists them, found others in the program",
                "build the artifact again",
            )
