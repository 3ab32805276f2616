"""The recurrence of Kimi Delta Attention: a token at a time, and over whole chunks.

Per head, with state S [K, V], log decay g_t [K] <= 0, write strength beta_t::

    S'_t = exp(g_t)[:, None] * S_{t-1}
    r_t  = v_t - k_t^T S'_t
    S_t  = S'_t + (beta_t k_t) r_t^T
    o_t  = q_t^T S_t                      (read after the write)

Chunked, over C = 16 tokens that start from S_0, with G_t = g_1 + ... + g_t, this is the same as::

    A_ti = beta_i <k_t exp(G_t), k_i exp(-G_i)>    for i < t, else 0
    r    = (I + A)^-1 (v - (k exp(G)) S_0)
    o_t  = (q_t exp(G_t))^T S_0 + sum_{i <= t} beta_i <q_t exp(G_t), k_i exp(-G_i)> r_i
    S_C  = exp(G_C) S_0 + sum_i (beta_i k_i exp(G_C - G_i)) r_i^T

Source: Kimi Linear (arXiv 2510.26692), docs/model.md, "KDA".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK

HIGHEST = lax.Precision.HIGHEST  # the recurrence is an fp32 island

FACTORED_BOUND = -80.0 / CHUNK  # per-token decay above which exp(-G) over a chunk stays finite in fp32


def is_factored(config: Config) -> bool:
    """Whether the gate's bound keeps the factored exponents of a chunk finite."""
    return config.kda_safe_gate and config.kda_lower_bound >= FACTORED_BOUND


class Inputs(NamedTuple):
    """Inputs of the recurrence: queries, keys, values, log decays and write strengths."""

    q: Float32[Array, "*rows H K"]
    k: Float32[Array, "*rows H K"]
    v: Float32[Array, "*rows H V"]
    g: Float32[Array, "*rows H K"]
    beta: Float32[Array, "*rows H"]


def recurrent_step(
    state: Float32[Array, "B H K V"],
    x: Inputs,
    hold: Callable[[Any], Any] = lax.optimization_barrier,
    by_sums: bool = False,
) -> tuple[Float32[Array, "B H K V"], Float32[Array, "B H V"]]:
    """One token of the recurrence of each sequence: (new state, o).

    The state is read once for both products, by ``k^T S' = (k exp(g))^T S`` and ``q^T S_t = q^T S' + <q, beta k> r``.
    ``hold`` keeps XLA:CPU from computing an exponential again for every element of the state; XLA:TPU does not, and is
    slower for what it may not fuse. ``by_sums`` adds both products up without a matrix unit, which for few rows is one
    operation there instead of three.
    """
    decay, written = jnp.exp(x.g), x.beta[..., None] * x.k
    if by_sums:
        # `read_k` includes `beta`, and `r` has no variable: two operations would read it, so it would be a third.
        # Laying values across lanes takes time: `decay` and `k`, each once.
        read_q, read_k = (jnp.sum((y * decay)[..., None] * state, axis=-2) for y in (x.q, written))
        v, k = x.beta[..., None] * x.v, x.k[..., None]
        o = read_q + jnp.sum(x.q * x.k, axis=-1, keepdims=True) * (v - read_k)
        gained = k * v[..., None, :] - k * read_k[..., None, :]
        return decay[..., None] * state + gained, o
    decay, written, rows = hold((decay, written, jnp.stack([x.q, x.k], axis=2) * decay[:, :, None]))
    read = jnp.einsum("bhnk,bhkv->bhnv", rows, state, precision=HIGHEST)
    r = hold(x.v - read[:, :, 1])
    o = read[:, :, 0] + jnp.sum(x.q * written, axis=-1, keepdims=True) * r
    return decay[..., None] * state + written[..., None] * r[..., None, :], o


def scores_factored(
    rows: Float32[Array, "*heads C K"], k: Float32[Array, "*heads C K"], g: Float32[Array, "*heads C K"]
) -> Float32[Array, "*heads C C"]:
    """``<rows_t exp(G_t), k_i exp(-G_i)>`` through factors relative to the middle of the chunk.

    The reference in the middle keeps every factor within exp(±40) for the bound of -5, far from both ends of fp32.
    Entries above the diagonal are not meaningful.
    """
    total = jnp.cumsum(g, axis=-2)
    middle = total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    grown, shrunk = rows * jnp.exp(total - middle), k * jnp.exp(middle - total)
    return jnp.einsum("...tk,...ik->...ti", grown, shrunk, precision=HIGHEST)


def scores_pairwise(
    rows: Float32[Array, "*heads C K"], k: Float32[Array, "*heads C K"], g: Float32[Array, "*heads C K"]
) -> Float32[Array, "*heads C C"]:
    """:func:`scores_factored` for gates without a lower bound: costs C² K exponentials a head.

    ``G_t - G_i`` is summed from the g between them: after a token that decays everything, the difference of two large
    sums would have lost its digits.
    """
    step = jnp.arange(CHUNK)
    between = (step[:, None, None] >= step) & (step[None, :, None] < step)  # t, i, s: i < s <= t
    difference = jnp.einsum("tis,...sk->...tik", between.astype(jnp.float32), g, precision=HIGHEST)
    lower = (step[:, None] >= step)[:, :, None]
    weight = jnp.exp(jnp.where(lower, difference, -jnp.inf))
    return jnp.einsum("...tk,...ik,...tik->...ti", rows, k, weight, precision=HIGHEST)


def unit_lower_inverse(strict: Float32[Array, "*heads C C"]) -> Float32[Array, "*heads C C"]:
    """``(I + A)^-1`` for a strictly lower triangular ``A``, by forward substitution, row by row.

    Products of powers (I - A)(I + A²)... need fewer steps but cancel: with repeated keys their intermediate entries
    reach thousands and fp32 loses four digits.
    """
    size = strict.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(size, dtype=strict.dtype), strict.shape)

    def row(t: jax.Array, inverse: jax.Array) -> jax.Array:
        a = lax.dynamic_index_in_dim(strict, t, axis=-2, keepdims=True)
        new = lax.dynamic_index_in_dim(inverse, t, axis=-2, keepdims=True)
        new = new - jnp.sum(jnp.swapaxes(a, -1, -2) * inverse, axis=-2, keepdims=True)
        return lax.dynamic_update_slice_in_dim(inverse, new, t, axis=inverse.ndim - 2)

    return lax.fori_loop(1, size, row, identity)


class ChunkTerms(NamedTuple):
    """The terms of N chunks that do not depend on their start state S_0.

    ``r = u - w S_0``; ``o = q_in S_0 + mix r``; ``S_C = decay * S_0 + k_out^T r``.
    """

    u: Float32[Array, "N H C V"]
    w: Float32[Array, "N H C K"]
    q_in: Float32[Array, "N H C K"]
    mix: Float32[Array, "N H C C"]
    k_out: Float32[Array, "N H C K"]
    decay: Float32[Array, "N H K"]


def chunk_terms(x: Inputs, factored: bool) -> ChunkTerms:
    """From inputs ``[N, C, H, ...]``."""
    q, k, v, g = (jnp.swapaxes(y, 1, 2) for y in (x.q, x.k, x.v, x.g))
    beta = jnp.swapaxes(x.beta, 1, 2)
    total = jnp.cumsum(g, axis=-2)
    scores = scores_factored if factored else scores_pairwise
    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    strict = jnp.tril(jnp.ones((CHUNK, CHUNK), bool), -1)
    inverse = unit_lower_inverse(jnp.where(strict, scores(k, k, g), 0.0) * beta[..., None, :])
    grown = jnp.exp(total)
    # Decays after each token, summed by themselves for the same reason as in `scores_pairwise`.
    after = lax.cumsum(
        jnp.pad(g[..., 1:, :], [(0, 0)] * (g.ndim - 2) + [(0, 1), (0, 0)]), axis=g.ndim - 2, reverse=True
    )
    return ChunkTerms(
        u=jnp.matmul(inverse, v, precision=HIGHEST),
        w=jnp.matmul(inverse, k * grown, precision=HIGHEST),
        q_in=q * grown,
        mix=jnp.where(causal, scores(q, k, g), 0.0) * beta[..., None, :],
        k_out=k * jnp.exp(after) * beta[..., None],
        decay=grown[..., -1, :],
    )


def chunk_step(
    state: Float32[Array, "H K V"], x: ChunkTerms
) -> tuple[Float32[Array, "H K V"], Float32[Array, "H C V"]]:
    """One chunk, whose terms come without their chunk axis: (state after it, o)."""
    r = x.u - jnp.matmul(x.w, state, precision=HIGHEST)
    o = jnp.matmul(x.q_in, state, precision=HIGHEST) + jnp.matmul(x.mix, r, precision=HIGHEST)
    return x.decay[..., None] * state + jnp.einsum("hck,hcv->hkv", x.k_out, r, precision=HIGHEST), o
