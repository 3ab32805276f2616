"""What a report shows, taken from a manifest: cells with sizes, costs and roofline bounds, and the machine's limits."""

from collections.abc import Mapping
from dataclasses import dataclass

from ling3export.artifacts import schema
from ling3export.artifacts.schema import Manifest
from ling3export.plan.chips import CHIPS, Chip
from ling3export.verify.receipts import error_columns

MEMORY = ("weights", "state", "temporaries", "outputs", "other arguments", "code")
PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}


def si(value: float, unit: str) -> str:
    """Three significant digits and a decimal prefix: ``2.14 ms``, ``1.35 GB``."""
    if value == 0:
        return f"0 {unit}"
    # What rounds to 1000 takes the next prefix.
    prefix = next((each for each, scale in PREFIXES.items() if abs(value) >= 0.9995 * scale), "n")
    scaled = value / PREFIXES[prefix]
    exponent = int(f"{scaled:.2e}".partition("e")[2])  # of the rounded number
    return f"{scaled:.{max(0, 2 - exponent)}f} {prefix}{unit}"


def times(ratio: float) -> str:
    """``2.35 times``."""
    return f"{ratio:,.0f} times" if ratio >= 100 else f"{ratio:.3g} times"


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a cell; bytes are None where only the lowered program was counted."""

    kind: str
    count: int
    bytes: int | None


@dataclass(frozen=True)
class Work:
    """What a compiled cell costs by its compiler's estimates, and the least that it could cost.

    Attributes:
        seconds: Estimated, without collectives.
        by_kind: The same by kind of operation; empty if the build did not record it.
        unestimated: Seconds that stand for instructions without an estimate: their bytes over the bandwidth.
        moved: Bytes through the large memory by the program's instructions; None if not recorded.
        bound_seconds: The roofline bound.
        bound_bytes: Bytes that must move, by what they are.
        bound_flops: Operations that must be computed.
        tokens: Cached tokens of a sequence that dynamic loops are counted for.
        clock: Cycles a second.
        guessed: Loops whose trips nobody states: counted once.
    """

    seconds: float
    by_kind: dict[str, float]
    unestimated: float
    moved: int | None
    bound_seconds: float
    bound_bytes: dict[str, int]
    bound_flops: int
    tokens: int
    clock: float
    guessed: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One program of one target.

    Attributes:
        name: ``decode@16``.
        status: The manifest's word.
        seconds: Seconds of compiling.
        size: Bytes of both files.
        memory: Bytes on one device by MEMORY; they add up to ``peak``.
        peak: Bytes on one device.
        collectives: By kind.
        flops: The compiler's count, a loop's body once; None if it has none.
        accessed: Bytes, counted in the same way, in every memory.
        errors: The median and the worst error of its receipt as text.
        work: None for a compiler that estimates nothing.
    """

    name: str
    status: str
    seconds: float
    size: int
    memory: dict[str, int]
    peak: int
    collectives: tuple[Collective, ...]
    flops: float | None
    accessed: float | None
    errors: tuple[str, str]
    work: Work | None


@dataclass(frozen=True)
class Target:
    """One target of an artifact.

    Attributes:
        name: Its name.
        text: The target as a user writes it.
        tp: Its devices.
        processes: Its hosts.
        chip: Facts about its machine; None where no table has them.
        tolerance: What its receipts are judged by; None if it was never executed.
        cells: Prefill, score, decode, then the rest.
    """

    name: str
    text: str
    tp: int
    processes: int
    chip: Chip | None
    tolerance: schema.Tolerance | None
    cells: tuple[Cell, ...]

    @property
    def executed(self) -> bool:
        """Whether its cells were run where they were built."""
        return self.tolerance is not None

    @property
    def estimated(self) -> list[tuple[Cell, Work]]:
        """Cells that the compiler estimated."""
        return [(cell, cell.work) for cell in self.cells if cell.work is not None]

    @property
    def together(self) -> int:
        """Bytes on one device with every program loaded, while the one with the largest temporaries runs."""
        held = [max(cell.memory[kind] for cell in self.cells) for kind in MEMORY if kind != "code"]
        return sum(held) + sum(cell.memory["code"] for cell in self.cells)


def targets(manifest: Manifest) -> list[Target]:
    """Every target of a manifest."""
    return [
        Target(
            name, record.text, record.tp, record.processes, CHIPS.get((record.platform, record.kind or "")),
            None if (found := manifest.vectors.receipts.get(name)) is None else found.tolerance,
            tuple(_cell(cell, record.tp, found) for cell in sorted(record.cells.values(), key=_order)),
        )
        for name, record in manifest.targets.items()
    ]  # fmt: skip


def _order(cell: schema.Cell) -> tuple[int, int]:
    """Prefill, score, decode, then the rest; ascending paddings."""
    return {"prefill": 0, "score": 1, "decode": 2}.get(cell.phase, 3), cell.padding


def _cell(cell: schema.Cell, tp: int, receipts: schema.Receipts | None) -> Cell:
    receipt, tolerance = (None, None) if receipts is None else (receipts.cells.get(cell.name), receipts.tolerance)
    return Cell(
        cell.name, cell.status, cell.compile_seconds, sum(file.bytes for file in cell.files), _memory(cell, tp),
        cell.memory.peak, _collectives(cell.collectives), cell.flops, cell.bytes_accessed,
        error_columns(cell.phase, receipt, tolerance), _work(cell),
    )  # fmt: skip


def _memory(cell: schema.Cell, tp: int) -> dict[str, int]:
    """What one device holds, by MEMORY: weights and state by their shapes, the rest as the compiler says."""
    sizes = {"params": 0, "state": 0, "batch": 0}
    for leaf in cell.inputs:
        sizes[leaf.group] += leaf.nbytes // tp ** sum(axis is not None for axis in leaf.spec)
    memory = cell.memory
    return {
        "weights": sizes["params"],
        "state": sizes["state"],
        "temporaries": memory.temporaries,
        "outputs": memory.outputs - memory.alias,
        "other arguments": memory.arguments - sizes["params"] - sizes["state"],  # the batch, and padding of layouts
        "code": memory.code,
    }


def _collectives(table: Mapping[str, schema.Collective]) -> tuple[Collective, ...]:
    """Counted in the compiled program with bytes, or in the lowered one without."""
    return tuple(Collective(kind.replace("_", "-"), each.count, each.bytes) for kind, each in table.items())


def _work(cell: schema.Cell) -> Work | None:
    found, floor = cell.estimate, cell.floor
    if found is None or floor is None:
        return None
    return Work(
        seconds=found.seconds,
        by_kind=found.by_kind,
        unestimated=sum(found.bounded.values()),
        moved=found.memory_bytes,
        bound_seconds=floor.seconds,
        bound_bytes=floor.bytes,
        bound_flops=floor.flops,
        tokens=found.tokens_a_sequence,
        clock=found.clock_hz,
        guessed=tuple(loop.loop for loop in found.loops if loop.source.startswith("unknown")),
    )
