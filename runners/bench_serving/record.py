"""A run as one line of JSON, runs side by side as a table, and a page with their figures and distributions."""

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import open_own
from ling3export.artifacts.schema import Manifest
from ling3export.foundation.pages import template
from ling3export.runners.bench_serving.metrics import PHASES, Figures, RequestResult
from ling3export.runners.bench_serving.run import Run
from ling3export.runners.bench_serving.workloads import SampleRequest

TEMPLATES = Path(__file__).parent / "templates"
BINS, SLICES = 24, 40  # bars of a distribution, and of throughput over time
FIRST = {"first": "first decode", "http": "HTTP"}  # phases that rows call otherwise
# (what a row of the comparison is called, where its figure is, how often the record's unit is in the row's)
ROWS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("Successful requests", ("completed",), 1),
    ("Failed requests", ("failed",), 1),
    ("Benchmark duration (s)", ("duration",), 1),
    ("Request throughput (req/s)", ("request_throughput",), 1),
    ("Output token throughput (tok/s)", ("output_throughput",), 1),
    ("Total token throughput (tok/s)", ("total_throughput",), 1),
    ("Concurrency", ("concurrency",), 1),
    ("Mean E2E Latency (ms)", ("e2e", "mean"), 1),
    ("Mean TTFT (ms)", ("ttft", "mean"), 1),
    ("P99 TTFT (ms)", ("ttft", "p99"), 1),
    ("Mean TPOT (ms)", ("tpot", "mean"), 1),
    ("Mean ITL (ms)", ("itl", "mean"), 1),
    ("P99 ITL (ms)", ("itl", "p99"), 1),
)
PHASES_TITLE = "Phases: all but decode add up to TTFT"
PHASE_ROWS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    *(
        (f"{of} {FIRST.get(phase, phase)} (ms)", ("phases", phase, of.lower()), 1)
        for phase in PHASES
        for of in ("Mean", "Median")
    ),
    ("States transferred (%)", ("remote_prefill_share",), 100),
    ("Save and transfer of TTFT (%)", ("moving_share",), 100),
    ("Mean bytes of a state (MB)", ("transfer_bytes",), 1e-6),
    ("Transfer (GB/s)", ("transfer_speed",), 1e-9),
)


def workload_digest(asks: Sequence[SampleRequest]) -> str:
    """sha256 of a workload: the same for the same requests."""
    return hashlib.sha256(json.dumps([asdict(ask) for ask in asks]).encode()).hexdigest()


def record(
    name: str,
    arguments: Mapping[str, Any],
    found: Figures,
    done: Run,
    asks: Sequence[SampleRequest],
    manifest: Manifest | None,
    *,
    raw: bool,
) -> dict[str, Any]:
    """A run as JSON.

    Args:
        name: What was measured, for people.
        arguments: What the command was given.
        found: The figures.
        done: The run.
        asks: The workload.
        manifest: The artifact's; None where none was given.
        raw: Also times, lengths and errors of every request.
    """
    line: dict[str, Any] = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg()[0], "system": platform.platform()},
        "versions": {each: version(each) for each in ("ling3export", "jax")},
        "artifact": None if manifest is None else {"checkpoint": manifest.source.name, "sha256": manifest.sha256},
        "workload_sha256": workload_digest(asks),
        "arguments": {key: _plain(value) for key, value in arguments.items()},
        "interrupted": bool(done.unfinished),
        "unfinished": done.unfinished,
        "compiles": done.compiles,
        "figures": asdict(found),
    }
    if raw:
        line["requests"] = [asdict(result) | {"phases": result.phases} for result in done.results]
    return line


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Adds a line to a file, which is made if it is missing."""
    data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
    with open_own(path, append=True) as file:
        file.write(data)


def side_by_side(records: Sequence[Mapping[str, Any]]) -> str:
    """Runs as columns, each but the first with its ratio to the first; then the phases of their requests, if known."""
    rows = [["", *(str(each["name"]) for each in records)]]
    parts = [
        [[title, *_cells(values, scale)] for title, values, scale in _rows(these, records)]
        for these in (ROWS, PHASE_ROWS)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, *parts[0], *parts[1], strict=True)]
    rule = [f"{f' {PHASES_TITLE} ':-^{sum(widths) + 2 * len(records)}}"] if parts[1] else []
    lines = [
        ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in part]
        for part in (rows + parts[0], parts[1])
    ]
    return "\n".join([*lines[0], *rule, *lines[1]])


def page(records: Sequence[Mapping[str, Any]], results: Sequence[Sequence[RequestResult]]) -> str:
    """A page that refers to nothing outside itself: figures, distributions, throughput over time, runs side by side.

    Args:
        records: Of the runs.
        results: Of each run, what became of its requests.
    """
    runs = []
    for each, found in zip(records, results, strict=True):
        done = [result for result in found if result.error is None]
        figures = [
            ("Time to first token, ms", distribution([1e3 * result.ttft for result in done if result.times])),
            ("Gap between tokens, ms", distribution([1e3 * gap for result in done for gap in result.itl])),
            ("Tokens per second, by seconds after the first submission", over_time(done)),
        ]
        runs.append({"record": each, "figures": [(title, bars) for title, bars in figures if bars]})
    rows, phases = (
        [
            (title, [None if value is None else value * scale for value in values])
            for title, values, scale in _rows(these, records)
        ]
        for these in (ROWS, PHASE_ROWS)
    )
    bars = [
        (f"{FIRST.get(phase, phase)}, {each['name']}", value)
        for phase in PHASES
        for each in records
        if (value := _value(each["figures"], ("phases", phase, "mean"))) is not None
    ]
    return template(TEMPLATES, "bench.html").render(
        records=records, rows=rows, phases=phases, phase_bars=bars, runs=runs
    )


def distribution(values: Sequence[float]) -> list[tuple[str, float]]:
    """(range, how many values lie in it), in ranges of equal ratio; nothing without values above 0."""
    above = [value for value in values if value > 0]
    if not above:
        return []
    low, high = min(above), max(above)
    step = math.log(high / low) / BINS if high > low else 1.0
    counts = [0] * BINS
    for value in above:
        counts[min(int(math.log(value / low) / step), BINS - 1)] += 1
    return [(f"{low * math.exp(step * at):.3g}", float(count)) for at, count in enumerate(counts)]


def over_time(results: Sequence[RequestResult]) -> list[tuple[str, float]]:
    """(seconds after the first submission, tokens per second from then on), in slices of equal length."""
    times = [at for result in results for at in result.times]
    if not times:
        return []
    start = min(result.start for result in results)
    length = max(max(times) - start, 1e-6) / SLICES
    counts = [0] * SLICES
    for at in times:
        counts[min(int((at - start) / length), SLICES - 1)] += 1
    return [(f"{length * at:.3g}", count / length) for at, count in enumerate(counts)]


def _value(found: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = found
    for name in path:
        value = None if value is None else value.get(name)
    return value


def _rows(
    which: Sequence[tuple[str, tuple[str, ...], float]], records: Sequence[Mapping[str, Any]]
) -> list[tuple[str, list[Any], float]]:
    """Those rows of which at least one run knows a figure."""
    found = [(title, [_value(each["figures"], path) for each in records], scale) for title, path, scale in which]
    return [row for row in found if any(value is not None for value in row[1])]


def _cells(values: Sequence[Any], scale: float) -> list[str]:
    return [_shown(value, values[0], scale, at) for at, value in enumerate(values)]


def _shown(value: Any, first: Any, scale: float, at: int) -> str:
    if value is None:
        return "-"
    text = f"{value * scale:.{3 if scale < 1 else 2}f}" if isinstance(value, float) or scale != 1 else str(value)
    return f"{text} ({value / first:.2f}×)" if at and first else text


def _plain(value: Any) -> Any:
    """An argument as JSON has it: infinity and paths become texts."""
    finite = isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if value is None or finite else str(value)
