"""Keeps the duration of each test between runs on this machine, so that the longest files begin first."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest


class Seconds:
    """A plugin for the process that distributes tests (``-n``).

    Args:
        path: JSON file: seconds by test id. This run's durations are added at its end.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._now = path, dict[str, float]()
        self._known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def longest(self, files: Mapping[str, Iterable[str]]) -> str:
        """The file, or other group of test ids, whose tests took longest; the first one if no time is known."""
        return max(files, key=lambda name: sum(self._known.get(test, 0) for test in files[name]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._now[report.nodeid] = self._now.get(report.nodeid, 0) + report.duration

    def pytest_sessionfinish(self) -> None:
        written = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        written.write_text(json.dumps({name: round(each, 3) for name, each in (self._known | self._now).items()}))
        written.replace(self._path)
