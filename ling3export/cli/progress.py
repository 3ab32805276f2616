"""Progress of a build on stderr: bars on a terminal, plain lines elsewhere. stdout stays free for data."""

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ling3export.artifacts.program_records import Program
from ling3export.artifacts.receipts import ERROR_COLUMNS, NO_WEIGHTS, error_columns, told
from ling3export.artifacts.schema import Manifest
from ling3export.cache.cells import CELL, PROGRAM
from ling3export.compile.pool import BuildOutcome
from ling3export.foundation.errors import listed, printable
from ling3export.foundation.tables import aligned, footnotes

COLUMNS = ("cell", "status", "seconds", "peak MB")
LABELS = {
    "programs": "compile programs",
    "weights": "write weights",
    "vectors": "compute vectors",
    "receipts": "check receipts",
    "signatures": "trace signatures",
}


class Console:
    """The reporter of the command line."""

    def __init__(self) -> None:
        self._console = RichConsole(stderr=True, soft_wrap=True, highlight=False)
        self._bars: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description:18}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            self._bars = Progress(*columns, TimeElapsedColumn(), console=self._console)
        self._tasks: dict[str, TaskID] = {}
        self._left: dict[str, int] = {}
        self._started = time.perf_counter()
        self._lock = threading.Lock()

    def __enter__(self) -> "Console":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False)

    def start(self, stage: str, total: int) -> None:
        with self._lock:
            self._left[stage] = total
        if self._bars is not None:
            self._tasks[stage] = self._bars.add_task(LABELS.get(stage, stage), total=total)

    def advance(self, stage: str, amount: int) -> None:
        with self._lock:
            self._left[stage] -= amount
            ended = self._left[stage] == 0
        if self._bars is not None:
            self._bars.advance(self._tasks[stage], amount)
        elif ended:
            self.note(f"{LABELS.get(stage, stage)}: done after {time.perf_counter() - self._started:.1f} s")

    def failed(self, outcomes: Sequence[BuildOutcome]) -> None:
        """Shows every cell of a failed build, in the order in which they started."""
        for outcome in outcomes:
            rows = []
            for cell in outcome.plan.cells:
                if cell.name in outcome.failures:
                    rows.append((cell.name, "failed", "-", "-"))
                elif cell.name in outcome.built:
                    rows.append((cell.name, *_built(outcome.built[cell.name].program)))
                else:
                    rows.append((cell.name, "not started", "-", "-"))
            self._table(outcome.plan.target.name, [COLUMNS, *rows])

    def summary(self, artifact: Path, manifest: Manifest, names: Sequence[str] | None = None) -> None:
        """Shows the cells as tables, and the artifact's folder; with ``names`` only these targets are new."""
        if self._bars is not None:
            self._bars.stop()
        for name in manifest.targets if names is None else names:
            self._target(name, manifest)
        seconds = time.perf_counter() - self._started
        what = f"built {artifact}" if names is None else f"added {listed(list(names))} to {artifact}"
        held = f"{manifest.weights.nbytes / 1e6:.1f} MB of weights" if manifest.has_weights else NO_WEIGHTS
        self.note(f"{what} in {seconds:.1f} s ({held})")

    def _target(self, name: str, manifest: Manifest) -> None:
        target, receipts = manifest.targets[name], manifest.measured(name)
        rows: list[tuple[str, ...]] = [(*COLUMNS, *ERROR_COLUMNS)]
        rows += [(cell.name, *_built(cell), *error_columns(cell.name, receipts)) for cell in target.cells.values()]
        self._table(name, rows)
        note = "this machine cannot run these programs: run ling3export verify on one that can"
        if not manifest.has_weights:
            note = f"not run: {NO_WEIGHTS}"
        for line in footnotes([note] if receipts is None else told(receipts)):
            self.note(line)

    def _table(self, target: str, rows: Sequence[tuple[str, ...]]) -> None:
        self.note(f"{target}:")
        for row, line in zip(rows, aligned(rows), strict=True):
            self._console.print(line, markup=False, style="red" if row[1] == "failed" else None)


def _built(program: Program) -> tuple[str, str, str]:
    """Status, seconds and peak of a cell.

    Its record has the seconds of the build that made it: a cell of the cache took none now, a program of the cache no
    compiling.
    """
    origin = None if program.origin is None else program.origin.source
    cached = origin in (CELL, PROGRAM)
    spent = program.lower_seconds + (0 if cached else program.compile_seconds)
    return (
        "cached" if cached else "compiled",
        "-" if origin == CELL else f"{spent:.1f}",
        f"{program.memory.peak / 1e6:,.1f}",
    )
