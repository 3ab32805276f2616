"""Programs as files of Google's Model Explorer: a graph, overlays of costs, and what belongs together in two graphs.

The formats are those of github.com/google-ai-edge/model-explorer: ``GraphCollection``, ``ModelNodeData`` and
``SyncNavigationData``.
"""

from pathlib import Path
from typing import Any

from ling3export.graph.diff import Difference
from ling3export.graph.record import Graph, Operation
from ling3export.graph.show import ranges
from ling3export.graph.view import path

GRADIENT = [{"stop": 0, "bgColor": "#f6f3ee"}, {"stop": 1, "bgColor": "#e9a15b"}]


def documents(place: Path, graph: Graph, difference: Difference | None) -> dict[Path, Any]:
    """The files by path: the graph at ``place``, and next to it overlays, the graph before and the pairs."""
    values = {
        "time": {one.name: one.times * (one.seconds or 0.0) * 1e6 for one in graph.operations if not one.overlapped},
        "bytes": {one.name: one.times * one.bytes for one in graph.operations},
        "flops": {one.name: one.times * one.flops for one in graph.operations},
    }
    names = {"time": "time (µs)", "bytes": "bytes", "flops": "FLOPs"}
    files: dict[Path, Any] = {place: collection(graph)}
    for name, results in values.items():
        shown = {operation: {"value": round(value, 3)} for operation, value in results.items() if value}
        overlay = {"name": names[name], "results": shown, "gradient": GRADIENT}
        files[place.with_suffix(f".{name}.json")] = {graph.cell: overlay}
    if difference is not None:
        files[place.with_suffix(".before.json")] = collection(difference.before, " (before)")
        files[place.with_suffix(".sync.json")] = pairs(difference)
    return files


def pairs(difference: Difference) -> dict[str, Any]:
    """Which nodes of two panes belong together; the graph before is in the left one.

    A node without a partner is mapped to one that does not exist: the viewer then marks it as deleted or new.
    """
    entries = [([one.name], [other.name]) for one, other in difference.pairs]
    for change in difference.changes:
        if change.before is None or change.after is None:
            name, missing = change.operation.name, f"{change.kind}: {change.operation.name}"
            entries.append(([missing], [name]) if change.before is None else ([name], [missing]))
    return {
        "type": "sync_navigation",
        "mappingEntries": [{"leftNodeIds": left, "rightNodeIds": right} for left, right in entries],
        "disableMappingFallback": True,
        "showDiffHighlights": True,
    }


def collection(graph: Graph, note: str = "") -> dict[str, Any]:
    """A graph whose groups are layers, layer kinds and their parts; ``note`` follows its names."""
    names = {one.name for one in graph.operations}
    nodes = [_node(one, names) for one in graph.operations]
    return {"label": f"{graph.target} {graph.cell}{note}", "graphs": [{"id": f"{graph.cell}{note}", "nodes": nodes}]}


def _node(one: Operation, names: set[str]) -> dict[str, Any]:
    groups = [*([ranges(one.layers)] if one.layers else []), one.layer_kind or "other", *path(one)]
    values = {
        "opcode": one.opcode,
        "work": one.kind,
        "scope": one.scope,
        "runs in a call": f"{one.times:g}",
        "µs": "" if one.seconds is None else f"{one.times * one.seconds * 1e6:.3f}",
        "bytes": f"{one.times * one.bytes:.0f}",
        "FLOPs": f"{one.times * one.flops:.0f}",
        "weights": ", ".join(one.weights),
        "custom call": one.target or "",
    }
    sources = [name for name in dict.fromkeys(one.operands) if name in names]
    return {
        "id": one.name,
        "label": one.name.rpartition("/")[2],
        "namespace": "/".join(group.replace("/", "∕") for group in groups),
        "attrs": [{"key": key, "value": value} for key, value in values.items() if value],
        "incomingEdges": [
            {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(number)}
            for number, name in enumerate(sources)
        ],
        "outputsMetadata": [
            {"id": str(number), "attrs": [{"key": "shape", "value": shape}]} for number, shape in enumerate(one.shapes)
        ],
    }
