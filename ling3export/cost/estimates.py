"""Estimated time of a compiled TPU program, from the compiler's own per-instruction cycle estimates.

A loop's body counts as often as it runs. Where the number of trips depends on the batch, it is what a stated workload
causes, and the estimate names it. An instruction without an estimate is bounded by its bytes over the memory's
bandwidth, and listed. Collectives and custom calls stand apart: the compiler estimates neither.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ling3export.artifacts.program_records import Collective, Estimate, LoopRecord
from ling3export.cost.chips import Chip
from ling3export.foundation.hlo import FAST, Frame, Instruction, Module, kind, parse, traffic, trip_count

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
# These instructions do no work of their own; the instructions that make or use their values do it.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
        "copy-done", "async-done", "slice-done", "call-update", "call-done", "opt-barrier", "domain",
        *(f"{opcode}-done" for opcode in COLLECTIVES)}  # fmt: skip
MOVED = ("copy-start", "async-start", "slice-start")  # run beside other work
BRANCHES = ("branch_computations", "true_computation", "false_computation")
ALLOCATION = "AllocateBuffer"  # a custom call in name only: the compiler's own scratch memory
LARGE = 10**6  # bytes of a copy worth counting
UNKNOWN = "unknown: counted once"  # the source of a loop's trips that nobody states


@dataclass
class Costs:
    """Sums over a program, every instruction as often as it runs."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # the compiler's estimates, by opcode
    # Seconds by bytes of instructions without an estimate, by opcode.
    bounded: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    # Seconds of both, by kind of operation (``foundation/hlo.py``).
    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    memory_bytes: float = 0.0  # bytes through the large memory, without collectives and custom calls
    overlapped: float = 0.0  # seconds by bytes of moves that run beside other work
    # By kind, a count and bytes.
    collectives: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    # By target, a count and bytes.
    custom_calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    copies: dict[str, int] = field(default_factory=dict)  # bytes of copies over 1 MB within the large memory, by name
    loops: list[LoopRecord] = field(default_factory=list)  # where every trip count came from
    # How many there are in the program (not how often they run), by opcode.
    instructions: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> float:
        """Seconds of work in sequence: estimates and bounds."""
        return sum(self.seconds.values()) + sum(self.bounded.values())


class Estimator:
    """Walks a module and adds up its costs.

    Args:
        module: The optimized HLO.
        chip: Clock and bandwidth.
        trips: By scope, the trips of a loop whose bound depends on the batch under the stated workload; of a
            conditional, 0 if it is not taken.
    """

    def __init__(self, module: Module, chip: Chip, trips: Mapping[str, float]) -> None:
        self._module, self._chip, self._trips = module, chip, trips
        self.costs = Costs()
        self._run(Frame(module.entry), 1.0)

    def _run(self, frame: Frame, times: float) -> None:
        for instruction in frame.computation.instructions.values():
            if instruction.opcode not in FREE:
                self.costs.instructions[instruction.opcode] += 1
                self._one(frame, instruction, times)

    def _one(self, frame: Frame, instruction: Instruction, times: float) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            self._loop(frame, instruction, times)
        elif opcode == "conditional":
            self._branch(frame, instruction, times)
        elif opcode in ("call", "call-start"):  # the latter on a sparse core, beside the rest
            self._run(self._called(frame, instruction, "to_apply"), times)
        elif (collective := opcode.removesuffix("-start")) in COLLECTIVES:
            _count(self.costs.collectives[collective], instruction, times)
        elif opcode == "custom-call":
            target = instruction.attributes.partition('custom_call_target="')[2].partition('"')[0]
            if target != ALLOCATION:
                _count(self.costs.custom_calls[target], instruction, times)
        else:
            self._timed(frame, instruction, times)

    def _called(self, frame: Frame, instruction: Instruction, role: str) -> Frame:
        return Frame(self._module.computations[instruction.called[role][0]], frame, instruction)

    def _timed(self, frame: Frame, instruction: Instruction, times: float) -> None:
        costs, opcode = self.costs, instruction.opcode
        costs.memory_bytes += times * traffic(self._module, frame.computation, instruction)
        operands = [frame.computation.instructions[name] for name in instruction.operands]
        # A large copy that begins or ends in the fast memory is a prefetch or a writing back: no copy.
        within = all(FAST not in operand.shape for operand in (instruction, *operands))
        if opcode in ("copy", "copy-start") and within and operands[0].bytes > LARGE:
            costs.copies[instruction.name] = operands[0].bytes
        by_bytes = times * _bytes(instruction, operands) / self._chip.bandwidth
        if opcode in MOVED:
            costs.overlapped += by_bytes
            return
        if instruction.cycles is None:
            seconds = by_bytes
            costs.bounded[_bounded_kind(instruction)] += seconds
        else:
            seconds = times * instruction.cycles / self._chip.clock
            costs.seconds[opcode] += seconds
        costs.kinds[kind(self._module, instruction)] += seconds

    def _loop(self, frame: Frame, loop: Instruction, times: float) -> None:
        known, scope = trip_count(self._module, frame, loop), _scope(loop)
        if known is not None:
            trips, source = float(known), "the program"
        elif scope in self._trips:
            trips, source = self._trips[scope], f"the workload's `{scope}`"
        else:
            trips, source = 1.0, UNKNOWN
        self.costs.loops.append(LoopRecord(loop.label or loop.name, trips, source, times))
        self._run(self._called(frame, loop, "condition"), times * (trips + 1))
        self._run(self._called(frame, loop, "body"), times * trips)

    def _branch(self, frame: Frame, conditional: Instruction, times: float) -> None:
        """The dearer branch; the cheaper one where the workload says that the condition does not hold."""
        names = [name for role in BRANCHES for name in conditional.called.get(role, [])]
        branches = [Frame(self._module.computations[name], frame, conditional) for name in names]
        choose = min if self._trips.get(_scope(conditional)) == 0 else max
        self._run(choose(branches, key=lambda branch: self._seconds(branch, times)), times)

    def _seconds(self, frame: Frame, times: float) -> float:
        """Seconds of a computation, without adding them to the sums."""
        kept, self.costs = self.costs, Costs()
        self._run(frame, times)
        alone, self.costs = self.costs, kept
        return alone.total


def _count(row: list[float], instruction: Instruction, times: float) -> None:
    row[0] += times
    row[1] += times * instruction.bytes


def _bytes(instruction: Instruction, operands: list[Instruction]) -> int:
    """Bytes that an instruction reads and writes; an update in place does not move what it leaves as it is."""
    opcode, name, read = instruction.opcode, instruction.name, [operand.bytes for operand in operands]
    if opcode in ("dynamic-update-slice", "scatter") or "scatter" in name:
        return 2 * sum(read[1:])
    if opcode in ("dynamic-slice", "slice", "gather") or "gather" in name:
        return 2 * instruction.bytes
    if opcode in MOVED:  # (operand, result, context)
        return max(0, instruction.bytes - sum(read)) if "slice" in opcode else sum(read)
    return instruction.bytes + sum(read)


def _scope(instruction: Instruction) -> str:
    """The named scope that the model put right around a loop or a conditional: ``…/pages/while``."""
    parts = instruction.label.split("/")
    return parts[-2] if len(parts) > 1 else ""


def _bounded_kind(instruction: Instruction) -> str:
    """The opcode, or ``gather`` or ``scatter`` for a fusion with that name."""
    return next((word for word in ("scatter", "gather") if word in instruction.name), instruction.opcode)


def estimate(text: str, chip: Chip, trips: Mapping[str, float], tokens: int) -> tuple[Estimate, dict[str, Collective]]:
    """The estimate of a program and its collectives by kind, as the manifest records them.

    ``seconds`` are estimates and bounds together, or the time to move what is moved beside them, if that is more.

    Args:
        text: ``Compiled.as_text()``.
        chip: The device it was compiled for.
        trips: See :class:`Estimator`.
        tokens: Cached tokens of a sequence that ``trips`` stand for.

    Raises:
        ValueError: The text has no entry computation.
    """
    costs = Estimator(parse(text), chip, trips).costs
    record = Estimate(
        seconds=max(costs.total, costs.overlapped),
        estimated=sum(costs.seconds.values()),
        by_opcode=_rounded(costs.seconds),
        bounded=_rounded(costs.bounded),
        by_kind=_rounded(costs.kinds),
        memory_bytes=int(costs.memory_bytes),
        overlapped=costs.overlapped,
        custom_calls=_counted(costs.custom_calls),
        copies=costs.copies,
        loops=tuple(costs.loops),
        instructions=dict(sorted(costs.instructions.items())),
        tokens_a_sequence=tokens,
        clock_hz=chip.clock,
    )
    return record, _counted(costs.collectives)


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in sorted(seconds.items(), key=lambda row: -row[1]) if value}


def _counted(table: Mapping[str, list[float]]) -> dict[str, Collective]:
    return {name: Collective(int(count), int(moved)) for name, (count, moved) in sorted(table.items())}
