"""The cells of every target, compiled side by side by worker processes; one that fails loses none of the others."""

import contextlib
import os
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ling3export.artifacts.files import write_new
from ling3export.artifacts.records import from_json, sha256_of, to_json
from ling3export.artifacts.schema import STATE
from ling3export.cache.cells import Built, Cells
from ling3export.cache.keys import program_fields, sources
from ling3export.compile.kernels import put_library
from ling3export.compile.worker import MODULE, NATIVE_KERNELS, STATE_PROGRAM, CompileJob
from ling3export.foundation.errors import ArtifactError, Ling3Error, PlanError, listed
from ling3export.foundation.processes import Child, Failure
from ling3export.model.config import Config
from ling3export.model.state import state_arrays
from ling3export.plan.memory import check_memory
from ling3export.plan.plan import Plan, PlannedCell

Done = Callable[[], None]


@dataclass(frozen=True)
class BuildOutcome:
    """The cells of one target, by name: those that were built, and why the others were not."""

    plan: Plan
    built: dict[str, Built]
    failures: dict[str, Failure]


class Compilers:
    """Worker processes that take the cells of one target from one queue until it is empty.

    Args:
        plan: The target and its geometry.
        folder: Gets the programs.
        jobs: Processes; None is one a core.
        cells: The cache; its cells are not compiled.
        tell: Gets a line when a cell begins to be compiled, and one with the seconds when it ends.
    """

    def __init__(
        self,
        plan: Plan,
        config: Config,
        folder: Path,
        jobs: int | None,
        cells: Cells,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.plan = plan
        self._cells = cells
        self.job = CompileJob(plan.target, plan.geometry, config, folder, cells.use, sources())
        self._jobs, self._tell = jobs, tell
        self._workers: list[Child] = []
        self._stopped = False
        self._lock = threading.Lock()

    def run(self, cells: Sequence[PlannedCell], done: Done) -> BuildOutcome:
        """Compiles cells of the plan in their order; one that fails does not stop the others.

        ``done`` is called, from a worker's thread, as each cell ends well.

        Raises:
            PlanError: The native kernels do not compile.
        """
        if self.plan.geometry.kernels:
            put_library(self.job.folder, self.plan.geometry.kernels, self._cells, self._kernels)
        waiting: SimpleQueue[PlannedCell] = SimpleQueue()
        outcome = BuildOutcome(self.plan, {}, {})
        for cell in cells:
            waiting.put(cell)
        count = min(self._jobs or len(os.sched_getaffinity(0)), waiting.qsize())
        if self.plan.target.autotuned:
            count = min(count, 1)  # kernels are timed on the one card
        threads = [threading.Thread(target=self._serve, args=(waiting, outcome, done)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return BuildOutcome(self.plan, outcome.built, {}) if self._stopped else outcome

    def _kernels(self) -> bytes:
        """The native kernels: a compiler of minutes, which ends with its worker."""
        with contextlib.ExitStack() as stack:
            worker = self._alive(None, stack)
            if worker is None:
                raise PlanError("kernels: the build was stopped")
            name, started = f"{self.plan.target.name}, native kernels", time.perf_counter()
            self._tell(f"{name}: compiling")
            raw = _file(worker, self.job, NATIVE_KERNELS, "kernels")
            self._tell(f"{name}: done in {time.perf_counter() - started:.1f} s")
            return raw

    def stop(self) -> None:
        """Ends the workers at once."""
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.kill()

    def _serve(self, waiting: "SimpleQueue[PlannedCell]", outcome: BuildOutcome, done: Done) -> None:
        """One worker's life: a fresh process when the last one died, a cell at a time."""
        worker: Child | None = None
        with contextlib.ExitStack() as stack, contextlib.suppress(Empty):
            while not self._stopped:
                cell = waiting.get_nowait()
                built: Built | Failure | None
                try:
                    built = self._cells.fetch(self.job.config, self.plan, cell, self.job.folder)
                    if built is None:
                        worker = self._alive(worker, stack)
                        if worker is None:
                            break
                        built = self._timed(worker, cell)
                except Ling3Error as error:
                    outcome.failures[cell.name] = Failure.of(error)
                    continue
                if isinstance(built, Failure):
                    outcome.failures[cell.name] = built
                else:
                    outcome.built[cell.name] = built
                    done()

    def _timed(self, worker: Child, cell: PlannedCell) -> Built | Failure:
        """:meth:`made` with a line before and after: the compiler itself may be silent for minutes."""
        name, started = f"{self.plan.target.name}, {cell.name}", time.perf_counter()
        self._tell(f"{name}: compiling")
        made = self.made(worker, cell)
        if not self._stopped:
            outcome = "failed" if isinstance(made, Failure) else "done"
            self._tell(f"{name}: {outcome} in {time.perf_counter() - started:.1f} s")
        return made

    def made(self, worker: Child, cell: PlannedCell) -> Built | Failure:
        """A cell that a worker makes now, kept in the cache; or why it failed."""
        reply = _reply(worker, self.job, asdict(cell))
        if isinstance(reply, Failure):
            return reply
        for message in reply["messages"]:
            self._cells.report(message)
        return self._cells.keep(self.job.config, self.plan, cell, self.job.folder, from_json(Built, reply["built"]))

    def _alive(self, worker: Child | None, stack: contextlib.ExitStack) -> Child | None:
        """``worker``, or a new one if it has died; None once the workers are stopped."""
        with self._lock:  # so that none starts after `stop`
            if self._stopped:
                return None
            if worker is None or not worker.alive:
                try:
                    worker = stack.enter_context(Child(MODULE))
                except OSError as error:
                    raise PlanError(f"no compiling process could be started: {error}") from error
                worker.send({"job": to_json(self.job)})
                self._workers.append(worker)
            return worker


def _reply(worker: Child, job: CompileJob, message: dict[str, Any]) -> dict[str, Any] | Failure:
    """The answer of a compiling process; a Failure if it has none, or if a source has changed meanwhile."""
    worker.send(message)
    reply = worker.receive()
    if reply is None:
        code, reason = worker.ended()
        hint = "if the memory was full: compile fewer at a time with --jobs" if code < 0 else None
        return Failure(f"the compiling process {reason}", hint)
    if "failure" in reply:
        return Failure(**reply["failure"])
    if changed := job.sources.changed():
        return Failure(f"expected no source to change during the build, {listed(changed)} did", "build again")
    return reply


def check(config: Config, outcomes: Sequence[BuildOutcome], kept: bool) -> None:
    """Refuses a build in which a cell failed, or whose cells a device cannot hold.

    ``kept`` is whether the cells that were built are in the cache.

    Raises:
        PlanError: Names each failed cell with its reason, up to three.
        ArtifactError: The disk is full.
    """
    failures = [(outcome.plan.target.name, *item) for outcome in outcomes for item in outcome.failures.items()]
    if not failures:
        for outcome in outcomes:
            programs = {name: built.program for name, built in outcome.built.items()}
            check_memory(config, outcome.plan.target, outcome.plan.geometry, programs)
        return
    several = len(outcomes) > 1
    text = "; ".join(f"{f'{target} ' * several}{cell}: {failure.error}" for target, cell, failure in failures[:3])
    count = sum(len(outcome.plan.cells) for outcome in outcomes)
    message = f"programs: expected {count} cells to build, {len(failures)} did not: {text}"
    hints = [failure.hint for _, _, failure in failures if failure.hint][:1]
    if any(failure.kind == ArtifactError.__name__ for _, _, failure in failures):
        raise ArtifactError(message, *hints)  # no room on the disk: nothing is left there
    if len(failures) < count:
        where = "are in the cache: the same build again takes them" if kept else "are lost without --cache on"
        hints.append(f"the {count - len(failures)} others {where}")
    raise PlanError(message, "; ".join(hints))


def put_state_program(folder: Path, config: Config, plan: Plan, cells: Cells) -> None:
    """Writes the program that gives the state into ``folder`` unless it is there; only cpu targets have one.

    Raises:
        PlanError: It does not compile.
        ArtifactError: The disk is full.
    """
    if plan.target.platform != "cpu" or (folder / STATE).exists():
        return
    arrays = [asdict(row) for row in state_arrays(config, plan.geometry)]
    job = CompileJob(plan.target, plan.geometry, config, folder, cells.use, sources())
    fields = program_fields(plan.target, job.sources.lowering, {"state": sha256_of(arrays)}, {})
    write_new(folder / STATE, cells.file(fields, lambda: _compiled(job)))


def _compiled(job: CompileJob) -> bytes:
    with Child(MODULE) as worker:
        worker.send({"job": to_json(job)})
        return _file(worker, job, STATE_PROGRAM, "the program that gives the state")


def _file(worker: Child, job: CompileJob, message: dict[str, Any], what: str) -> bytes:
    """The bytes of a file that a worker makes."""
    reply = _reply(worker, job, message)
    if isinstance(reply, Failure):
        raise PlanError(reply.error if reply.error.startswith(what) else f"{what}: {reply.error}", reply.hint)
    return b64decode(reply["raw"])
