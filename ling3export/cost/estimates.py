"""What a compiled TPU program costs, from the compiler's own per-instruction cycle estimates.

A loop's body counts as often as it runs. Where the number of trips depends on the batch, it is what a stated workload
causes, and the estimate names it. Instructions without an estimate are bounded by their bytes over the memory's
bandwidth, and listed. Collectives and custom calls stand apart: the compiler estimates neither.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ling3export.cost.hlo import Frame, Instruction, Module, parse, trip_count
from ling3export.cost.operations import FAST, kind, traffic
from ling3export.plan.chips import Chip

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
# Names without work of their own: their operands' or users' instructions have it.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
        "copy-done", "async-done", "slice-done", "opt-barrier", "domain"}  # fmt: skip
MOVED = ("copy-start", "async-start", "slice-start")  # run beside other work
ALLOCATION = "AllocateBuffer"  # a custom call in name only: the compiler's own scratch memory
LARGE = 10**6  # bytes of a copy worth counting


@dataclass
class Costs:
    """Sums over a program, every instruction as often as it runs.

    Attributes:
        seconds: The compiler's estimates, by opcode.
        bounded: Seconds by bytes of instructions without an estimate, by opcode.
        kinds: Seconds of both, by kind of operation (``operations.py``).
        memory_bytes: Through the large memory, without collectives and custom calls.
        overlapped: Seconds by bytes of moves that run beside other work.
        collectives: kind → [count, bytes].
        custom_calls: target → [count, bytes].
        copies: Names of copies over 1 MB within the large memory, with bytes.
        loops: Where every trip count came from.
        instructions: opcode → how many there are in the program (not how often they run).
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bounded: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    memory_bytes: float = 0.0
    overlapped: float = 0.0
    collectives: dict[str, list[float]] = field(default_factory=dict)
    custom_calls: dict[str, list[float]] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    loops: list[dict[str, Any]] = field(default_factory=list)
    instructions: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> float:
        """Seconds of work in sequence: estimates and bounds."""
        return sum(self.seconds.values()) + sum(self.bounded.values())


class Estimator:
    """Walks a module.

    Args:
        module: The optimized HLO.
        chip: Clock and bandwidth.
        trips: Scope of a loop whose bound depends on the batch → its trips under the stated workload; of a conditional
            → 0 if it is not taken.
    """

    def __init__(self, module: Module, chip: Chip, trips: Mapping[str, float]) -> None:
        self._module, self._chip, self._trips = module, chip, trips
        self._first = True
        self.costs = Costs()
        self._run(Frame(module.entry), 1.0)

    def _run(self, frame: Frame, times: float) -> None:
        for instruction in frame.computation.instructions.values():
            self._one(frame, instruction, times)

    def _one(self, frame: Frame, instruction: Instruction, times: float) -> None:
        opcode, costs = instruction.opcode, self.costs
        if opcode in FREE or (opcode.endswith("-done") and opcode.removesuffix("-done") in COLLECTIVES):
            return
        costs.instructions[opcode] += 1
        if opcode == "while":
            return self._loop(frame, instruction, times)
        if opcode == "conditional":
            return self._branch(frame, instruction, times)
        if opcode == "call":
            inner = self._module.computations[instruction.called["to_apply"][0]]
            return self._run(Frame(inner, frame, instruction), times)
        plain = opcode.removesuffix("-start")
        if plain in COLLECTIVES:
            return self._apart(costs.collectives, plain, instruction, times)
        if opcode == "custom-call":
            target = instruction.attributes.partition('custom_call_target="')[2].partition('"')[0]
            if target == ALLOCATION:
                return None
            return self._apart(costs.custom_calls, target, instruction, times)
        self._timed(frame, instruction, times)
        return None

    def _timed(self, frame: Frame, instruction: Instruction, times: float) -> None:
        costs, opcode = self.costs, instruction.opcode
        moved = self._moved(frame, instruction)
        costs.memory_bytes += times * traffic(self._module, frame.computation, instruction)
        self._copied(frame, instruction)
        if opcode in MOVED:
            costs.overlapped += times * moved / self._chip.bandwidth
            return
        if instruction.cycles is not None:
            seconds = times * instruction.cycles / self._chip.clock
            costs.seconds[opcode] += seconds
        else:
            seconds = times * moved / self._chip.bandwidth
            costs.bounded[_bounded_kind(instruction)] += seconds
        costs.kinds[kind(self._module, instruction)] += seconds

    def _copied(self, frame: Frame, instruction: Instruction) -> None:
        """Notes a large copy; one that begins or ends in the fast memory is a prefetch or a writing back."""
        if instruction.opcode not in ("copy", "copy-start") or FAST in instruction.shape:
            return
        source = frame.computation.instructions[instruction.operands[0]]
        if source.bytes > LARGE and FAST not in source.shape:
            self.costs.copies[instruction.name] = source.bytes

    def _moved(self, frame: Frame, instruction: Instruction) -> int:
        """Bytes that an instruction reads and writes; an update in place does not move what it leaves as it is."""
        operands = [self._bytes(frame, name) for name in instruction.operands]
        if instruction.opcode in ("dynamic-update-slice", "scatter") or "scatter" in instruction.name:
            return 2 * sum(operands[1:])
        if instruction.opcode in ("dynamic-slice", "slice", "gather") or "gather" in instruction.name:
            return 2 * instruction.bytes
        if instruction.opcode in MOVED:  # (operand, result, context)
            return max(0, instruction.bytes - sum(operands)) if "slice" in instruction.opcode else sum(operands)
        return instruction.bytes + sum(operands)

    def _bytes(self, frame: Frame, name: str) -> int:
        return frame.computation.instructions[name].bytes

    def _apart(self, table: dict[str, list[float]], kind: str, instruction: Instruction, times: float) -> None:
        row = table.setdefault(kind, [0.0, 0.0])
        row[0] += times
        row[1] += times * instruction.bytes

    def _loop(self, frame: Frame, loop: Instruction, times: float) -> None:
        known = trip_count(self._module, frame, loop)
        scope = _scope(loop)
        trips, source = (float(known), "the program") if known is not None else (1.0, "unknown: counted once")
        if known is None and scope in self._trips:
            trips, source = self._trips[scope], f"the workload's `{scope}`"
        self.costs.loops.append({"loop": loop.label or loop.name, "trips": trips, "source": source, "times": times})
        for role, count in (("condition", trips + 1), ("body", trips)):
            computation = self._module.computations[loop.called[role][0]]
            self._run(Frame(computation, frame, loop), times * count)

    def _branch(self, frame: Frame, instruction: Instruction, times: float) -> None:
        """The dearer branch; the cheaper one where the workload says that the condition does not hold."""
        roles = ("branch_computations", "true_computation", "false_computation")
        names = [name for role in roles for name in instruction.called.get(role, [])]
        kept = self.costs
        found = []
        for name in names:
            self.costs = Costs()
            self._run(Frame(self._module.computations[name], frame, instruction), times)
            found.append(self.costs)
        self.costs = kept
        skipped = self._trips.get(_scope(instruction)) == 0
        chosen = (min if skipped else max)(found, key=lambda costs: costs.total)
        _add(kept, chosen)


def _scope(instruction: Instruction) -> str:
    """The named scope that the model put right around a loop or a conditional: ``…/pages/while``."""
    parts = instruction.label.split("/")
    return parts[-2] if len(parts) > 1 else ""


def _bounded_kind(instruction: Instruction) -> str:
    """``fusion`` says little: the name of a gather's or scatter's fusion says what it is."""
    for word in ("scatter", "gather"):
        if word in instruction.name:
            return word
    return instruction.opcode


def _add(whole: Costs, part: Costs) -> None:
    tables = ((whole.seconds, part.seconds), (whole.bounded, part.bounded), (whole.kinds, part.kinds))
    for times, more in tables:
        for name, value in more.items():
            times[name] += value
    whole.memory_bytes += part.memory_bytes
    whole.instructions += part.instructions
    whole.overlapped += part.overlapped
    whole.loops += part.loops
    whole.copies |= part.copies
    for left, right in ((whole.collectives, part.collectives), (whole.custom_calls, part.custom_calls)):
        for name, (count, moved) in right.items():
            row = left.setdefault(name, [0.0, 0.0])
            row[0], row[1] = row[0] + count, row[1] + moved


def estimate(text: str, chip: Chip, trips: Mapping[str, float]) -> dict[str, Any]:
    """The estimate of a program as the manifest records it.

    Args:
        text: ``Compiled.as_text()``.
        chip: The device it was compiled for.
        trips: See :class:`Estimator`.

    Returns:
        ``seconds`` (estimates and bounds together, or the time to move what is moved beside them, if that is more),
        ``by_opcode``, ``bounded`` (seconds without an estimate), ``by_kind`` (both), ``memory_bytes`` (through the
        large memory), ``collectives``, ``custom_calls``, ``copies``, ``loops``, ``instructions``.
    """
    costs = Estimator(parse(text), chip, trips).costs
    return {
        "seconds": max(costs.total, costs.overlapped),
        "estimated": sum(costs.seconds.values()),
        "by_opcode": _rounded(costs.seconds),
        "bounded": _rounded(costs.bounded),
        "by_kind": _rounded(costs.kinds),
        "memory_bytes": int(costs.memory_bytes),
        "overlapped": costs.overlapped,
        "collectives": {name: {"count": int(c), "bytes": int(b)} for name, (c, b) in sorted(costs.collectives.items())},
        "custom_calls": {
            name: {"count": int(c), "bytes": int(b)} for name, (c, b) in sorted(costs.custom_calls.items())
        },
        "copies": costs.copies,
        "loops": costs.loops,
        "instructions": dict(sorted(costs.instructions.items())),
    }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in sorted(seconds.items(), key=lambda row: -row[1]) if value}
