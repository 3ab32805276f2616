"""Programs as one HTML page without outside references: data for ``view.html``, drawn by its two scripts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ling3export.graph.diff import Difference, values
from ling3export.graph.memory import Timeline
from ling3export.graph.record import Graph, Operation
from ling3export.graph.show import fused
from ling3export.graph.summary import SOURCES


@dataclass(frozen=True)
class Shown:
    """One cell of the page; its memory is None if no optimized program is kept."""

    graph: Graph
    memory: Timeline | None = None
    difference: Difference | None = None


def path(operation: Operation) -> list[str]:
    """The named parts of a layer kind that an operation belongs to, or the kind of its work if none is named."""
    return operation.part.split("/") if operation.part else [operation.kind]


def page(cells: Sequence[Shown]) -> str:
    """The page. Names of a program are data in it, never markup."""
    folder = files("ling3export.graph")
    text = folder.joinpath("view.html").read_text()
    for mark, name in (("@CHARTS@", "view_charts.js"), ("@VIEW@", "view.js")):
        text = text.replace(mark, f"\n{folder.joinpath(name).read_text()}")
    data = json.dumps([_cell(one) for one in cells], separators=(",", ":"))
    return text.replace("@DATA@", data.replace("<", "\\u003c"))


def _cell(shown: Shown) -> dict[str, Any]:
    graph, difference = shown.graph, shown.difference
    memory = shown.memory
    source = graph.seconds_source
    return {
        "cell": graph.cell,
        "target": graph.target,
        "form": graph.form,
        "source": SOURCES[source] if source else None,
        "flops": graph.peak_flops,
        "bandwidth": graph.bandwidth,
        "peak": graph.peak_bytes,
        "operations": [_operation(graph, one) for one in graph.operations],
        "memory": memory
        and {
            "points": memory.points,
            "inputs": [_tensor(vars(one)) for one in memory.inputs],
            "at_peak": [_tensor(vars(one)) for one in memory.at_peak],
        },
        "difference": difference
        and {
            **values(difference),
            "before": f"{difference.before.target} {difference.before.cell}",
            "after": f"{difference.after.target} {difference.after.cell}",
        },
    }


def _tensor(fields: dict[str, Any]) -> list[Any]:
    return [fields[name] for name in ("name", "bytes", "what", "shape", "layer_kind")]


def _operation(graph: Graph, one: Operation) -> dict[str, Any]:
    """An operation as JSON values; costs are those of a call, all its runs."""
    values = {name: getattr(one, name) for name in ("name", "opcode", "scope", "operands", "layers", "source")}
    values |= {name: getattr(one, name) for name in ("weights", "target", "overlapped")}
    values |= {
        "work": one.kind,
        "kind": one.layer_kind or "other",
        "path": path(one),
        "shapes": ", ".join(one.shapes),
        "runs": one.times,
        "seconds": one.times * (one.seconds or 0.0),
        "flops": one.total("flops"),
        "bytes": one.total("bytes"),
        "moved": one.total("collective_bytes"),
        "fed": graph.fed[one.name],
        "bound": graph.bound(one),
        "fused": fused(one),
    }
    return {name: value for name, value in values.items() if value}
