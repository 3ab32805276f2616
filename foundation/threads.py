"""Threads of this process. Every job is guarded: its error goes to what waits for it, and the thread goes on.

The runner makes its threads here and nowhere else (tests/runners/test_threads.py). ``failures`` lists the threads that
ended by an error; a server's /health reports them.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from ling3export.foundation.errors import Ling3Error

Failed = Callable[[BaseException], object]
Report = Callable[[str], object]

_failures: dict["GuardedThread", BaseException] = {}


class ThreadEnded(Ling3Error):
    """The thread that does a job has ended."""


def failures() -> dict[str, str]:
    """Names and errors of the threads that ended by an error and were not joined since."""
    return {worker.name: f"{type(error).__name__}: {error}" for worker, error in _failures.copy().items()}


def attempt(label: str, job: Callable[[], object], failed: Failed, report: Report) -> bool:
    """Runs a job. If it raises, reports that and calls ``failed`` with the error. Never raises.

    Args:
        label: Names the job in reports.
        failed: Fails what waits for the job.

    Returns:
        Whether the job returned.
    """
    try:
        perform(label, job)
        return True
    except BaseException as error:  # libraries in Rust panic with a BaseException of their own
        _quietly(failed, error)
        _quietly(report, f"{label}: failed: {type(error).__name__}: {error}")
        return False


def perform(label: str, job: Callable[[], object]) -> None:
    """Runs a job; a test raises in its place."""
    job()


def _quietly(call: Callable[[Any], object], argument: object) -> None:
    try:
        call(argument)
    except BaseException:
        return


class GuardedThread:
    """Runs one function in a thread.

    Args:
        failed: Called in the thread if ``run`` raises. It ends what depends on the thread.
        report: Gets a line if ``run`` raises.
        daemon: Whether the process may end before the thread does.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], object],
        failed: Failed = lambda error: None,
        report: Report = lambda text: None,
        *,
        daemon: bool = True,
    ) -> None:
        self.name, self._run, self._failed, self._report = name, run, failed, report
        self._thread = threading.Thread(target=self._main, name=name, daemon=daemon)
        self._thread.start()

    def _main(self) -> None:
        attempt(self.name, self._run, self._end, self._report)

    def _end(self, error: BaseException) -> None:
        _failures[self] = error
        self._failed(error)

    @property
    def running(self) -> bool:
        """Whether the function has neither returned nor raised."""
        return self._thread.is_alive() and self not in _failures

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end, unless this is the thread itself. Its failure is not listed afterwards."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        _failures.pop(self, None)


class JobThread:
    """Runs jobs in the order in which they come, in one thread or several.

    Args:
        report: Gets a line for each job that failed.
        between: Called after each job, and every ``interval`` seconds while there is none.
        interval: Seconds; None waits for a job however long it takes.
        last: Called once, at the end of the last thread.
    """

    def __init__(
        self,
        name: str,
        report: Report,
        between: Callable[[], object] = lambda: None,
        interval: float | None = None,
        last: Callable[[], object] = lambda: None,
        threads: int = 1,
    ) -> None:
        self._name, self._report, self._between, self._interval, self._last = name, report, between, interval, last
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], object], Failed] | None] = queue.SimpleQueue()
        self._lock, self._over, self._left = threading.Lock(), False, threads
        self._threads = [GuardedThread(name, self._run, self._ended, report) for _ in range(threads)]

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    def put(self, label: str, job: Callable[[], object], failed: Failed = lambda error: None) -> None:
        """Has a job run after those before it.

        Args:
            label: Names the job in reports.
            failed: Called if the job raises, or will never run because the threads have ended.
        """
        with self._lock:
            if not self._over:
                self._jobs.put((label, job, failed))
                return
        self._fail(label, failed)

    def close(self, timeout: float) -> None:
        """Ends the threads after the jobs that wait now. May be called again, from any thread."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._interval)
            except queue.Empty:
                job = f"{self._name} idle", _nothing, _ignore
            if job is None:
                break
            attempt(*job, self._report)
            attempt(f"{self._name} between", self._between, _ignore, self._report)
        self._ended()

    def _ended(self, error: BaseException | None = None) -> None:
        """Fails the jobs that will never run, once no thread is left."""
        with self._lock:
            self._left -= 1
            if self._left > 0 or self._over:
                return
            self._over = True
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                self._fail(job[0], job[2])
        attempt(f"{self._name} last", self._last, _ignore, self._report)

    def _fail(self, label: str, failed: Failed) -> None:
        _quietly(failed, ThreadEnded(f"{label}: not done: thread {self._name} has ended"))


def _nothing() -> None:
    pass


def _ignore(error: BaseException) -> None:
    pass
