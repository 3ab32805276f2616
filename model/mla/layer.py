"""Gated multi-head latent attention over paged latents.

Two ways to compute the same attention, softmax scale ``(nope + rope)^-0.5``, or YaRN's multiple of it. Expanded: keys
and values of every head are computed from the latent; cheapest for the tokens of a prefill call among themselves.
Absorbed: ``w_uk`` takes the query into latent space, ``w_uv`` the result back; cheapest over cached tokens, since a
page is read once for all heads. Decode is absorbed. Prefill is expanded inside the call. Over tokens cached before the
call it is absorbed, or expanded where many tokens of one sequence attend: 512 tokens after 8,192 took 0.3 of the time
(docs/log/kernels-cpu.md). Both parts are merged as an online softmax. Source: docs/model.md, "MLA"; DeepSeek-V2 (arXiv
2405.04434).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, CHUNK, Geometry
from ling3export.model.inputs import Chunks, DecodeRows
from ling3export.model.layers import COLUMNS, IN_BOUNDS, Index, State, Weight, rms_norm, rope, take
from ling3export.model.mla.paged import (
    MASKED,
    OnlineSoftmax,
    Pool,
    attend_expanded,
    attend_list,
    attend_pages,
    attend_tables,
    is_at_once,
    local_pages,
    masked_softmax,
    merge,
    merge_devices,
    weighted_mean,
)
from ling3export.model.native import calls
from ling3export.model.products import column_parallel, dot, dot_heads, einsum, per_head, replicated, row_parallel
from ling3export.model.quantized import of_heads

LATENT_NORM_EPS = 1e-6  # for the norms of the query's and the key-value latent, whatever rms_norm_eps says
QUERY_BLOCK = 512  # padded tokens whose scores against the whole call are held at once


class Projected(NamedTuple):
    """Projections of the tokens of a step, in the model dtype but for the gate."""

    q_nope: Float[Array, "T H N"]  # the part of each head's query without position, scaled
    q_rope: Float[Array, "T H P"]  # the roped part, scaled
    latent: Float[Array, "T R"]  # the compressed keys and values, normed
    k_rope: Float[Array, "T P"]  # the roped key that all heads share
    gate: Float32[Array, "T H"]  # each head's gate, fp32, between 0 and 1


class GatedMLA(nnx.Module):
    """All MLA layers of one device, stacked; parameters as ``model/parameters.py`` lists them under ``mla``."""

    def __init__(self, config: Config, geometry: Geometry, weights: dict[str, Weight]) -> None:
        self.config, self.geometry = config, geometry
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = weights["kv_a_proj_with_mqa"], weights["kv_a_layernorm"]
        self.w_uk, self.w_uv = weights["w_uk"], weights["w_uv"]
        self.g_proj, self.dense = weights["g_proj"], weights["dense"]
        self.q_proj, self.q_a_proj = weights.get("q_proj"), weights.get("q_a_proj")
        self.q_a_layernorm, self.q_b_proj = weights.get("q_a_layernorm"), weights.get("q_b_proj")

    @jax.named_scope("q_proj")
    def _query(self, x: Float[Array, "T D"], layer: Index) -> Float32[Array, "T H Q"]:
        """Each head's query, nope and rope, by the flat projection or through the low rank."""
        if self.q_proj is not None:
            y = column_parallel(x, self.q_proj, layer, self.geometry)
        else:
            assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
            low = replicated(x, self.q_a_proj, layer, self.geometry)
            weight = take(self.q_a_layernorm[...], layer, split=False)
            low = rms_norm(low, weight, LATENT_NORM_EPS, self.geometry.sums).astype(x.dtype)
            y = column_parallel(low, self.q_b_proj, layer, self.geometry)
        return y.reshape(x.shape[0], -1, self.config.qk_head_dim)

    def _project(self, x: Float32[Array, "T D"], layer: Index, position: Int32[Array, "T"]) -> Projected:
        config, dtype = self.config, jnp.dtype(self.geometry.dtype)
        # The same numbers in other words: where three products read one rounded `x`, XLA:TPU makes it an operation.
        apart = self.geometry.sum_by_matmul and dtype == jnp.bfloat16
        rounded = x.astype(dtype)
        of_gate, x = lax.reduce_precision(x, 8, 7).astype(dtype) if apart else rounded, rounded
        query = self._query(x, layer) * config.softmax_scale
        compressed = replicated(x, self.kv_a_proj_with_mqa, layer, self.geometry)
        weight = take(self.kv_a_layernorm[...], layer, split=False)
        nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
        turns = (position, config.rope_frequencies, config.rope_factor, self.geometry.sum_by_matmul)
        gate = jax.nn.sigmoid(column_parallel(of_gate, self.g_proj, layer, self.geometry).reshape(x.shape[0], -1))
        return Projected(
            q_nope=query[..., :nope].astype(x.dtype),
            q_rope=rope(query[..., nope:], *turns).astype(x.dtype),
            latent=rms_norm(compressed[:, :rank], weight, LATENT_NORM_EPS, self.geometry.sums).astype(x.dtype),
            k_rope=rope(compressed[:, rank:], *turns).astype(x.dtype),
            gate=gate,
        )

    @jax.named_scope("absorb")
    def _absorb(self, p: Projected, layer: Index, row: int) -> Float[Array, "T H row"]:
        """The query in latent space, as wide as a row of the pool: [q_nope w_uk | q_rope | 0]."""
        query = per_head(p.q_nope, self.w_uk, layer, 0, self.geometry).astype(p.latent.dtype)
        return _side_by_side(query, p.q_rope, row, self.geometry.sum_by_matmul)

    @jax.named_scope("release")
    def _release(self, latent: Float32[Array, "T H R"], layer: Index, dtype: jnp.dtype) -> Float32[Array, "T H V"]:
        """Attended latents to head outputs."""
        return per_head(latent.astype(dtype), self.w_uv, layer, 1, self.geometry)

    @jax.named_scope("output")
    def _output(self, heads: Float32[Array, "T H V"], p: Projected, layer: Index) -> Float32[Array, "T D"]:
        """Gates each head, then the output projection: this device's partial sum."""
        gated = (heads * p.gate[..., None]).reshape(heads.shape[0], -1).astype(p.latent.dtype)
        return row_parallel(gated, self.dense, layer, self.geometry)

    @jax.named_scope("mla")
    def decode(
        self, x: Float32[Array, "B D"], layer: Index, state: State, rows: DecodeRows
    ) -> tuple[Float32[Array, "B D"], State]:
        """One token of each sequence, ``x`` normed: this device's partial sum, and the state.

        The list of the rows' pages is walked; without one, all pages at once, or a sequence after the other.
        """
        p, rank = self._project(x, layer, rows.position), self.config.kv_lora_rank
        pool = self._store(state["mla_latent"], layer, p, rows, rows.page_table)
        query = self._absorb(p, layer, pool.shape[3])
        if is_at_once(rows.slot.shape[0], self.geometry):
            length = jnp.where(rows.valid, rows.position + 1, 0)
            latent = attend_tables(query, pool, layer, rows.page_table, length, rank)
        elif rows.pages is None:
            latent = self._one_by_one(query, pool, layer, rows)
        elif self.geometry.striped:
            query = lax.all_gather(query, AXIS, axis=1, tiled=True)  # all heads, on every device
            latent = merge_devices(attend_list(query, pool, layer, rows.pages, rank), rank)
        else:
            latent = weighted_mean(attend_list(query, pool, layer, rows.pages, rank), rank)
        return self._output(self._release(latent, layer, p.latent.dtype), p, layer), state | {"mla_latent": pool}

    @jax.named_scope("attention")
    def _one_by_one(
        self, query: Float[Array, "B H row"], pool: Pool, layer: Index, rows: DecodeRows
    ) -> Float32[Array, "B H R"]:
        """Attended latents, one sequence after the other, or all in a native kernel."""
        rank = self.config.kv_lora_rank
        length = jnp.where(rows.valid, rows.position + 1, 0)
        if self.geometry.kernels and not self.geometry.striped:
            return calls.attention(query, pool, layer, rows.page_table, length, rank, self.geometry)

        def sequence(b: jax.Array, out: jax.Array) -> jax.Array:
            part = attend_pages(query[b], pool, layer, rows.page_table[b], length[b], rank, self.geometry)
            return out.at[b].set(part.normalized)

        with jax.named_scope("sequences"):
            return lax.fori_loop(0, rows.used, sequence, jnp.zeros((*query.shape[:2], rank), jnp.float32))

    @jax.named_scope("mla")
    def prefill(
        self, x: Float32[Array, "T D"], layer: Index, state: State, chunks: Chunks
    ) -> tuple[Float32[Array, "T D"], State]:
        """All padded tokens of a prefill call; arguments and results as :meth:`decode`, rows being padded tokens."""
        p = self._project(x, layer, chunks.position)
        # Written before anything is read: a write after a read that nothing orders would make XLA copy the pool.
        pool = self._store(state["mla_latent"], layer, p, chunks, jnp.repeat(chunks.page_table, CHUNK, axis=0))
        part = self._within(p, layer, chunks)
        with jax.named_scope("cached"):
            part = lax.cond(
                jnp.any(chunks.run_start > 0),
                lambda part, pool: merge(part, self._before(p, layer, pool, chunks)),
                lambda part, pool: part,
                part,
                pool,
            )
        return self._output(part.normalized, p, layer), state | {"mla_latent": pool}

    @jax.named_scope("cache_update")
    def _store(
        self, pool: Pool, layer: Index, p: Projected, tokens: DecodeRows | Chunks, table: Int32[Array, "T M"]
    ) -> Pool:
        """Writes each token's [latent | roped k | 0] into its page by its page table; padding goes to dummy page 0."""
        page, row = pool.shape[2:]
        index = jnp.where(tokens.valid, tokens.position // page, 0)
        number = jnp.where(tokens.valid, jnp.take_along_axis(table, index[:, None], axis=1)[:, 0], 0)
        _, number = local_pages(number, self.geometry)
        latent, k_rope = p.latent.astype(pool.dtype), p.k_rope.astype(pool.dtype)
        new = _side_by_side(latent, k_rope, row, self.geometry.sum_by_matmul)
        return pool.at[layer, number, tokens.position % page].set(new, mode=IN_BOUNDS)

    @jax.named_scope("attention")
    def _within(self, p: Projected, layer: Index, chunks: Chunks) -> OnlineSoftmax:
        """Expanded attention of the call's tokens among themselves: ``m [T, H]``, ``l [T, H]``, ``acc [T, H, V]``."""
        k_nope = dot(p.latent, of_heads(self.w_uk, layer), self.geometry).astype(p.latent.dtype)
        to_value = of_heads(self.w_uv, layer)
        width = to_value.shape[1]
        ones_column = self.geometry.sum_by_matmul  # whose weighted sum is l: a sum of its own takes longer
        if ones_column:
            to_value = jnp.pad(to_value, ((0, 0), (0, COLUMNS), (0, 0)))
        value = dot(p.latent, to_value, self.geometry)
        if ones_column:
            value += (np.arange(width + COLUMNS) == width).astype(np.float32)
        value = value.astype(p.latent.dtype)
        # A weight of zero would keep a NaN of another sequence; in its own, it is in the scores instead. In the form
        # of tiles the products of the convolution keep one anyway.
        usable = None if self.geometry.tiled else jnp.all(jnp.isfinite(value), axis=(1, 2))
        if usable is not None:
            value = jnp.where(usable[:, None, None], value, jnp.zeros((), value.dtype))
        k_rope = jnp.broadcast_to(p.k_rope[:, None], (*k_nope.shape[:2], p.k_rope.shape[-1]))
        key = jnp.concatenate([k_nope, k_rope], axis=-1)
        query = jnp.concatenate([p.q_nope, p.q_rope], axis=-1)

        def block(rows: tuple[jax.Array, jax.Array, jax.Array]) -> OnlineSoftmax:
            q, slot, position = rows
            scores = dot_heads("thd,shd->hts", q, key, self.geometry)
            scores = scores if usable is None else jnp.where(usable, scores, jnp.nan)
            mask = (slot[:, None] == chunks.token_slot) & (chunks.position <= position[:, None]) & chunks.valid
            m, l, weights = masked_softmax(scores, mask[None])  # noqa: E741
            acc = dot_heads("hts,shv->thv", weights.astype(key.dtype), value, self.geometry)
            if ones_column:
                return OnlineSoftmax(m.T, acc[..., width], acc[..., :width])
            return OnlineSoftmax(m.T, l.T, acc)

        count = query.shape[0]
        size = max(s for s in range(CHUNK, min(count, QUERY_BLOCK) + 1, CHUNK) if count % s == 0)
        rows = (query, chunks.token_slot, chunks.position)
        if size == count:
            return block(rows)
        split = jax.tree.map(lambda y: y.reshape(-1, size, *y.shape[1:]), rows)
        return jax.tree.map(lambda y: y.reshape(count, *y.shape[2:]), lax.map(block, split))

    @jax.named_scope("attention")
    def _before(self, p: Projected, layer: Index, pool: Pool, chunks: Chunks) -> OnlineSoftmax:
        """Attention of the call's tokens over what their sequences had cached before it, shapes as `_within`.

        Accelerators expand, one sequence after the other: with 16 tokens at a time every page is an operation of its
        own, and a sum over all devices. Else only a single sequence with cached tokens is expanded, where that takes
        less, as with a long prompt.
        """
        config, count = self.config, p.latent.shape[0]
        rank, values = config.kv_lora_rank, config.qk_nope_head_dim + config.v_head_dim
        # Products of a cached token and head: for all tokens of the call, and absorbed for one.
        expanding = count * (config.qk_head_dim + config.v_head_dim) + rank * values
        absorbed = 2 * pool.shape[3]
        if count * absorbed < expanding and not self.geometry.tiled:
            return self._absorbed_before(p, layer, pool, chunks)
        cached_before = (chunks.slot > 0) & (chunks.run_start > 0)

        def expanded(p: Projected, pool: Pool, table: jax.Array, length: jax.Array, owner: jax.Array) -> OnlineSoftmax:
            query = jnp.moveaxis(jnp.concatenate([p.q_nope, p.q_rope], axis=-1), 1, 0)
            weights = of_heads(self.w_uk, layer), of_heads(self.w_uv, layer)
            return attend_expanded(query, pool, layer, table, length, jnp.repeat(owner, CHUNK), *weights, self.geometry)

        if self.geometry.tiled:
            length = jnp.where(cached_before & chunks.first, chunks.run_start, 0)
            begins = lax.cummax(jnp.where(chunks.first, jnp.arange(len(chunks.slot), dtype=jnp.int32), 0))
            return expanded(p, pool, chunks.page_table, length, jnp.where(cached_before, begins, -1))
        first = jnp.argmax(cached_before)
        own = cached_before & (chunks.slot == chunks.slot[first])
        less = jnp.all(own == cached_before) & (jnp.sum(own, dtype=jnp.int32) * (CHUNK * absorbed) >= expanding)
        single = chunks.page_table[first][None], chunks.run_start[first][None], own.astype(jnp.int32) - 1
        return lax.cond(
            less,
            lambda p, pool: expanded(p, pool, *single),
            lambda p, pool: self._absorbed_before(p, layer, pool, chunks),
            p,
            pool,
        )

    def _absorbed_before(self, p: Projected, layer: Index, pool: Pool, chunks: Chunks) -> OnlineSoftmax:
        """Absorbed attention of each chunk over what its sequence had cached before this call, shapes as `_within`."""
        count, rank = chunks.slot.shape[0], self.config.kv_lora_rank
        query = self._absorb(p, layer, pool.shape[3])
        heads = query.shape[1]
        query = query.reshape(count, CHUNK * heads, -1)

        def chunk(n: jax.Array, out: OnlineSoftmax) -> OnlineSoftmax:
            length = jnp.where(chunks.slot[n] > 0, chunks.run_start[n], 0)
            part = attend_pages(query[n], pool, layer, chunks.page_table[n], length, rank, self.geometry)
            return jax.tree.map(lambda whole, one: whole.at[n].set(one), out, part)

        rows = (count, CHUNK * heads)
        empty = OnlineSoftmax(jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, rank)))
        with jax.named_scope("chunks"):
            part = lax.fori_loop(0, chunks.used, chunk, empty)
        m, l, acc = jax.tree.map(lambda y: y.reshape(count * CHUNK, heads, *y.shape[2:]), part)  # noqa: E741
        # The weights of a value are not normalized yet: the sums may be large, w_uv is linear, so order is free.
        return OnlineSoftmax(m, l, self._release(acc, layer, p.latent.dtype))


def _side_by_side(
    latent: Float[Array, "*rows R"], roped: Float[Array, "*rows P"], width: int, by_product: bool
) -> Float[Array, "*rows row"]:
    """A row of the pool, or a query of one: [latent | roped | 0].

    ``by_product`` puts the roped part in its place by a product with ones, which is exact: on TPU half as long.
    """
    rest = width - latent.shape[-1] - roped.shape[-1]
    if not by_product:
        return jnp.concatenate([latent, roped, jnp.zeros((*latent.shape[:-1], rest), latent.dtype)], axis=-1)
    place = jnp.asarray(np.eye(roped.shape[-1], width, latent.shape[-1]), roped.dtype)
    padded = jnp.pad(latent, [(0, 0)] * (latent.ndim - 1) + [(0, width - latent.shape[-1])])
    return (einsum("...p,pr->...r", roped, place) + padded.astype(jnp.float32)).astype(latent.dtype)
