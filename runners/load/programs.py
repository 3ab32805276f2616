"""A target's programs: read by digest, judged, then loaded in threads or compiled where the policy allows."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.program_records import CallRecord
from ling3export.artifacts.schema import Cell, Executable, FileRecord, Target
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.phases import MOVING, ON_LOGITS
from ling3export.foundation.threads import GuardedThread
from ling3export.machine.kernels import register
from ling3export.machine.verdict import Verdict, VerdictStatus

if TYPE_CHECKING:
    from ling3export.machine.pjrt import Program
    from ling3export.runners.load.recompile import Compiled


LATER = (*MOVING, *ON_LOGITS, "score")  # a first request needs at most their smallest padding
REST = 2.0  # seconds from the first programs to the others: a short command has ended by then, and loads no others


class Programs(Mapping[str, "Program"]):
    """Programs by cell, which load in threads. Asking for one waits for it, or loads it where its turn has not come.

    Args:
        names: All programs, in the order in which they begin to load.
        first: Names of the first ones; the others load one after the other, REST seconds later. None for all.
    """

    def __init__(
        self,
        load: "Callable[[str], Program]",
        names: Collection[str],
        pool: ThreadPoolExecutor,
        first: Collection[str] | None = None,
    ) -> None:
        early = [name for name in names if first is None or name in first]
        later = [name for name in names if name not in early]
        self._load, self._loaded = load, dict[str, "Program"]()
        self._locks = {name: threading.Lock() for name in early + later}
        self._go, self._closed = threading.Event(), False
        begun = [pool.submit(self.__getitem__, name) for name in early]
        self._behind = GuardedThread("ling3-load-behind", partial(self._follow, begun, later), daemon=False)

    def __getitem__(self, name: str) -> "Program":
        """A program. Raises ArtifactError: it does not load."""
        with self._locks[name]:
            if name not in self._loaded:
                self._loaded[name] = self._load(name)
            return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._locks)

    def __len__(self) -> int:
        return len(self._locks)

    def _follow(self, begun: "list[Future[Program]]", later: list[str]) -> None:
        """Waits until those that have begun are there or have failed, then for REST seconds, and loads the others."""
        for future in begun:
            with suppress(CancelledError):
                future.exception()
        self._go.wait(REST if later else 0)
        for name in later:
            with suppress(ArtifactError):  # who asks for it is told
                if not self._closed:
                    self[name]

    def settle(self) -> None:
        """Waits until all have loaded, and loads some of them. Raises ArtifactError: one does not load."""
        self._go.set()
        for name in reversed(list(self)):  # the background thread begins at the other end
            self[name]

    def close(self) -> None:
        """Waits for programs that load, begins no other, and releases all."""
        self._closed = True
        self._go.set()
        self._behind.join()
        self._loaded.clear()


def first_needed(target: Target) -> set[str]:
    """The cells that a first request of a few tokens needs: the smallest of each phase, and what samples from them."""
    phases = {cell.phase for cell in target.cells.values()}.difference(LATER)
    first = {f"{phase}@{target.paddings(phase)[0]}" for phase in phases}
    rows = {leaf.shape[0] for name in first for leaf in target.cells[name].outputs if leaf.name == "logits"}
    return first | {f"sample@{count}" for count in rows}.intersection(target.cells)


def read_executables(folder: Path, target: Target, pool: ThreadPoolExecutor) -> dict[FileRecord, Future[bytes]]:
    """Starts reading and digesting all native code of a target; returns a future for each file.

    A future raises ArtifactError where its file is missing or damaged.
    """
    files = (*(cell.exec for cell in target.cells.values()), target.kernels, target.state_program)
    return {file: pool.submit(read_checked, folder, file) for file in files if file is not None}


def load_programs(
    read: Mapping[FileRecord, bytes],
    target: Target,
    verdicts: dict[str, Verdict],
    compiled: "dict[str, Compiled]",
    pool: ThreadPoolExecutor,
    first: Collection[str] | None = None,
) -> Programs:
    """Starts loading every cell, once every signature was found right.

    Args:
        read: The bytes of the target's files that hold native code, of right digests.
        verdicts: By cell; the executables of OPTIMAL ones come from the artifact.
        first: Cells that load before all others; None where all load side by side.

    Raises:
        ArtifactError: A call contradicts its cell; nothing was deserialized.
    """
    from ling3export.machine.pjrt import load_executable

    parts = dict(compiled)
    for name, (_, executable) in compiled.items():
        _check_signature(name, target.cells[name], executable.call)
    for name, cell in target.cells.items():
        if verdicts[name].status is VerdictStatus.OPTIMAL and cell.exec is not None and cell.call is not None:
            parts[name] = read[cell.exec], Executable(target.requires, target.mesh, cell.call)

    if target.kernels is not None and any(verdict.status is VerdictStatus.OPTIMAL for verdict in verdicts.values()):
        register(read[target.kernels], target.kernel_names)

    def load(name: str) -> "Program":
        try:
            program = load_executable(*parts[name])
        except (RuntimeError, ValueError) as error:
            raise ArtifactError(
                f"program `{name}`: expected an executable that loads, found {error}",
                "build the artifact again, or compile the portable programs here: --programs allow-compile",
            ) from error
        del parts[name]  # its bytes are needed once
        return program

    largest_first = sorted(parts, key=lambda name: -len(parts[name][0]))
    return Programs(load, largest_first, pool, first)


def _check_signature(name: str, cell: Cell, call: CallRecord) -> None:
    """Refuses a program that was compiled here if its call is not its cell's: calling it would mix up arrays.

    Shapes and dtypes are compared here, shardings by jax.
    """
    for side, rows, called in (("inputs", cell.inputs, call.inputs), ("outputs", cell.outputs, call.outputs)):
        if [(row.shape, row.dtype) for row in rows] != [(row.shape, row.dtype) for row in called]:
            raise ArtifactError(
                f"program `{name}`: expected {len(rows)} {side} as its cell lists them, found others in the program",
                "build the artifact again",
            )
