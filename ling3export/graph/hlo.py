"""The text of an optimized HLO module as records: computations, instructions, cycle estimates, trips of loops; what
kind of work an instruction is, and which bytes it moves through the large memory.
"""

import lzma
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

LARGEST = 2**28  # bytes of a program's text: the largest of Ling3-Tiny has 10 million
MOST = 2_000_000  # instructions with every call written out: the most of Ling3-Tiny are 100,000
SIZES = {1: "pred s8 u8", 2: "bf16 f16 s16 u16", 4: "s32 u32 f32", 8: "s64 u64 f64"}
WIDTHS = {name: size for size, names in SIZES.items() for name in names.split()}
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]+[0-9]+|pred)\[([0-9,<=]*)\]")  # a size with <= is dynamic
CALLED = re.compile(
    r"\b(condition|body|calls|to_apply|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
# The result of these has the value of their operand.
SAME = {"copy", "bitcast", "reshape", "convert", "copy-done", "broadcast", "copy-start"}
FAST = "S(1)"  # the memory space of a chip's own fast memory, in a layout
PRODUCTS, INDEXED, SORTS, REDUCTIONS, LAYOUT, ELEMENTWISE = KINDS = (
    "matrix products",
    "gathers and scatters",
    "sorts",
    "reductions",
    "copies and layout",
    "elementwise",
)
COLLECTIVES = "collectives"  # whose time is in no estimate
BETWEEN = {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}  # opcodes of devices
# The first row that names an instruction, or one inside a fusion, decides its kind.
OPCODES = (
    (COLLECTIVES, BETWEEN),
    (PRODUCTS, {"convolution", "dot", "dot-general", "ragged-dot"}),
    (SORTS, {"composite", "sort", "topk"}),
    (INDEXED, {"gather", "scatter", "dynamic-slice", "dynamic-update-slice"}),
    (REDUCTIONS, {"reduce", "reduce-window"}),
)
MOVING = {
    "broadcast",
    "broadcast-in-dim",
    "concatenate",
    "copy",
    "iota",
    "pad",
    "reshape",
    "reverse",
    "slice",
    "transpose",
}
# These instructions do no work of their own; the instructions that make or use their values do it.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
        "copy-done", "async-done", "slice-done", "call-update", "call-done", "opt-barrier", "domain",
        *(f"{opcode}-done" for opcode in BETWEEN)}  # fmt: skip
SLICING = {"dynamic-slice", "gather", "slice"}  # read no more of their first operand than they return
UPDATING = {"dynamic-update-slice": 1, "scatter": 2}  # write the operand of this number into their first one
TYPE = re.compile(r"(?:[a-z]+[0-9]+|pred)\[[0-9,<=]*\](?:\{[^}]*\})?")


def packed(text: str) -> bytes:
    """Optimized HLO as an artifact keeps it."""
    return lzma.compress(text.encode(), preset=1)


def unpacked(data: bytes) -> str:
    """The reverse of :func:`packed`.

    Raises:
        ValueError: The data is damaged, or its text has more than ``LARGEST`` bytes.
    """
    reader = lzma.LZMADecompressor(memlimit=2**28)
    try:
        text = reader.decompress(data, LARGEST)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"not compressed text: {error}") from error
    if not reader.eof:
        raise ValueError(f"incomplete, or more than {LARGEST} bytes")
    return text.decode()


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str  # without the percent sign
    opcode: str  # ``fusion``, ``while`` and their like
    shape: str  # the type of its result as text
    operands: tuple[str, ...]  # names of its operands
    literal: str  # the text between the parentheses: a constant's value, a parameter's number, or the operands
    attributes: str  # the rest of the line
    root: bool  # whether it is its computation's result

    @property
    def bytes(self) -> int:
        """Bytes of its result; of a tuple, those of all its parts together."""
        return shape_bytes(self.shape)

    @cached_property
    def called(self) -> dict[str, list[str]]:
        """Computations that it calls, by role."""
        return {role: re.findall(r"%([\w.\-]+)", names) for role, names in CALLED.findall(self.attributes)}

    @cached_property
    def label(self) -> str:
        """jax's scopes around it in the traced program, with slashes between; empty where there are none."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @cached_property
    def cycles(self) -> int | None:
        """The compiler's estimate of its cycles; None where the compiler made none."""
        match = re.search(r'"estimated_cycles":"?(\d+)', self.attributes)
        return int(match[1]) if match and 0 < int(match[1]) < 2**53 else None

    @property
    def index(self) -> int:
        """The number of the element that a ``get-tuple-element`` takes."""
        match = re.search(r"\bindex=(\d+)", self.attributes)
        if match is None:
            raise ValueError(f"{self.name}: no index of an element")
        return int(match[1])


def shape_bytes(text: str) -> int:
    """Bytes of all arrays that the text of a type names."""
    total = 0
    for kind, sizes in ARRAY.findall(text):
        total += WIDTHS.get(kind, 4) * math.prod(dims(sizes))
    return total


def dims(sizes: str) -> tuple[int, ...]:
    """The sizes between the brackets of a type; of a dynamic one, the most that it can be."""
    return tuple(int(size.removeprefix("<=")) for size in sizes.split(",") if size)


@dataclass
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        if root := next((one for one in self.instructions.values() if one.root), None):
            return root
        raise ValueError(f"{self.name}: no ROOT instruction")

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The number of each parameter, by its name."""
        return {i.name: int(i.literal) for i in self.instructions.values() if i.opcode == "parameter"}


@dataclass(frozen=True)
class Module:
    """A parsed module: computations by name, and the one that runs first."""

    computations: dict[str, Computation]
    entry: Computation
    # By a result's number, the parameter that it is written into.
    aliased: Mapping[int, int] = field(default_factory=dict)

    def fused(self, fusion: Instruction) -> Computation:
        """The computation of a fusion."""
        return self.computations[fusion.called["calls"][0]]


def _instruction(name: str, text: str, root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    at = rest.index("(")
    close = _closing(rest, at)
    inside = rest[at + 1 : close]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, rest[:at], shape, operands, inside, rest[close + 1 :], root)


def _closing(text: str, at: int) -> int:
    depth = 0
    for index in range(at, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise ValueError(f"HLO text: no closing parenthesis in {text[:80]}")


def parse(text: str) -> Module:
    """Parses ``Compiled.as_text()``.

    Raises:
        ValueError: There is no entry computation, an instruction reads a value before it is made, computations call
            each other in a circle, or there are more than ``MOST`` instructions with every call written out.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if (header := HEADER.match(line)) and not line.startswith(" "):
            current = computations[header[2]] = Computation(header[2])
            entry = current if header[1] else entry
        elif current is not None and (match := LINE.match(line)):
            one = _instruction(match[2], match[3], match[1] is not None)
            if later := [name for name in one.operands if name not in current.instructions]:
                raise ValueError(f"HLO text: {one.name} reads {later[0]} before it is made")
            current.instructions[match[2]] = one
    if entry is None:
        raise ValueError("HLO text: no ENTRY computation")
    _written_out(computations, entry.name, {})
    aliases = re.search(r"input_output_alias=\{(.*?\)) \}", text.partition("\n")[0])
    numbers = re.findall(r"\{(\d*)\}: \((\d+), \{", aliases[1]) if aliases else []
    return Module(computations, entry, {int(result or 0): int(parameter) for result, parameter in numbers})


def _written_out(computations: Mapping[str, Computation], name: str, sizes: dict[str, int]) -> int:
    """Instructions of a computation with every call written out; 0 in ``sizes`` marks a computation not yet counted."""
    if name not in sizes:
        sizes[name] = 0
        if name not in computations:
            raise ValueError(f"HLO text: a call of {name}, which is no computation of it")
        instructions = computations[name].instructions.values()
        called = [inner for one in instructions for names in one.called.values() for inner in names]
        sizes[name] = 1 + len(instructions) + sum(_written_out(computations, inner, sizes) for inner in called)
    if not 0 < sizes[name] <= MOST:
        raise ValueError(f"HLO text: {name} calls itself, or has more than {MOST:,} instructions")
    return sizes[name]


@dataclass(frozen=True)
class Frame:
    """A computation that is being run, and the frame and instruction that called it and give it its parameters."""

    computation: Computation
    caller: "Frame | None" = None
    call: Instruction | None = None


def constant(frame: Frame, name: str, index: int | None = None) -> int | None:
    """The value of a scalar, or of a tuple's element ``index``; None if it is not constant.

    It is traced back through copies, tuples, parameters and calls. An element that a loop carries from trip to trip
    counts as what it is before the first one.
    """
    instruction, call = frame.computation.instructions[name], frame.call
    if instruction.opcode == "parameter" and frame.caller is not None and call is not None:
        loop = call.opcode == "while"
        if loop and index is None:
            return None
        operand = call.operands[0 if loop else frame.computation.parameters[name]]
        return constant(frame.caller, operand, index)
    if index is not None:
        return constant(frame, instruction.operands[index]) if instruction.opcode == "tuple" else None
    if instruction.opcode == "constant":
        return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
    if instruction.opcode == "get-tuple-element":
        return constant(frame, instruction.operands[0], instruction.index)
    return constant(frame, instruction.operands[0]) if instruction.opcode in SAME else None


def trip_count(module: Module, frame: Frame, loop: Instruction) -> int | None:
    """Trips of a ``while`` that counts up by one from a constant to a constant; None for any other loop."""
    condition = Frame(module.computations[loop.called["condition"][0]], frame, loop)
    root = condition.computation.root
    if root.opcode == "fusion":
        condition = Frame(module.fused(root), condition, root)
        root = condition.computation.root
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    first, last = (constant(condition, name) for name in root.operands)
    return None if first is None or last is None else max(0, last - first)


def kind(opcodes: Collection[str]) -> str:
    """The kind of work of an instruction, by its opcode or those of a fusion: the one that usually takes most time."""
    for name, members in OPCODES:
        if not members.isdisjoint(opcodes):
            return name
    return LAYOUT if MOVING.issuperset(opcodes) else ELEMENTWISE


def opcodes(module: Module, instruction: Instruction) -> tuple[str, ...]:
    """The opcode of an instruction; of a fusion, those of everything in it that does work."""
    if instruction.opcode != "fusion":
        return (instruction.opcode,)
    inner = module.fused(instruction).instructions.values()
    return tuple(opcode for one in inner for opcode in opcodes(module, one) if opcode not in FREE)


def large_bytes(shape: str) -> int:
    """Bytes of those arrays of a type that lie in the large memory."""
    return sum(shape_bytes(array) for array in TYPE.findall(shape) if FAST not in array)


@dataclass(frozen=True)
class Access:
    """Bytes of one run of an instruction in the large memory."""

    read: tuple[int, ...]  # of each operand
    written: int
    updated: int | None = None  # the operand in whose buffer the instruction writes


def access(module: Module, computation: Computation, instruction: Instruction) -> Access:
    """Bytes that an instruction reads from and writes to the large memory.

    A slice or a gather reads only the bytes that it takes; an update in place writes only the bytes that it changes.
    Loops, branches, calls, collectives and custom calls are not counted here.
    """
    operands = [computation.instructions[name] for name in instruction.operands]
    rest = (0,) * (len(operands) - 1)
    if instruction.opcode.endswith("-start"):  # a move from one memory to another, at the same time as other work
        moved = instruction.bytes - sum(operand.bytes for operand in operands)
        moved = moved if "slice" in instruction.opcode else operands[0].bytes
        return Access((moved, *rest), 0 if FAST in instruction.shape else moved)
    if instruction.opcode == "fusion":
        return _fused(module, instruction, operands)
    if instruction.opcode in UPDATING:
        index = UPDATING[instruction.opcode]
        read = (0, *(large_bytes(operand.shape) for operand in operands[1:]))
        return Access(read, _written(instruction, operands[index]), 0)
    written = large_bytes(instruction.shape)
    if instruction.opcode in SLICING:
        return Access((0 if FAST in operands[0].shape else instruction.bytes, *rest), written)
    return Access(tuple(large_bytes(operand.shape) for operand in operands), written)


def _result(inner: Computation) -> Instruction:
    """The instruction that makes a computation's result; bitcasts make nothing."""
    root = inner.root
    while root.opcode == "bitcast":
        root = inner.instructions[root.operands[0]]
    return root


def _fused(module: Module, fusion: Instruction, operands: list[Instruction]) -> Access:
    inner = module.fused(fusion)
    names = {number: name for name, number in inner.parameters.items()}
    read = tuple(min(_used(module, inner, names[i]), large_bytes(operand.shape)) for i, operand in enumerate(operands))
    root = _result(inner)
    if root.opcode in UPDATING:
        written = _written(fusion, inner.instructions[root.operands[UPDATING[root.opcode]]])
        return Access(read, written, _parameter(inner, root.operands[0]))
    return Access(read, large_bytes(fusion.shape))


def _parameter(inner: Computation, name: str) -> int | None:
    """The number of the parameter that a value is, seen through bitcasts; None if it is another value."""
    while inner.instructions[name].opcode == "bitcast":
        name = inner.instructions[name].operands[0]
    return inner.parameters.get(name)


def _written(instruction: Instruction, update: Instruction) -> int:
    return 0 if FAST in instruction.shape else update.bytes


def _used(module: Module, inner: Computation, name: str) -> int:
    """Bytes that a fusion's instructions read of one of its parameters: all bytes if one of them reads it whole."""
    used = 0
    for user in inner.instructions.values():
        if name not in user.operands:
            continue
        if user.opcode == "bitcast":
            used += _used(module, inner, user.name)
        elif user.opcode == "fusion":
            nested = module.fused(user)
            if _result(nested).opcode == "parameter":
                used += _used(module, inner, user.name)
            used += sum(
                _used(module, nested, parameter)
                for parameter, number in nested.parameters.items()
                if user.operands[number] == name
            )
        elif user.opcode in SLICING and user.operands[0] == name:
            used += user.bytes
        elif user.opcode not in UPDATING or user.operands[0] != name:
            return inner.instructions[name].bytes
    return used
