"""What kind of work an instruction of an optimized HLO module is, and which bytes it moves through the large memory."""

import re

from ling3export.foundation.hlo import Computation, Instruction, Module, shape_bytes

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
BETWEEN = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")  # opcodes of devices
# The first row that names an instruction, or one inside a fusion, decides its kind.
OPCODES = (
    (PRODUCTS, {"convolution", "dot", "ragged-dot"}),
    (SORTS, {"sort", "topk"}),
    (INDEXED, {"gather", "scatter", "dynamic-slice", "dynamic-update-slice"}),
    (REDUCTIONS, {"reduce", "reduce-window"}),
)
MOVING = {"broadcast", "concatenate", "copy", "iota", "pad", "reshape", "reverse", "slice", "transpose"}
SILENT = {"bitcast", "constant", "fusion", "get-tuple-element", "parameter", "tuple"}
SLICING = {"dynamic-slice", "gather", "slice"}  # read no more of their first operand than they return
UPDATING = {"dynamic-update-slice": 1, "scatter": 2}  # write the operand of this number into their first one
TYPE = re.compile(r"(?:[a-z]+[0-9]+|pred)\[[0-9,]*\](?:\{[^}]*\})?")


def kind(module: Module, instruction: Instruction) -> str:
    """One of KINDS; a fusion has the kind of the operation in it that usually takes the most time."""
    opcodes = _opcodes(module, instruction)
    for name, members in OPCODES:
        if opcodes & members:
            return name
    return LAYOUT if opcodes <= MOVING else ELEMENTWISE


def kinds_of(module: Module) -> dict[str, str]:
    """The kind of every instruction of a module, by its name: one of KINDS, or COLLECTIVES."""
    each = [instruction for inner in module.computations.values() for instruction in inner.instructions.values()]
    return {one.name: COLLECTIVES if one.opcode.startswith(BETWEEN) else kind(module, one) for one in each}


def _opcodes(module: Module, instruction: Instruction) -> set[str]:
    """The opcode of an instruction; of a fusion, the opcodes of all that is in it."""
    if instruction.opcode != "fusion":
        return {instruction.opcode}
    inner = _called(module, instruction).instructions.values()
    return set().union(
        *(_opcodes(module, each) for each in inner if each.opcode == "fusion"), {each.opcode for each in inner} - SILENT
    )


def large_bytes(shape: str) -> int:
    """Bytes of those arrays of a type that lie in the large memory."""
    return sum(shape_bytes(array) for array in TYPE.findall(shape) if FAST not in array)


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction reads from and writes to the large memory.

    A slice or a gather reads only the bytes that it takes; an update in place writes only the bytes that it changes.

    Args:
        module: The optimized HLO.
        computation: The computation that holds the instruction and its operands.
        instruction: Any instruction but a loop, branch, call, collective or custom call.
    """
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.opcode.endswith("-start"):  # a move beside other work, from one memory to another
        moved = instruction.bytes - sum(operand.bytes for operand in operands)
        moved = moved if "slice" in instruction.opcode else operands[0].bytes
        return moved * (1 if FAST in instruction.shape else 2)
    if instruction.opcode == "fusion":
        return _fused(module, instruction, operands)
    if instruction.opcode in UPDATING:
        index = UPDATING[instruction.opcode]
        return sum(large_bytes(each.shape) for each in operands[1:]) + _written(instruction, operands[index])
    written = large_bytes(instruction.shape)
    if instruction.opcode in SLICING:
        return written + (0 if FAST in operands[0].shape else instruction.bytes)
    return written + sum(large_bytes(operand.shape) for operand in operands)


def _called(module: Module, fusion: Instruction) -> Computation:
    return module.computations[fusion.called["calls"][0]]


def _result(inner: Computation) -> Instruction:
    """The instruction that makes a computation's result; bitcasts make nothing."""
    root = inner.root
    while root.opcode == "bitcast":
        root = inner.instructions[root.operands[0]]
    return root


def _fused(module: Module, fusion: Instruction, operands: list[Instruction]) -> int:
    inner = _called(module, fusion)
    names = {number: name for name, number in inner.parameters.items()}
    read = sum(min(_used(module, inner, names[i]), large_bytes(operand.shape)) for i, operand in enumerate(operands))
    root = _result(inner)
    if root.opcode in UPDATING:
        return read + _written(fusion, inner.instructions[root.operands[UPDATING[root.opcode]]])
    return read + large_bytes(fusion.shape)


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
            nested = _called(module, user)
            if _result(nested).opcode == "parameter":
                used += _used(module, inner, user.name)
            used += sum(
                _used(module, nested, each)
                for each, number in nested.parameters.items()
                if user.operands[number] == name
            )
        elif user.opcode in SLICING and user.operands[0] == name:
            used += user.bytes
        elif user.opcode not in UPDATING or user.operands[0] != name:
            return inner.instructions[name].bytes
    return used
