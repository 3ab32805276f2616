"""One program as a list of operations: scope, layer kind, layers, trips, FLOPs, bytes and seconds of each.

``optimized.py`` reads it from optimized HLO, ``portable.py`` from StableHLO. Every count of costs in the project is a
sum over these operations.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

UNKNOWN = "unknown: counted once"  # the source of a loop's trips that nothing tells
# Steps of a scope that jax adds: control flow, functions that it calls, equations of products.
OF_JAX = re.compile(r"while|body|cond|branch_\w+|closed_call|call_exported|eval_jaxpr|shard_map|\w*\(.*\)|.*->.*")
# Where an operation's bytes lie: a weight, an array of the state, or anything else (activations, batch, outputs).
PLACES = ("weights", "state", "other")
# The sums of operations: the name of a table's column, the factor of its unit, and its digits.
QUANTITIES = {
    "flops": ("GFLOP", 1e-9, 3),
    "bytes_weights": ("weights MB", 1e-6, 2),
    "bytes_state": ("state MB", 1e-6, 2),
    "bytes_other": ("other MB", 1e-6, 2),
    "collective_bytes": ("moved MB", 1e-6, 2),
    "seconds": ("µs", 1e6, 2),
}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a program. Costs are those of one run; :attr:`times` says how often it runs in a call.

    Attributes:
        name: Unique in its program.
        kind: The kind of work, one of ``hlo.KINDS``, ``collectives`` or ``custom calls``.
        shapes: Types of its results: ``bf16[16,2048]``.
        operands: Names of the operations or inputs that it reads.
        scope: Named scopes of the model around it, with slashes between them; empty if it has none.
        layer_kind: The innermost scope that names a kind of layer (a norm counts to the kind around it); None outside.
        layers: Numbers of the layers that run it; empty outside of the layers.
        times: Runs in one call, all loops around it counted.
        read: Bytes that one run reads from the device's memory, by place (``PLACES``).
        written: Bytes that one run writes, by place.
        weights: Names of the weights that it reads directly.
        collective_bytes: Bytes of the results of a collective; 0 for any other operation.
        result_bytes: Bytes of its results, in whatever memory.
        source: Where ``seconds`` come from: ``compiler``, ``roofline`` or ``measured``.
        copied: Bytes of a copy from one place of the device's memory to another; 0 for anything else.
        overlapped: Whether it runs at the same time as other operations: its seconds do not add to a call's.
        fused: Opcodes inside a fusion that do work, in their order.
        digest: A digest of its computation: opcode, types, attributes, the names of inputs that it reads, and
            everything inside a fusion; names of operations do not count.
        shared: A digest of a fusion's computation alone: a card may run one kernel for fusions that have it in common.
    """

    name: str
    opcode: str
    kind: str
    shapes: tuple[str, ...] = ()
    operands: tuple[str, ...] = ()
    scope: str = ""
    layer_kind: str | None = None
    layers: tuple[int, ...] = ()
    times: float = 1.0
    flops: float = 0.0
    read: Mapping[str, float] = field(default_factory=dict)
    written: Mapping[str, float] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    collective_bytes: float = 0.0
    result_bytes: float = 0.0
    seconds: float | None = None
    source: str | None = None
    copied: int = 0
    overlapped: bool = False
    target: str | None = None
    fused: tuple[str, ...] = ()
    digest: str = ""
    shared: str = ""

    @property
    def bytes(self) -> float:
        """Bytes read and written in one run."""
        return sum(self.read.values()) + sum(self.written.values())

    def total(self, quantity: str) -> float:
        """One of ``QUANTITIES`` or another number, of all runs in a call; overlapped operations add no seconds."""
        if quantity == "seconds":
            return 0.0 if self.overlapped else self.times * (self.seconds or 0.0)
        if quantity.startswith("bytes_"):
            place = quantity.removeprefix("bytes_")
            return self.times * (self.read.get(place, 0.0) + self.written.get(place, 0.0))
        return self.times * float(getattr(self, quantity))

    @property
    def instruction(self) -> str:
        """The name in the program's text, without the loops and calls around it."""
        return self.name.rpartition("/")[2]

    @property
    def part(self) -> str:
        """The named scopes below the layer kind, such as ``q_proj``; empty if there are none."""
        steps = self.scope.split("/")
        inside = steps[steps.index(self.layer_kind) + 1 : -1] if self.layer_kind in steps else []
        return "/".join(step for step in inside if step != self.layer_kind and not OF_JAX.fullmatch(step))


@dataclass(frozen=True)
class Loop:
    """A loop of a program: its label, the trips of one run, where their number comes from, and its runs in a call."""

    label: str
    trips: float
    source: str
    times: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """Sums over operations, each as often as it runs; ``seconds`` is None if no operation has any.

    Attributes:
        layer_kind: The kind of all of them; None for operations outside of every kind.
        operation_kind: The kind of all of them, or the name of the group that :meth:`Graph.rows` made.
        count: Operations in the program's text.
    """

    layer_kind: str | None
    operation_kind: str
    count: int
    flops: float
    bytes_weights: float
    bytes_state: float
    bytes_other: float
    collective_bytes: float
    seconds: float | None

    @property
    def bytes(self) -> float:
        """All bytes read and written."""
        return self.bytes_weights + self.bytes_state + self.bytes_other

    @property
    def sums(self) -> dict[str, float | None]:
        """The sums by the names of ``QUANTITIES``."""
        return {name: getattr(self, name) for name in QUANTITIES}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A program of one cell.

    Attributes:
        cell: ``decode@16``.
        target: Its target's name in the manifest.
        form: ``optimized`` or ``portable``.
        operations: In the order in which the text has them; operations of a loop's body stand where the loop stands.
        loops: Every loop, in the order of the text; a loop inside a loop comes after it.
        peak_bytes: The compiler's peak on one device; None if it is not recorded.
        constants: Bytes of the large constants in the program, by name.
        aliased: Inputs whose buffers the outputs reuse.
        bandwidth: Bytes a second of the device's memory; None if no table has the device.
        peak_flops: FLOPs a second of the device.
    """

    cell: str
    target: str
    form: str
    operations: tuple[Operation, ...]
    loops: tuple[Loop, ...] = ()
    constants: Mapping[str, int] = field(default_factory=dict)
    aliased: frozenset[str] = frozenset()
    peak_bytes: int | None = None
    bandwidth: float | None = None
    peak_flops: float | None = None

    @cached_property
    def fed(self) -> dict[str, float]:
        """Bytes that each operation reads and writes in a call, and those that prefetches bring for it, by its name."""
        operations = {one.name: one for one in self.operations}
        users = Counter(name for one in self.operations for name in one.operands)

        @cache
        def brought(name: str, depth: int = 3) -> float:
            if (one := operations.get(name)) is None:
                return 0.0
            if one.overlapped:
                return one.total("bytes") / users[name]
            inside = depth > 0 and not one.seconds
            return sum(brought(source, depth - 1) for source in one.operands) / users[name] if inside else 0.0

        return {
            one.name: one.total("bytes") + (0.0 if one.overlapped else sum(map(brought, one.operands)))
            for one in self.operations
        }

    def bound(self, operation: Operation) -> str:
        """``memory`` or ``compute``, whichever takes longer on the device; empty for an operation without costs."""
        fed, flops = self.fed[operation.name], operation.total("flops")
        if not self.bandwidth or not self.peak_flops or not (fed or flops):
            return ""
        return "memory" if fed / self.bandwidth >= flops / self.peak_flops else "compute"

    @property
    def unknown_loops(self) -> list[str]:
        """Labels of loops that count once because nothing tells their trips."""
        return [loop.label for loop in self.loops if loop.source == UNKNOWN]

    def rows(self, by: str = "operation_kind") -> list[Row]:
        """Sums by layer kind, or also by ``operation_kind``, ``layer``, ``part`` or ``operation``; the largest first.

        An operation that several layers run counts in equal parts for each of them with ``layer``.
        """
        groups: dict[tuple[str | None, str], list[Operation]] = {}
        for operation, key in keyed(self.operations, by):
            groups.setdefault((operation.layer_kind, key), []).append(operation)
        rows = [summed(kind, key, group) for (kind, key), group in groups.items()]
        return sorted(
            rows, key=lambda row: (-(row.seconds or 0.0), -row.bytes, row.layer_kind or "", row.operation_kind)
        )

    def totals(self) -> Row:
        """Sums over the whole program."""
        return summed(None, "all", self.operations)

    @property
    def seconds_source(self) -> str | None:
        """Where most of the seconds come from."""
        seconds = Counter[str]()
        for one in self.operations:
            if one.source is not None:
                seconds[one.source] += one.times * (one.seconds or 0.0)  # type: ignore[assignment]
        return max(seconds, key=lambda source: seconds[source], default=None)


def keyed(operations: Iterable[Operation], by: str) -> Iterable[tuple[Operation, str]]:
    """Each operation with the key of its group."""
    keys: dict[str, Callable[[Operation], str]] = {
        "operation_kind": lambda operation: operation.kind,
        "layer_kind": lambda operation: "",
        "operation": lambda operation: operation.name,
        "part": lambda operation: operation.part or operation.kind,
    }
    for operation in operations:
        if by == "layer" and operation.layers:
            share = operation.times / len(operation.layers)
            for layer in operation.layers:
                yield replace(operation, times=share), f"{layer:02d}"
        else:
            yield operation, "-" if by == "layer" else keys[by](operation)


def summed(layer_kind: str | None, key: str, operations: Iterable[Operation]) -> Row:
    """The sums of some operations."""
    group = list(operations)
    sums: dict[str, Any] = {name: sum(one.total(name) for one in group) for name in QUANTITIES}
    if all(one.seconds is None or one.overlapped for one in group):
        sums["seconds"] = None
    return Row(layer_kind=layer_kind, operation_kind=key, count=len({one.name for one in group}), **sums)


def columns(sums: Mapping[str, float | None], sign: str = "") -> dict[str, str]:
    """Sums as cells of a table, by its columns; with the sign ``+`` 0 is a dash."""
    return {
        label: f"{(value or 0.0) * factor:{sign},.{digits}f}" if value or not sign else "-"
        for name, (label, factor, digits) in QUANTITIES.items()
        for value in [sums[name]]
    }
