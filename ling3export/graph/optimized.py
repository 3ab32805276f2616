"""Optimized HLO as a :class:`Graph`: every instruction with its runs, its layers and its costs.

The reader walks the module as it runs: into loops, branches and calls, and into the body of a loop once, with the
number of its trips. A fusion counts as one operation.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ling3export.graph.context import Context, attributed, enclosing, scope_of
from ling3export.graph.flops import flops
from ling3export.graph.hlo import (
    ARRAY,
    BETWEEN,
    CALLED,
    COLLECTIVES,
    FAST,
    FREE,
    Computation,
    Frame,
    Instruction,
    Module,
    access,
    kind,
    opcodes,
    parse,
    trip_count,
)
from ling3export.graph.native import cost
from ling3export.graph.record import Graph, Loop, Operation

CUSTOM_CALLS = "custom calls"
PREFETCHES = "prefetches"  # from one memory of a device to another, at the same time as other work
MOVED = ("copy-start", "async-start", "slice-start")  # run at the same time as other work
BRANCHES = ("branch_computations", "true_computation", "false_computation")
LARGE_CONSTANT = 1024  # bytes
ALLOCATION = "AllocateBuffer"  # a custom call in name only: the compiler's own scratch memory
# The result of these is their first operand's buffer.
SAME_BUFFER = {"bitcast", "opt-barrier", "copy-done", "dynamic-update-slice", "scatter", "while"}
ALIASES = re.compile(r"\{(\d*)\}: ?\((\d+), ?\{(\d*)\}")

# Text after one of these in an instruction says nothing about its computation.
NOTES = (", metadata={", ", backend_config=", ", frontend_attributes={", ", control-predecessors={", ", origin=")
CHANNEL = re.compile(r"(channel_id|async_execution_thread)=[^,\s]+")
Origin = str | tuple | None  # the input that a buffer is, or those of a tuple's elements


def read(text: str, cell: str, target: str, context: Context, peak_bytes: int | None = None) -> Graph:
    """The graph of ``Compiled.as_text()``.

    Raises:
        ValueError: The text has no entry computation, or a form that this reader does not know.
    """
    module = parse(text)
    walk = _Walk(module, context)
    walk.run()
    return Graph(
        cell=cell,
        target=target,
        form="optimized",
        operations=tuple(attributed(walk.operations, walk.users, context)),
        peak_bytes=peak_bytes,
        bandwidth=context.bandwidth,
        peak_flops=context.peak,
        loops=tuple(walk.loops),
        constants=_constants(module),
        aliased=frozenset(name for number, name in enumerate(context.inputs) if number in module.aliased.values()),
    )


def _constants(module: Module) -> dict[str, int]:
    instructions = (one for computation in module.computations.values() for one in computation.instructions.values())
    return {one.name: one.bytes for one in instructions if one.opcode == "constant" and one.bytes >= LARGE_CONSTANT}


class _Walk:
    def __init__(self, module: Module, context: Context) -> None:
        self._module, self._context = module, context
        self.operations: list[Operation] = []
        self.users: dict[str, list[str]] = {}  # names of operations by the name of one that they read
        self._contents: dict[str, str] = {}  # digests of called computations
        self._makers: dict[str, tuple[str, ...]] = {}  # the operations that an instruction's value comes from
        self.loops: list[Loop] = []

    def run(self) -> None:
        frame = Frame(self._module.entry)
        names = {number: name for name, number in self._module.entry.parameters.items()}
        inputs = self._context.inputs
        origins: dict[str, Origin] = {
            name: inputs[number] if number < len(inputs) else f"input {number}" for number, name in names.items()
        }
        self._computation(frame, 1.0, origins, "")

    def _computation(self, frame: Frame, times: float, origins: dict[str, Origin], prefix: str) -> Origin:
        """Adds the operations of one computation; gives the origin of its result."""
        for instruction in frame.computation.instructions.values():
            name = instruction.name
            if instruction.opcode == "parameter":
                origin = origins.get(name)
                self._makers[prefix + name] = (origin,) if isinstance(origin, str) else ()
                continue
            free = instruction.opcode in FREE
            self._makers[prefix + name] = self._sources(instruction, prefix) if free else (prefix + name,)
            origins[name] = reused(
                self._module, instruction, [origins.get(operand) for operand in instruction.operands]
            )
            if instruction.opcode not in FREE:
                result = self._one(frame, instruction, times, origins, prefix)
                origins[name] = result if result is not None else origins[name]
        return origins[frame.computation.root.name]

    def _digest(self, computation: Computation, instruction: Instruction, operands: Sequence[Origin]) -> str:
        """The content of an instruction, without names: see :attr:`Operation.digest`."""
        shapes = [computation.instructions[name].shape for name in instruction.operands]
        called = [self._inside(name) for names in instruction.called.values() for name in names]
        inputs = [origin for origin in operands if isinstance(origin, str)]
        content = instruction.opcode, instruction.shape, shapes, plain(instruction.attributes), called, inputs
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def _inside(self, name: str) -> str:
        """The content of a called computation: its result as an expression of its parameters, in any order of lines."""
        if name not in self._contents:
            computation, values = self._module.computations[name], dict[str, str]()
            for one in computation.instructions.values():
                literal = one.literal if one.opcode in ("constant", "parameter", "iota") else ""
                called = [self._inside(inner) for names in one.called.values() for inner in names]
                operands = [values.get(operand, "") for operand in one.operands]
                content = one.opcode, one.shape, literal, plain(one.attributes), called, operands
                values[one.name] = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
            self._contents[name] = values[computation.root.name]
        return self._contents[name]

    def _sources(self, instruction: Instruction, prefix: str) -> tuple[str, ...]:
        """The operations and inputs that an instruction's operands come from."""
        makers = (maker for name in instruction.operands for maker in self._makers.get(prefix + name, ()))
        return tuple(dict.fromkeys(makers))

    def _one(
        self, frame: Frame, instruction: Instruction, times: float, origins: dict[str, Origin], prefix: str
    ) -> Origin:
        opcode = instruction.opcode
        if opcode == "while":
            return self._loop(frame, instruction, times, origins[instruction.operands[0]], prefix)
        if opcode == "conditional":
            return self._branches(frame, instruction, times, origins, prefix)
        if opcode in ("call", "call-start"):  # the latter on a sparse core, at the same time as the rest
            called = self._called(frame, instruction, "to_apply")
            inner = _bound(called.computation, [origins.get(name) for name in instruction.operands])
            return self._computation(called, times, inner, f"{prefix}{instruction.name}/")
        if (operation := self._operation(frame.computation, instruction, times, origins, prefix)) is not None:
            self.operations.append(operation)
            for operand in operation.operands:
                self.users.setdefault(operand, []).append(operation.name)
        return None

    def _called(self, frame: Frame, instruction: Instruction, role: str) -> Frame:
        return Frame(self._module.computations[instruction.called[role][0]], frame, instruction)

    def _loop(self, frame: Frame, loop: Instruction, times: float, carried: Origin, prefix: str) -> Origin:
        known, scope = trip_count(self._module, frame, loop), enclosing(loop.label)
        trips, source = self._context.counted(known, scope)
        self.loops.append(Loop(loop.label or loop.name, trips, source, times))
        inside = f"{prefix}{loop.name}/"
        for role, runs in (("condition", trips + 1), ("body", trips)):
            called = self._called(frame, loop, role)
            self._computation(called, times * runs, _bound(called.computation, [carried]), inside)
        return carried

    def _branches(
        self, frame: Frame, conditional: Instruction, times: float, origins: dict[str, Origin], prefix: str
    ) -> Origin:
        """Every branch that runs: by its share where the context knows one, else the dearest alone."""
        names = [name for role in BRANCHES for name in conditional.called.get(role, [])]
        runs = []
        for number, name in enumerate(names):
            called = Frame(self._module.computations[name], frame, conditional)
            part = _Walk(self._module, self._context)
            part._makers, part._contents = self._makers, self._contents
            operand = origins.get(conditional.operands[min(number + 1, len(conditional.operands) - 1)])
            inner = _bound(called.computation, [operand])
            origin = part._computation(called, times, inner, f"{prefix}{conditional.name}/{number}/")
            runs.append((part, origin))
        shares = branch_shares([part.operations for part, _ in runs], self._context, enclosing(conditional.label))
        for (part, _), (share, layers) in zip(runs, shares, strict=True):
            if share:
                self.operations += [taken(one, share, layers) for one in part.operations]
                self.loops += part.loops
                for operand, users in part.users.items():
                    self.users.setdefault(operand, []).extend(users)
        largest = max(range(len(runs)), key=lambda number: shares[number][0])
        return runs[largest][1]

    def _operation(
        self,
        computation: Computation,
        instruction: Instruction,
        times: float,
        origins: Mapping[str, Origin],
        prefix: str,
    ) -> Operation | None:
        module, opcode = self._module, instruction.opcode
        work, sources = opcodes(module, instruction), [origins.get(name) for name in instruction.operands]
        operation = Operation(
            name=f"{prefix}{instruction.name}",
            opcode=opcode,
            kind=CUSTOM_CALLS,
            shapes=tuple(match[0] for match in ARRAY.finditer(instruction.shape)),
            operands=self._sources(instruction, prefix),
            scope=scope_of(module, instruction),
            times=times,
            result_bytes=instruction.bytes,
            fused=work if opcode == "fusion" else (),
            shared=self._inside(instruction.called["calls"][0]) if opcode == "fusion" else "",
            digest=self._digest(computation, instruction, sources),
        )
        if opcode.removesuffix("-start") in BETWEEN:
            return replace(operation, kind=COLLECTIVES, collective_bytes=instruction.bytes)
        weights = (name for name in sources if isinstance(name, str) and name.startswith("params."))
        operation = replace(operation, weights=tuple(name.removeprefix("params.") for name in weights))
        operands = [computation.instructions[name] for name in instruction.operands]
        if opcode == "custom-call":
            return self._custom_call(operation, instruction, operands, sources, origins.get(instruction.name))
        moved = access(module, computation, instruction)
        updated = None if moved.updated is None else sources[moved.updated]
        operation = replace(
            operation,
            kind=PREFETCHES if opcode in MOVED else kind(work),
            flops=flops(module, computation, instruction),
            overlapped=opcode in MOVED,
            copied=_copied(module, instruction, operands),
            read=_by_place(moved.read, sources),
            written=_by_place([moved.written], [updated]),
        )
        if (clock := self._context.clock) and instruction.cycles is not None and opcode not in MOVED:
            return replace(operation, seconds=instruction.cycles / clock, source="compiler")
        return self._context.bounded(operation)

    def _custom_call(
        self,
        operation: Operation,
        call: Instruction,
        operands: Sequence[Instruction],
        sources: Sequence[Origin],
        results: Origin,
    ) -> Operation | None:
        target = call.attributes.partition('custom_call_target="')[2].partition('"')[0]
        if target == ALLOCATION:
            return None
        shapes = [operand.shape for operand in operands]
        counted = cost(target, shapes, call.shape, call.attributes, self._context)
        updated = results if isinstance(results, tuple) else (results,) * len(counted.written)
        read, written = _by_place(counted.read, sources), _by_place(counted.written, updated)
        return self._context.bounded(replace(operation, target=target, flops=counted.flops, read=read, written=written))


def _by_place(sizes: Iterable[float], origins: Iterable[Origin]) -> dict[str, float]:
    places: dict[str, float] = {}
    for size, origin in zip(sizes, origins, strict=False):
        if size:
            places[place_of(origin)] = places.get(place_of(origin), 0.0) + size
    return places


def _bound(computation: Computation, operands: Sequence[Origin]) -> dict[str, Origin]:
    return {
        name: operands[number] if number < len(operands) else None for name, number in computation.parameters.items()
    }


def reused(module: Module, instruction: Instruction, operands: Sequence[Any]) -> Any:
    """The values of ``operands`` that an instruction's results are, or are written into; a tuple for a tuple.

    None stands for a new result, or for a tuple of new results.
    """
    opcode = instruction.opcode
    if opcode == "tuple":
        return tuple(operands)
    if opcode == "get-tuple-element":
        (whole,) = operands
        return whole[instruction.index] if isinstance(whole, tuple) and instruction.index < len(whole) else None
    if opcode in SAME_BUFFER:
        return operands[0]
    if opcode == "fusion":
        return _updated(module.fused(instruction), operands)
    if opcode == "custom-call" and "output_to_operand_aliasing" in instruction.attributes:
        aliases = {result: operands[int(number)] for result, number, _ in ALIASES.findall(instruction.attributes)}
        if "" in aliases:
            return aliases[""]
        return tuple(aliases.get(str(number)) for number in range(len(ARRAY.findall(instruction.shape))))
    return None


def _updated(fused: Computation, operands: Sequence[Any]) -> Any:
    """The ``operands`` that a fusion updates in place: one, or a tuple."""

    def origin(name: str) -> Any:
        instruction = fused.instructions[name]
        while instruction.opcode in ("bitcast", "dynamic-update-slice", "scatter"):
            instruction = fused.instructions[instruction.operands[0]]
        return operands[int(instruction.literal)] if instruction.opcode == "parameter" else None

    root = fused.root
    return tuple(origin(name) for name in root.operands) if root.opcode == "tuple" else origin(root.name)


def plain(attributes: str) -> str:
    """Attributes without names, places in sources, channels and what the compiler only noted."""
    for note in NOTES:
        attributes = attributes.partition(note)[0]
    return CHANNEL.sub("", CALLED.sub("", attributes) if "=%" in attributes or "={%" in attributes else attributes)


def _copied(module: Module, instruction: Instruction, operands: Sequence[Instruction]) -> int:
    """Bytes of a copy; 0 for one that begins or ends in the fast memory, a prefetch or a writing back.

    A copy of one repeated value is none either: XLA fills equal results of a branch so, each in a buffer of its own.
    """
    if instruction.opcode not in ("copy", "copy-start"):
        return 0
    if {*opcodes(module, operands[0])} == {"broadcast"}:
        return 0
    return operands[0].bytes if all(FAST not in one.shape for one in (instruction, *operands)) else 0


def place_of(origin: Origin) -> str:
    group = origin.split(".")[0] if isinstance(origin, str) else ""
    return {"params": "weights", "state": "state"}.get(group, "other")


def branch_shares(
    parts: Sequence[Sequence[Operation]], context: Context, scope: str
) -> list[tuple[float, tuple[int, ...]]]:
    """How much of a conditional's runs each branch takes, and the layers that take it.

    A loop over layers of both kinds of MLP takes the branch of each as often as it has such layers. Any other
    conditional takes its dearest branch, or the cheapest one where the context says that the condition does not hold.
    """
    steps = [{step for one in part for step in one.scope.split("/")} for part in parts]
    layers = next((context.layers[step] for group in steps for step in sorted(group) if step in context.layers), ())
    if len(parts) == 2 and layers and sum("dense_mlp" in group for group in steps) == 1:
        own = [tuple(n for n in layers if (n in context.dense) == ("dense_mlp" in group)) for group in steps]
        return [(len(numbers) / len(layers), numbers) for numbers in own]
    choose = min if context.trips.get(scope) == 0 else max
    costs = [sum(_cost(one) for one in part) for part in parts]
    chosen = choose(range(len(parts)), key=lambda number: costs[number])
    return [(float(number == chosen), ()) for number in range(len(parts))]


def _cost(operation: Operation) -> float:
    seconds = operation.bytes * 1e-12 if operation.seconds is None else operation.seconds
    return 0.0 if operation.overlapped else operation.times * seconds


def taken(operation: Operation, share: float, layers: tuple[int, ...]) -> Operation:
    """An operation of a branch that is not always taken."""
    return replace(operation, times=operation.times * share, layers=layers or operation.layers)
