"""Which tensors are alive at a program's memory peak, and memory over program order.

The reader walks scheduled HLO: a tensor lives from the instruction that makes it until the last one that reads it. An
elementwise result may take the place of an operand of its size. Updates in place, loops, tuples and bitcasts make no
tensor. The next value of a loop lies where the last one did, and the results of all branches lie in one place. Inputs,
constants and results live throughout; a result may lie in a donated input. Tensors in a chip's fast memory count, as in
the compiler's own peak; the program itself does not.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ling3export.foundation.tables import aligned, footnotes
from ling3export.graph.context import classified_kind, scope_of
from ling3export.graph.hlo import (
    ELEMENTWISE,
    FREE,
    TYPE,
    WIDTHS,
    Computation,
    Instruction,
    Module,
    dims,
    kind,
    opcodes,
    parse,
)
from ling3export.graph.optimized import BRANCHES, reused

PASSING = {"tuple", "get-tuple-element", "bitcast"}  # these read no operand
TILED = re.compile(r"\{([0-9,]*):T\(([0-9,]+)\)")


@dataclass(frozen=True, eq=False)
class Tensor:
    """A buffer; ``bytes`` are on one device, ``what`` is weights, state, other, temporary, result or constant."""

    name: str
    bytes: int
    what: str
    shape: str
    layer_kind: str | None = None


Value = Any  # of an instruction: a Tensor, a tuple of values, or None for a constant


@dataclass(frozen=True)
class Timeline:
    """Memory of one device while a program runs.

    Attributes:
        points: For each instruction of the entry: its name, and bytes on top of the inputs that live while it runs.
        inputs: Buffers that live throughout.
        at_peak: Other tensors that live at the peak, the largest first.
        compiler_peak: The compiler's own peak; None if the artifact does not have it.
    """

    points: tuple[tuple[str, int], ...]
    inputs: tuple[Tensor, ...]
    at_peak: tuple[Tensor, ...]
    compiler_peak: int | None

    @property
    def peak(self) -> int:
        """Inputs and the other tensors at the peak."""
        return _size((*self.inputs, *self.at_peak))


def timeline(text: str, inputs: Sequence[str], kinds: frozenset[str], compiler_peak: int | None) -> Timeline:
    """The memory of a program from ``Compiled.as_text()``.

    ``inputs`` are the names of the entry's parameters in their order, ``kinds`` the scopes that are layer kinds.

    Raises:
        ValueError: The text has no entry computation.
    """
    module = parse(text)
    names = {number: name for name, number in module.entry.parameters.items()}
    held = []
    for number, name in sorted(names.items()):
        label = inputs[number] if number < len(inputs) else f"input {number}"
        what = {"params": "weights", "state": "state"}.get(label.partition(".")[0], "other")
        shape = module.entry.instructions[name].shape
        held.append(Tensor(label, padded_bytes(shape), what, plain(shape)))
    frame = _Frame(module, kinds, module.entry, held)
    results = frame.result if isinstance(frame.result, tuple) else (frame.result,)
    fresh = [value for number, value in enumerate(results) if number not in module.aliased]
    throughout = [replace(one, what="result") for one in _tensors(fresh) if one in frame.elsewhere]
    if frame.constants:
        throughout.append(Tensor("constants", frame.constants, "constant", ""))
    points, alive = frame.run()
    at_peak = sorted([*throughout, *alive], key=lambda one: -one.bytes)
    held.sort(key=lambda one: -one.bytes)
    base = _size(throughout)
    return Timeline(tuple((name, base + size) for name, size in points), tuple(held), tuple(at_peak), compiler_peak)


class _Frame:
    """One run of a computation: the value of each instruction, the tensors that it makes, and the frames inside it.

    Attributes:
        result: The value of the computation's result.
        elsewhere: Tensors of the result that lie in a buffer of the caller.
        constants: Bytes of all constants, those of inner frames included.
    """

    def __init__(self, module: Module, kinds: frozenset[str], computation: Computation, arguments: Sequence[Value]):
        self._module, self._kinds, self._arguments = module, kinds, arguments
        self._instructions = computation.instructions
        self._values: dict[str, Value] = {}
        self._made: dict[str, list[Tensor]] = {}
        self._inner: dict[str, list[_Frame]] = {}
        self.constants = 0
        for one in self._instructions.values():
            self._made[one.name] = []
            self._values[one.name] = self._value(one, [self._values[name] for name in one.operands])
        self.result = self._values[computation.root.name]
        own = {tensor for group in self._made.values() for tensor in group}
        self.elsewhere = own.intersection(_tensors([self.result]))

    def _value(self, one: Instruction, operands: list[Value]) -> Value:
        opcode = one.opcode
        if opcode == "parameter":
            number = int(one.literal)
            return self._arguments[number] if number < len(self._arguments) else None
        if opcode == "constant":
            self.constants += padded_bytes(one.shape)
            return None
        if opcode == "while":
            self._enter(one, [(one.called[role][0], operands) for role in ("condition", "body")])
            return operands[0]
        if opcode == "conditional":
            names = [name for role in BRANCHES for name in one.called.get(role, [])]
            return self._enter(
                one, [(name, [operands[min(at, len(operands) - 1)]]) for at, name in enumerate(names, 1)]
            )
        if opcode == "call":
            return self._enter(one, [(one.called["to_apply"][0], operands)])
        if opcode.endswith("-start"):  # its operands live until it is done
            if opcode == "call-start":
                return (self._enter(one, [(one.called["to_apply"][0], operands)]), *operands)
            moved = sum(padded_bytes(self._instructions[name].shape) for name in one.operands)
            return (self._new(one, one.shape, padded_bytes(one.shape) - moved), *operands)
        if opcode.endswith(("-done", "-update")) or (opcode == "get-tuple-element" and isinstance(operands[0], Tensor)):
            return operands[0][0] if isinstance(operands[0], tuple) else operands[0]
        value = reused(self._module, one, operands)
        if opcode in FREE:
            return value
        if not one.shape.startswith("("):
            return self._new(one, one.shape) if value is None else value
        types = _elements(one.shape)
        parts = value if isinstance(value, tuple) else (value,) * len(types)
        return tuple(self._new(one, inner) if part is None else part for inner, part in zip(types, parts, strict=True))

    def _new(self, one: Instruction, shape: str, size: int | None = None) -> Tensor:
        layer_kind = classified_kind(scope_of(self._module, one), self._kinds)
        size = padded_bytes(shape) if size is None else max(0, size)
        tensor = Tensor(one.name, size, "temporary", plain(shape), layer_kind)
        self._made[one.name].append(tensor)
        return tensor

    def _enter(self, one: Instruction, calls: Iterable[tuple[str, list[Value]]]) -> Value:
        """Runs computations that an instruction calls; gives the value of its result if it is no loop."""
        frames = [_Frame(self._module, self._kinds, self._module.computations[name], values) for name, values in calls]
        self._inner[one.name] = frames
        self.constants += sum(frame.constants for frame in frames)
        if one.opcode == "while":
            return None
        if not isinstance(frames[0].result, tuple):
            return self._common(one, [frame.result for frame in frames])
        return tuple(self._common(one, values) for values in zip(*(frame.result for frame in frames), strict=True))

    def _common(self, one: Instruction, values: Sequence[Value]) -> Value:
        """The result of one of several branches: a value from outside if one of them gives that, else a new one."""
        frames = self._inner[one.name]
        outside = [
            value
            for value, frame in zip(values, frames, strict=True)
            if not isinstance(value, Tensor) or value not in frame.elsewhere
        ]
        if outside or values[0] is None:
            return next((value for value in outside if value is not None), None)
        self._made[one.name].append(replace(values[0], name=one.name))
        return self._made[one.name][-1]

    def run(self, borrowed: Sequence[Tensor] = ()) -> tuple[list[tuple[str, int]], list[Tensor]]:
        """For each instruction its name and the bytes that live while it runs; and the tensors of the largest.

        ``borrowed`` are tensors of the caller that nothing reads after this computation.
        """
        ends = dict.fromkeys(borrowed, -1)
        for place, one in enumerate(self._instructions.values()):
            read = [] if one.opcode in PASSING else _tensors([self._values[name] for name in one.operands])
            ends |= dict.fromkeys([*self._made[one.name], *read], place)
        ends |= dict.fromkeys(_tensors([self.result]), len(self._instructions))
        points, peak, live, most = [], list[Tensor](), list(borrowed), -1
        for place, one in enumerate(self._instructions.values()):
            live = [tensor for tensor in live if ends[tensor] >= place]
            new = [tensor for tensor in self._made[one.name] if tensor not in self.elsewhere]
            if new and kind(opcodes(self._module, one)) == ELEMENTWISE:
                for size in [tensor.bytes for tensor in new]:
                    replaced = next((old for old in live if ends[old] == place and old.bytes == size), None)
                    live = [tensor for tensor in live if tensor is not replaced]
            live += new
            now = self._with_inner(one, live, [tensor for tensor in live if ends[tensor] == place])
            points.append((one.name, _size(now)))
            if points[-1][1] > most:
                peak, most = now, points[-1][1]
        return points, peak

    def _with_inner(self, one: Instruction, live: list[Tensor], ending: list[Tensor]) -> list[Tensor]:
        """The tensors that live inside of an instruction; those that only a called computation reads may end in it."""
        if one.name not in self._inner:
            return live
        result = set(_tensors([self._values[one.name]]))
        lent = [tensor for tensor in ending if tensor not in result]
        inner = max((frame.run(lent)[1] for frame in self._inner[one.name]), key=_size)
        return [*(tensor for tensor in live if tensor not in lent), *inner]


def _tensors(values: Sequence[Value]) -> list[Tensor]:
    """Every tensor of some values once, in their order."""
    tensors, seen, waiting = dict[Tensor, None](), set[int](), list(values[::-1])
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            tensors[value] = None
        elif value is not None and id(value) not in seen:
            seen.add(id(value))
            waiting += value[::-1]
    return list(tensors)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def padded_bytes(shape: str) -> int:
    """Bytes of the arrays of a type, with the padding of their tiles."""
    return sum(_array_bytes(array) for array in TYPE.findall(shape))


def _elements(shape: str) -> list[str]:
    """The types of a tuple's elements, which may be tuples."""
    depth, start, types = 0, 1, []
    for place, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            types.append(shape[start:place])
            start = place + 1
    return [one for one in types if one]


def _array_bytes(array: str) -> int:
    dtype, _, rest = array.partition("[")
    sizes = list(dims(rest.partition("]")[0]))
    if match := TILED.search(array):
        order, tile = ([int(size) for size in part.split(",") if size] for part in match.groups())
        sizes, order = sizes or [1], order or [0]  # a scalar fills a tile
        for axis, size in zip(order, reversed(tile), strict=False):
            sizes[axis] = -(-sizes[axis] // size) * size
    return WIDTHS.get(dtype, 4) * math.prod(sizes)


def plain(shape: str) -> str:
    """A type without its layout."""
    return re.sub(r"\{[^}]*\}", "", shape)


def document(memory: Timeline) -> dict[str, Any]:
    """A timeline as JSON values."""
    return {
        "peak_bytes": memory.peak,
        "compiler_peak_bytes": memory.compiler_peak,
        "inputs": [vars(one) for one in memory.inputs],
        "at_peak": [vars(one) for one in memory.at_peak],
        "timeline": [list(point) for point in memory.points],
    }


def table(memory: Timeline, most: int = 15) -> list[str]:
    """Tensors that live at the peak, for a person, the largest first."""
    tensors = sorted((*memory.inputs, *memory.at_peak), key=lambda one: -one.bytes)
    rows = [("at the peak", "MB", "what", "layer kind", "type")]
    rows += [
        (one.name, f"{one.bytes / 1e6:,.3f}", one.what, one.layer_kind or "-", one.shape[:40]) for one in tensors[:most]
    ]
    for what in dict.fromkeys(one.what for one in tensors):
        size = _size(one for one in tensors if one.what == what)
        rows.append((f"all {what}", f"{size / 1e6:,.3f}", "", "", ""))
    rows += [("all", f"{memory.peak / 1e6:,.3f}", "", "", "")]
    peak = memory.compiler_peak
    note = (
        "" if peak is None else f"by the compiler's sizes it is {peak / 1e6:,.3f} MB; both without the program itself"
    )
    return [*aligned(rows), *footnotes([note])]
