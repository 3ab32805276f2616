"""Kimi Delta Attention: projections, gate, short convolution, state and output around ``recurrence.py``.

Decode takes one token of each sequence, prefill chunks of 16. Source: Kimi Linear (arXiv 2510.26692); docs/model.md,
"KDA".
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32

from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.model.inputs import Chunks, DecodeRows
from ling3export.model.kda.conv import causal_conv, convolve_tiles, step_conv
from ling3export.model.kda.recurrence import ChunkTerms, Inputs, chunk_step, chunk_terms, is_factored, recurrent_step
from ling3export.model.kda.tiled import Rows, island_precision, tile_scan
from ling3export.model.layers import IN_BOUNDS, Index, State, Weight, l2_norm, rms_norm, take
from ling3export.model.native import calls
from ling3export.model.products import column_parallel, row_parallel
from ling3export.model.quantized import of_heads

# States of a decode step, one a row and head, that XLA:TPU reads faster by sums than by products
# (docs/log/programs-tpu.md).
SUMMED_STATES = 16


def log_decay(
    f: Float32[Array, "T H K"], a_log: Float32[Array, "H"], dt_bias: Float32[Array, "H K"], config: Config
) -> Float32[Array, "T H K"]:
    """The gate ``g`` from ``f``, the output of f_proj, and the logarithm of each head's rate.

    In fp32 in both phases: rounding it to bf16 shifts the decay by up to 1.6 %.
    """
    rate = jnp.exp(a_log)[:, None]
    if config.kda_safe_gate:
        return config.kda_lower_bound * jax.nn.sigmoid(rate * (f + dt_bias))
    return -rate * jax.nn.softplus(f + dt_bias)


class KimiDeltaAttention(nnx.Module):
    """All KDA layers of one device, stacked; parameters as ``model/parameters.py`` lists them under ``kda``."""

    def __init__(self, config: Config, geometry: Geometry, weights: dict[str, Weight]) -> None:
        self.config, self.geometry = config, geometry
        self.qkvfg_proj, self.b_proj = weights["qkvfg_proj"], weights["b_proj"]
        self.conv1d, self.A_log, self.dt_bias = weights["conv1d"], weights["A_log"], weights["dt_bias"]
        self.o_norm, self.o_proj = weights["o_norm"], weights["o_proj"]

    @jax.named_scope("projections")
    def _project(
        self, x: Float[Array, "T D"], layer: Index
    ) -> tuple[Float[Array, "T H X"], Float32[Array, "T H K"], Float32[Array, "T H K"], Float32[Array, "T H"]]:
        """(raw q, k and v in the model dtype, log decay g, output gate, write strength beta)."""
        rows, key = x.shape[0], self.config.head_dim
        y = column_parallel(x, self.qkvfg_proj, layer, self.geometry).reshape(rows, -1, 5 * key)
        raw, f, gate = jnp.split(y, (3 * key, 4 * key), axis=-1)
        g = log_decay(f, of_heads(self.A_log, layer), of_heads(self.dt_bias, layer), self.config)
        beta = jax.nn.sigmoid(column_parallel(x, self.b_proj, layer, self.geometry).reshape(rows, -1))
        return raw.astype(x.dtype), g, gate, beta

    @jax.named_scope("convolution")
    def _taps(self, layer: Index, rows: int = 1) -> Float32[Array, "W _ H X"]:
        """The filters of q, k and v of each head, tap after tap, the same for each of ``rows``.

        In the form ``tiles`` those of all layers are turned and repeated at once: for one layer's part, XLA:TPU would
        make an operation in every layer. (A barrier keeps it from that; all of them become one.)
        """
        if not self.geometry.sum_by_matmul:
            taps = of_heads(self.conv1d, layer)
            taps = taps.reshape(taps.shape[0], -1, taps.shape[-1]).astype(jnp.float32)
            return jnp.moveaxis(taps, -1, 0)[:, None]
        turned = jnp.moveaxis(self.conv1d[...].astype(jnp.float32), -1, 0)  # [W, s, n, h, 3, K]
        width, shards, layers, heads = turned.shape[:4]
        turned = turned.reshape(width, shards, layers, 1, heads, -1)
        turned = jnp.broadcast_to(turned, (width, shards, layers, rows, heads, turned.shape[-1]))
        turned = lax.optimization_barrier(turned)[:, :, layer]
        return jnp.moveaxis(turned, 1, 2).reshape(width, rows, shards * heads, -1)

    def _inputs(
        self, conv: Float32[Array, "*rows H X"], g: Float32[Array, "*rows H K"], beta: Float32[Array, "*rows H"]
    ) -> Inputs:
        """Normalizes and scales what the convolution gave: q, k and v side by side."""
        q, k, v = jnp.split(conv, 3, axis=-1)
        scale = self.config.head_dim**-0.5
        if self.geometry.sum_by_matmul:
            return Inputs(l2_norm(q, self.geometry.sums, scale), l2_norm(k, self.geometry.sums), v, g, beta)
        q, k = l2_norm(q), l2_norm(k)
        return Inputs(q * scale, k, v, g, beta)

    @jax.named_scope("output")
    def _output(
        self, o: Float32[Array, "*rows H V"], gate: Float32[Array, "T H V"], layer: Index, dtype: jnp.dtype
    ) -> Float32[Array, "T D"]:
        """Norm, elementwise sigmoid gate and o_proj: this device's partial sum."""
        weight = take(self.o_norm[...], layer, split=False)
        y = rms_norm(o, weight, self.config.rms_norm_eps, self.geometry.sums) * jax.nn.sigmoid(gate.reshape(o.shape))
        return row_parallel(y.reshape(gate.shape[0], -1).astype(dtype), self.o_proj, layer, self.geometry)

    @jax.named_scope("kda")
    def decode(
        self, x: Float32[Array, "B D"], layer: Index, state: State, rows: DecodeRows
    ) -> tuple[Float32[Array, "B D"], State]:
        """One token of each sequence, ``x`` normed: this device's partial sum, and the state."""
        slot, x = rows.slot, x.astype(self.geometry.dtype)
        if self.geometry.kernels:
            return self._decode_natively(x, layer, state, rows)
        raw, g, gate, beta = self._project(x, layer)
        # Held apart, or XLA:CPU reads the pool in whatever needs the convolution, and must copy it before an update.
        hold: Callable[[Any], Any] = (lambda x: x) if self.geometry.tiled else lax.optimization_barrier
        window = hold(state["kda_conv"].at[layer, slot].get(mode=IN_BOUNDS))
        conv, window = hold(step_conv(window, raw, self._taps(layer, slot.shape[0])))
        window = _finite(window) if self.geometry.tiled else window
        state = state | {"kda_conv": state["kda_conv"].at[layer, slot].set(window, mode=IN_BOUNDS)}
        inputs = self._inputs(conv, g, beta)
        if self.geometry.tiled:
            pool = state["kda_recurrent"]
            by_sums = inputs.beta.size <= SUMMED_STATES
            new, out = recurrent_step(pool.at[layer, slot].get(mode=IN_BOUNDS), inputs, hold, by_sums)
            state = state | {"kda_recurrent": pool.at[layer, slot].set(new, mode=IN_BOUNDS)}
            return self._output(out, gate, layer, x.dtype), state

        def step(b: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            pool, out = carry
            row = Inputs(*(lax.dynamic_slice_in_dim(value, b, 1) for value in inputs))
            new, o = recurrent_step(pool[layer, slot[b]][None], row)
            return pool.at[layer, slot[b]].set(new[0]), lax.dynamic_update_slice_in_dim(out, o, b, axis=0)

        # A row at a time: gathering and scattering whole states takes XLA:CPU ten times as long
        # (docs/log/kernels-cpu.md).
        with jax.named_scope("sequences"):
            pool, out = lax.fori_loop(0, rows.used, step, (state["kda_recurrent"], jnp.zeros_like(inputs.v)))
        return self._output(out, gate, layer, x.dtype), state | {"kda_recurrent": pool}

    def _decode_natively(
        self, x: BFloat16[Array, "B D"], layer: Index, state: State, rows: DecodeRows
    ) -> tuple[Float32[Array, "B D"], State]:
        """:meth:`decode` with native kernels: two products, and one call between them."""
        y = column_parallel(x, self.qkvfg_proj, layer, self.geometry).reshape(x.shape[0], -1, 5 * self.config.head_dim)
        params = (self.b_proj, self.conv1d, self.A_log, self.dt_bias, self.o_norm)
        weights, pools = (
            calls.KdaWeights(*(param[...] for param in params)),
            (state["kda_recurrent"], state["kda_conv"]),
        )
        pool, windows, out = calls.token(*pools, y, x, weights, layer, rows.slot, rows.used, self.config, self.geometry)
        out = row_parallel(out.reshape(x.shape[0], -1), self.o_proj, layer, self.geometry)
        return out, state | {"kda_recurrent": pool, "kda_conv": windows}

    @jax.named_scope("kda")
    def prefill(
        self, x: Float32[Array, "T D"], layer: Index, state: State, chunks: Chunks
    ) -> tuple[Float32[Array, "T D"], State]:
        """All padded tokens of a prefill call; arguments and results as :meth:`decode`, rows being padded tokens."""
        x = x.astype(self.geometry.dtype)
        raw, g, gate, beta = self._project(x, layer)
        scan = self._chunk_by_chunk if chunks.tiles is None else self._all_tiles
        o, state = scan(raw, g, beta, layer, state, chunks)
        return self._output(o, gate, layer, x.dtype), state

    def _chunk_by_chunk(
        self,
        raw: Float[Array, "T H X"],
        g: Float32[Array, "T H K"],
        beta: Float32[Array, "T H"],
        layer: Index,
        state: State,
        chunks: Chunks,
    ) -> tuple[Float32[Array, "T H V"], State]:
        """The recurrence over all padded tokens in the form ``loops``: its outputs, and the state."""
        count, heads = chunks.slot.shape[0], raw.shape[1]
        conv, state = self._convolve(raw.reshape(count, CHUNK, *raw.shape[1:]), layer, state, chunks)
        real = chunks.valid.reshape(count, CHUNK, 1)
        # Padding neither decays nor writes: the state passes through it untouched.
        g = jnp.where(real[..., None], g.reshape(count, CHUNK, *g.shape[1:]), 0.0)
        beta = jnp.where(real, beta.reshape(count, CHUNK, heads), 0.0)
        config = self.config
        terms = chunk_terms(self._inputs(conv, g, beta), is_factored(config))

        def step(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            pool, out = carry
            slot = chunks.slot[n]
            start = jnp.where(chunks.fresh[n], 0.0, pool.at[layer, slot].get(mode=IN_BOUNDS))
            after, o = chunk_step(start, ChunkTerms(*(term[n] for term in terms)))
            return pool.at[layer, slot].set(after, mode=IN_BOUNDS), out.at[n].set(o)

        out = jnp.zeros((count, heads, CHUNK, config.head_dim), jnp.float32)
        with jax.named_scope("chunks"):
            pool, out = lax.fori_loop(0, chunks.used, step, (state["kda_recurrent"], out))
        o = jnp.swapaxes(out, 1, 2).reshape(count * CHUNK, heads, config.head_dim)
        return o, state | {"kda_recurrent": pool}

    def _all_tiles(
        self,
        raw: Float[Array, "T H X"],
        g: Float32[Array, "T H K"],
        beta: Float32[Array, "T H"],
        layer: Index,
        state: State,
        chunks: Chunks,
    ) -> tuple[Float32[Array, "*rows H V"], State]:
        """:meth:`_chunk_by_chunk` in the form ``tiles``."""
        assert chunks.tiles is not None
        tiles, heads, key = chunks.tiles, raw.shape[1], self.config.head_dim
        count = chunks.slot.shape[0]
        total = tiles.runs.starts.size  # chunks, with those that fill up the last tile: their rows are zeros

        def fill(y: jax.Array, length: int) -> jax.Array:
            """``[N·length, ...]`` to ``[J, n·length, ...]``."""
            y = jnp.pad(y, ((0, (total - count) * length),) + ((0, 0),) * (y.ndim - 1))
            return y.reshape(-1, tiles.runs.starts.shape[1] * length, *y.shape[1:])

        def rows(y: jax.Array) -> jax.Array:
            """``[J, L, H, X]`` to ``[J, H, n, C, X]``."""
            return jnp.moveaxis(y.reshape(y.shape[0], -1, CHUNK, *y.shape[2:]), 3, 1)

        window = fill(state["kda_conv"].at[layer, chunks.slot].get(mode=IN_BOUNDS), 1)
        conv, kept = convolve_tiles(fill(raw, CHUNK), window, self._taps(layer)[:, 0], tiles.picks)
        conv = lax.optimization_barrier(conv)  # or XLA:GPU computes it again for each of its parts
        kept = _finite(kept).reshape(total, heads, -1)[:count]
        written = jnp.where(chunks.last, chunks.slot, 0)
        state = state | {"kda_conv": state["kda_conv"].at[layer, written].set(kept, mode=IN_BOUNDS)}
        # Padding neither decays nor writes: the state passes through it untouched.
        g = jnp.where(chunks.valid[:, None, None], g, 0.0)
        beta = jnp.where(chunks.valid[:, None], beta, 0.0)
        x = self._inputs(conv, fill(g, CHUNK), fill(beta, CHUNK))
        pool = state["kda_recurrent"]

        def start() -> jax.Array:
            old = pool.at[layer, chunks.slot].get(mode=IN_BOUNDS)
            return jnp.moveaxis(fill(jnp.where(chunks.from_zero[:, None, None, None], 0.0, old), 1), 2, 1)

        held = jnp.any(~chunks.from_zero & (chunks.slot > 0))
        tiled = Rows(*(rows(y) for y in (x.q, x.k, x.v, x.g, x.beta[..., None])))
        few = self.geometry.sum_by_matmul
        ended, out = tile_scan(start, held, tiles.runs, tiled, island_precision(raw.dtype), few)
        place = tiles.place

        def store(i: Index, pool: jax.Array, states: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
            """Stores the states after the ends of runs that have the number ``i`` in their tiles."""
            ends = place == i

            def of_end(y: jax.Array) -> jax.Array:
                return jnp.sum(jnp.where(ends, fill(y.astype(jnp.int32), 1), 0), axis=1)

            slot = of_end(chunks.slot)
            old = pool.at[layer, slot].get(mode=IN_BOUNDS)
            begun = jnp.where((of_end(chunks.from_zero) > 0)[:, None, None, None], 0.0, old)
            return pool.at[layer, slot].set(states(ends, begun), mode=IN_BOUNDS)

        with jax.named_scope("ends"):  # a tile has seldom more than one
            pool = store(0, pool, ended.last_states)
            pool = lax.fori_loop(1, jnp.max(place) + 1, lambda i, pool: store(i, pool, ended.states), pool)
        # In tiles as long as their rows are those of `raw`, so that XLA:TPU fuses squares into the product of a norm.
        o = jnp.moveaxis(out.reshape(*out.shape[:2], -1, key), 1, 2)
        o = o if total == count else o.reshape(-1, heads, key)[: count * CHUNK]
        return o, state | {"kda_recurrent": pool}

    @jax.named_scope("convolution")
    def _convolve(self, raw: jax.Array, layer: Index, state: State, chunks: Chunks) -> tuple[jax.Array, State]:
        """Convolves ``raw [N, C, H, 3K]``; a chunk's history is the chunk before it, the pool, or zero."""
        width, count = self.config.short_conv_kernel_size - 1, raw.shape[0]
        pooled = state["kda_conv"].at[layer, chunks.slot].get(mode=IN_BOUNDS)
        pooled = jnp.moveaxis(pooled.reshape(*pooled.shape[:2], width, -1), 2, 1)
        before = jnp.concatenate([jnp.zeros_like(raw[:1]), raw[:-1]])[:, CHUNK - width :]
        shape = (-1, 1, 1, 1)
        history = jnp.where(chunks.first.reshape(shape), pooled, before)
        history = jnp.where(chunks.fresh.reshape(shape), jnp.zeros_like(history), history)
        conv = causal_conv(history, raw, self._taps(layer)[:, 0])
        sequence = jnp.concatenate([history, raw], axis=1)
        kept = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, width))(sequence, chunks.length)
        kept = jnp.moveaxis(kept, 1, 2).reshape(count, raw.shape[2], -1)
        pool = state["kda_conv"].at[layer, jnp.where(chunks.last, chunks.slot, 0)].set(kept, mode=IN_BOUNDS)
        return conv, state | {"kda_conv": pool}


def _finite(window: jax.Array) -> jax.Array:
    """The window that a slot keeps. A convolution over tiles would spread a NaN of one slot to the rows of others; the
    recurrent state keeps it for its own sequence."""
    return jnp.where(jnp.isfinite(window), window, jnp.zeros((), window.dtype))
