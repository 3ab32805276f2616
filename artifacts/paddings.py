"""The paddings of a target's programs, and which of them a call takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ling3export.artifacts.schema import Target

# Cost of a prefill call on top of its padded tokens, in tokens, where the compiler gives no estimate of its time.
# Measured on cpu: docs/log/engine.md, 2026-11-21, "what a prefill call costs".
CALL = 32
# How much more a token may cost in a call that sequences wait for, so that they wait for a shorter one.
PATIENCE = 1.25


@dataclass(frozen=True)
class Shapes:
    """The paddings and dimensions of an artifact's programs.

    Attributes:
        prefill: Paddings of prefill programs in tokens, ascending.
        decode: Paddings of decode programs in sequences, ascending.
        chunk: Padded tokens a chunk.
        costs: Cost of a call at each prefill padding, in any unit; empty means padding + CALL.
        score: Paddings of score programs in tokens, ascending; empty where there are none.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    chunk: int
    costs: tuple[float, ...] = ()
    score: tuple[int, ...] = ()

    @classmethod
    def of(cls, target: Target, measured: Mapping[str, float] = MappingProxyType({})) -> "Shapes":
        """The shapes of a manifest's target.

        Costs are what was measured, or the compiler's estimates, if every prefill program has one.

        Args:
            measured: Seconds of a call, by cell.
        """
        prefill, decode, score = (target.paddings(phase) for phase in ("prefill", "decode", "score"))
        cells = [target.cells[f"prefill@{padding}"] for padding in prefill]
        sources = [measured.get(cell.name) for cell in cells], [cell.estimated_seconds for cell in cells]
        whole = [tuple(seconds for seconds in costs_of_cells if seconds) for costs_of_cells in sources]
        costs = next((costs_of_cells for costs_of_cells in whole if len(costs_of_cells) == len(prefill)), ())
        return cls(prefill, decode, target.state.chunk, costs, score)

    def cheapest_padding(self, work: int, *, beside_decode: bool = False) -> int:
        """The prefill padding at which a token costs least; among equals the largest.

        Args:
            work: How many padded tokens are to be prefilled.
            beside_decode: Sequences wait for the call. Then no padding is taken beyond the first at which a token of a
                full call costs at most PATIENCE times what it costs at best: the call is shorter, and little is lost.
        """
        costs = dict(zip(self.prefill, self.costs or [padding + CALL for padding in self.prefill], strict=True))
        most = self.prefill[-1]
        if beside_decode:
            token_costs = {padding: cost / padding for padding, cost in costs.items()}
            most = next(
                padding for padding in self.prefill if token_costs[padding] <= PATIENCE * min(token_costs.values())
            )
        return min(
            (padding for padding in self.prefill if padding <= most),
            key=lambda padding: (costs[padding] / min(work, padding), -padding),
        )

    def scoring(self, work: int) -> int:
        """The score padding at which one of ``work`` padded tokens costs least; among equals the largest."""
        return min(self.score, key=lambda padding: ((padding + CALL) / min(work, padding), -padding))
