"""Attention over cached latents in parts: a softmax over some of the keys, and how parts are merged.

Absorbed: the query is in latent space, and a page's row is key and value at once. One sequence page after page, or all
sequences over a list of pages in tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.layers import precision
from ling3export.model.mla.pages import TILE, PageList, local_pages

MASKED = -1e30  # finite, so that a row which sees nothing yet gives weights of zero and not NaN


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
        if geometry.cut_pages:
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
