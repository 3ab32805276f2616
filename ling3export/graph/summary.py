"""``ling3export graph summary``: where a program's FLOPs, bytes and seconds go, by layer kind."""

from collections.abc import Iterable, Mapping
from typing import Any

from ling3export.foundation.tables import footnotes, selected
from ling3export.graph.record import Graph, Row, columns

SCHEMA = "ling3.graph/1"
BY = {"operation-kind": "operation_kind", "layer": "layer", "part": "part", "operation": "operation"}
SOURCES = {
    "compiler": "the compiler's estimate; operations without one by the roofline",
    "roofline": "the roofline of the device: bytes over its bandwidth, or FLOPs over its peak",
    "measured": "measured",
}


def document(graphs: Iterable[Graph], by: str = "operation_kind") -> dict[str, Any]:
    """The summary of some cells as JSON values, by the schema ``SCHEMA``."""
    return {"schema": SCHEMA, "cells": {graph.cell: cell(graph, by) for graph in graphs}}


def cell(graph: Graph, by: str = "operation_kind") -> dict[str, Any]:
    """The summary of one cell."""
    totals = {**graph.totals().sums, "seconds_source": graph.seconds_source, "peak_bytes": graph.peak_bytes}
    rows = [
        {"layer_kind": row.layer_kind, "operation_kind": row.operation_kind, "count": row.count, **row.sums}
        for row in graph.rows(by)
    ]
    donated = sorted(graph.aliased)
    return {"target": graph.target, "form": graph.form, "by": by, "totals": totals, "rows": rows, "aliased": donated}


def folded(graph: Graph) -> list[str]:
    """Collapsed stacks for flame graphs: layer kind, part, operation, and nanoseconds, or bytes without times."""
    timed = graph.seconds_source is not None
    lines = []
    for operation in graph.operations:
        value = 1e9 * operation.total("seconds") if timed else operation.total("bytes")
        if value >= 0.5 and not operation.overlapped:
            steps = [graph.cell, operation.layer_kind or "other", *filter(None, (operation.part, operation.name))]
            lines.append(f"{';'.join(step.replace(';', ',') for step in steps)} {value:.0f}")
    return lines


def table(graph: Graph, by: str = "operation_kind") -> list[str]:
    """One cell for a person: a line for each layer kind and group, and one for each layer kind."""
    whole = graph.totals()
    lines = [_line(whole, "all", "", whole)]
    rows = graph.rows(by)
    for kind in graph.rows("layer_kind"):
        lines.append(_line(kind, kind.layer_kind or "other", "", whole))
        lines += [_line(row, "", row.operation_kind, whole) for row in rows if row.layer_kind == kind.layer_kind]
    source = graph.seconds_source
    notes = [f"µs: {SOURCES[source]}" if source else "share: of all bytes; this program has no times"]
    if graph.form == "portable":
        notes.append("portable program: bytes are those of an unfused program; FLOPs and bytes of weights are exact")
    if any(operation.overlapped for operation in graph.operations):
        notes.append("prefetches run at the same time as other operations: their bytes count, their time does not")
    if graph.unknown_loops:
        notes.append(f"{len(graph.unknown_loops)} loops have trips that the batch decides; each is counted once")
    return [f"{graph.target} {graph.cell}, {graph.form}", *selected(lines, list(lines[0])), *footnotes(notes)]


def _line(row: Row, layer_kind: str, group: str, whole: Row) -> Mapping[str, str]:
    share = (row.seconds or 0.0) / whole.seconds if whole.seconds else row.bytes / (whole.bytes or 1.0)
    return {
        "layer kind": layer_kind,
        "operations": group,
        "count": f"{row.count}",
        **columns(row.sums),
        "share": f"{100 * share:.1f} %",
    }
