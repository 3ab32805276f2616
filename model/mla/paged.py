"""Attention over the pages of the latent pool: where a page lies, which pages a step attends, and the attention.

Absorbed attention: the query is in latent space, and a page's row is key and value at once. It goes one sequence page
after page, or over all sequences' pages in tiles, as an online softmax whose parts are merged.

Striped: page number n lies on device (n - 1) % TP, as its local page (n - 1) // TP + 1; local page 0 is each device's
dummy. Any page may be anywhere, so whoever hands out pages needs no rule, and numbers that are handed out in order
spread a sequence over all devices.

In the form ``tiles`` a decode step lists the (row, page) pairs that this device holds, and walks the list in tiles. So
its time follows what the sequences hold, whatever their number and lengths, and a device reads each cached byte once
for all heads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.layers import precision

MASKED = -1e30  # finite, so that a row which sees nothing yet gives weights of zero and not NaN
TILE = 16  # pages attended at once: 8 cost 12 small operations as often again (docs/log.md)


class PageList(NamedTuple):
    """The pages that this device attends in a decode step, those of live rows first.

    Attributes:
        row: ``[X]`` int32, which sequence of the batch.
        page: ``[X]`` int32, local page number, 0 past the end.
        length: ``[X]`` int32, tokens of the page that count, 0 past the end.
        tiles: int32 scalar, how many tiles of :data:`TILE` hold pages.
    """

    row: jax.Array
    page: jax.Array
    length: jax.Array
    tiles: jax.Array


def local_pages(number: jax.Array, geometry: Geometry) -> tuple[jax.Array, jax.Array]:
    """(whether this device holds each page, its local number, 0 where it does not); page 0 is nobody's."""
    if not geometry.striped:
        return number > 0, number
    device, place = (number - 1) % geometry.tp, (number - 1) // geometry.tp
    here = (number > 0) & (device == lax.axis_index(AXIS))
    return here, jnp.where(here, place + 1, 0)


def list_pages(position: jax.Array, table: jax.Array, valid: jax.Array, geometry: Geometry) -> PageList:
    """Lists what a decode step attends: every page up to each row's position.

    Args:
        position: ``[B]`` int32, of the token that decodes.
        table: ``[B, M]`` int32 page numbers.
        valid: ``[B]`` bool.
        geometry: Placement and page size.
    """
    rows, columns = table.shape
    page = geometry.page_size
    seen = jnp.where(valid, position + 1, 0)[:, None] - jnp.arange(columns, dtype=jnp.int32) * page
    here, local = local_pages(table, geometry)
    mine = (here & (seen > 0)).reshape(-1)
    count = rows * columns
    order = jnp.sort(jnp.where(mine, jnp.arange(count, dtype=jnp.int32), count))
    order = jnp.pad(order, (0, -count % TILE), constant_values=count)
    live = order < count
    at = jnp.where(live, order, 0)
    return PageList(
        row=at // columns,
        page=jnp.where(live, local.reshape(-1)[at], 0),
        length=jnp.where(live, jnp.minimum(seen, page).reshape(-1)[at], 0),
        tiles=(jnp.sum(mine, dtype=jnp.int32) + TILE - 1) // TILE,
    )


class Partial(NamedTuple):
    """A softmax over part of the keys: running maximum, sum of weights, weighted values (all fp32)."""

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


def merge(a: Partial, b: Partial) -> Partial:
    """The softmax over both parts; shapes ``[...]``, ``[...]``, ``[..., V]``."""
    maximum = jnp.maximum(a.maximum, b.maximum)
    left, right = jnp.exp(a.maximum - maximum), jnp.exp(b.maximum - maximum)
    values = a.values * left[..., None] + b.values * right[..., None]
    return Partial(maximum, a.total * left + b.total * right, values)


def softmax_part(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(maximum, sum, unnormalized weights) over the last axis of fp32 ``scores``, only where ``mask``."""
    scores = jnp.where(mask, scores, MASKED)
    maximum = jnp.max(scores, axis=-1)
    weights = jnp.where(mask, jnp.exp(scores - maximum[..., None]), 0.0)
    return maximum, jnp.sum(weights, axis=-1), weights


def attend_pages(
    query: jax.Array, pool: jax.Array, layer: int | jax.Array, table: jax.Array, length: jax.Array, rank: int,
    geometry: Geometry,
) -> Partial:  # fmt: skip
    """Absorbed attention of one sequence over its first ``length`` cached tokens.

    Costs the pages that the sequence uses: the loop's trip count is ``ceil(length / page)``.

    Args:
        query: ``[Q, row]``, already scaled, zero beyond latent and rope.
        pool: ``[layers, pages, page, row]``.
        layer: Index into the pool.
        table: ``[M]`` page numbers.
        length: int32 scalar.
        rank: Width of the latent, the part that is also the value.
        geometry: Where the pages are; the device that holds one alone sends it to all.

    Returns:
        :class:`Partial` of shapes ``[Q]``, ``[Q]``, ``[Q, rank]``.
    """
    page = pool.shape[2]

    def step(j: jax.Array, part: Partial) -> Partial:
        mask = j * page + jnp.arange(page, dtype=jnp.int32) < length
        here, number = local_pages(table[j], geometry)
        # What a freed page holds past the end must not count, not even a NaN that a weight of zero would keep.
        cached = jnp.where(mask[:, None], pool[layer, number], jnp.zeros((), pool.dtype))
        if geometry.striped:
            cached = lax.psum(jnp.where(here, cached, jnp.zeros((), pool.dtype)), AXIS)
        exact = precision(pool.dtype)
        scores = jnp.matmul(query, cached.T, precision=exact, preferred_element_type=jnp.float32)
        maximum, total, weights = softmax_part(scores, mask[None])
        # Over the whole row, rope part and all: a slice of the page would be copied first on CPU.
        weights = weights.astype(pool.dtype)
        values = jnp.matmul(weights, cached, precision=exact, preferred_element_type=jnp.float32)
        return merge(part, Partial(maximum, total, values))

    rows, row = query.shape
    empty = Partial(jnp.full((rows,), MASKED), jnp.zeros((rows,)), jnp.zeros((rows, row)))
    with jax.named_scope("pages"):
        part = lax.fori_loop(0, (length + page - 1) // page, step, empty)
    return part._replace(values=part.values[:, :rank])


def attend_list(query: jax.Array, pool: jax.Array, layer: int | jax.Array, pages: PageList, rank: int) -> Partial:
    """Absorbed attention of every row over the listed pages.

    Args:
        query: ``[B, H, row]``, scaled, zero beyond latent and rope.
        pool: ``[layers, pages, page, row]``, this device's.
        layer: Index into the pool.
        pages: What to attend.
        rank: Width of the latent, the part that is also the value.

    Returns:
        :class:`Partial` of shapes ``[B, H]``, ``[B, H]``, ``[B, H, rank]``.
    """
    count, heads = query.shape[:2]
    exact = precision(pool.dtype)
    place = jnp.arange(pool.shape[2], dtype=jnp.int32)

    def step(i: jax.Array, part: Partial) -> Partial:
        row, number, length = (lax.dynamic_slice_in_dim(x, i * TILE, TILE) for x in pages[:3])
        counts = place < length[:, None]  # [TILE, page]
        cached = pool.at[layer, number].get(mode="promise_in_bounds")
        owner = (row == jnp.arange(count, dtype=jnp.int32)[:, None]) & (length > 0)  # [B, TILE]
        scores = jnp.einsum("phr,plr->phl", query[row], cached, precision=exact, preferred_element_type=jnp.float32)
        scores = jnp.where(counts[:, None], scores, MASKED)
        highest = jnp.where(owner[:, :, None], jnp.max(scores, axis=-1), MASKED)  # [B, TILE, H]
        maximum = jnp.maximum(part.maximum, jnp.max(highest, axis=1))
        weights = jnp.where(counts[:, None], jnp.exp(scores - maximum[row][..., None]), 0.0)
        share = owner.astype(jnp.float32)
        # What a freed page holds past the end must not count, not even a NaN that a weight of zero would keep.
        latent = jnp.where(counts[:, :, None], cached[..., :rank], jnp.zeros((), pool.dtype))
        values = jnp.einsum("phl,plr->phr", weights.astype(pool.dtype), latent, precision=exact,
                            preferred_element_type=jnp.float32)  # fmt: skip
        kept = jnp.exp(part.maximum - maximum)
        total = jnp.einsum("bp,ph->bh", share, jnp.sum(weights, axis=-1), precision=lax.Precision.HIGHEST)
        gained = jnp.einsum("bp,phr->bhr", share, values, precision=lax.Precision.HIGHEST)
        return Partial(maximum, part.total * kept + total, part.values * kept[..., None] + gained)

    empty = Partial(jnp.full((count, heads), MASKED), jnp.zeros((count, heads)), jnp.zeros((count, heads, rank)))
    with jax.named_scope("page_tiles"):
        return lax.fori_loop(0, pages.tiles, step, empty)


def gather_heads(query: jax.Array) -> jax.Array:
    """``[B, h, row]`` of each device's heads to ``[B, H, row]`` on all."""
    return lax.all_gather(query, AXIS, axis=1, tiled=True)


def merge_devices(part: Partial) -> Partial:
    """Parts ``[B, H, …]`` over each device's pages to this device's heads ``[B, h, …]`` over all pages.

    One all-to-all: maximum and sum travel beside the values.
    """
    packed = jnp.concatenate([part.values, part.maximum[..., None], part.total[..., None]], axis=-1)
    count, heads, width = packed.shape
    devices = lax.axis_size(AXIS)
    packed = packed.reshape(count, devices, heads // devices, width)
    packed = lax.all_to_all(packed, AXIS, split_axis=1, concat_axis=1, tiled=True)  # [B, devices, h, width]
    maximum = jnp.max(packed[..., -2], axis=1)
    scale = jnp.exp(packed[..., -2] - maximum[:, None])
    total = jnp.sum(packed[..., -1] * scale, axis=1)
    return Partial(maximum, total, jnp.sum(packed[..., :-2] * scale[..., None], axis=1))
