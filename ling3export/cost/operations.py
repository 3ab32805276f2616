"""What kind of work an instruction of an optimized HLO module is, and which bytes it moves through the large memory."""

import re

from ling3export.cost.hlo import Computation, Instruction, Module, shape_bytes

FAST = "S(1)"  # the memory space of a chip's own fast memory, in a layout
PRODUCTS, INDEXED, SORTS, REDUCTIONS, LAYOUT, ELEMENTWISE = KINDS = (
    "matrix products", "gathers and scatters", "sorts", "reductions", "copies and layout", "elementwise",
)  # fmt: skip
# The first row that an instruction (for a fusion: something in it) is in decides.
OPCODES = (
    (PRODUCTS, {"convolution", "dot", "ragged-dot"}),
    (SORTS, {"sort", "topk"}),
    (INDEXED, {"gather", "scatter", "dynamic-slice", "dynamic-update-slice"}),
    (REDUCTIONS, {"reduce", "reduce-window"}),
)
MOVING = {"broadcast", "concatenate", "copy", "iota", "pad", "reshape", "reverse", "slice", "transpose"}
SILENT = {"bitcast", "constant", "fusion", "get-tuple-element", "parameter", "tuple"}
SLICING = {"dynamic-slice", "gather", "slice"}  # read of their first operand what they return
UPDATING = {"dynamic-update-slice": 1, "scatter": 2}  # write into their first operand what this operand has
TYPE = re.compile(r"(?:[a-z]+[0-9]+|pred)\[[0-9,]*\](?:\{[^}]*\})?")


def kind(module: Module, instruction: Instruction) -> str:
    """One of KINDS: of all that a fusion does, what is usually dearest."""
    opcodes = _opcodes(module, instruction)
    for name, members in OPCODES:
        if opcodes & members:
            return name
    return LAYOUT if opcodes <= MOVING else ELEMENTWISE


def _opcodes(module: Module, instruction: Instruction) -> set[str]:
    """The opcode, or those in a fusion and in the fusions within it."""
    if instruction.opcode != "fusion":
        return {instruction.opcode}
    inner = _called(module, instruction).instructions.values()
    return set().union(*(_opcodes(module, each) for each in inner if each.opcode == "fusion"),
                       {each.opcode for each in inner} - SILENT)  # fmt: skip


def large_bytes(shape: str) -> int:
    """Bytes of the arrays of a type that lie in the large memory."""
    return sum(shape_bytes(array) for array in TYPE.findall(shape) if FAST not in array)


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction reads from and writes to the large memory.

    What is sliced or gathered out of an operand counts with what is taken, an update in place with what is written.

    Args:
        module: The module.
        computation: Where the instruction stands; it has the operands.
        instruction: Any that is no loop, branch, call, collective or custom call.
    """
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.opcode.endswith("-start"):  # a move beside other work: each end in one of the memories
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
    """What makes a computation's result, seen through bitcasts."""
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
    """Bytes that the instructions of a fusion take of one of its parameters; all of it if one takes it whole."""
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
            used += sum(_used(module, nested, each) for each, number in nested.parameters.items()
                        if user.operands[number] == name)  # fmt: skip
        elif user.opcode in SLICING and user.operands[0] == name:
            used += user.bytes
        elif user.opcode not in UPDATING or user.operands[0] != name:
            return inner.instructions[name].bytes
    return used
