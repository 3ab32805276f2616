"""Kimi Delta Attention: projections, gate, short convolution, state, and output around the recurrence of ``delta.py``.

Decode takes one token of each sequence, prefill chunks of 16. Source: Kimi Linear (arXiv 2510.26692), written from
MODEL.md section 2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.model.inputs import Chunks, DecodeRows
from ling3export.model.kda.conv import convolve
from ling3export.model.kda.recurrence import ChunkTerms, Inputs, chunk_step, chunk_terms, is_factored, recurrent_step
from ling3export.model.kda.tiled import Rows, island_precision, tile_scan
from ling3export.model.layers import l2_norm, rms_norm, take
from ling3export.model.products import dot_rows_split, dot_split

IN_BOUNDS = "promise_in_bounds"  # slots come from the allocator; a bounds check costs XLA:CPU the in-place update

State = dict[str, jax.Array]


def log_decay(f: jax.Array, a_log: jax.Array, dt_bias: jax.Array, config: Config) -> jax.Array:
    """The gate ``g``, in fp32 in both phases (rounding it to bf16 shifts the decay by up to 1.6 %).

    Args:
        f: ``[T, H, K]``, the output of f_proj.
        a_log: ``[H]``.
        dt_bias: ``[H, K]``.
        config: Says which gate (``kda_safe_gate``) and its bound.
    """
    rate = jnp.exp(a_log)[:, None]
    if config.kda_safe_gate:
        return config.kda_lower_bound * jax.nn.sigmoid(rate * (f + dt_bias))
    return -rate * jax.nn.softplus(f + dt_bias)


def causal_conv(history: jax.Array, raw: jax.Array, taps: jax.Array) -> jax.Array:
    """Depthwise causal convolution and SiLU; the last tap multiplies the current token.

    Args:
        history: ``[N, W-1, ...]`` raw inputs before the first of ``raw``.
        raw: ``[N, C, ...]``.
        taps: ``[..., W]``.

    Returns:
        fp32 ``[N, C, ...]``.
    """
    length, width = raw.shape[1], taps.shape[-1]
    sequence = jnp.concatenate([history, raw], axis=1).astype(jnp.float32)
    taps = taps.astype(jnp.float32)
    out = sum(taps[..., w] * sequence[:, w : w + length] for w in range(width))
    return jax.nn.silu(out)


def step_conv(window: jax.Array, raw: jax.Array, taps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """:func:`causal_conv` of one token of each sequence.

    Args:
        window: ``[B, H, (W-1)·X]``, the inputs before it, one after the other.
        raw: ``[B, H, X]``.
        taps: ``[H, X, W]`` fp32.

    Returns:
        fp32 ``[B, H, X]``, and the window after it.
    """
    width = raw.shape[-1]
    window = jnp.concatenate([window, raw], axis=-1)
    inputs = jnp.split(window, taps.shape[-1], axis=-1)
    out = sum(taps[..., w] * value.astype(jnp.float32) for w, value in enumerate(inputs))
    return jax.nn.silu(out), window[..., width:]


class KimiDeltaAttention(nnx.Module):
    """All KDA layers of one device, stacked; parameters as ``model/parameters.py`` lists them under ``kda``."""

    def __init__(self, config: Config, geometry: Geometry, weights: dict[str, nnx.Param]) -> None:
        self.config, self.geometry = config, geometry
        self.qkvfg_proj, self.b_proj = weights["qkvfg_proj"], weights["b_proj"]
        self.conv1d, self.A_log, self.dt_bias = weights["conv1d"], weights["A_log"], weights["dt_bias"]
        self.o_norm, self.o_proj = weights["o_norm"], weights["o_proj"]

    def _per_head(self, weight: nnx.Param, layer: int | jax.Array) -> jax.Array:
        """A split parameter of one layer with its slab and head axes merged: ``[H, ...]``."""
        value = take(weight[...], layer, split=True)
        return value.reshape(-1, *value.shape[2:])

    def _project(self, x: jax.Array, layer: int | jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(raw q|k|v ``[T, H, 3K]`` model dtype, g, output gate ``[T, H, K]``, beta ``[T, H]``) from x ``[T, D]``."""
        rows, key = x.shape[0], self.config.head_dim
        y = dot_split(x, self.qkvfg_proj, layer, self.geometry).reshape(rows, -1, 5 * key)
        raw, f, gate = jnp.split(y, (3 * key, 4 * key), axis=-1)
        g = log_decay(f, self._per_head(self.A_log, layer), self._per_head(self.dt_bias, layer), self.config)
        beta = jax.nn.sigmoid(dot_split(x, self.b_proj, layer, self.geometry).reshape(rows, -1))
        return raw.astype(x.dtype), g, gate, beta

    def _taps(self, layer: int | jax.Array) -> jax.Array:
        """fp32 ``[H, 3K, W]``."""
        taps = self._per_head(self.conv1d, layer)
        return taps.reshape(taps.shape[0], -1, taps.shape[-1]).astype(jnp.float32)

    def _inputs(self, conv: jax.Array, g: jax.Array, beta: jax.Array) -> Inputs:
        """Normalizes and scales what the convolution gave, ``[..., H, 3K]``."""
        q, k, v = jnp.split(conv, 3, axis=-1)
        units = self.geometry.tiled
        return Inputs(l2_norm(q, units) * self.config.head_dim**-0.5, l2_norm(k, units), v, g, beta)

    def _output(self, o: jax.Array, gate: jax.Array, layer: int | jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Norm, elementwise sigmoid gate and o_proj: o, gate ``[T, H, V]`` to this device's partial ``[T, D]``."""
        weight = take(self.o_norm[...], layer, split=False)
        y = rms_norm(o, weight, self.config.rms_norm_eps, self.geometry.tiled) * jax.nn.sigmoid(gate)
        return dot_rows_split(y.reshape(o.shape[0], -1).astype(dtype), self.o_proj, layer, self.geometry)

    def decode(self, x: jax.Array, layer: int | jax.Array, state: State, rows: DecodeRows) -> tuple[jax.Array, State]:
        """One token of each sequence.

        Args:
            x: ``[B, D]``, normed, model dtype.
            layer: Index into the stack.
            state: The state dict; the KDA arrays are replaced.
            rows: The step's rows.

        Returns:
            This device's partial sum ``[B, D]`` in fp32, and the state.
        """
        slot = rows.slot
        raw, g, gate, beta = self._project(x, layer)
        # Held apart, or XLA:CPU reads the pool in whatever needs the convolution, and must copy it before an update.
        hold: Callable[[Any], Any] = (lambda x: x) if self.geometry.tiled else lax.optimization_barrier
        window = hold(state["kda_conv"].at[layer, slot].get(mode=IN_BOUNDS))
        conv, window = hold(step_conv(window, raw, self._taps(layer)))
        state = state | {"kda_conv": state["kda_conv"].at[layer, slot].set(window, mode=IN_BOUNDS)}
        inputs = self._inputs(conv, g, beta)
        if self.geometry.tiled:
            pool = state["kda_recurrent"]
            new, out = recurrent_step(pool.at[layer, slot].get(mode=IN_BOUNDS), inputs, hold)
            state = state | {"kda_recurrent": pool.at[layer, slot].set(new, mode=IN_BOUNDS)}
            return self._output(out, gate, layer, x.dtype), state

        def step(b: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            pool, out = carry
            row = Inputs(*(lax.dynamic_slice_in_dim(value, b, 1) for value in inputs))
            new, o = recurrent_step(pool[layer, slot[b]][None], row)
            return pool.at[layer, slot[b]].set(new[0]), lax.dynamic_update_slice_in_dim(out, o, b, axis=0)

        # A row at a time: gathering and scattering whole states takes XLA:CPU ten times longer (docs/log.md).
        with jax.named_scope("sequences"):
            pool, out = lax.fori_loop(0, rows.used, step, (state["kda_recurrent"], jnp.zeros_like(inputs.v)))
        return self._output(out, gate, layer, x.dtype), state | {"kda_recurrent": pool}

    def prefill(self, x: jax.Array, layer: int | jax.Array, state: State, chunks: Chunks) -> tuple[jax.Array, State]:
        """All token slots of a prefill call; arguments and results as :meth:`decode`, rows being token slots."""
        raw, g, gate, beta = self._project(x, layer)
        count, heads = chunks.slot.shape[0], raw.shape[1]
        if chunks.tiles is not None:
            return self._tiled(raw, g, gate, beta, layer, state, chunks, x.dtype)
        conv, state = self._convolve(raw.reshape(count, CHUNK, *raw.shape[1:]), layer, state, chunks)
        real = chunks.valid.reshape(count, CHUNK, 1)
        # An unused token slot neither decays nor writes: the state passes through it untouched.
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
        return self._output(o, gate, layer, x.dtype), state | {"kda_recurrent": pool}

    def _tiled(
        self, raw: jax.Array, g: jax.Array, gate: jax.Array, beta: jax.Array, layer: int | jax.Array, state: State,
        chunks: Chunks, dtype: jnp.dtype,
    ) -> tuple[jax.Array, State]:  # fmt: skip
        """The rest of :meth:`prefill`, all chunks at once; arguments as :meth:`_project` gives them."""
        assert chunks.tiles is not None
        tiles, heads, key = chunks.tiles, raw.shape[1], self.config.head_dim
        count = chunks.slot.shape[0]
        total = tiles.runs.here.size  # chunks, with those that fill up the last tile: their rows are zeros

        def fill(y: jax.Array, each: int) -> jax.Array:
            """``[N·each, ...]`` to ``[J, n·each, ...]``."""
            y = jnp.pad(y, ((0, (total - count) * each),) + ((0, 0),) * (y.ndim - 1))
            return y.reshape(-1, tiles.runs.here.shape[1] * each, *y.shape[1:])

        def rows(y: jax.Array) -> jax.Array:
            """``[J, L, H, X]`` to ``[J, H, n, C, X]``."""
            return jnp.moveaxis(y.reshape(y.shape[0], -1, CHUNK, *y.shape[2:]), 3, 1)

        window = fill(state["kda_conv"].at[layer, chunks.slot].get(mode=IN_BOUNDS), 1)
        conv, kept = convolve(fill(raw, CHUNK), window, jnp.moveaxis(self._taps(layer), -1, 0), tiles.picks)
        kept = kept.reshape(total, heads, -1)[:count]
        written = jnp.where(chunks.last, chunks.slot, 0)
        state = state | {"kda_conv": state["kda_conv"].at[layer, written].set(kept, mode=IN_BOUNDS)}
        # An unused token slot neither decays nor writes: the state passes through it untouched.
        g = jnp.where(chunks.valid[:, None, None], g, 0.0)
        beta = jnp.where(chunks.valid[:, None], beta, 0.0)
        x = self._inputs(conv, fill(g, CHUNK), fill(beta, CHUNK))
        pool = state["kda_recurrent"]

        def start() -> jax.Array:
            old = pool.at[layer, chunks.slot].get(mode=IN_BOUNDS)
            return jnp.moveaxis(fill(jnp.where(chunks.from_zero[:, None, None, None], 0.0, old), 1), 2, 1)

        held = jnp.any(~chunks.from_zero & (chunks.slot > 0))
        tiled = Rows(*(rows(y) for y in (x.q, x.k, x.v, x.g, x.beta[..., None])))
        after, out = tile_scan(start, held, tiles.runs, tiled, island_precision(dtype))
        after = jnp.moveaxis(after, 1, 2).reshape(-1, *pool.shape[2:])[:count]
        o = jnp.moveaxis(out, 1, 3).reshape(-1, heads, key)[: count * CHUNK]
        pool = pool.at[layer, written].set(after, mode=IN_BOUNDS)
        return self._output(o, gate, layer, dtype), state | {"kda_recurrent": pool}

    def _convolve(
        self, raw: jax.Array, layer: int | jax.Array, state: State, chunks: Chunks
    ) -> tuple[jax.Array, State]:
        """Convolves ``raw [N, C, H, 3K]``; a chunk's history is the chunk before it, the pool, or zero."""
        width, count = self.config.short_conv_kernel_size - 1, raw.shape[0]
        pooled = state["kda_conv"].at[layer, chunks.slot].get(mode=IN_BOUNDS)
        pooled = jnp.moveaxis(pooled.reshape(*pooled.shape[:2], width, -1), 2, 1)
        before = jnp.concatenate([jnp.zeros_like(raw[:1]), raw[:-1]])[:, CHUNK - width :]
        shape = (-1, 1, 1, 1)
        history = jnp.where(chunks.first.reshape(shape), pooled, before)
        history = jnp.where(chunks.fresh.reshape(shape), jnp.zeros_like(history), history)
        conv = causal_conv(history, raw, self._taps(layer))
        sequence = jnp.concatenate([history, raw], axis=1)
        kept = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, width))(sequence, chunks.length)
        kept = jnp.moveaxis(kept, 1, 2).reshape(count, raw.shape[2], -1)
        pool = state["kda_conv"].at[layer, jnp.where(chunks.last, chunks.slot, 0)].set(kept, mode=IN_BOUNDS)
        return conv, state | {"kda_conv": pool}
