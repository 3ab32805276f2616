"""Cells of one target, compiled side by side by worker processes."""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from ling3export.cache.cells import Cells
from ling3export.cache.use import CacheUse
from ling3export.errors import Ling3Error, PlanError
from ling3export.model.config import Config
from ling3export.plan.plan import Cell, Plan
from ling3export.processes import command, ending, environment

Done = Callable[[Cell, dict[str, Any]], None]


def default_jobs(cells: int) -> int:
    """One a core, never more than there are cells."""
    return max(1, min(cells, len(os.sched_getaffinity(0))))


class Compilers:
    """Worker processes that take cells from one queue until it is empty.

    Args:
        plan: Says the target and the geometry.
        config: The content of config.json.
        ignore: Its fields that are ignored on request.
        folder: Where the programs are written.
        jobs: Processes; None is one a core.
        cells: The cache; what it has is not compiled. None uses none.
        shown: The workers' stderr is ours; else its end is kept, for the message of one that dies.
    """

    def __init__(
        self, plan: Plan, config: dict[str, Any], ignore: Sequence[str], folder: Path, jobs: int | None,
        cells: Cells | None = None, shown: bool = False,
    ) -> None:  # fmt: skip
        self._plan, self._folder = plan, folder
        self._cells = Cells(CacheUse("off"), lambda text: None) if cells is None else cells
        self._config = Config.from_dict(config, ignore=tuple(ignore))
        self._job = {
            "target": asdict(plan.target),
            "geometry": asdict(plan.geometry),
            "config": config,
            "ignore": list(ignore),
            "folder": str(folder),
            "cache": self._cells.job,
        }
        self._jobs = jobs
        self._shown = shown
        self._workers: list[_Worker] = []
        self._stopped = False
        self._lock = threading.Lock()

    def run(self, cells: Sequence[Cell], done: Done) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Compiles every cell; one that fails does not stop the others.

        Args:
            cells: In the order in which they start.
            done: Called from a worker's thread as each cell ends well.

        Returns:
            By name, the record of each cell that was built, and ``error`` and ``hint`` of each that was not.
        """
        waiting: SimpleQueue[Cell] = SimpleQueue()
        for cell in cells:
            waiting.put(cell)
        replies: dict[Cell, dict[str, Any]] = {}
        count = default_jobs(len(cells)) if self._jobs is None else max(1, min(self._jobs, len(cells)))
        if self._plan.target.autotuned:
            count = 1  # kernels are timed on the one card
        threads = [threading.Thread(target=self._serve, args=(waiting, replies, done)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        built = {cell.name: reply["record"] for cell, reply in replies.items() if "record" in reply}
        failed = {cell.name: reply for cell, reply in replies.items() if "error" in reply}
        return built, {} if self._stopped else failed

    def stop(self) -> None:
        """Ends the workers at once."""
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.process.kill()

    def _serve(self, waiting: "SimpleQueue[Cell]", replies: dict[Cell, dict[str, Any]], done: Done) -> None:
        """One worker's life: a fresh process when the last one died, a cell at a time."""
        worker: _Worker | None = None
        with contextlib.ExitStack() as stack, contextlib.suppress(Empty):
            while not self._stopped:
                cell = waiting.get_nowait()
                try:
                    record = self._cells.fetch(self._config, self._plan, cell, self._folder)
                    if record is None:
                        try:
                            worker = self._alive(worker, stack)
                        except OSError as error:
                            raise PlanError(f"no compiling process could be started: {error}") from error
                        if worker is None:
                            break
                        record = self._made(worker.ask(cell), cell, replies)
                except Ling3Error as error:
                    replies[cell] = {"error": error.message, "hint": error.hint, "kind": type(error).__name__}
                    continue
                if record is not None:
                    replies[cell] = {"record": record}
                    done(cell, record)

    def _made(self, reply: dict[str, Any], cell: Cell, replies: dict[Cell, dict[str, Any]]) -> dict[str, Any] | None:
        """The record of a cell that a worker made, kept in the cache; None, and its reply noted, if it failed."""
        self._cells.say(reply.get("messages", []))
        if "record" in reply:
            return self._cells.keep(self._config, self._plan, cell, self._folder, reply["record"])
        replies[cell] = reply
        return None

    def _alive(self, worker: "_Worker | None", stack: contextlib.ExitStack) -> "_Worker | None":
        """``worker``, or a new one if it has died; None once the workers are stopped."""
        with self._lock:  # so that none starts behind `stop`
            if self._stopped:
                return None
            if worker is None or worker.process.poll() is not None:
                worker = stack.enter_context(_Worker(self._job, self._shown))
                self._workers.append(worker)
            return worker


class _Worker:
    """A process of ``ling3export/compile/worker.py``, and what is written to and read from it."""

    def __init__(self, job: dict[str, Any], shown: bool) -> None:
        # A file, because a pipe that nobody reads would fill up and block the worker.
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command("ling3export.compile.worker"), stdin=pipe, stdout=pipe,
            stderr=None if shown else self._errors, text=True, env=environment(),
        )  # fmt: skip
        self._send(job)

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):  # what a dead worker has not read cannot be flushed
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self._errors.close()

    def ask(self, cell: Cell) -> dict[str, Any]:
        """The worker's reply: a ``record``, or an ``error`` with or without a ``hint``, also when it dies."""
        assert self.process.stdout is not None
        self._send({"phase": cell.phase, "padding": cell.padding})
        line = self.process.stdout.readline()
        if line.endswith("\n"):
            return dict(json.loads(line))
        code = self.process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-400:].strip() or "nothing was printed"
        hint = "if the memory was full: compile fewer at a time with --jobs" if code < 0 else None
        return {"error": f"the compiling process {ending(code)}: {said}", "hint": hint}

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # one that is dead is found when its reply is read
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
