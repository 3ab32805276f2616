"""Attention over the pages of the latent pool: where a page lies, which pages a step attends, and the attention.

Absorbed attention: the query is in latent space, and a page's row is key and value at once. It goes page after page of
one sequence, or over the pages of all sequences in tiles. Either way it is an online softmax (Milakov and Gimelshein,
arXiv 1805.02867): parts of the keys give parts (m, l, acc), which are merged in any order.

Striped: page number n lies on device (n - 1) % TP, as its local page (n - 1) // TP + 1; local page 0 is each device's
dummy. Any page may be anywhere, and numbers that are handed out in order spread a sequence over all devices.

In the forms for accelerators a decode step lists the (row, page) pairs that this device holds, and walks the list in
tiles. So its time follows what the sequences hold, whatever their number and lengths, and a device reads each cached
byte once for all heads. Where the page tables of a step for a card are small, it attends them whole, without a loop.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.layers import COLUMNS, IN_BOUNDS, Index
from ling3export.model.products import dot_heads, einsum, product

MASKED = -1e30  # finite, so that a row which sees nothing yet gives weights of zero and not NaN
TILE = 16  # pages attended at once: 8 cost 12 small operations as often again (docs/log/programs-tpu.md)
TILE_EACH = 4  # and as many at most for each sequence: tiles are read whole
AT_ONCE = 512  # pages of all page tables of a step for a card that are attended without a loop: 150 MB copied a layer

BLOCK = 4  # pages whose keys and values :func:`attend_expanded` computes at once: 7.6 ms a page, one by one 9
BLOCK_TILED = 8  # the same in the forms for accelerators, where every operation takes a microsecond, however small

SEEN = 1e-30  # in the place of a sum of no weights

Pool = Float[Array, "layers pages page row"]  # this device's latents; a row is [latent | roped key | 0]


class PageList(NamedTuple):
    """The pages that this device attends in a decode step, those of live rows first."""

    row: Int32[Array, "tiles each"]  # which sequence of the batch
    page: Int32[Array, "tiles each"]  # local page number, 0 past the end
    length: Int32[Array, "tiles each"]  # tokens of the page that count, 0 past the end
    used: Int32[Array, ""]  # how many tiles hold pages


class OnlineSoftmax(NamedTuple):
    """A softmax over part of the keys, not yet normalized."""

    m: Float32[Array, "..."]  # the largest score so far
    l: Float32[Array, "..."]  # noqa: E741 (the papers' name); the sum of ``exp(score - m)``
    acc: Float32[Array, "... X"]  # the values, weighted by ``exp(score - m)``, added up

    @property
    def normalized(self) -> Float32[Array, "... X"]:
        """The weighted mean of the values; zero where no key was seen."""
        return self.acc / jnp.maximum(self.l, SEEN)[..., None]


def local_pages(
    number: Int32[Array, "*pages"], geometry: Geometry
) -> tuple[Bool[Array, "*pages"], Int32[Array, "*pages"]]:
    """(whether this device holds each page, its local number, 0 where it does not); page 0 is nobody's."""
    if not geometry.striped:
        return number > 0, number
    device, place = (number - 1) % geometry.tp, (number - 1) // geometry.tp
    is_local = (number > 0) & (device == lax.axis_index(AXIS))
    return is_local, jnp.where(is_local, place + 1, 0)


def tile_pages(sequences: int) -> int:
    """Pages that a decode step for ``sequences`` sequences attends at once."""
    return min(TILE, TILE_EACH * sequences)


def is_at_once(sequences: int, geometry: Geometry) -> bool:
    """Whether a decode step for ``sequences`` sequences goes by :func:`attend_tables`, and without a list of pages."""
    return geometry.unrolled and sequences * geometry.max_pages <= AT_ONCE


def list_pages(
    position: Int32[Array, "B"], table: Int32[Array, "B M"], valid: Bool[Array, "B"], tile: int, geometry: Geometry
) -> PageList:
    """Lists what a decode step attends: every page of ``table`` up to the position of each row that is ``valid``.

    ``tile`` pages are attended at once, :func:`tile_pages`.
    """
    rows, columns = table.shape
    page = geometry.page_size
    seen = jnp.where(valid, position + 1, 0)[:, None] - jnp.arange(columns, dtype=jnp.int32) * page
    is_local, local = local_pages(table, geometry)
    mine = (is_local & (seen > 0)).reshape(-1)
    count = rows * columns
    order = jnp.sort(jnp.where(mine, jnp.arange(count, dtype=jnp.int32), count))
    order = jnp.pad(order, (0, -count % tile), constant_values=count)
    order = order.reshape(-1, tile)
    live = order < count
    at = jnp.where(live, order, 0)
    return PageList(
        row=at // columns,
        page=jnp.where(live, local.reshape(-1).at[at].get(mode=IN_BOUNDS), 0),
        length=jnp.where(live, jnp.minimum(seen, page).reshape(-1).at[at].get(mode=IN_BOUNDS), 0),
        used=(jnp.sum(mine, dtype=jnp.int32) + tile - 1) // tile,
    )


def merge(a: OnlineSoftmax, b: OnlineSoftmax) -> OnlineSoftmax:
    """The softmax over the keys of both parts."""
    m = jnp.maximum(a.m, b.m)
    left, right = jnp.exp(a.m - m), jnp.exp(b.m - m)
    acc = a.acc * left[..., None] + b.acc * right[..., None]
    return OnlineSoftmax(m, a.l * left + b.l * right, acc)


def masked_softmax(
    scores: Float32[Array, "*rows S"], mask: Bool[Array, "*mask S"]
) -> tuple[Float32[Array, "*rows"], Float32[Array, "*rows"], Float32[Array, "*rows S"]]:
    """(m, l, unnormalized weights) over the last axis of ``scores``, only where ``mask``, which is broadcast."""
    scores = jnp.where(mask, scores, MASKED)
    m = jnp.max(scores, axis=-1)
    weights = jnp.where(mask, jnp.exp(scores - m[..., None]), 0.0)
    return m, jnp.sum(weights, axis=-1), weights


def attend_pages(
    query: Float[Array, "Q row"],
    pool: Pool,
    layer: Index,
    table: Int32[Array, "M"],
    length: Int32[Array, ""],
    rank: int,
    geometry: Geometry,
) -> OnlineSoftmax:
    """Absorbed attention of one sequence over its first ``length`` cached tokens, on the pages of ``table``.

    Costs the pages that the sequence uses: the loop's trip count is ``ceil(length / page)``. Where pages are striped,
    the device of a page sends it to all.

    Args:
        query: Scaled, and zero beyond latent and rope.
        rank: R, the width of the latent, the part that is also the value.

    Returns:
        ``m [Q]``, ``l [Q]``, ``acc [Q, R]``.
    """
    page = pool.shape[2]

    def step(j: jax.Array, part: OnlineSoftmax) -> OnlineSoftmax:
        mask = j * page + jnp.arange(page, dtype=jnp.int32) < length
        is_local, number = local_pages(table[j], geometry)
        # Values of a freed page past the end must not count, not even a NaN, which a weight of zero would keep.
        cached = jnp.where(mask[:, None], pool[layer, number], jnp.zeros((), pool.dtype))
        if geometry.striped:
            cached = lax.psum(jnp.where(is_local, cached, jnp.zeros((), pool.dtype)), AXIS)
        scores = product(query, cached.T, 0)
        m, l, weights = masked_softmax(scores, mask[None])  # noqa: E741
        # Over the whole row, rope part and all: a slice of the page would be copied first on CPU.
        return merge(part, OnlineSoftmax(m, l, product(weights.astype(pool.dtype), cached, 0)))

    rows, row = query.shape
    empty = OnlineSoftmax(jnp.full((rows,), MASKED), jnp.zeros((rows,)), jnp.zeros((rows, row)))
    with jax.named_scope("pages"):
        part = lax.fori_loop(0, (length + page - 1) // page, step, empty)
    return part._replace(acc=part.acc[:, :rank])


def attend_expanded(
    query: Float[Array, "H T Q"],
    pool: Pool,
    layer: Index,
    table: Int32[Array, "B M"],
    length: Int32[Array, "B"],
    owner: Int32[Array, "T"],
    to_key: Float[Array, "H N R"],
    to_value: Float[Array, "H V R"],
    geometry: Geometry,
) -> OnlineSoftmax:
    """Attention of T tokens over what their sequences have cached, whose keys and values are computed.

    One loop goes over the blocks of one sequence after the other: where a loop stands within a loop, XLA:TPU brings
    less of the layers' weights ahead (docs/log/programs-tpu.md). Costs 2 R (N + V) / T + 2 (Q + V) for a query, head
    and cached token, where :func:`attend_pages` costs 4 R and more.

    Args:
        query: Scaled: nope, then rope.
        length: Cached tokens; the loop's trip count is the number of blocks that they fill, for each sequence its own.
        owner: The row of ``table`` that each token attends; another number for none.
        to_key: ``w_uk`` of the layer.
        to_value: ``w_uv`` of the layer.

    Returns:
        ``m [T, H]``, ``l [T, H]``, ``acc [T, H, V]``.
    """
    heads, tokens, width = query.shape
    nope, rank = to_key.shape[1:]
    page, dtype, values = pool.shape[2], pool.dtype, to_value.shape[1]
    pages = BLOCK_TILED if geometry.tiled else BLOCK
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
    span = pages * page  # tokens of a block
    blocks = (length + span - 1) // span
    ends = jnp.cumsum(blocks)
    places = jnp.stack([ends - blocks, length])
    ones_columns = geometry.sum_by_matmul  # whose weighted sum is l: a sum of its own would take as long
    if ones_columns:
        to_value = jnp.pad(to_value, ((0, 0), (0, COLUMNS), (0, 0)))

    ones = (np.arange(to_value.shape[1]) >= values).astype(np.float32)

    def expanded(latent: jax.Array, weight: jax.Array) -> jax.Array:  # [S, R] to [S, H, each]
        return product(latent, weight.reshape(-1, rank), 1).reshape(latent.shape[0], heads, -1)

    def block(i: jax.Array, part: OnlineSoftmax) -> OnlineSoftmax:
        n = jnp.sum(ends <= i, dtype=jnp.int32)
        before, cached_tokens = places[:, n]
        j = i - before
        is_local, number = local_pages(lax.dynamic_slice(table, (n, j * pages), (1, pages))[0], geometry)
        cached = pool.at[layer, number].get(mode=IN_BOUNDS)
        if geometry.striped:
            cached = lax.psum(jnp.where(is_local[:, None, None], cached, jnp.zeros((), dtype)), AXIS)
        cached = cached.reshape(span, -1)
        counts = jnp.arange(span, dtype=jnp.int32) < cached_tokens - j * span
        roped = jnp.broadcast_to(cached[None, :, rank : rank + width - nope], (heads, span, width - nope))
        nopes = jnp.moveaxis(expanded(cached[:, :rank], to_key).astype(dtype), 1, 0)
        key = jnp.concatenate([nopes, roped], axis=-1)
        # Values of a freed page past the end must not count, not even a NaN, which a weight of zero would keep.
        value = jnp.where(counts[:, None, None], expanded(cached[:, :rank], to_value) + ones, 0.0)
        value = jnp.moveaxis(value.astype(dtype), 1, 0)

        own = owner == n  # taken by selection: a weight of zero would keep a NaN of another sequence

        def merged(before: OnlineSoftmax, score: jax.Array, times: Callable[[jax.Array], jax.Array]) -> OnlineSoftmax:
            score = jnp.where(counts, score, MASKED)
            m = jnp.maximum(before.m, jnp.max(score, axis=-1))
            weights, kept = jnp.exp(score - m[..., None]), jnp.exp(before.m - m)
            acc = before.acc * kept[..., None] + times(weights.astype(dtype))
            l = before.l if ones_columns else before.l * kept + jnp.sum(weights, axis=-1)  # noqa: E741
            return OnlineSoftmax(
                jnp.where(own, m, before.m), jnp.where(own, l, before.l), jnp.where(own[:, None], acc, before.acc)
            )

        if geometry.tiled:
            scores = dot_heads("htq,hsq->hts", query, key, geometry)
            return merged(part, scores, lambda x: dot_heads("hts,hsv->htv", x, value, geometry))

        def head(h: jax.Array, part: OnlineSoftmax) -> OnlineSoftmax:  # XLA:CPU has no batched product of bf16
            before = jax.tree.map(lambda whole: whole[h], part)
            after = merged(before, product(query[h], key[h], 1), lambda x: product(x, value[h], 0))
            return jax.tree.map(lambda whole, one: whole.at[h].set(one), part, after)

        return lax.fori_loop(0, heads, head, part)

    rows = (heads, tokens)
    empty = OnlineSoftmax(jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, to_value.shape[1])))
    with jax.named_scope("blocks"):
        part = lax.fori_loop(0, ends[-1], block, empty)
    if ones_columns:
        part = OnlineSoftmax(part.m, part.acc[..., values], part.acc[..., :values])
    return jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), part)


def attend_list(
    query: Float[Array, "B H row"], pool: Pool, layer: Index, pages: PageList, rank: int
) -> Float32[Array, "B H row"]:
    """Absorbed attention of every row of a decode step over the listed pages; ``query`` and ``rank`` as above.

    Returns:
        A softmax over these keys in one array: R columns of ``acc``, then ``l``, then ``m``; the rest means nothing.
    """
    count = query.shape[0]

    def tile(i: Index, part: jax.Array | None) -> jax.Array:
        row, number, length = (lax.dynamic_index_in_dim(x, i, keepdims=False) for x in pages[:3])

        def counts(x: jax.Array, axis: int) -> jax.Array:
            """Which of ``x [tile, ...]`` are of tokens before the end. Compared anew for each shape: XLA:TPU would lay
            the bits of one comparison across lanes, in three times as long as the product takes."""
            return lax.broadcasted_iota(jnp.int32, x.shape, axis) < length[:, None, None]

        cached = pool.at[layer, number].get(mode=IN_BOUNDS)
        owner = row == jnp.arange(count, dtype=jnp.int32)[:, None]  # [B, tile]; past the end, where all is masked, too
        scores = einsum("phr,plr->phl", query.at[row].get(mode=IN_BOUNDS), cached)
        scores = jnp.where(counts(scores, 2), scores, MASKED)
        highest = jnp.where(owner[:, :, None], jnp.max(scores, axis=-1), MASKED)  # [B, tile, H]
        m = jnp.max(highest, axis=1)
        m = m if part is None else jnp.maximum(part[..., rank + 1], m)
        weights = jnp.exp(scores - m.at[row].get(mode=IN_BOUNDS)[..., None])
        weights = jnp.where(counts(weights, 2), weights, 0.0)
        # The column after the latent is 1 here, so that its weighted sum is l: a sum of its own would take as long.
        # Values of a freed page past the end must not count, not even a NaN, which a weight of zero would keep.
        value = jnp.where(lax.broadcasted_iota(jnp.int32, cached.shape, 2) == rank, jnp.ones((), pool.dtype), cached)
        value = jnp.where(counts(value, 1), value, jnp.zeros((), pool.dtype))
        values = einsum("phl,plr->phr", weights.astype(pool.dtype), value)
        # A share of zero would keep a NaN of another row; in its own, it is in the largest score.
        values = jnp.where(jnp.isfinite(values), values, 0.0)
        share = owner.astype(jnp.float32)
        gained = jnp.einsum("bp,phr->bhr", share, values, precision=lax.Precision.HIGHEST)
        if part is not None:
            gained += part * jnp.exp(part[..., rank + 1] - m)[..., None]
        column = lax.broadcasted_iota(jnp.int32, gained.shape, 2)
        gained = jnp.where(column == rank, gained + SEEN, gained)
        return jnp.where(column == rank + 1, m[..., None], gained)

    first = tile(0, None)  # outside of the loop: most lists have no other, and a loop's results have to be made first
    with jax.named_scope("page_tiles"):
        return lax.fori_loop(1, pages.used, tile, first)


def attend_tables(
    query: Float[Array, "B H row"],
    pool: Pool,
    layer: Index,
    table: Int32[Array, "B M"],
    length: Int32[Array, "B"],
    rank: int,
) -> Float32[Array, "B H R"]:
    """Absorbed attention of each row over the first ``length`` cached tokens of its pages: weighted means of latents.

    Whole tables are copied; what is not seen is a copy of the dummy page, so of one that is in the caches. ``query``
    and ``rank`` as above.
    """
    page = pool.shape[2]
    seen = jnp.arange(table.shape[1] * page, dtype=jnp.int32) < length[:, None]
    number = jnp.where(seen[:, ::page], table, 0)
    cached = pool.at[layer, number].get(mode=IN_BOUNDS).reshape(*seen.shape, -1)
    # Values of a freed page past the end must not count, not even a NaN, which a weight of zero would keep.
    cached = jnp.where(seen[:, :, None], cached, jnp.zeros((), pool.dtype))
    m, l, weights = masked_softmax(einsum("bhr,bsr->bhs", query, cached), seen[:, None])  # noqa: E741
    return OnlineSoftmax(m, l, einsum("bhs,bsr->bhr", weights.astype(pool.dtype), cached)).normalized[..., :rank]


def weighted_mean(part: Float32[Array, "B H row"], rank: int) -> Float32[Array, "B H R"]:
    """The weighted mean of the values that :func:`attend_list` gives, NaN where a score was; zero where no key was
    seen."""
    m = part[..., rank + 1]
    l = jnp.where(jnp.isfinite(m), part[..., rank], jnp.nan)  # noqa: E741
    return part[..., :rank] / l[..., None]


def merge_devices(part: Float32[Array, "B H row"], rank: int) -> Float32[Array, "B h R"]:
    """Parts of all heads over each device's pages, to the weighted means of this device's heads over all pages.

    ``part`` is what :func:`attend_list` gives; one all-to-all moves it. Zero where no key was seen.
    """
    count, heads, width = part.shape
    devices = lax.axis_size(AXIS)
    packed = part.reshape(count, devices, heads // devices, width)
    packed = lax.all_to_all(packed, AXIS, split_axis=1, concat_axis=1, tiled=True)  # [B, devices, h, width]
    acc, l, m = packed[..., :rank], packed[..., rank], packed[..., rank + 1]  # noqa: E741
    # Each part is divided by the sum over all parts, relative to its own `m`: infinite where the part has no keys.
    sums = jnp.sum(l[:, None] * jnp.exp(m[:, None] - m[:, :, None]), axis=2)
    return jnp.sum(acc / sums[..., None], axis=1)
