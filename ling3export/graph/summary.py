"""``ling3export graph summary``: where a program's FLOPs, bytes and seconds go, by layer kind."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ling3export.foundation.tables import footnotes, selected
from ling3export.graph.record import Graph, Row

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
    totals = {**sums(graph.totals()), "seconds_source": graph.seconds_source, "peak_bytes": graph.peak_bytes}
    rows = [
        {"layer_kind": row.layer_kind, "operation_kind": row.operation_kind, "count": row.count, **sums(row)}
        for row in graph.rows(by)
    ]
    donated = sorted(graph.aliased)
    return {"target": graph.target, "form": graph.form, "by": by, "totals": totals, "rows": rows, "aliased": donated}


def sums(row: Row) -> dict[str, float | None]:
    """The sums of a row by the names of the schema."""
    return {
        "flops": row.flops,
        "bytes_weights": row.bytes_weights,
        "bytes_state": row.bytes_state,
        "bytes_other": row.bytes_other,
        "collective_bytes": row.collective_bytes,
        "seconds": row.seconds,
    }


def folded(graph: Graph) -> list[str]:
    """Collapsed stacks for flame graphs: layer kind, part, operation, and nanoseconds, or bytes without times."""
    timed = graph.seconds_source is not None
    lines = []
    for operation in graph.operations:
        value = operation.times * (1e9 * (operation.seconds or 0.0) if timed else operation.bytes)
        if value >= 0.5 and not operation.overlapped:
            steps = [graph.cell, operation.layer_kind or "other", *filter(None, (operation.part, operation.name))]
            lines.append(f"{';'.join(step.replace(';', ',') for step in steps)} {value:.0f}")
    return lines


def table(graph: Graph, by: str = "operation_kind") -> list[str]:
    """One cell for a person: a line for each layer kind and group, and one for each layer kind."""
    total = graph.totals()
    timed = total.seconds is not None
    whole = (total.seconds if timed else total.bytes) or 1.0
    kinds: dict[str | None, list[Row]] = {}
    for row in graph.rows(by):
        kinds.setdefault(row.layer_kind, []).append(row)
    lines = [_line("all", "", [total], whole, timed)]
    ordered = sorted(kinds.items(), key=lambda item: -_weight(item[1]))
    for layer_kind, rows in ordered:
        lines.append(_line(layer_kind or "other", "", rows, whole, timed))
        lines += [_line("", row.operation_kind, [row], whole, timed) for row in rows]
    source = graph.seconds_source
    notes = [f"µs: {SOURCES[source]}" if source else "share: of all bytes; this program has no times"]
    if graph.form == "portable":
        notes.append("portable program: bytes are those of an unfused program; FLOPs and bytes of weights are exact")
    if any(operation.overlapped for operation in graph.operations):
        notes.append("prefetches run at the same time as other operations: their bytes count, their time does not")
    if graph.unknown_loops:
        notes.append(f"{len(graph.unknown_loops)} loops have trips that the batch decides; each is counted once")
    return [f"{graph.target} {graph.cell}, {graph.form}", *selected(lines, list(lines[0])), *footnotes(notes)]


def _weight(rows: Sequence[Row]) -> float:
    return sum(row.seconds or 0.0 for row in rows) or sum(row.bytes for row in rows) * 1e-15


def _line(layer_kind: str, group: str, rows: Sequence[Row], whole: float, timed: bool) -> Mapping[str, str]:
    def total(name: str) -> float:
        return sum(getattr(row, name) or 0.0 for row in rows)

    seconds = [row.seconds for row in rows if row.seconds is not None]
    weight = sum(seconds) if timed else total("bytes")
    return {
        "layer kind": layer_kind,
        "operations": group,
        "count": f"{sum(row.count for row in rows)}",
        "GFLOP": f"{total('flops') / 1e9:.3f}",
        "weights MB": f"{total('bytes_weights') / 1e6:,.2f}",
        "state MB": f"{total('bytes_state') / 1e6:,.2f}",
        "other MB": f"{total('bytes_other') / 1e6:,.2f}",
        "moved MB": f"{total('collective_bytes') / 1e6:,.2f}",
        "µs": f"{sum(seconds) * 1e6:,.1f}" if seconds else "-",
        "share": f"{100 * weight / whole:.1f} %",
    }
