"""The roofline bound: the least time of a step for any program, and the batch that it is counted for."""

import math

from ling3export.artifacts.program_records import RooflineBound
from ling3export.cost.chips import Chip
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.phases import HEAD, MOVING, ON_LOGITS, SPLIT, TABLE
from ling3export.model.config import Config
from ling3export.model.ffn.dispatch import SCALE_BYTES
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.model.mla.paged import tile_pages
from ling3export.model.moe import form_of, tile_rows, touched
from ling3export.model.parameters import weight_table
from ling3export.model.sampling.logits_processor import TOP

# Seconds of one small collective over 16 chips: assumed, not published. 51 of them were put at about 0.5 ms.
COLLECTIVE_SECONDS = 1e-5


TOKENS = 1024  # cached by each sequence of the decode batch that costs are counted for


def loop_trips(config: Config, geometry: Geometry, phase: str, padding: int, tokens: int) -> dict[str, float]:
    """Trips, by scope, of the loops whose bounds depend on the batch (``model/`` names the scopes).

    All rows of the batch are in use. A decoding sequence has cached ``tokens``; a prefill call starts its sequences; at
    most one ends in a tile.
    """
    if phase in MOVING:
        return {"copies": padding, "pages": padding / (geometry.tp if geometry.striped else 1)}
    if phase == "sample":  # some row samples, with top-k and top-p; its border falls between two tokens
        return {"ties": 0}
    if phase == "logits_processor":  # a few edits, and as many likely tokens as there can be
        return {"edits": 1, "ranked": TOP}
    if phase == "experts":
        local, rows = config.num_experts / geometry.tp, tile_rows(padding, config.num_experts)
        return {"tiles": _tiles(padding, 1 / config.num_experts, rows, local)}
    tiles = expected_tiles(padding, config, config.num_experts / geometry.tp)
    few = form_of(padding, config, geometry) == "some"
    some = {"some": most_touched(padding, config, geometry.tp)} if few else {}
    if phase in ("prefill", "score"):
        return {"chunks": padding // CHUNK, "tiles": tiles, "cached": 0, "ends": 0} | some
    pages = min(geometry.max_pages, math.ceil(tokens / geometry.page_size))
    held = math.ceil(padding * pages / (geometry.tp if geometry.striped else 1))
    further = max(0, math.ceil(held / tile_pages(padding)) - 1)  # the first tile lies outside of the loop
    return {"sequences": padding, "pages": pages, "page_tiles": further, "tiles": tiles} | some


def most_touched(rows: int, config: Config, chips: int) -> float:
    """How many of its experts that chip reads on average whose rows chose the most: the others wait for it."""
    local, share = config.num_experts // chips, touched(rows, config)
    probabilities = [_probability(n, local, share) for n in range(local)]
    return sum(1 - math.fsum(probabilities[: n + 1]) ** chips for n in range(local))


def expected_tiles(tokens: int, config: Config, experts: float) -> float:
    """Tiles of rows that ``experts`` experts get on average when every expert is as likely as any other."""
    share = config.num_experts_per_tok / config.num_experts
    return _tiles(tokens, share, tile_rows(tokens * config.num_experts_per_tok, config.num_experts), experts)


def _tiles(tokens: int, share: float, rows: int, experts: float) -> float:
    """Tiles of ``rows`` rows where each of ``tokens`` takes each of ``experts`` with the probability ``share``."""
    return experts * sum(math.ceil(n / rows) * _probability(n, tokens, share) for n in range(1, tokens + 1))


def _probability(count: int, of: int, share: float) -> float:
    """The probability of ``count`` events in ``of`` trials, each of the probability ``share``."""
    ways = math.lgamma(of + 1) - math.lgamma(count + 1) - math.lgamma(of - count + 1)
    return math.exp(ways + count * math.log(share) + (of - count) * math.log1p(-share))


def expected_collectives(config: Config, geometry: Geometry, phase: str) -> int:
    """The collectives of one call: one for the embeddings, two a layer, and two more a decoded layer of striped MLA."""
    striped = 2 * len(config.layers("mla")) if geometry.striped and phase == "decode" else 0
    return 1 + 2 * config.num_hidden_layers + striped


def _bound(moved: dict[str, int], flops: float, collectives: int, chip: Chip) -> RooflineBound:
    seconds = max(sum(moved.values()) / chip.bandwidth, flops / chip.flops)
    return RooflineBound(moved, round(flops), seconds, collectives, collectives * COLLECTIVE_SECONDS)


def roofline_bound(
    config: Config, geometry: Geometry, phase: str, padding: int, chip: Chip, tokens: int
) -> RooflineBound:
    """The roofline bound of one step, whose decoding sequences have cached ``tokens`` each.

    Bytes: the weights once (of the experts, those that the expected routing touches), the recurrent and conv state of
    the rows read and written, and the device's share of the latents read once. FLOPs: two a weight and token that uses
    it. Collectives: two a layer.
    """
    if phase in MOVING:
        sequences = padding if phase == "copy" else 1
        pages = 0 if phase == "copy" else 2 * padding * geometry.page_size  # read in one place, written in another
        held = 1 if geometry.striped else geometry.tp
        moved = _state_moved(config, geometry, sequences, pages)
        moved["latents"] *= held
        return _bound(moved, 0.0, 0, chip)
    if phase in ON_LOGITS:
        return _bound({"logits": 4 * padding * config.vocab_size // geometry.tp}, 0.0, 0, chip)
    if phase in SPLIT:
        return _split_bound(config, geometry, phase, padding, chip, tokens)
    weights = flops = 0.0
    chosen = config.num_experts_per_tok / config.num_experts
    read = touched(padding, config)
    for row in weight_table(config, geometry.weights):
        if row.name == TABLE:
            continue
        split = geometry.tp if row.split else 1
        share = math.prod(row.shape) / split
        routed = row.split == "experts"
        rows = padding // CHUNK if row.name == "embeddings.lm_head" and phase == "prefill" else padding
        weights += row.nbytes(geometry.dtype) / split * (read if routed else 1.0)
        flops += 2 * rows * share * (chosen if routed else 1.0)
    sequences = padding if phase == "decode" else 1
    moved = {"weights": round(weights)} | _state_moved(config, geometry, sequences, tokens if phase == "decode" else 0)
    collectives = 2 * config.num_hidden_layers if geometry.tp > 1 else 0
    return _bound(moved, flops, collectives, chip)


def _split_bound(
    config: Config, geometry: Geometry, phase: str, padding: int, chip: Chip, tokens: int
) -> RooflineBound:
    """The bound of one call of a decode step that is cut at the experts: one layer's, of ``attend`` the mean layer's.

    ``experts`` reads the experts that ``padding`` pairs touch where every expert is as likely as any other.
    """
    width, dim, layers = BY_NAME[geometry.dtype].nbytes, config.hidden_size, config.num_hidden_layers
    sent = dim + SCALE_BYTES if geometry.token_dtype == "int8" else dim * width
    moved = {
        "dispatch": {"tokens": 2 * padding * sent},
        "experts": {"tokens": padding * (sent + dim * width)},
        "combine": {"tokens": padding * dim * (config.num_experts_per_tok * width + 2 * 4)},
        "attend": {name: size // layers for name, size in _state_moved(config, geometry, padding, tokens).items()},
    }.get(phase, {})
    weights = flops = 0.0
    for row in weight_table(config, geometry.weights):
        kind = "experts" if row.split == "experts" else "head" if row.name in HEAD else "attend"
        if kind == phase and row.name != TABLE:
            parts = (geometry.tp if row.split else 1) * {"head": 1, "attend": layers}.get(kind, len(row.layers))
            share = math.prod(row.shape) / parts
            read = 1 - (1 - 1 / config.num_experts) ** padding if kind == "experts" else 1.0
            weights += row.nbytes(geometry.dtype) / parts * read
            flops += 2 * padding * share / (config.num_experts if kind == "experts" else 1)
    collectives = {"attend": 2, "experts": 1}.get(phase, 0) if geometry.tp > 1 else 0
    return _bound(moved | ({"weights": round(weights)} if weights else {}), flops, collectives, chip)


def _state_moved(config: Config, geometry: Geometry, sequences: int, tokens: int) -> dict[str, int]:
    width = BY_NAME[geometry.dtype].nbytes
    heads = config.num_attention_heads / geometry.tp
    recurrent = 4 * heads * config.head_dim**2
    conv = width * 3 * heads * config.head_dim * (config.short_conv_kernel_size - 1)
    state = 2 * sequences * len(config.layers("kda")) * (recurrent + conv)
    latents = sequences * tokens * len(config.layers("mla")) * config.latent_dim * width / geometry.tp
    return {"state": round(state), "latents": round(latents)}
