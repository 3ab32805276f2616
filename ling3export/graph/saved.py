"""Files of ``graph summary --json`` as graphs, so that a program compares with an earlier one whose artifact is gone.

Such a graph has one operation for each row of the summary: its layer kind is the scope, its kind of work the opcode.
"""

import json
from collections.abc import Mapping
from typing import Any

from ling3export.foundation.errors import ArtifactError
from ling3export.graph.record import PLACES, QUANTITIES, Graph, Operation
from ling3export.graph.summary import SCHEMA, cell

LONGEST = 256  # characters of a name


def read(data: bytes, where: str) -> dict[str, Graph]:
    """The cells of a summary, by name.

    Raises:
        ArtifactError: It is no summary by operation kind, or has another schema.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: not JSON: {error}") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ArtifactError(
            f"{where}: schema is {schema!r:.80}, but must be {SCHEMA!r}", "make it by: graph summary --json"
        )
    try:
        return {name: _graph(_word(name), values) for name, values in document["cells"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ArtifactError(
            f"{where}: no summary of cells: {error!r:.200}", "make it by: graph summary --json"
        ) from None


def rolled(graph: Graph) -> Graph:
    """A graph as it would be read from its own summary."""
    return _graph(graph.cell, cell(graph))


def _graph(name: str, values: Mapping[str, Any]) -> Graph:
    if values["by"] != "operation_kind":
        raise ValueError(f"rows are by {values['by']}, not by operation_kind")
    peak = values["totals"]["peak_bytes"]
    return Graph(
        cell=name,
        target=_word(values["target"]),
        form=_word(values["form"]),
        operations=tuple(_operation(row) for row in values["rows"]),
        peak_bytes=None if peak is None else int(peak),
        aliased=frozenset(map(_word, values["aliased"])),
    )


def _word(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > LONGEST:
        raise ValueError(f"a name is {value!r:.80}")
    return value


def _operation(row: Mapping[str, Any]) -> Operation:
    layer_kind = None if row["layer_kind"] is None else _word(row["layer_kind"])
    kind = _word(row["operation_kind"])
    sums = {name: float(row[name]) for name in QUANTITIES if name != "seconds"}
    return Operation(
        name=f"{layer_kind or 'other'}: {kind}",
        opcode=kind,
        kind=kind,
        scope=layer_kind or "",
        layer_kind=layer_kind,
        flops=sums["flops"],
        read={place: sums[f"bytes_{place}"] for place in PLACES},
        collective_bytes=sums["collective_bytes"],
        seconds=None if row["seconds"] is None else float(row["seconds"]),
        digest=f"{int(row['count'])} operations",
    )
