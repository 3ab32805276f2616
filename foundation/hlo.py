"""The text of an optimized HLO module as records: computations, instructions, cycle estimates, trips of loops."""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property

WIDTHS = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]+[0-9]+|pred)\[([0-9,]*)\]")
CALLED = re.compile(
    r"\b(condition|body|calls|to_apply|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
# The result of these has the value of their operand.
SAME = {"copy", "bitcast", "reshape", "convert", "copy-done", "broadcast", "copy-start"}


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
        assert match is not None
        return int(match[1])


def shape_bytes(text: str) -> int:
    """Bytes of all arrays that the text of a type names."""
    total = 0
    for kind, sizes in ARRAY.findall(text):
        total += WIDTHS.get(kind, 4) * math.prod(int(size) for size in sizes.split(",") if size)
    return total


@dataclass
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(instruction for instruction in self.instructions.values() if instruction.root)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The number of each parameter, by its name."""
        return {i.name: int(i.literal) for i in self.instructions.values() if i.opcode == "parameter"}


@dataclass(frozen=True)
class Module:
    """A parsed module: computations by name, and the one that runs first."""

    computations: dict[str, Computation]
    entry: Computation


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
    raise ValueError(f"HLO text: expected a closing parenthesis, found none, in {text[:80]}")


def parse(text: str) -> Module:
    """Parses ``Compiled.as_text()``.

    Raises:
        ValueError: There is no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if (header := HEADER.match(line)) and not line.startswith(" "):
            current = computations[header[2]] = Computation(header[2])
            entry = current if header[1] else entry
        elif current is not None and (match := LINE.match(line)):
            current.instructions[match[2]] = _instruction(match[2], match[3], match[1] is not None)
    if entry is None:
        raise ValueError("HLO text: expected an ENTRY computation, found none")
    return Module(computations, entry)


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
    found, call = frame.computation.instructions[name], frame.call
    if found.opcode == "parameter" and frame.caller is not None and call is not None:
        loop = call.opcode == "while"
        if loop and index is None:
            return None
        operand = call.operands[0 if loop else frame.computation.parameters[name]]
        return constant(frame.caller, operand, index)
    if index is not None:
        return constant(frame, found.operands[index]) if found.opcode == "tuple" else None
    if found.opcode == "constant":
        return int(found.literal) if re.fullmatch(r"-?\d+", found.literal) else None
    if found.opcode == "get-tuple-element":
        return constant(frame, found.operands[0], found.index)
    return constant(frame, found.operands[0]) if found.opcode in SAME else None


def trip_count(module: Module, frame: Frame, loop: Instruction) -> int | None:
    """Trips of a ``while`` that counts up by one from a constant to a constant; None for any other loop."""
    condition = Frame(module.computations[loop.called["condition"][0]], frame, loop)
    root = condition.computation.root
    if root.opcode == "fusion":
        condition = Frame(module.computations[root.called["calls"][0]], condition, root)
        root = condition.computation.root
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    first, last = (constant(condition, name) for name in root.operands)
    return None if first is None or last is None else max(0, last - first)
