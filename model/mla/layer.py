"""Gated multi-head latent attention over paged latents.

Two forms of the same attention, softmax scale ``(nope + rope)^-0.5``. Expanded: keys and values of every head are
computed from the latent; cheapest for the tokens of a prefill call among themselves. Absorbed: the query is taken into
latent space by ``w_uk``, the result back out by ``w_uv``; cheapest over what is cached, since a page is read once for
all heads. Prefill uses the first inside the call and the second over what was cached before it, merged by their
log-sum-exp; decode uses the second. Source: MODEL.md section 2; DeepSeek-V2 (arXiv 2405.04434).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.model.inputs import Chunks, DecodeRows
from ling3export.model.layers import dot, dot_heads, rms_norm, rope, take
from ling3export.model.mla.paged import (
    MASKED,
    PageList,
    Partial,
    attend_list,
    attend_pages,
    gather_heads,
    local_pages,
    merge,
    merge_devices,
    softmax_part,
)
from ling3export.model.products import dot_heads_split, dot_rows_split, dot_split

LATENT_NORM_EPS = 1e-6  # of the query's and the key-value latent's norm, whatever rms_norm_eps says
QUERY_BLOCK = 512  # token slots whose scores against the whole call are held at once


class Projected(NamedTuple):
    """Projections of the tokens of a step, model dtype: q_nope ``[T, H, N]``, q_rope ``[T, H, P]`` (both scaled),
    latent ``[T, R]``, k_rope ``[T, P]``, and the head gate in fp32 ``[T, H]``."""

    q_nope: jax.Array
    q_rope: jax.Array
    latent: jax.Array
    k_rope: jax.Array
    gate: jax.Array


class GatedMLA(nnx.Module):
    """All MLA layers of one device, stacked; parameters as ``model/parameters.py`` lists them under ``mla``."""

    def __init__(self, config: Config, geometry: Geometry, weights: dict[str, nnx.Param]) -> None:
        self.config, self.geometry = config, geometry
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = weights["kv_a_proj_with_mqa"], weights["kv_a_layernorm"]
        self.w_uk, self.w_uv = weights["w_uk"], weights["w_uv"]
        self.g_proj, self.dense = weights["g_proj"], weights["dense"]
        self.q_proj, self.q_a_proj = weights.get("q_proj"), weights.get("q_a_proj")
        self.q_a_layernorm, self.q_b_proj = weights.get("q_a_layernorm"), weights.get("q_b_proj")

    def _heads(self, weight: nnx.Param, layer: int | jax.Array) -> jax.Array:
        """``[H, X, R]`` of one layer, slabs merged."""
        value = take(weight[...], layer, split=True)
        return value.reshape(-1, *value.shape[2:])

    def _query(self, x: jax.Array, layer: int | jax.Array) -> jax.Array:
        """fp32 ``[T, H, N + P]`` by the flat projection or through the low rank."""
        if self.q_proj is not None:
            y = dot_split(x, self.q_proj, layer, self.geometry)
        else:
            assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
            low = dot(x, take(self.q_a_proj[...], layer, split=False))
            weight = take(self.q_a_layernorm[...], layer, split=False)
            low = rms_norm(low, weight, LATENT_NORM_EPS).astype(x.dtype)
            y = dot_split(low, self.q_b_proj, layer, self.geometry)
        return y.reshape(x.shape[0], -1, self.config.qk_head_dim)

    def _project(self, x: jax.Array, layer: int | jax.Array, position: jax.Array) -> Projected:
        config = self.config
        query = self._query(x, layer) * config.qk_head_dim**-0.5
        compressed = dot(x, take(self.kv_a_proj_with_mqa[...], layer, split=False))
        weight = take(self.kv_a_layernorm[...], layer, split=False)
        nope, rank, units = config.qk_nope_head_dim, config.kv_lora_rank, self.geometry.tiled
        gate = jax.nn.sigmoid(dot_split(x, self.g_proj, layer, self.geometry).reshape(x.shape[0], -1))
        return Projected(
            q_nope=query[..., :nope].astype(x.dtype),
            q_rope=rope(query[..., nope:], position, config.rope_theta, units).astype(x.dtype),
            latent=rms_norm(compressed[:, :rank], weight, LATENT_NORM_EPS).astype(x.dtype),
            k_rope=rope(compressed[:, rank:], position, config.rope_theta, units).astype(x.dtype),
            gate=gate,
        )

    def _absorb(self, p: Projected, layer: int | jax.Array, row: int) -> jax.Array:
        """The query in latent space: ``[T, H, row]`` = [q_nope w_uk | q_rope | 0]."""
        query = dot_heads_split(p.q_nope, self.w_uk, layer, 0, self.geometry).astype(p.latent.dtype)
        filled = jnp.zeros((*query.shape[:2], row - query.shape[-1] - p.q_rope.shape[-1]), query.dtype)
        return jnp.concatenate([query, p.q_rope, filled], axis=-1)

    def _release(self, latent: jax.Array, layer: int | jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Attended latents ``[T, H, R]`` fp32 to head outputs ``[T, H, V]`` fp32."""
        return dot_heads_split(latent.astype(dtype), self.w_uv, layer, 1, self.geometry)

    def _output(self, heads: jax.Array, p: Projected, layer: int | jax.Array) -> jax.Array:
        """Gates each head, then the output projection: ``[T, H, V]`` fp32 to this device's partial ``[T, D]``."""
        gated = (heads * p.gate[..., None]).reshape(heads.shape[0], -1).astype(p.latent.dtype)
        return dot_rows_split(gated, self.dense, layer, self.geometry)

    def decode(
        self, x: jax.Array, layer: int | jax.Array, pool: jax.Array, rows: DecodeRows
    ) -> tuple[jax.Array, jax.Array]:
        """One token of each sequence.

        Args:
            x: ``[B, D]``, normed, model dtype.
            layer: Index into the stack and the pool.
            pool: ``[layers, pages, page, row]``.
            rows: The step's rows; their list of pages is walked, or without one a sequence after the other.

        Returns:
            This device's partial sum ``[B, D]`` in fp32, and the pool with the new latents.
        """
        p = self._project(x, layer, rows.position)
        pool = store_latents(pool, layer, p, rows.position, rows.page_table, rows.valid, self.geometry)
        query = self._absorb(p, layer, pool.shape[3])
        if rows.pages is None:
            latent = self._one_by_one(query, pool, layer, rows)
        else:
            latent = self._all_pages(query, pool, layer, rows.pages)
        return self._output(self._release(latent, layer, x.dtype), p, layer), pool

    def _one_by_one(self, query: jax.Array, pool: jax.Array, layer: int | jax.Array, rows: DecodeRows) -> jax.Array:
        """Attended latents ``[B, H, R]``, one sequence after the other."""
        rank = self.config.kv_lora_rank
        length = jnp.where(rows.valid, rows.position + 1, 0)

        def sequence(b: jax.Array, out: jax.Array) -> jax.Array:
            part = attend_pages(query[b], pool, layer, rows.page_table[b], length[b], rank, self.geometry)
            return out.at[b].set(part.values / jnp.maximum(part.total, 1e-30)[:, None])

        with jax.named_scope("sequences"):
            return lax.fori_loop(0, rows.used, sequence, jnp.zeros((*query.shape[:2], rank), jnp.float32))

    def _all_pages(self, query: jax.Array, pool: jax.Array, layer: int | jax.Array, pages: PageList) -> jax.Array:
        """Attended latents ``[B, H, R]`` over the listed pages of all sequences."""
        rank = self.config.kv_lora_rank
        if self.geometry.striped:
            part = merge_devices(attend_list(gather_heads(query), pool, layer, pages, rank))
        else:
            part = attend_list(query, pool, layer, pages, rank)
        return part.values / jnp.maximum(part.total, 1e-30)[..., None]

    def prefill(
        self, x: jax.Array, layer: int | jax.Array, pool: jax.Array, chunks: Chunks
    ) -> tuple[jax.Array, jax.Array]:
        """All padded tokens of a prefill call; arguments and results as :meth:`decode`, rows being padded tokens."""
        p = self._project(x, layer, chunks.position)
        # Written before anything is read: a write after a read that nothing orders would make XLA copy the pool.
        table = jnp.repeat(chunks.page_table, CHUNK, axis=0)
        pool = store_latents(pool, layer, p, chunks.position, table, chunks.valid, self.geometry)
        part = self._within(p, layer, chunks)
        with jax.named_scope("cached"):
            part = lax.cond(
                jnp.any(chunks.run_start > 0),
                lambda part, pool: merge(part, self._before(p, layer, pool, chunks)),
                lambda part, pool: part,
                part, pool,
            )  # fmt: skip
        heads = part.values / jnp.maximum(part.total, 1e-30)[..., None]
        return self._output(heads, p, layer), pool

    def _within(self, p: Projected, layer: int | jax.Array, chunks: Chunks) -> Partial:
        """Expanded attention of the call's tokens among themselves: ``[T, H]``, ``[T, H]``, ``[T, H, V]``."""
        k_nope = dot(p.latent, self._heads(self.w_uk, layer)).astype(p.latent.dtype)
        value = dot(p.latent, self._heads(self.w_uv, layer)).astype(p.latent.dtype)
        k_rope = jnp.broadcast_to(p.k_rope[:, None], (*k_nope.shape[:2], p.k_rope.shape[-1]))
        key = jnp.concatenate([k_nope, k_rope], axis=-1)
        query = jnp.concatenate([p.q_nope, p.q_rope], axis=-1)

        def block(rows: tuple[jax.Array, jax.Array, jax.Array]) -> Partial:
            q, slot, position = rows
            scores = dot_heads("thd,shd->hts", q, key)
            mask = (slot[:, None] == chunks.token_slot) & (chunks.position <= position[:, None]) & chunks.valid
            maximum, total, weights = softmax_part(scores, mask[None])
            values = dot_heads("hts,shv->thv", weights.astype(key.dtype), value)
            return Partial(maximum.T, total.T, values)

        count = query.shape[0]
        size = max(s for s in range(CHUNK, min(count, QUERY_BLOCK) + 1, CHUNK) if count % s == 0)
        rows = (query, chunks.token_slot, chunks.position)
        if size == count:
            return block(rows)
        split = jax.tree.map(lambda y: y.reshape(-1, size, *y.shape[1:]), rows)
        return jax.tree.map(lambda y: y.reshape(count, *y.shape[2:]), lax.map(block, split))

    def _before(self, p: Projected, layer: int | jax.Array, pool: jax.Array, chunks: Chunks) -> Partial:
        """Absorbed attention of each chunk over what its sequence had cached before this call."""
        count, rank = chunks.slot.shape[0], self.config.kv_lora_rank
        query = self._absorb(p, layer, pool.shape[3])
        heads = query.shape[1]
        query = query.reshape(count, CHUNK * heads, -1)

        def chunk(n: jax.Array, out: Partial) -> Partial:
            length = jnp.where(chunks.slot[n] > 0, chunks.run_start[n], 0)
            part = attend_pages(query[n], pool, layer, chunks.page_table[n], length, rank, self.geometry)
            return jax.tree.map(lambda whole, one: whole.at[n].set(one), out, part)

        rows = (count, CHUNK * heads)
        empty = Partial(jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, rank)))
        with jax.named_scope("chunks"):
            part = lax.fori_loop(0, chunks.used, chunk, empty)
        maximum, total, values = jax.tree.map(lambda y: y.reshape(count * CHUNK, heads, *y.shape[2:]), part)
        # The weights of a value are not normalized yet: the sums may be large, w_uv is linear, so order is free.
        return Partial(maximum, total, self._release(values, layer, p.latent.dtype))


def store_latents(
    pool: jax.Array, layer: int | jax.Array, p: Projected, position: jax.Array, table: jax.Array, valid: jax.Array,
    geometry: Geometry,
) -> jax.Array:  # fmt: skip
    """Writes each token's [latent | roped k | 0] into its page; padding goes to the dummy page 0.

    Args:
        pool: ``[layers, pages, page, row]``.
        layer: Index into the pool.
        p: The step's projections.
        position: ``[T]`` int32.
        table: ``[T, M]`` int32, each token's page table.
        valid: ``[T]`` bool.
        geometry: Where the pages are.
    """
    page, row = pool.shape[2:]
    index = jnp.where(valid, position // page, 0)
    number = jnp.where(valid, jnp.take_along_axis(table, index[:, None], axis=1)[:, 0], 0)
    _, number = local_pages(number, geometry)
    filled = jnp.zeros((p.latent.shape[0], row - p.latent.shape[1] - p.k_rope.shape[1]), pool.dtype)
    new = jnp.concatenate([p.latent.astype(pool.dtype), p.k_rope.astype(pool.dtype), filled], axis=-1)
    return pool.at[layer, number, position % page].set(new, mode="promise_in_bounds")
