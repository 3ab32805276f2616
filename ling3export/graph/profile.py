"""Measured times of operations, from a trace of jax's profiler: ``NAME.trace.json.gz``, Chrome's trace format.

An event of an operation names it in ``hlo_op``, and the call in ``run_id``. Events of one thread nest: a loop has those
of its body inside. So each operation counts by its own time, without the events inside it. A card's trace has kernels
and no calls: ``kernels.py`` finds both.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.reading import read_bytes
from ling3export.graph.kernels import KNOWN, Event, calls_of, named
from ling3export.graph.record import Graph

LARGEST = 2**28  # bytes of a trace's text: the profiler writes at most a million events
SUFFIX = ".trace.json.gz"
RECORD = "ling3export verify ARTIFACT --time --trace FOLDER"

Call = Mapping[str, float]  # the own seconds of each operation in one call, on one device


def events(data: bytes, where: str) -> list[Event]:
    """The events of operations of a trace, compressed or not; ``where`` is its name, for messages.

    Raises:
        ArtifactError: It is no trace of this form, is too large, or has no operations.
    """
    try:
        document = json.loads(_text(data, where))
        rows = document["traceEvents"]
        known = [event for event in map(_event, rows) if event is not None]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{where}: not a trace of jax's profiler ({type(error).__name__}: {error})") from error
    if not known:
        raise ArtifactError(f"{where}: the trace has no operations of a program", f"record it: {RECORD}")
    return known


def _text(data: bytes, where: str) -> bytes:
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        with gzip.open(BytesIO(data)) as opened:
            text = opened.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ArtifactError(f"{where}: damaged gzip data ({error})") from error
    if len(text) > LARGEST:
        raise ArtifactError(f"{where}: more than {LARGEST >> 20} MiB of text; trace fewer calls")
    return text


def _event(row: Any) -> Event | None:
    """An operation of a program; None for anything else."""
    details = row.get("args")
    if row.get("ph") != "X" or not isinstance(details, dict) or "hlo_op" not in details:
        return None
    begin, length = float(row["ts"]), float(row["dur"])
    if not 0 <= length < 1e12 or not abs(begin) < 1e15:
        raise ValueError(f"an event of {length} µs at {begin} µs")
    # Kernels of a CUDA graph have the graph as their operation; their own name is the event's.
    name, node = str(details["hlo_op"]), None
    if name.startswith("command_buffer"):
        name, node = str(row["name"]), f"{name} {details.get('cuda_graph_node_id')}"
    device = str(details.get("device_ordinal", row.get("pid")))
    run = str(details.get("run_id", details.get("group_id", "")))
    return Event(name, run, device, (str(row.get("pid")), str(row.get("tid"))), begin, length, node)


def calls(ordered: Iterable[Event]) -> dict[tuple[str, str], Call]:
    """The calls of programs by run and device; events and calls are in the order of their beginning."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in ordered:
        groups.setdefault((event.run, event.device), []).append(event)
    return {key: _call(group) for key, group in groups.items()}


def _call(group: list[Event]) -> Call:
    threads: dict[tuple[str, str], list[Event]] = {}
    for event in group:
        threads.setdefault(event.thread, []).append(event)
    seconds: dict[str, float] = {}
    for thread in threads.values():
        for name, own in own_times(thread):
            seconds[name] = seconds.get(name, 0.0) + own * 1e-6
    return seconds


def own_times(ordered: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """The name of each event of one thread, and its microseconds without those of the events inside it.

    A card may begin a kernel before the one before it ends: the earlier one counts until then. Events are ordered by
    their beginning; of two that begin together the longer one comes first.
    """
    open_: list[tuple[float, str, list[float]]] = []  # end, name, own time
    for event in ordered:
        while open_ and open_[-1][0] <= event.begin:
            _, name, own = open_.pop()
            yield name, max(own[0], 0.0)
        if open_:
            open_[-1][2][0] -= min(event.length, open_[-1][0] - event.begin)
        open_.append((event.begin + event.length, event.name, [event.length]))
    for _, name, own in open_:
        yield name, max(own[0], 0.0)


@dataclass(frozen=True)
class Joined:
    """A graph with measured seconds.

    Attributes:
        graph: Every operation that the trace has takes its seconds from it; others have none.
        calls: How many calls were averaged, over all devices.
        unmatched: The share of the measured time that is of no operation: that of loops and calls themselves, mostly.
    """

    graph: Graph
    calls: int
    unmatched: float


def joined(graph: Graph, events: Iterable[Event], where: str) -> Joined:
    """The mean seconds of each operation over the calls of this program, matched by names.

    A call counts if the operations of ``graph``, an optimized program, have ``KNOWN`` of its time. The calls of a card
    count together.

    Raises:
        ArtifactError: No call is one of this program.
    """
    times: dict[str, float] = {}  # an instruction that is called in several places has one name in the trace
    for operation in graph.operations:
        name = operation.instruction
        times[name] = times.get(name, 0.0) + operation.times
    around = {name for operation in graph.operations for name in operation.name.split("/")}  # loops and calls, too
    total, known, count = 0.0, 0.0, 0
    seconds: dict[str, float] = {}
    ordered = named(events, graph.operations)
    together = None if any(event.run for event in ordered) else calls_of(ordered, graph.operations)
    for (_, device), call in calls(ordered).items():
        whole = sum(call.values())
        own = sum(value for name, value in call.items() if name in around or name in times)
        runs = 1 if together is None else together.get(device, 0)
        if own < KNOWN * whole or not runs:
            continue
        count += runs
        total += whole
        for name, value in call.items():
            if name in times:
                seconds[name] = seconds.get(name, 0.0) + value
                known += value
    if not count:
        raise ArtifactError(
            f"{where}: no call in the trace is one of {graph.target} {graph.cell}",
            f"each cell has a trace of its own: {RECORD}",
        )
    operations = []
    for operation in graph.operations:
        name = operation.instruction
        run = seconds[name] / count / times[name] if name in seconds and times[name] else None
        operations.append(replace(operation, seconds=run, source=None if run is None else "measured"))
    return Joined(replace(graph, operations=tuple(operations)), count, max(0.0, 1 - known / total) if total else 0.0)


def trace_of(path: Path, cell: str) -> tuple[bytes, str]:
    """A trace's bytes and its name; ``path`` is a trace, or a folder with a ``CELL.trace.json.gz`` of each cell.

    Raises:
        ArtifactError: There is no such file, or it is too large.
    """
    file = path / f"{cell}{SUFFIX}" if path.is_dir() else path
    try:
        return read_bytes(file.parent, file.name, LARGEST, links=True), file.name
    except OSError as error:
        raise ArtifactError(f"{file}: no trace ({error.strerror})", f"record it: {RECORD}") from error
