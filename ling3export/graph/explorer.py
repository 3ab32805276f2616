"""Programs as files of Google's Model Explorer: a graph, overlays of costs, and what belongs together in two graphs.

The formats are those of github.com/google-ai-edge/model-explorer: ``GraphCollection``, ``ModelNodeData`` and
``SyncNavigationData``.
"""

from pathlib import Path
from typing import Any

from ling3export.graph.diff import Difference
from ling3export.graph.record import Graph, Operation
from ling3export.graph.show import facts, ranges
from ling3export.graph.view import path

GRADIENT = [{"stop": 0, "bgColor": "#f6f3ee"}, {"stop": 1, "bgColor": "#e9a15b"}]
OVERLAYS = (("time", "time (µs)", "seconds", 1e6), ("bytes", "bytes", "bytes", 1), ("flops", "FLOPs", "flops", 1))


def documents(place: Path, graph: Graph, difference: Difference | None) -> dict[Path, Any]:
    """The files by path: the graph at ``place``, and next to it overlays, the graph before and the pairs."""
    files: dict[Path, Any] = {place: collection(graph)}
    for name, title, quantity, unit in OVERLAYS:
        values = {one.name: one.total(quantity) * unit for one in graph.operations}
        results = {operation: {"value": round(value, 3)} for operation, value in values.items() if value}
        overlay = {"name": title, "results": results, "gradient": GRADIENT}
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
    nodes = [_node(graph, one, names) for one in graph.operations]
    return {"label": f"{graph.target} {graph.cell}{note}", "graphs": [{"id": f"{graph.cell}{note}", "nodes": nodes}]}


def _node(graph: Graph, one: Operation, names: set[str]) -> dict[str, Any]:
    groups = filter(None, (ranges(one.layers), one.layer_kind or "other", *path(one)))
    sources = [name for name in dict.fromkeys(one.operands) if name in names]
    return {
        "id": one.name,
        "label": one.name.rpartition("/")[2],
        "namespace": "/".join(group.replace("/", "∕") for group in groups),
        "attrs": [{"key": key, "value": value} for key, value in facts(graph, one).items() if value],
        "incomingEdges": [
            {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(number)}
            for number, name in enumerate(sources)
        ],
        "outputsMetadata": [
            {"id": str(number), "attrs": [{"key": "shape", "value": shape}]} for number, shape in enumerate(one.shapes)
        ],
    }
