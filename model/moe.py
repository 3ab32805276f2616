"""Mixture of experts: sigmoid router with groups, work for the chosen experts only, one shared expert.

Rows (a token and one of its experts) are sorted by expert into tiles of R rows. A loop runs over the tiles that hold
rows, so an expert that no row chose is not read. In executables for cpu one native kernel does all of it (``native/``).
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from ling3export.model.card import route_by_rank, weighted_sum
from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.layers import IN_BOUNDS, Index, Weight, swiglu, take
from ling3export.model.native import calls
from ling3export.model.products import einsum, gated_mlp, times
from ling3export.model.quantized import Matrix, at, exact, flattened, leading, of_layer, value_of, widened

SMALLEST_TILE = 4
# Up to these rows, computing all local experts takes no longer than reading them (v6e: 918 TFLOP/s, 1640 GB/s).
LOCAL_ROWS = 512
ONE_REDUCTION = 128  # experts; one reduction of more, for more than 16 rows, takes XLA:TPU minutes to compile
SPARED = 16  # experts that a chip need not read, from which on a loop over the others is worth its operations
LARGEST_TILE = 64  # rows; more rows a tile cost as much time a row and waste more on the last tile of an expert


def group_score(biased: Float32[Array, "T G each"]) -> Float32[Array, "T G"]:
    """The score of each group: the sum of its two best biased scores."""
    return jnp.sum(lax.top_k(biased, min(2, biased.shape[-1]))[0], axis=-1)


@jax.named_scope("router")
def route(
    scores: Float32[Array, "T E"], bias: Float32[Array, "E"], config: Config
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"]]:
    """Expert ids and their weights, which sum to ``routed_scaling_factor``. Source: docs/model.md, "MoE".

    The ``scores`` are the sigmoid of the router's logits. The bias takes part in the choice, never in the weights.
    """
    tokens, experts = scores.shape
    grouped = (scores + bias).reshape(tokens, config.n_group, -1)
    _, kept = lax.top_k(group_score(grouped), config.topk_group)
    open_group = jnp.any(kept[:, :, None] == jnp.arange(config.n_group), axis=1)
    candidates = jnp.where(open_group[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
    _, chosen = lax.top_k(candidates, config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20) * config.routed_scaling_factor
    return chosen.astype(jnp.int32), weights


@jax.named_scope("router")
def route_weights(
    scores: Float32[Array, "E T"],
    bias: Float32[Array, "E"],
    config: Config,
    wanted: Int32[Array, "W"],
    by_products: bool = False,
) -> Float32[Array, "W T"]:
    """:func:`route` as weights of the experts that are ``wanted``, zero where not chosen; ties go to the lower id, too.

    Tokens are the last axis, so that comparisons go across registers. ``by_products`` compares groups by products.
    """
    count, groups = scores.shape[0], config.n_group
    if count > ONE_REDUCTION and scores.shape[1] > 16:
        chosen, weights = route(scores.T, bias, config)
        return jnp.sum(jnp.where(wanted[:, None, None] == chosen.T, weights.T, 0.0), axis=1)
    scores = scores.reshape(groups, count // groups, -1)
    group, place = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
    biased = scores + bias.reshape(groups, -1, 1)
    best, *second = (value for (value,) in largest((biased,), min(2, count // groups), (1,)))
    best = best + second[0] if second else best
    if by_products:
        is_open = _open_groups(best, config.topk_group)
    else:
        kept = largest((best, group[:, 0]), config.topk_group, (0,))
        is_open = functools.reduce(jnp.logical_or, (number == group for _, number in kept))
    rows = jnp.where(is_open, biased, -jnp.inf), group * (count // groups) + place, scores
    top = largest(rows, config.num_experts_per_tok, (0, 1))

    def total(where: Callable[[Int32[Array, "T"]], Bool[Array, "W T"]]) -> Float32[Array, "W T"]:
        return sum((jnp.where(where(number), score, 0.0) for _, number, score in top), jnp.zeros(()))

    wanted = wanted[:, None]
    # True of every number: XLA:TPU would make the sum of all an operation of its own if it had no axis W.
    everyone = total(lambda number: number < wanted + count)
    return total(lambda number: number == wanted) / (everyone + 1e-20) * config.routed_scaling_factor


def _open_groups(score: Float32[Array, "G T"], count: int) -> Bool[Array, "G 1 T"]:
    """Which groups are the ``count`` best, by products: differences of all pairs, and how many are ahead of each."""
    groups = score.shape[0]
    one, other = np.divmod(np.arange(groups * groups), groups)
    of_one, of_other = (np.eye(groups, dtype=np.float32)[index] for index in (one, other))
    ahead = jnp.matmul(of_other - of_one, score, precision=lax.Precision.HIGHEST)  # exact where both are the same
    # By `reshape`, for a constant with a stride of 0 would be a broadcast outside of the program.
    before = (ahead > 0) | ((ahead == 0) & (other < one).reshape(-1, 1))
    return (jnp.matmul(of_one.T, before.astype(jnp.float32)) < count)[:, None]


Row = tuple[jax.Array, ...]


def largest(rows: Row, count: int, axes: tuple[int, ...]) -> list[Row]:
    """The ``count`` largest along ``axes``, in descending order: one reduction whose elements are sorted lists.

    Args:
        rows: Arrays of one shape: values, then their indices, which settle ties for the lower one (they may be left
            out where ties do not matter), then whatever shall come with them.

    Returns:
        ``count`` tuples with the arrays of ``rows``, which lack ``axes``.
    """
    size, width = 1 << (count - 1).bit_length(), len(rows)
    least = [-jnp.inf, np.iinfo(np.int32).max, *(0 for _ in rows[2:])][:width]
    start = tuple(np.array(value, row.dtype) for row, value in zip(rows, least, strict=True))
    none = tuple(jnp.full_like(row, value) for row, value in zip(rows, start, strict=True))

    def merge(a: Row, b: Row) -> Row:
        lists = ([part[i : i + width] for i in range(0, size * width, width)] for part in (a, b))
        return tuple(value for row in _merge_sorted(*lists) for value in row)

    best = lax.reduce((*rows, *none * (size - 1)), start * size, merge, axes)
    return [best[i : i + width] for i in range(0, count * width, width)]


def _merge_sorted(a: list[Row], b: list[Row]) -> list[Row]:
    """The largest half of two descending lists, descending: half a bitonic merge (Batcher 1968)."""
    size = len(a)
    kept = [_in_order(a[i], b[size - 1 - i])[0] for i in range(size)]
    step = size // 2
    while step:
        for i in range(size):
            if not i & step:
                kept[i], kept[i + step] = _in_order(kept[i], kept[i + step])
        step //= 2
    return kept


def _in_order(a: Row, b: Row) -> tuple[Row, Row]:
    """Both rows, the one with the larger value first; of equal values that with the lower index."""
    if len(a) == 1:
        return (jnp.maximum(a[0], b[0]),), (jnp.minimum(a[0], b[0]),)
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    pairs = list(zip(a, b, strict=True))
    return tuple(lax.select(first, x, y) for x, y in pairs), tuple(lax.select(first, y, x) for x, y in pairs)


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile, a power of two: room for one and a half times the mean rows an expert.

    One row where nearly every row has an expert of its own; else at least :data:`SMALLEST_TILE`, because rows that
    share an expert then share the reading of its weights.
    """
    mean = rows / experts
    if mean <= 0.25:
        return 1
    size = SMALLEST_TILE
    while size < min(LARGEST_TILE, 1.5 * mean):
        size *= 2
    return size


def touched(rows: int, config: Config) -> float:
    """The mean share of the experts that ``rows`` rows choose."""
    return 1 - (1 - config.num_experts_per_tok / config.num_experts) ** rows


def lowest(words: list[UInt32[Array, ""]]) -> tuple[Int32[Array, ""], list[UInt32[Array, ""]]]:
    """The number of the lowest bit that is set, 32 bits a word, and the words without it.

    Scalars cost XLA:TPU nothing; to take a number from an array is an operation of 1.2 µs.
    """
    number, is_set, left = jnp.int32(0), jnp.bool_(False), []
    for place, word in enumerate(words):
        bit = jnp.where(is_set, jnp.uint32(0), word & (~word + 1))
        number = jnp.where(bit != 0, 32 * place + 31 - lax.clz(bit).astype(jnp.int32), number)
        is_set |= bit != 0
        left.append(word ^ bit)
    return number, left


def form_of(rows: int, config: Config, geometry: Geometry) -> Literal["chosen", "grouped", "some", "all", "tiles"]:
    """The way to multiply ``rows`` rows: by the matrices that each chooses, by batches of rows of every expert, by the
    device's matrices that some row chooses, by all of the device, or tile after tile.

    A card reads a matrix for each choice as fast as it computes, so it takes the chosen ones while there are no more
    choices than experts (docs/log/programs-cuda.md).
    """
    if geometry.form == "card":
        return "chosen" if rows * config.num_experts_per_tok <= config.num_experts else "grouped"
    # A chip of a slice computes all its experts faster than a loop over some, unless those are few of many, as in
    # Ling-3.0-flash (docs/log/programs-tpu.md).
    if geometry.tiled and geometry.tp > 1:
        share = touched(rows, config)
        return "some" if share < 0.5 and (1 - share) * config.num_experts / geometry.tp >= SPARED else "all"
    return "all" if geometry.tiled and rows <= LOCAL_ROWS else "tiles"


class MixtureOfExperts(nnx.Module):
    """All MoE layers of one device, stacked; parameters as ``model/parameters.py`` lists them under ``moe``."""

    def __init__(self, config: Config, geometry: Geometry, weights: dict[str, Weight]) -> None:
        self.config, self.geometry = config, geometry
        self.gate, self.expert_bias = weights["gate"], weights["expert_bias"]
        self.experts_gate_up_proj = weights["experts_gate_up_proj"]
        self.experts_down_proj = weights["experts_down_proj"]
        self.shared_gate_up_proj = weights["shared_gate_up_proj"]
        self.shared_down_proj = weights["shared_down_proj"]

    @jax.named_scope("experts")
    def __call__(self, x: Float32[Array, "T D"], layer: Index, valid: Bool[Array, "T"]) -> Float32[Array, "T D"]:
        """This device's partial sum, from ``x`` normed: its own experts and its part of the shared one.

        The router sees ``x`` unrounded. Padding, which is not ``valid``, takes no expert.
        """
        dtype = jnp.dtype(self.geometry.dtype)
        form = form_of(x.shape[0], self.config, self.geometry)
        if form in ("chosen", "grouped"):
            chosen, share = route_by_rank(*self.scores(x, layer), self.config)
            x = x.astype(dtype)
            if form == "grouped":
                chosen = jnp.where(valid[:, None], chosen, self.config.num_experts)
                return self.grouped(x, layer, chosen, share) + self.shared(x, layer)
            share = jnp.where(valid[:, None], share, 0.0)
            return self.chosen_local(x, layer, chosen, share) + self.shared(x, layer)
        if form == "some":
            share = jnp.where(valid, self.local_weights(x, layer), 0.0)
            return self.some_local(x.astype(dtype), layer, share) + self.shared(x.astype(dtype), layer)
        if form == "all":
            weights = self.local_weights(x, layer)
            routed = [
                self.all_local(x[i : i + LOCAL_ROWS].astype(dtype), layer, weights[:, i : i + LOCAL_ROWS])
                for i in range(0, x.shape[0], LOCAL_ROWS)
            ]
            return jnp.concatenate(routed) + self.shared(x.astype(dtype), layer)
        if self.geometry.kernels and calls.are_few(x.shape[0], self.geometry):
            chosen, weights = calls.route(x, self.gate[...], self.expert_bias[...], layer, self.config, self.geometry)
        else:
            chosen, weights = route(*self.scores(x, layer), self.config)
        x = x.astype(dtype)
        return self._routed(x, layer, chosen, weights, valid) + self.shared(x, layer)

    @jax.named_scope("router")
    def scores(self, x: Float32[Array, "T D"], layer: Index) -> tuple[Float32[Array, "T E"], Float32[Array, "E"]]:
        """The sigmoid of the router's logits, and the bias, from ``x`` normed and unrounded."""
        gate, bias = self._router(layer)
        logits = jnp.matmul(x, gate.T, precision=lax.Precision.HIGHEST)  # a rounded score flips experts
        return jax.nn.sigmoid(logits), bias

    def _router(self, layer: Index) -> tuple[Float32[Array, "E D"], Float32[Array, "E"]]:
        gate = of_layer(self.gate, layer, split=False)
        assert isinstance(gate, jax.Array)
        return gate, take(self.expert_bias[...], layer, split=False)

    @jax.named_scope("router")
    def local_weights(self, x: Float32[Array, "T D"], layer: Index) -> Float32[Array, "W T"]:
        """The router of :meth:`all_local`: weights of this device's experts, zero where not chosen."""
        gate, bias = self._router(layer)
        scores = jax.nn.sigmoid(jnp.matmul(gate, x.T, precision=lax.Precision.HIGHEST))
        local = self.config.num_experts // lax.axis_size(AXIS)
        wanted = lax.axis_index(AXIS) * local + jnp.arange(local)
        return route_weights(scores, bias, self.config, wanted, self.geometry.sum_by_matmul)

    def limit(self, limits: tuple[float, ...] | None, layer: Index) -> Float32[Array, ""] | None:
        """The limit of an MLP in one of the stacked layers, infinite for none; None where no layer has one."""
        if limits is None:
            return None
        own = [limits[number] or np.inf for number in self.config.layers("moe")]
        return jnp.asarray(own, jnp.float32)[layer]

    def routed_limit(self, layer: Index) -> Float32[Array, ""] | None:
        return self.limit(self.config.expert_swiglu_limit_list, layer)

    @jax.named_scope("shared_expert")
    def shared(self, x: Float[Array, "T D"], layer: Index) -> Float32[Array, "T D"]:
        """This device's partial sum of the shared expert, which is neither scaled nor gated."""
        limit = self.limit(self.config.share_expert_swiglu_limit_list, layer)
        return gated_mlp(x, self.shared_gate_up_proj, self.shared_down_proj, layer, self.geometry, limit)

    @jax.named_scope("experts")
    def all_local(self, x: Float[Array, "T D"], layer: Index, share: Float32[Array, "W T"]) -> Float32[Array, "T D"]:
        """Every expert of this device for every row, weighted; best where reading weights takes longer."""
        stacks = self.experts_gate_up_proj, self.experts_down_proj
        layers = (of_layer(stack, layer, split=True) for stack in stacks)
        (gate_up, up_scale), (down, down_scale) = (widened(weights, self.geometry) for weights in layers)
        local, dim = gate_up.shape[0] * gate_up.shape[1], x.shape[1]
        # Experts outside, tokens inside: an axis of 8 experts as the second to last would be laid out anew. One axis of
        # experts with gate and up: with two axes XLA:TPU lays out int8 weights anew.
        y = einsum("td,nfd->ntf", x, gate_up.reshape(2 * local, -1, dim)).reshape(local, 2, x.shape[0], -1)
        if up_scale is not None:
            y = y * up_scale.reshape(local, 2, 1, -1)
        hidden = swiglu(y[:, 0], y[:, 1], self.routed_limit(layer), share[:, :, None]).astype(x.dtype)
        down = down.reshape(local, dim, -1)
        if down_scale is None:
            return einsum("etf,edf->td", hidden, down)
        return jnp.sum(einsum("etf,edf->etd", hidden, down) * down_scale.reshape(local, 1, dim), axis=0)

    @jax.named_scope("experts")
    def some_local(self, x: Float[Array, "T D"], layer: Index, share: Float32[Array, "W T"]) -> Float32[Array, "T D"]:
        """:meth:`all_local` that reads only the experts that some row chose, one after the other."""
        stacks = self.experts_gate_up_proj, self.experts_down_proj
        layers = [of_layer(stack, layer, split=True) for stack in stacks]
        gate_up, down = (flattened(weights, len(share)) for weights in layers)
        middle = leading(gate_up)[1] // 2
        limit = self.routed_limit(layer)
        # Wide, and not put together in the loop: each expert's would be an operation of its own there.
        wide = lax.optimization_barrier(jnp.broadcast_to(share[:, :, None], (*share.shape, middle)))
        chosen = jnp.pad(jnp.any(share != 0, axis=1), (0, -len(share) % 32)).reshape(-1, 32)
        words = jnp.sum(jnp.where(chosen, jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32), jnp.uint32(0)), axis=1)

        def one(carry: tuple[list[jax.Array], jax.Array]) -> tuple[list[jax.Array], jax.Array]:
            number, left = lowest(carry[0])
            up, out = (jax.tree.map(lambda leaf: take(leaf, number, split=False), stack) for stack in (gate_up, down))
            y = times(x, up, self.geometry)
            hidden = swiglu(y[:, :middle], y[:, middle:], limit) * take(wide, number, split=False)
            return left, carry[1] + times(hidden.astype(x.dtype), out, self.geometry)

        def is_left(carry: tuple[list[jax.Array], jax.Array]) -> jax.Array:
            return functools.reduce(jnp.bitwise_or, carry[0]) != 0

        with jax.named_scope("some"):
            return lax.while_loop(is_left, one, (list(words), jnp.zeros(x.shape, jnp.float32)))[1]

    @jax.named_scope("experts")
    def chosen_local(
        self, x: Float[Array, "T D"], layer: Index, chosen: Int32[Array, "T A"], share: Float32[Array, "T A"]
    ) -> Float32[Array, "T D"]:
        """The chosen experts of each row, weighted by their ``share``, on a device that has them all.

        Sums of products of elements: XLA:GPU reads the chosen matrices where they lie, without a copy of them.
        """
        stacks = self.experts_gate_up_proj, self.experts_down_proj
        layers = [of_layer(stack, layer, split=True) for stack in stacks]
        gate_up, down = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), layers)

        def of_chosen(weights: Matrix) -> Float32[Array, "T A ..."]:
            return exact(jax.tree.map(lambda leaf: leaf.at[chosen].get(mode=IN_BOUNDS), weights))

        wide = of_chosen(gate_up)  # [T, A, 2, F, D]
        y = jnp.sum(wide * x.astype(jnp.float32)[:, None, None, None], axis=-1)
        hidden = (swiglu(y[:, :, 0], y[:, :, 1], self.routed_limit(layer)) * share[:, :, None]).astype(x.dtype)
        narrow = of_chosen(down)  # [T, A, D, F]
        return jnp.sum(jnp.sum(narrow * hidden.astype(jnp.float32)[:, :, None], axis=-1), axis=1)

    @jax.named_scope("experts")
    def grouped(
        self, x: Float[Array, "T D"], layer: Index, chosen: Int32[Array, "T A"], share: Float32[Array, "T A"]
    ) -> Float32[Array, "T D"]:
        """:meth:`chosen_local` for many rows, as ``card.py`` has it."""
        stacks, count = (self.experts_gate_up_proj, self.experts_down_proj), self.config.num_experts
        layers = (flattened(of_layer(stack, layer, split=True), count) for stack in stacks)
        (gate_up, up_scale), (down, down_scale) = (widened(weights, self.geometry) for weights in layers)

        def multiply(rows: Float[Array, "N C D"], own: Callable[[Array], Array]) -> Float32[Array, "N C D"]:
            y = einsum("ecd,efd->ecf", rows, own(gate_up))
            y = y if up_scale is None else y * own(up_scale)[:, None]
            gate, up = jnp.split(y, 2, axis=-1)
            hidden = swiglu(gate, up, self.routed_limit(layer)).astype(x.dtype)
            done = einsum("ecf,edf->ecd", hidden, own(down))
            return done if down_scale is None else done * own(down_scale)[:, None]

        return weighted_sum(x, chosen, share, count, multiply)

    @jax.named_scope("experts")
    def _routed(
        self,
        x: Float[Array, "T D"],
        layer: Index,
        chosen: Int32[Array, "T A"],
        weights: Float32[Array, "T A"],
        valid: Bool[Array, "T"],
    ) -> Float32[Array, "T D"]:
        """The chosen experts of this device, one tile of rows of one expert after the other."""
        layered, stacks = self.geometry.tiled, (self.experts_gate_up_proj, self.experts_down_proj)
        limit = self.routed_limit(layer)
        if calls.do_experts(stacks, chosen.size, self.config.num_experts, self.geometry):
            up, out = (value_of(stack) for stack in stacks)
            own = chosen - lax.axis_index(AXIS) * leading(up)[0] * leading(up)[2]
            return calls.experts(x, up, out, layer, jnp.where(valid[:, None], own, -1), weights, limit, self.geometry)
        gate_up, down = (of_layer(stack, layer, split=True) if layered else value_of(stack) for stack in stacks)
        shards, per_shard = leading(gate_up)[0], leading(gate_up)[1 if layered else 2]
        local = shards * per_shard
        tokens, top = chosen.shape
        mine = chosen - lax.axis_index(AXIS) * local
        mine = jnp.where(valid[:, None] & (mine >= 0) & (mine < local), mine, local).reshape(-1)
        rows = tile_rows(tokens * top, self.config.num_experts)
        place, tile_expert, tile_used, tiles = tile_layout(mine, local, rows)
        capacity = tile_expert.shape[0] * rows
        # Where each row of the tiled order comes from; rows without a token repeat token 0 and are never read back.
        token = jnp.zeros((capacity + 1,), jnp.int32).at[place].set(jnp.arange(tokens * top, dtype=jnp.int32) // top)

        def multiply(i: jax.Array, out: jax.Array, count: int) -> jax.Array:
            expert = tile_expert[i]
            shard, number = expert // per_shard, expert % per_shard
            own = (shard, number) if layered else (shard, layer, number)
            inputs = x[lax.dynamic_slice_in_dim(token, i * rows, count)]
            y = times(inputs, at(gate_up, own), self.geometry)
            half = y.shape[1] // 2
            hidden = swiglu(y[:, :half], y[:, half:], limit).astype(x.dtype)
            done = times(hidden, at(down, own), self.geometry)
            return lax.dynamic_update_slice_in_dim(out, done, i * rows, axis=0)

        def tile(i: jax.Array, out: jax.Array) -> jax.Array:
            if rows != SMALLEST_TILE:
                return multiply(i, out, rows)
            # Here most tiles hold one row, and one row is read a quarter faster than several (docs/log/kernels-cpu.md).
            return lax.cond(tile_used[i] == 1, lambda y: multiply(i, y, 1), lambda y: multiply(i, y, rows), out)

        with jax.named_scope("tiles"):
            done = lax.fori_loop(0, tiles, tile, jnp.zeros((capacity + 1, x.shape[1]), jnp.float32))
        share = jnp.where((mine < local).reshape(tokens, top), weights, 0.0)
        return jnp.einsum("tad,ta->td", done[place].reshape(tokens, top, -1), share, precision=lax.Precision.HIGHEST)


def tile_layout(
    expert: Int32[Array, "X"], experts: int, rows: int
) -> tuple[Int32[Array, "X"], Int32[Array, "tiles"], Int32[Array, "tiles"], Int32[Array, ""]]:
    """Sorts rows by expert into tiles of ``rows``; the expert of a row that is not this device's is ``experts``.

    Returns:
        Each row's place in the tiled order (one past the tiles for rows that are not this device's); each tile's
        expert; how many of each tile's rows are taken; and the number of tiles that hold rows.
    """
    count = expert.shape[0]
    capacity = min(count, count // rows + experts)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    counts = jnp.sum(expert[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    start = jnp.cumsum(counts) - counts
    needed = (counts + rows - 1) // rows
    tile_end = jnp.cumsum(needed)
    tile_start = tile_end - needed
    sorted_expert = expert[order]
    owner = jnp.minimum(sorted_expert, experts - 1)
    rank = jnp.arange(count, dtype=jnp.int32) - start[owner]
    place = jnp.where(sorted_expert < experts, tile_start[owner] * rows + rank, capacity * rows)
    place = jnp.zeros((count,), jnp.int32).at[order].set(place.astype(jnp.int32))
    tile = jnp.arange(capacity, dtype=jnp.int32)
    tile_expert = jnp.searchsorted(tile_end, tile, side="right", method="compare_all")
    tile_expert = jnp.minimum(tile_expert, experts - 1).astype(jnp.int32)
    used = jnp.clip(counts[tile_expert] - (tile - tile_start[tile_expert]) * rows, 0, rows)
    return place, tile_expert, used, tile_end[-1]
