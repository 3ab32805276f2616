"""A portable program (StableHLO) as a :class:`Graph`: what the model computes, before any compiler fused or moved it.

Every operation reads its operands and writes its results; a slice or a gather reads only what it takes. Bytes of
weights and FLOPs are exact; bytes of other values are what an unfused program would move.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ling3export.graph.context import Context, classified, enclosing
from ling3export.graph.hlo import BETWEEN, SLICING, UPDATING, WIDTHS, kind
from ling3export.graph.optimized import CUSTOM_CALLS, Origin, branch_shares, place_of, taken
from ling3export.graph.record import Graph, Loop, Operation
from ling3export.machine import portable

FREE = {"constant", "return", "reshape", "optimization_barrier", "partition_id", "get_tuple_element", "tuple"}
# The result is the first operand's buffer, perhaps changed; or a new value made of the first operand.
SAME_BUFFER = {"reshape", "optimization_barrier", "dynamic_update_slice", "scatter"}
TAKEN = {"dynamic_slice", "slice", "gather", "convert", "transpose", "broadcast_in_dim"}
TYPE = re.compile(r"tensor<((?:\d+x)*)(\w+)>")


def read(blob: bytes, cell: str, target: str, context: Context) -> Graph:
    """The graph of a portable program.

    Raises:
        Ling3Error: The bytes are no portable program.
    """
    walk = _Walk(context)
    with portable.module(blob) as module:
        walk.functions = {
            str(one.name).strip('"'): one for one in module.body.operations if one.operation.name == "func.func"
        }
        walk.run(walk.functions["main"].regions[0].blocks[0])
    return Graph(
        cell=cell,
        target=target,
        form="portable",
        operations=tuple(walk.operations),
        loops=tuple(walk.loops),
        bandwidth=context.bandwidth,
        peak_flops=context.peak,
    )


@dataclass(frozen=True)
class _Place:
    """The runs, the scopes and the names of operations in a block."""

    times: float = 1.0
    scope: str = ""
    prefix: str = ""


class _Walk:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._origins: dict[Any, Origin] = {}  # the input that a value is
        self._values: dict[Any, int] = {}  # values that are constant integers
        self._constants: dict[Any, str] = {}  # the texts of constants
        self.functions: dict[str, Any] = {}
        self.operations: list[Operation] = []
        self.loops: list[Loop] = []

    def run(self, block: Any) -> None:
        """Adds the operations of the main function."""
        inputs = self._context.inputs
        names = [*inputs, *(f"input {number}" for number in range(len(inputs), len(block.arguments)))]
        self._origins.update(zip(block.arguments, names, strict=False))
        self._block(block, _Place())

    def _block(self, block: Any, place: _Place) -> list[Any]:
        """Adds the operations of a block; gives the operands of its terminator."""
        for number, op in enumerate(block.operations):
            opcode = op.operation.name.partition(".")[2]
            if opcode == "return":
                return list(op.operands)
            self._one(op, opcode, f"{place.prefix}{opcode}.{number}", place)
        return []

    def _one(self, op: Any, opcode: str, name: str, place: _Place) -> None:
        results, operands = list(op.operation.results), list(op.operation.operands)
        own = joined(place.scope, op.location)
        if opcode == "constant":
            self._constants[results[0]] = str(op.operation.attributes["value"])
            if (value := _scalar(op)) is not None:
                self._values[results[0]] = value
            return
        if opcode in ("call", "composite"):
            attribute = "callee" if opcode == "call" else "decomposition"
            function = self.functions[str(op.operation.attributes[attribute]).lstrip("@")]
            block = function.regions[0].blocks[0]
            returned = self._inside(block, operands, _Place(place.times, own, f"{name}/"))
        elif opcode == "while":
            returned = self._loop(op, operands, name, place)
        elif opcode in ("case", "if"):
            returned = self._branches(op, name, place)
        else:
            if opcode not in FREE:
                self.operations.append(self._operation(op, opcode, name, replace(place, scope=own)))
            self._follow(opcode, operands, results)
            return
        for result, value in zip(results, returned, strict=False):
            self._origins[result] = self._origins.get(value)
            if value in self._values and opcode != "while":
                self._values[result] = self._values[value]

    def _follow(self, opcode: str, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Records which input, or which constant, a result is."""
        if opcode in SAME_BUFFER:
            self._origins[results[0]] = self._origins.get(operands[0])
        elif opcode in TAKEN and isinstance(origin := self._origins.get(operands[0]), str):
            self._origins[results[0]] = f"~{origin.removeprefix('~')}"
        if opcode in ("reshape", "convert") and operands[0] in self._values:
            self._values[results[0]] = self._values[operands[0]]

    def _inside(self, block: Any, operands: Sequence[Any], place: _Place, constant: bool = True) -> list[Any]:
        for argument, operand in zip(block.arguments, operands, strict=False):
            self._origins[argument] = self._origins.get(operand)
            self._values.pop(argument, None)
            self._constants[argument] = self._constants.get(operand, "")
            if constant and operand in self._values:
                self._values[argument] = self._values[operand]
        return self._block(block, place)

    def _loop(self, op: Any, operands: Sequence[Any], name: str, place: _Place) -> list[Any]:
        condition, body = (region.blocks[0] for region in op.operation.regions)
        own = joined(place.scope, op.location)
        trips, source = self._context.counted(_trips(condition, operands, self._values), enclosing(own))
        self.loops.append(Loop(own, trips, source, place.times))
        for block, runs, prefix in ((condition, trips + 1, f"{name}/cond/"), (body, trips, f"{name}/")):
            self._inside(block, operands, _Place(place.times * runs, place.scope, prefix), False)
        return list(operands)

    def _branches(self, op: Any, name: str, place: _Place) -> list[Any]:
        parts, returned = [], []
        for number, region in enumerate(op.operation.regions):
            kept, self.operations = self.operations, []
            returned.append(self._block(region.blocks[0], replace(place, prefix=f"{name}/{number}/")))
            parts.append(self.operations)
            self.operations = kept
        shares = branch_shares(parts, self._context, enclosing(joined(place.scope, op.location)))
        for part, (share, layers) in zip(parts, shares, strict=True):
            self.operations += [taken(one, share, layers) for one in part if share]
        return returned[max(range(len(parts)), key=lambda number: shares[number][0])]

    def _digest(self, op: Any) -> str:
        """The content of an operation, without names: see :attr:`Operation.digest`."""
        operands = [
            (str(value.type), self._origins.get(value), self._constants.get(value, ""))
            for value in op.operation.operands
        ]
        names = sorted(getattr(one, "name", one) for one in op.operation.attributes)  # jax 0.10 gives named attributes
        attributes = [(name, str(op.operation.attributes[name])) for name in names]
        blocks = [block for region in op.operation.regions for block in region.blocks]
        inside = [one.operation.name for block in blocks for one in block.operations]
        return hashlib.sha256(repr((operands, attributes, inside)).encode()).hexdigest()[:16]

    def _operation(self, op: Any, opcode: str, name: str, place: _Place) -> Operation:
        results, operands = list(op.operation.results), list(op.operation.operands)
        origins = [self._origins.get(value) for value in operands]
        sizes, made = [_bytes(value.type) for value in operands], sum(_bytes(value.type) for value in results)
        whole, work = made, opcode.replace("_", "-")
        if work in SLICING:
            sizes = [made, *([0] * (len(sizes) - 1))]
        if work in UPDATING:
            made, sizes = sizes[UPDATING[work]], [0, *sizes[1:]]
        read: dict[str, float] = {}
        for origin, size in zip(origins, sizes, strict=True):
            # A weight counts where it is taken from its own buffer, not where a slice of it is used.
            read[place_of(origin)] = read.get(place_of(origin), 0.0) + size
        written = place_of(origins[0]) if work in UPDATING else "other"
        collective = work in BETWEEN
        layer_kind, layers = classified(place.scope, self._context)
        weights = [origin.removeprefix("~") for origin in origins if isinstance(origin, str)]
        return Operation(
            name=name,
            opcode=opcode,
            kind=CUSTOM_CALLS if opcode == "custom_call" else kind([work]),
            shapes=tuple(_shape(value.type) for value in results),
            scope=place.scope,
            layer_kind=layer_kind,
            layers=layers,
            times=place.times,
            flops=_flops(op, operands, results) if opcode == "dot_general" else 0.0,
            read={} if collective else read,
            written={} if collective else {written: float(made)},
            weights=tuple(weight.removeprefix("params.") for weight in weights if weight.startswith("params.")),
            collective_bytes=whole if collective else 0.0,
            result_bytes=whole,
            digest=self._digest(op),
            target=str(op.operation.attributes["call_target_name"]).strip('"') if opcode == "custom_call" else None,
        )


def joined(scope: str, location: Any) -> str:
    """The scopes of an operation's location, after the scopes of the call that it stands in."""
    match = re.match(r'loc\("([^"]*)"', str(location))
    return "/".join(filter(None, (scope, match[1] if match else "")))


def _scalar(op: Any) -> int | None:
    match = re.search(r"dense<(-?\d+)>", str(op.operation.attributes["value"]))
    return int(match[1]) if match else None


def _trips(condition: Any, operands: Sequence[Any], values: Mapping[Any, int]) -> int | None:
    """Trips of a loop that counts up by one from a constant to a constant; None for any other loop."""
    *_, last = condition.operations
    compare = last.operands[0].owner
    if compare.name != "stablehlo.compare" or "LT" not in str(compare.attributes["comparison_direction"]):
        return None
    arguments = list(condition.arguments)

    def value(operand: Any) -> int | None:
        if operand in arguments:
            return values.get(operands[arguments.index(operand)])
        return values.get(operand)

    first, end = (value(operand) for operand in compare.operands)
    return None if first is None or end is None else max(0, end - first)


def _sizes(type_: Any) -> tuple[tuple[int, ...], str]:
    match = TYPE.fullmatch(str(type_))
    if match is None:
        return (), "i32"
    return tuple(int(size) for size in match[1].split("x") if size), match[2]


def _bytes(type_: Any) -> float:
    shape, dtype = _sizes(type_)
    bits = dtype.lstrip("ui")
    return math.prod(shape) * (WIDTHS.get(dtype, 4) if not bits.isdecimal() else 1 if bits == "1" else int(bits) / 8)


def _shape(type_: Any) -> str:
    shape, dtype = _sizes(type_)
    return f"{dtype}[{','.join(map(str, shape))}]"


def _flops(op: Any, operands: Sequence[Any], results: Sequence[Any]) -> float:
    axes = re.search(
        r"lhs_contracting_dimensions = \[([\d, ]*)\]", str(op.operation.attributes["dot_dimension_numbers"])
    )
    left, _ = _sizes(operands[0].type)
    summed = math.prod(left[int(axis)] for axis in axes[1].split(",") if axis.strip()) if axes else 1
    return 2.0 * math.prod(_sizes(results[0].type)[0]) * summed
