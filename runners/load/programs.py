"""A target's programs: read by digest, judged, then loaded in threads or compiled where the policy allows."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.schema import Call, Cell, Executable, Target
from ling3export.errors import ArtifactError
from ling3export.runners.load.verdict import Status, Verdict

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from ling3export.runners.load.recompile import Compiled

    Program = Callable[..., list[jax.Array]]  # flat inputs → flat outputs


class ProgramFiles:
    """The executables of a target, read and digested in threads while jax is being imported.

    Args:
        folder: The artifact.
        target: The manifest's.
        pool: Where to read.
    """

    def __init__(self, folder: Path, target: Target, pool: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._target = target
        self._raw: dict[str, Future[bytes]] = {
            name: pool.submit(read_checked, folder, cell.exec)
            for name, cell in target.cells.items()
            if cell.exec is not None
        }

    def executable(self, name: str) -> bytes:
        """The compiled tier of a cell.

        Raises:
            ArtifactError: The file is missing or damaged.
        """
        return self._raw[name].result()

    def portable(self, name: str) -> bytes:
        """The portable tier of a cell.

        Raises:
            ArtifactError: The file is missing or damaged.
        """
        return read_checked(self._folder, self._target.cells[name].stablehlo)

    def check(self) -> None:
        """Waits for every executable, also for those that will not be used.

        Raises:
            ArtifactError: A file is missing or damaged.
        """
        for future in self._raw.values():
            future.result()


def mesh_of(target: Target) -> "Mesh":
    """The mesh of a target over the devices with the recorded ids where they all exist, else over the first ones."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    wanted = target.mesh.devices
    by_id = {device.id: device for device in jax.devices()}
    chosen = [by_id[number] for number in wanted] if set(wanted) <= by_id.keys() else jax.devices()[: len(wanted)]
    return Mesh(np.array(chosen), (target.mesh.axis,), axis_types=(AxisType.Auto,))


def load_programs(
    files: ProgramFiles, target: Target, mesh: "Mesh", verdicts: dict[str, Verdict],
    compiled: "dict[str, Compiled]", pool: ThreadPoolExecutor,
) -> "dict[str, Future[Program]]":  # fmt: skip
    """Starts loading every cell, once every digest and every signature was found right.

    Args:
        files: The target's programs.
        target: The manifest's.
        mesh: Where to load.
        verdicts: By cell; the executables of OPTIMAL ones come from the artifact.
        compiled: The others, compiled here.
        pool: Where to load.

    Raises:
        ArtifactError: A file is missing or damaged, or a call contradicts its cell; nothing was deserialized.
    """
    from ling3export.runners.load.pjrt import load_executable

    files.check()
    for name, (_, executable) in compiled.items():
        same_signature(name, target.cells[name], executable.call)
    parts = dict(compiled)
    for name, cell in target.cells.items():
        if verdicts[name].status is Status.OPTIMAL and cell.call is not None:
            parts[name] = files.executable(name), Executable(target.requires, target.mesh, cell.call)

    def load(name: str) -> "Program":
        raw, executable = parts[name]
        try:
            return load_executable(raw, executable, mesh)
        except (RuntimeError, ValueError) as error:
            raise ArtifactError(
                f"program `{name}`: expected an executable that loads, found {error}",
                "build the artifact again, or compile the portable programs here: --programs allow-compile",
            ) from error

    largest_first = sorted(parts, key=lambda name: -len(parts[name][0]))
    return {name: pool.submit(load, name) for name in largest_first}


def same_signature(name: str, cell: Cell, call: Call) -> None:
    """Compares the call of a program that was compiled here with its cell; jax compares shardings.

    Raises:
        ArtifactError: They differ: calling the program would mix up arrays.
    """
    for side, rows, called in (("inputs", cell.inputs, call.inputs), ("outputs", cell.outputs, call.outputs)):
        if [(row.shape, row.dtype) for row in rows] != [(row.shape, row.dtype) for row in called]:
            raise ArtifactError(
                f"program `{name}`: expected {len(rows)} {side} as its cell lists them, found others in the program",
                "build the artifact again",
            )
