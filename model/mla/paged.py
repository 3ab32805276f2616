"""Attention over the pages of the latent pool: where a page lies, which pages a step attends, and the attention.

Absorbed attention: the query is in latent space, and a page's row is key and value at once. It goes page after page of
one sequence, or over the pages of all sequences in tiles. Either way it is an online softmax (Milakov and Gimelshein,
arXiv 1805.02867): parts of the keys give parts (m, l, acc), which are merged in any order.

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
from jaxtyping import Array, Bool, Float, Float32, Int32

from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.layers import Index
from ling3export.model.products import einsum, product

MASKED = -1e30  # finite, so that a row which sees nothing yet gives weights of zero and not NaN
TILE = 16  # pages attended at once: 8 cost 12 small operations as often again (docs/log.md)

Pool = Float[Array, "layers pages page row"]  # this device's latents; a row is [latent | roped key | 0]


class PageList(NamedTuple):
    """The pages that this device attends in a decode step, those of live rows first."""

    row: Int32[Array, "X"]  # which sequence of the batch
    page: Int32[Array, "X"]  # local page number, 0 past the end
    length: Int32[Array, "X"]  # tokens of the page that count, 0 past the end
    tiles: Int32[Array, ""]  # how many tiles of :data:`TILE` hold pages


class OnlineSoftmax(NamedTuple):
    """A softmax over part of the keys, not yet normalized."""

    m: Float32[Array, "..."]  # the largest score so far
    l: Float32[Array, "..."]  # noqa: E741 (the papers' name); the sum of ``exp(score - m)``
    acc: Float32[Array, "... X"]  # the values, weighted by ``exp(score - m)``, added up

    @property
    def normalized(self) -> Float32[Array, "... X"]:
        """The weighted mean of the values; zero where no key was seen."""
        return self.acc / jnp.maximum(self.l, 1e-30)[..., None]


def local_pages(
    number: Int32[Array, "*pages"], geometry: Geometry
) -> tuple[Bool[Array, "*pages"], Int32[Array, "*pages"]]:
    """(whether this device holds each page, its local number, 0 where it does not); page 0 is nobody's."""
    if not geometry.striped:
        return number > 0, number
    device, place = (number - 1) % geometry.tp, (number - 1) // geometry.tp
    here = (number > 0) & (device == lax.axis_index(AXIS))
    return here, jnp.where(here, place + 1, 0)


def list_pages(
    position: Int32[Array, "B"], table: Int32[Array, "B M"], valid: Bool[Array, "B"], geometry: Geometry
) -> PageList:
    """Lists what a decode step attends: every page of ``table`` up to the position of each row that is ``valid``."""
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
    query: Float[Array, "Q row"], pool: Pool, layer: Index, table: Int32[Array, "M"], length: Int32[Array, ""],
    rank: int, geometry: Geometry,
) -> OnlineSoftmax:  # fmt: skip
    """Absorbed attention of one sequence over its first ``length`` cached tokens, on the pages of ``table``.

    Costs the pages that the sequence uses: the loop's trip count is ``ceil(length / page)``. A device that alone holds
    a page sends it to all.

    Args:
        query: Already scaled, zero beyond latent and rope.
        rank: R, the width of the latent, the part that is also the value.

    Returns:
        ``m [Q]``, ``l [Q]``, ``acc [Q, R]``.
    """
    page = pool.shape[2]

    def step(j: jax.Array, part: OnlineSoftmax) -> OnlineSoftmax:
        mask = j * page + jnp.arange(page, dtype=jnp.int32) < length
        here, number = local_pages(table[j], geometry)
        # What a freed page holds past the end must not count, not even a NaN that a weight of zero would keep.
        cached = jnp.where(mask[:, None], pool[layer, number], jnp.zeros((), pool.dtype))
        if geometry.striped:
            cached = lax.psum(jnp.where(here, cached, jnp.zeros((), pool.dtype)), AXIS)
        scores = product(query, cached.T, 0)
        m, l, weights = masked_softmax(scores, mask[None])  # noqa: E741
        # Over the whole row, rope part and all: a slice of the page would be copied first on CPU.
        return merge(part, OnlineSoftmax(m, l, product(weights.astype(pool.dtype), cached, 0)))

    rows, row = query.shape
    empty = OnlineSoftmax(jnp.full((rows,), MASKED), jnp.zeros((rows,)), jnp.zeros((rows, row)))
    with jax.named_scope("pages"):
        part = lax.fori_loop(0, (length + page - 1) // page, step, empty)
    return part._replace(acc=part.acc[:, :rank])


def attend_list(query: Float[Array, "B H row"], pool: Pool, layer: Index, pages: PageList, rank: int) -> OnlineSoftmax:
    """Absorbed attention of every row of a decode step over the listed pages; ``query`` and ``rank`` as above.

    Returns:
        ``m [B, H]``, ``l [B, H]``, ``acc [B, H, R]``.
    """
    count, heads = query.shape[:2]
    place = jnp.arange(pool.shape[2], dtype=jnp.int32)

    def step(i: jax.Array, part: OnlineSoftmax) -> OnlineSoftmax:
        row, number, length = (lax.dynamic_slice_in_dim(x, i * TILE, TILE) for x in pages[:3])
        counts = place < length[:, None]  # [TILE, page]
        cached = pool.at[layer, number].get(mode="promise_in_bounds")
        owner = (row == jnp.arange(count, dtype=jnp.int32)[:, None]) & (length > 0)  # [B, TILE]
        scores = einsum("phr,plr->phl", query[row], cached)
        scores = jnp.where(counts[:, None], scores, MASKED)
        highest = jnp.where(owner[:, :, None], jnp.max(scores, axis=-1), MASKED)  # [B, TILE, H]
        m = jnp.maximum(part.m, jnp.max(highest, axis=1))
        weights = jnp.where(counts[:, None], jnp.exp(scores - m[row][..., None]), 0.0)
        share = owner.astype(jnp.float32)
        # What a freed page holds past the end must not count, not even a NaN that a weight of zero would keep.
        latent = jnp.where(counts[:, :, None], cached[..., :rank], jnp.zeros((), pool.dtype))
        values = einsum("phl,plr->phr", weights.astype(pool.dtype), latent)
        kept = jnp.exp(part.m - m)
        total = jnp.einsum("bp,ph->bh", share, jnp.sum(weights, axis=-1), precision=lax.Precision.HIGHEST)
        gained = jnp.einsum("bp,phr->bhr", share, values, precision=lax.Precision.HIGHEST)
        return OnlineSoftmax(m, part.l * kept + total, part.acc * kept[..., None] + gained)

    empty = OnlineSoftmax(jnp.full((count, heads), MASKED), jnp.zeros((count, heads)), jnp.zeros((count, heads, rank)))
    with jax.named_scope("page_tiles"):
        return lax.fori_loop(0, pages.tiles, step, empty)


def merge_devices(part: OnlineSoftmax) -> OnlineSoftmax:
    """Parts of all heads over each device's pages, to parts of this device's heads over all pages.

    One all-to-all: m and l travel beside acc. From shapes ``[B, H]``, ``[B, H, R]`` to ``[B, h]``, ``[B, h, R]``.
    """
    packed = jnp.concatenate([part.acc, part.m[..., None], part.l[..., None]], axis=-1)
    count, heads, width = packed.shape
    devices = lax.axis_size(AXIS)
    packed = packed.reshape(count, devices, heads // devices, width)
    packed = lax.all_to_all(packed, AXIS, split_axis=1, concat_axis=1, tiled=True)  # [B, devices, h, width]
    m = jnp.max(packed[..., -2], axis=1)
    scale = jnp.exp(packed[..., -2] - m[:, None])
    total = jnp.sum(packed[..., -1] * scale, axis=1)
    return OnlineSoftmax(m, total, jnp.sum(packed[..., :-2] * scale[..., None], axis=1))
