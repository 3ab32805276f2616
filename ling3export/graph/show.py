"""Single operations of a program: where each belongs, what it costs, what is fused in it, and what it reads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ling3export.foundation.tables import footnotes, selected
from ling3export.graph.record import OF_JAX, Graph, Operation

DETAILED = 5  # operations that are shown with everything


def matching(graph: Graph, pattern: str) -> list[Operation]:
    """Operations whose name, opcode, kind, scope, layer, weight or custom call contains a text, in program order."""
    wanted = pattern.lower()

    def texts(one: Operation) -> list[str]:
        layers = [f"layer {number} " for number in one.layers]
        own = [one.name, one.opcode, one.kind, one.layer_kind or "other", one.scope, one.target or ""]
        return [*own, *layers, *one.weights, *one.shapes]

    return [one for one in graph.operations if any(wanted in text.lower() for text in texts(one))]


def document(graph: Graph, operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """Operations as JSON values; costs are those of one run."""
    users = readers(graph)
    return [
        {name: value for name, value in vars(one).items() if name not in ("digest", "shared")}
        | {"bound_by": graph.bound(one) or None, "read_by": users.get(one.name, [])}
        for one in operations
    ]


def readers(graph: Graph) -> Mapping[str, list[str]]:
    """Names of the operations that read the result of one, by its name."""
    users: dict[str, list[str]] = {}
    for one in graph.operations:
        for name in dict.fromkeys(one.operands):
            users.setdefault(name, []).append(one.name)
    return users


def table(graph: Graph, operations: Sequence[Operation]) -> list[str]:
    """Operations for a person: a line each, or everything about a few."""
    title = f"{graph.target} {graph.cell}, {graph.form}: {len(operations)} of {len(graph.operations)} operations"
    if not operations:
        return [title]
    if len(operations) <= DETAILED:
        users = readers(graph)
        return [title, *(line for one in operations for line in ["", *_details(graph, one, users.get(one.name, []))])]
    rows = [
        {
            "operation": one.name,
            "layer kind": one.layer_kind or "other",
            "layers": ranges(one.layers).partition(" ")[2] or "-",
            "work": one.kind,
            "runs": f"{one.times:g}",
            "µs": "-" if one.seconds is None else f"{one.times * one.seconds * 1e6:,.2f}",
            "bytes": size(one.total("bytes")),
            "moved": size(one.total("collective_bytes")),
            "bound by": graph.bound(one) or "-",
        }
        for one in operations
    ]
    return [title, *selected(rows, list(rows[0])), *footnotes(["µs and bytes are those of all runs in a call"])]


def _details(graph: Graph, one: Operation, users: Sequence[str]) -> list[str]:
    values = facts(graph, one) | {"reads": ", ".join(dict.fromkeys(one.operands)), "read by": ", ".join(users)}
    return [one.name, *(f"  {name:<12}{value}" for name, value in values.items() if value)]


def facts(graph: Graph, one: Operation) -> dict[str, str]:
    """Everything about an operation but its neighbours, by name; some facts are empty."""
    moved = {
        "reads": sum(one.read.values()),
        "writes": sum(one.written.values()),
        "moves between devices": one.collective_bytes,
    }
    costs = [f"{one.flops / 1e6:,.3f} MFLOP"] if one.flops else []
    costs += [f"{verb} {size(count)}" for verb, count in moved.items() if count]
    costs += [f"{one.seconds * 1e6:,.2f} µs ({one.source})"] if one.seconds is not None else []
    costs += [f"bound by {bound}"] if (bound := graph.bound(one)) else []
    return {
        "layer kind": ", ".join(filter(None, (one.layer_kind or "none", ranges(one.layers)))),
        "work": f"{one.kind} ({one.opcode})",
        "scope": "/".join(step for step in one.scope.split("/") if not OF_JAX.fullmatch(step)),
        "result": ", ".join(one.shapes),
        "runs": f"{one.times:g} in a call",
        "one run": ", ".join(costs),
        "fused": ", ".join(fused(one)),
        "custom call": one.target or "",
        "weights": ", ".join(one.weights),
    }


def fused(one: Operation) -> list[str]:
    """The opcodes inside a fusion, each with its number if there are several."""
    return [f"{opcode} {count}" if count > 1 else opcode for opcode, count in Counter(one.fused).items()]


def size(count: float) -> str:
    """Bytes with a decimal unit; ``-`` for none."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B" if count else "-"


def ranges(layers: Sequence[int]) -> str:
    """``layer 7``, ``layers 0-2, 4-6``; empty for none."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(parts)}" if parts else ""
