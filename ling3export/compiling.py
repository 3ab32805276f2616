"""Cells of one target, compiled side by side by worker processes."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ling3export.errors import PlanError
from ling3export.plan import Cell, Plan

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
    """

    def __init__(
        self, plan: Plan, config: dict[str, Any], ignore: Sequence[str], folder: Path, jobs: int | None
    ) -> None:
        self._job = {
            "platform": plan.target.platform,
            "geometry": asdict(plan.geometry),
            "config": config,
            "ignore": list(ignore),
            "folder": str(folder),
        }
        self._jobs = jobs
        self._processes: list[subprocess.Popen[str]] = []
        self._stopped = False
        # A file, because a pipe nobody reads would fill up and block a worker; it lives as long as this object.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def run(self, cells: Sequence[Cell], done: Done) -> dict[str, dict[str, Any]]:
        """Compiles every cell; one that fails does not stop the others.

        Args:
            cells: In the order in which they start.
            done: Called from a worker's thread as each cell ends well.

        Returns:
            The record of each cell by name.

        Raises:
            PlanError: Some cell could not be built; names each with its reason.
        """
        waiting: SimpleQueue[Cell] = SimpleQueue()
        for cell in cells:
            waiting.put(cell)
        records: dict[str, dict[str, Any]] = {}
        failures: dict[str, str] = {}
        count = default_jobs(len(cells)) if self._jobs is None else max(1, min(self._jobs, len(cells)))
        threads = [threading.Thread(target=self._serve, args=(waiting, records, failures, done)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures and not self._stopped:
            text = "; ".join(f"{name}: {why}" for name, why in list(failures.items())[:3])
            raise PlanError(f"programs: expected {len(cells)} cells to build, {len(failures)} did not: {text}")
        return records

    def stop(self) -> None:
        """Ends the workers at once."""
        self._stopped = True
        for process in self._processes:
            process.kill()

    def _serve(
        self, waiting: "SimpleQueue[Cell]", records: dict[str, dict[str, Any]], failures: dict[str, str], done: Done
    ) -> None:
        """One worker's life: a fresh process when the last one died, a cell at a time."""
        process: subprocess.Popen[str] | None = None
        while not self._stopped:
            try:
                cell = waiting.get_nowait()
            except Empty:
                break
            if process is None or process.poll() is not None:
                process = self._start()
            reply = self._ask(process, cell)
            if "record" in reply:
                records[cell.name] = reply["record"]
                done(cell, reply["record"])
            else:
                failures[cell.name] = reply["error"]
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ling3export.worker"]
        # -m finds this package as the parent did, be it installed or a bare checkout.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # a worker that is dead already is found when it is asked
            process.stdin.write(json.dumps(self._job) + "\n")
        return process

    def _ask(self, process: subprocess.Popen[str], cell: Cell) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"phase": cell.phase, "padding": cell.padding}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if line:
            return dict(json.loads(line))
        code = process.wait()
        self._errors.seek(0)
        tail = self._errors.read()[-400:].strip()
        return {"error": f"the compiling process ended with code {code}: {tail or 'nothing was printed'}"}
