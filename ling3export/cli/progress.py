"""Progress of a build on stderr: bars on a terminal, plain lines elsewhere. stdout stays free for data."""

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ling3export.compile.matrix import COLUMNS, manifest_rows
from ling3export.errors import listed
from ling3export.tables import aligned

LABELS = {
    "programs": "compile programs",
    "weights": "write weights",
    "compare": "compare weights",
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
        """A line for the user."""
        self._console.print(text, markup=False)

    def start(self, stage: str, total: int) -> None:
        """A stage of ``total`` units begins."""
        with self._lock:
            self._left[stage] = total
        if self._bars is not None:
            self._tasks[stage] = self._bars.add_task(LABELS.get(stage, stage), total=total)

    def advance(self, stage: str, amount: int) -> None:
        """``amount`` more units are done."""
        with self._lock:
            self._left[stage] -= amount
            ended = self._left[stage] == 0
        if self._bars is not None:
            self._bars.advance(self._tasks[stage], amount)
        elif ended:
            self.note(f"{LABELS.get(stage, stage)}: done after {time.perf_counter() - self._started:.1f} s")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table: drawn on a terminal, aligned text elsewhere."""
        if not self._console.is_terminal:
            for line in aligned([tuple(columns), *map(tuple, rows)]):
                self.note(line)
            return
        drawn = Table(box=None, pad_edge=False)
        for index, column in enumerate(columns):
            drawn.add_column(column, justify="right" if index > 1 else "left", no_wrap=index < 2)
        for row in rows:
            drawn.add_row(*row, style="red" if row[1] == "failed" else None)
        self._console.print(drawn)

    def summary(self, artifact: Path, manifest: dict[str, Any], names: Sequence[str] | None = None) -> None:
        """The cells as a table, and where the artifact is; those of the targets ``names`` if only they are new."""
        if self._bars is not None:
            self._bars.stop()
        self.table(COLUMNS, manifest_rows(manifest, names))
        seconds = time.perf_counter() - self._started
        what = f"built {artifact}" if names is None else f"added {listed(list(names))} to {artifact}"
        self.note(f"{what} in {seconds:.1f} s ({manifest['weights']['bytes'] / 1e6:.1f} MB of weights)")
