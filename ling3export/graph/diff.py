"""Two programs compared: which operations changed, and what the changes cost, by layer kind.

Operations are matched in three passes, each within what the one before left: by content (scope, opcode, shapes and
digest), then by scope, opcode and shapes with the padding left out, then by scope and kind of work. Within a pass they
are matched in order. Names, places in sources and the order of independent operations do not matter.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ling3export.foundation.tables import footnotes, selected
from ling3export.graph.record import QUANTITIES, Graph, Operation, columns

SHARES = 1e-9  # relative: what differs by less is rounding of sums
SHOWN = 12
SCHEMA = "ling3.graph.diff/1"


@dataclass(frozen=True)
class Change:
    """One pair of operations that differ, or an operation that only one program has (the other side is None)."""

    before: Operation | None
    after: Operation | None

    @property
    def operation(self) -> Operation:
        """The operation after the change, or the one that is gone."""
        operation = self.after or self.before
        assert operation is not None
        return operation

    @property
    def kind(self) -> str:
        """``added``, ``removed`` or ``changed``."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    def delta(self, quantity: str) -> float:
        """How much more of a quantity the program has after the change."""
        before, after = (0.0 if side is None else side.total(quantity) for side in (self.before, self.after))
        return after - before


@dataclass(frozen=True)
class Difference:
    """Everything that differs between two programs."""

    before: Graph
    after: Graph
    changes: tuple[Change, ...]
    pairs: tuple[tuple[Operation, Operation], ...]

    @property
    def matched(self) -> int:
        """How many operations have a partner."""
        return len(self.pairs)

    @property
    def equal(self) -> bool:
        """Whether the programs are the same, apart from names and order."""
        return (
            not self.changes
            and self.before.peak_bytes == self.after.peak_bytes
            and self.before.aliased == self.after.aliased
        )

    @property
    def donations(self) -> list[str]:
        """Inputs whose buffers only one of the programs reuses for its outputs."""
        lost = [f"{name} is no longer donated" for name in sorted(self.before.aliased - self.after.aliased)]
        return [*lost, *(f"{name} is now donated" for name in sorted(self.after.aliased - self.before.aliased))]

    @property
    def unmatched_share(self) -> float:
        """The share of operations of both programs without a partner."""
        alone = sum(change.kind != "changed" for change in self.changes)
        return alone / max(1, alone + 2 * self.matched)

    def rows(self) -> list[tuple[tuple[str, str], dict[str, float]]]:
        """(layer kind, kind of work) and the sums of the changes in it, the largest first."""
        sums: dict[tuple[str, str], dict[str, float]] = defaultdict(
            lambda: dict.fromkeys((*QUANTITIES, "changes"), 0.0)
        )
        for change in self.changes:
            row = sums[change.operation.layer_kind or "other", change.operation.kind]
            row["changes"] += 1
            for quantity in QUANTITIES:
                row[quantity] += change.delta(quantity)
        return sorted(sums.items(), key=lambda item: (-abs(item[1]["seconds"]), -_bytes(item[1]), item[0]))


def compare(before: Graph, after: Graph) -> Difference:
    """Matches the operations of two programs and lists those that differ."""
    left, right = list(before.operations), list(after.operations)
    padding = _padding(before.cell), _padding(after.cell)
    keys: Sequence[Callable[[Operation, int | None], Hashable]] = (
        lambda one, _: (one.scope, one.opcode, one.shapes, one.digest, round(one.times, 9)),
        lambda one, size: (one.scope, one.opcode, _abstract(one.shapes, size)),
        lambda one, _: (one.scope, one.kind),
    )
    pairs: list[tuple[Operation, Operation]] = []
    for key in keys:
        partners: dict[Hashable, list[Operation]] = defaultdict(list)
        for one in right:
            partners[key(one, padding[1])].append(one)
        rest = []
        for one in left:
            group = partners.get(key(one, padding[0]))
            if group:
                pairs.append((one, group.pop(0)))
            else:
                rest.append(one)
        taken = {other.name for _, other in pairs}
        left, right = rest, [one for one in right if one.name not in taken]
    changes = [Change(one, other) for one, other in pairs if not _same(one, other)]
    changes += [Change(one, None) for one in left] + [Change(None, one) for one in right]
    changes.sort(key=lambda change: (-abs(change.delta("seconds")), -abs(change.delta("bytes")), change.operation.name))
    return Difference(before, after, tuple(changes), tuple(pairs))


def _same(one: Operation, other: Operation) -> bool:
    return (one.opcode, one.shapes, one.digest) == (other.opcode, other.shapes, other.digest) and all(
        _close(one.total(quantity), other.total(quantity)) for quantity in (*QUANTITIES, "bytes")
    )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= SHARES * max(abs(one), abs(other))


def _padding(cell: str) -> int | None:
    size = cell.rpartition("@")[2]
    return int(size) if size.isdecimal() else None


def _abstract(shapes: Iterable[str], padding: int | None) -> tuple[str, ...]:
    """Shapes with the padding of their cell as ``N``."""
    if padding is None or padding == 1:
        return tuple(shapes)
    return tuple(re.sub(rf"(?<=[\[,]){padding}(?=[,\]])", "N", shape) for shape in shapes)


def _bytes(sums: Mapping[str, float]) -> float:
    return sum(abs(sums[name]) for name in QUANTITIES if name.startswith("bytes_"))


def document(differences: Mapping[str, Difference], notes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Comparisons and their notes by cell as JSON values, by the schema ``SCHEMA``."""
    cells = {cell: {**values(one), "notes": list(notes[cell])} for cell, one in differences.items()}
    return {"schema": SCHEMA, "equal": all(one.equal for one in differences.values()), "cells": cells}


def values(difference: Difference) -> dict[str, Any]:
    """One comparison as JSON values."""
    before, after = difference.before.totals(), difference.after.totals()
    return {
        "equal": difference.equal,
        "matched": difference.matched,
        "unmatched_share": difference.unmatched_share,
        "totals": {name: [getattr(before, name), getattr(after, name)] for name in QUANTITIES},
        "donations": difference.donations,
        "peak_bytes": [difference.before.peak_bytes, difference.after.peak_bytes],
        "rows": [{"layer_kind": kind, "operation_kind": work, **sums} for (kind, work), sums in difference.rows()],
        "changes": [
            {
                "kind": change.kind,
                "layer_kind": change.operation.layer_kind,
                "scope": change.operation.scope,
                "before": change.before and change.before.name,
                "after": change.after and change.after.name,
                **{name: change.delta(name) for name in QUANTITIES},
            }
            for change in difference.changes
        ],
    }


def table(difference: Difference, *, markdown: bool = False) -> list[str]:
    """A comparison for a person: totals, changes by layer kind, the dearest operations."""
    before, after = difference.before, difference.after
    title = f"{before.target} {before.cell} → {after.target} {after.cell}"
    if difference.equal:
        return [f"{title}: equal, {difference.matched} operations"]
    old, new = (graph.totals().sums for graph in (before, after))
    shown = columns(old), columns(new)
    totals = [
        {"total": label, "before": shown[0][label], "after": shown[1][label], "change": _percent(old[name], new[name])}
        for name, (label, *_) in QUANTITIES.items()
        if old[name] or new[name]
    ]
    peaks = before.peak_bytes, after.peak_bytes
    if all(peaks):
        one, other = (f"{(peak or 0) / 1e6:,.2f}" for peak in peaks)
        totals.append({"total": "peak MB", "before": one, "after": other, "change": _percent(*peaks)})
    kinds = [
        {"layer kind": kind, "operations": work, "changes": f"{sums['changes']:.0f}"} | columns(sums, "+")
        for (kind, work), sums in difference.rows()
    ]
    largest = [
        {
            "change": change.kind,
            "operation": change.operation.name,
            "scope": _short(change.operation.scope),
            "µs": f"{change.delta('seconds') * 1e6:+,.2f}",
            "MB": f"{change.delta('bytes') / 1e6:+,.3f}",
        }
        for change in difference.changes[:SHOWN]
    ]
    shape = _markdown if markdown else lambda rows: selected(rows, list(rows[0])) if rows else []
    note = f"{100 * difference.unmatched_share:.1f} % of the operations have no partner in the other program"
    lines = [f"### {title}" if markdown else title, ""]
    for rows in (totals, kinds, largest):
        lines += [*shape(rows), ""]
    notes = [note, *difference.donations]
    return [*lines, *(notes if markdown else footnotes(notes))]


def _percent(before: float | None, after: float | None) -> str:
    return f"{100 * ((after or 0.0) / before - 1):+.1f} %" if before else "new"


def _short(scope: str) -> str:
    """The last steps of a scope."""
    return "/".join(scope.split("/")[-3:])


def _markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    if not rows:
        return []
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
