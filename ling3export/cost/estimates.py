"""The workload that programs are counted for, and the estimate of a compiled TPU program, without collectives."""

from collections import defaultdict

from ling3export.artifacts.program_records import Collective, Estimate
from ling3export.cost.chips import Chip
from ling3export.cost.roofline import TOKENS, loop_trips
from ling3export.graph.context import Context
from ling3export.graph.hlo import COLLECTIVES
from ling3export.graph.native import VIEWS
from ling3export.graph.record import Graph
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.scopes import LAYER_KINDS, WEIGHTS, looped_layers


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
        experts=config.num_experts,
        pages=-(-TOKENS // geometry.page_size),
    )


def estimate(graph: Graph, chip: Chip, tokens: int) -> Estimate:
    """The estimate of a program that is compiled for ``chip``: its seconds, or the time of all prefetches if more.

    Args:
        tokens: Cached tokens of a sequence that loops over pages are counted for.
    """
    overlapped = sum(one.times * (one.seconds or 0.0) for one in graph.operations if one.overlapped)
    unseen = sum(one.times for one in graph.operations if one.target and not VIEWS.fullmatch(one.target))
    return Estimate(max(graph.totals().seconds or 0.0, overlapped), int(unseen), tokens, chip.clock)


def collectives_of(graph: Graph) -> dict[str, Collective]:
    """The runs and the bytes of each kind of collective in a call."""
    table: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in graph.operations:
        if one.kind == COLLECTIVES:
            row = table[one.opcode.removesuffix("-start")]
            row[0] += one.times
            row[1] += one.times * one.result_bytes
    return {name: Collective(int(count), int(moved)) for name, (count, moved) in sorted(table.items())}
