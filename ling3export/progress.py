"""Progress of a build on stderr: bars on a terminal, plain lines elsewhere. stdout stays free for data."""

import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

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

    def summary(self, artifact: Path, manifest: dict[str, Any]) -> None:
        """The cells as a table, and where the artifact is."""
        if self._bars is not None:
            self._bars.stop()
        table = Table("cell", "status", "seconds", "program", "temporaries", "worst error", box=None, pad_edge=False)
        for name, target in manifest["targets"].items():
            receipts = manifest["vectors"]["receipts"].get(name, {}).get("cells", {})
            for cell, record in target["cells"].items():
                size = record["exec"]["bytes"] + record["stablehlo"]["bytes"]
                error = receipts.get(cell, {}).get("relative")
                table.add_row(
                    f"{name} {cell}", record["status"], f"{record['compile_seconds']:.1f}", f"{size / 1e6:.2f} MB",
                    f"{record['memory']['temporaries'] / 1e6:.1f} MB", "" if error is None else f"{error:.1e}",
                )  # fmt: skip
        self._console.print(table)
        seconds = time.perf_counter() - self._started
        self.note(f"built {artifact} in {seconds:.1f} s ({manifest['weights']['bytes'] / 1e6:.1f} MB of weights)")
