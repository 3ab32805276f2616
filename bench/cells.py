"""Compiling every cell of the default plan at full size for a slice that is not here: seconds, and memory of it all."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.report import machine, say, show, table
from ling3export.checkpoint.synth import config_fields
from ling3export.compile.pool import Compilers
from ling3export.foundation.errors import PlanError
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

PERIOD = 0.2  # seconds between looks at the processes


def resident() -> tuple[int, int]:
    """Resident bytes of this process and all its descendants: proportional ones, and anonymous ones."""
    parents, found = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    for pid in ours:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        found[pid] = sizes.get("Pss", 0), sizes.get("Anonymous", 0)
    return sum(each[0] for each in found.values()), sum(each[1] for each in found.values())


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Fills in the peaks of :func:`resident` within the block."""
    peak, done = {"resident": 0, "anonymous": 0}, threading.Event()

    def look() -> None:
        while not done.wait(PERIOD):
            whole, anonymous = resident()
            peak["resident"], peak["anonymous"] = max(peak["resident"], whole), max(peak["anonymous"], anonymous)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def main(target: str, jobs: int | None) -> dict[str, Any]:
    """Measures and prints."""
    config = Config.from_dict(config_fields("full", {}))
    plan = make_plan(config, Options(), target)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, watched() as peak:
        outcome = Compilers(plan, config, Path(folder), jobs).run(
            plan.cells, lambda cell, built: say(f"{cell.name}: {built.program.compile_seconds} s")
        )
        if failed := outcome.failures:
            raise PlanError(f"bench: expected every cell to build, {len(failed)} did not: {failed}")
        files = sum(file.stat().st_size for file in Path(folder).iterdir())
    seconds = time.perf_counter() - started
    rows = [
        [
            name,
            row.lower_seconds,
            row.compile_seconds,
            row.memory.peak / 1e6,
            None if row.estimated_seconds is None else 1e3 * row.estimated_seconds,
        ]
        for name, row in ((name, built.program) for name, built in outcome.built.items())
    ]
    result = {
        "target": target,
        "seconds": seconds,
        "peak_bytes": peak,
        "file_bytes": files,
        "machine": machine(),
        "cells": {
            row[0]: dict(zip(("lower_s", "compile_s", "device_mb", "estimated_ms"), row[1:], strict=True))
            for row in rows
        },
    }
    title = (
        f"All {len(rows)} cells of the default plan at full size for {target}: {seconds:.0f} s, "
        f"{peak['resident'] / 1e9:.1f} GB resident in all processes ({peak['anonymous'] / 1e9:.1f} anonymous), "
        f"{files / 1e6:.0f} MB of programs, load average {machine()['load_average'][0]}"
    )
    show(title, [table(["cell", "lower s", "compile s", "MB a device", "estimated ms"], rows)], result)
    return result
