"""The workload that programs are counted for, and the estimate of a compiled TPU program: sums over its graph.

An operation without the compiler's cycles is bounded by its bytes or FLOPs, and listed. Collectives stand apart: the
compiler estimates none.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from ling3export.artifacts.program_records import Collective, Estimate, LoopRecord
from ling3export.cost.chips import Chip
from ling3export.cost.roofline import TOKENS, loop_trips
from ling3export.graph.context import Context
from ling3export.graph.native import Workload
from ling3export.graph.record import Graph, Operation
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.scopes import LAYER_KINDS, WEIGHTS, looped_layers

LARGE = 10**6  # bytes of a copy worth counting


def context_of(
    config: Config, geometry: Geometry, phase: str, padding: int, inputs: tuple[str, ...], chip: Chip | None
) -> Context:
    """Facts about a cell's program apart from its text; decoding sequences have cached ``TOKENS``."""
    return Context(
        inputs=inputs,
        kinds=frozenset(LAYER_KINDS),
        weights=WEIGHTS,
        layers=looped_layers(config, geometry),
        dense=frozenset(config.layers("dense")),
        trips=loop_trips(config, geometry, phase, padding, TOKENS),
        clock=None if chip is None else chip.clock,
        bandwidth=None if chip is None else chip.bandwidth,
        peak=None if chip is None else chip.flops,
        workload=Workload(config.num_experts, -(-TOKENS // geometry.page_size)),
    )


def estimate(graph: Graph, chip: Chip, tokens: int) -> tuple[Estimate, dict[str, Collective]]:
    """The estimate of a program and its collectives by kind, as the manifest records them.

    ``seconds`` are estimates and bounds together, or the time of all prefetches if that is more.

    Args:
        graph: The program, compiled for ``chip``.
        chip: The device.
        tokens: Cached tokens of a sequence that loops over pages are counted for.
    """
    timed = [one for one in graph.operations if one.seconds is not None and not one.overlapped]
    estimated = _seconds((one.opcode, one) for one in timed if one.source == "compiler")
    bounded = _seconds((_bounded_kind(one), one) for one in timed if one.source == "roofline")
    overlapped = sum(one.times * (one.seconds or 0.0) for one in graph.operations if one.overlapped)
    record = Estimate(
        seconds=max(sum(estimated.values()) + sum(bounded.values()), overlapped),
        estimated=sum(estimated.values()),
        by_opcode=_rounded(estimated),
        bounded=_rounded(bounded),
        by_kind=_rounded(_seconds((one.kind, one) for one in timed)),
        overlapped=overlapped,
        custom_calls=_counted((one.target, one) for one in graph.operations if one.target is not None),
        copies={one.name: one.copied for one in graph.operations if one.copied > LARGE},
        loops=tuple(LoopRecord(loop.label, loop.trips, loop.source, loop.times) for loop in graph.loops),
        instructions=dict(sorted(Counter(one.opcode for one in graph.operations).items())),
        tokens_a_sequence=tokens,
        clock_hz=chip.clock,
    )
    return record, collectives_of(graph)


def collectives_of(graph: Graph) -> dict[str, Collective]:
    """The runs and the bytes of each kind of collective in a call."""
    return _counted((one.opcode.removesuffix("-start"), one) for one in graph.operations if one.kind == "collectives")


def _seconds(rows: Iterable[tuple[str, Operation]]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for key, operation in rows:
        seconds[key] += operation.times * (operation.seconds or 0.0)
    return seconds


def _bounded_kind(operation: Operation) -> str:
    """The opcode, or what the name of a gather's or scatter's fusion says: ``fusion`` says little."""
    return next((word for word in ("scatter", "gather") if word in operation.name), operation.opcode)


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in sorted(seconds.items(), key=lambda row: -row[1]) if value}


def _counted(rows: Iterable[tuple[str | None, Operation]]) -> dict[str, Collective]:
    table: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, operation in rows:
        table[name or ""][0] += operation.times
        table[name or ""][1] += operation.times * operation.result_bytes
    return {name: Collective(int(count), int(moved)) for name, (count, moved) in sorted(table.items())}
