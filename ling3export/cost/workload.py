"""The batch that an estimate is made for: how often loops run whose bounds the batch decides."""

import math
from dataclasses import dataclass

from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.model.mla.pages import TILE
from ling3export.model.moe import tile_rows


@dataclass(frozen=True)
class Workload:
    """The batch that dynamic loops are counted for: full rows, ``tokens`` cached by each sequence.

    Attributes:
        tokens: Tokens that a decoding sequence holds; a prefill call starts its sequences.
    """

    tokens: int = 1024

    def trips(self, phase: str, padding: int, config: Config, geometry: Geometry) -> dict[str, float]:
        """Trips by scope of the loops whose bounds depend on the batch (named so in ``model/``)."""
        if phase == "sample":  # some row samples, with top-k and top-p; its border falls between two tokens
            return {"ties": 0}
        tiles = expected_tiles(padding, config, config.num_experts / geometry.tp)
        if phase in ("prefill", "score"):
            return {"chunks": padding // CHUNK, "tiles": tiles, "cached": 0}
        pages = min(geometry.max_pages, math.ceil(self.tokens / geometry.page_size))
        rows = math.ceil(padding / geometry.tp) if geometry.placement == "by_sequence" else padding
        held = math.ceil(rows * pages / (geometry.tp if geometry.placement == "striped" else 1))
        return {"sequences": padding, "pages": pages, "page_tiles": math.ceil(held / TILE), "tiles": tiles}


def expected_tiles(tokens: int, config: Config, experts: float) -> float:
    """Tiles of rows that ``experts`` experts get on average when every expert is as likely as any other."""
    share = config.num_experts_per_tok / config.num_experts
    rows = tile_rows(tokens * config.num_experts_per_tok, config.num_experts)
    each = 0.0
    for n in range(1, tokens + 1):
        ways = math.lgamma(tokens + 1) - math.lgamma(n + 1) - math.lgamma(tokens - n + 1)
        each += math.ceil(n / rows) * math.exp(ways + n * math.log(share) + (tokens - n) * math.log1p(-share))
    return experts * each
