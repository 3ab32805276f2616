"""The model's formulas in plain numpy, one function each: what `reference.py` strings together.

Written to be read next to the model's description; any float dtype in, the same out. It shares no code with the
product model, which is tested against it.

Dimension letters: T tokens, E experts, A experts a token, H heads, K / V key / value width of a head, P rope width,
W conv taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Fixed in the published code, whatever rms_norm_eps says; it is added to the sum of squares, not to the mean.
L2_NORM_EPS = 1e-6
# Query rows of one attention block: bounds the scores held at a time.
QUERY_BLOCK = 128


class Margins(NamedTuple):
    """How far the closest routing decisions are from a tie, in biased scores; infinite where there was no choice."""

    expert: float
    group: float

    def smaller(self, other: Margins) -> Margins:
        """The closer decision of the two, for experts and groups apart."""
        return Margins(min(self.expert, other.expert), min(self.group, other.group))


NO_MARGINS = Margins(float("inf"), float("inf"))


class Routing(NamedTuple):
    """Router decisions: experts int [T, A], weights [T, A], and the smallest margins over the T tokens."""

    experts: Array
    weights: Array
    margins: Margins


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x) without overflow and with full relative precision on both sides."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) * weight over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def l2_norm(x: Array) -> Array:
    """x / sqrt(Σx² + 1e-6) over the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2_NORM_EPS)


def causal_conv(x: Array, taps: Array) -> Array:
    """Depthwise convolution of one sequence: y[t] = Σ_j taps[:, j] x[t - (W-1) + j], with x = 0 before the first token.

    Args:
        x: [T, channels].
        taps: [channels, W]; the last tap multiplies the current token.
    """
    y = np.zeros_like(x)
    width = taps.shape[1]
    for tap in range(width):
        lag = width - 1 - tap
        y[lag:] += x[: len(x) - lag] * taps[:, tap]
    return y


def kda_log_decay(f: Array, a_log: Array, dt_bias: Array, lower_bound: float | None) -> Array:
    """Log decay g of each head and key channel, from f = f_proj(x).

    Bounded: g = lower_bound * sigmoid(exp(a_log) * (f + dt_bias)).
    Without a bound (kda_safe_gate false): g = -exp(a_log) * softplus(f + dt_bias).

    Args:
        f: [T, H, K].
        a_log: [H].
        dt_bias: [H, K].
        lower_bound: kda_lower_bound, or None where kda_safe_gate is false.

    Returns:
        [T, H, K], never positive.
    """
    rate = np.exp(a_log)[:, None]
    if lower_bound is None:
        return -rate * np.logaddexp(0, f + dt_bias)
    return lower_bound * sigmoid(rate * (f + dt_bias))


def kda_recurrence(q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> tuple[Array, Array]:
    """The delta rule of one sequence from a zero state S [K, V] per head.

    S = exp(g) S (each key channel);  r = v - kᵀS;  S = S + (beta k) rᵀ;  o = qᵀS, read after the write.

    Args:
        q, k: [T, H, K], normalized, q scaled.
        v: [T, H, V].
        log_decay: [T, H, K].
        beta: [T, H].

    Returns:
        o [T, H, V], and the last state [H, K, V].
    """
    heads, width = k.shape[1:]
    state = np.zeros((heads, width, v.shape[2]), v.dtype)
    out = np.empty_like(v)
    decay = np.exp(log_decay)
    write = beta[:, :, None] * k
    for t in range(len(q)):
        state *= decay[t, :, :, None]
        rest = v[t] - (k[t, :, None, :] @ state)[:, 0]
        state += write[t, :, :, None] * rest[:, None, :]
        out[t] = (q[t, :, None, :] @ state)[:, 0]
    return out, state


def rope_angles(length: int, width: int, theta: float, yarn: Mapping[str, float] | None = None) -> NDArray[np.float32]:
    """position * theta^(-2i / width) for each pair i: fp32 [length, width / 2], as fp32 is part of the model.

    The frequencies are rounded to fp32 once, then multiplied by the position in fp32. YaRN (arXiv 2309.00071) divides
    those by its factor that turn less than ``beta_slow`` times within the original context, leaves those that turn
    more than ``beta_fast`` times, and mixes the two between.
    """
    frequencies = float(theta) ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if yarn is not None:
        for i, frequency in enumerate(frequencies):
            first, last = (
                width * np.log(yarn["original_max_position_embeddings"] / (2 * np.pi * turns)) / (2 * np.log(theta))
                for turns in (yarn["beta_fast"], yarn["beta_slow"])
            )
            first, last = max(np.floor(first), 0), min(np.ceil(last), width - 1)
            slow = min(max((i - first) / (last - first or 0.001), 0.0), 1.0)
            frequencies[i] = slow * frequency / yarn["factor"] + (1 - slow) * frequency
    return np.arange(length, dtype=np.float32)[:, None] * frequencies.astype(np.float32)


def yarn_magnitude(yarn: Mapping[str, float] | None, name: str) -> float:
    """``0.1 · yarn[name] · ln(factor) + 1``, by which YaRN keeps the entropy of attention; 1 without it."""
    return 1.0 if yarn is None or yarn["factor"] <= 1 else float(0.1 * yarn[name] * np.log(yarn["factor"]) + 1)


def rope(x: Array, angles: Array, factor: float = 1.0) -> Array:
    """Rotates each pair (x[2i], x[2i+1]) by angles[t, i], times factor. x: [T, ..., P], angles: [T, P / 2]."""
    angles = angles.astype(x.dtype).reshape(len(x), *[1] * (x.ndim - 2), -1)
    cos, sin = np.cos(angles) * x.dtype.type(factor), np.sin(angles) * x.dtype.type(factor)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = odd * cos + even * sin
    return out


def causal_attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    """softmax(scale q kᵀ) v over the tokens up to one's own. q, k: [T, H, K], v: [T, H, V] → [T, H, V]."""
    q, keys, values = q.transpose(1, 0, 2), k.transpose(1, 2, 0), v.transpose(1, 0, 2)
    out = np.empty_like(values)
    for start in range(0, len(v), QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, len(v))
        scores = scale * (q[:, start:stop] @ keys[:, :, :stop])
        future = np.arange(stop) > np.arange(start, stop)[:, None]
        scores[:, future] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, start:stop] = (weights / weights.sum(axis=-1, keepdims=True)) @ values[:, :stop]
    return out.transpose(1, 0, 2)


def route(scores: Array, bias: Array, groups: int, kept_groups: int, chosen: int, scaling: float) -> Routing:
    """Chooses experts by biased scores inside the best groups; weighs them by unbiased ones.

    A group's score is the sum of its two best biased scores. weight = score / (Σ chosen scores + 1e-20) * scaling.
    Equal scores go to the lower index.

    Args:
        scores: sigmoid(x Wᵀ), [T, E].
        bias: [E].
        groups, kept_groups, chosen: n_group, topk_group, num_experts_per_tok.
        scaling: routed_scaling_factor.
    """
    tokens, experts = scores.shape
    biased = scores + bias
    by_group = np.sort(biased.reshape(tokens, groups, experts // groups), axis=-1)
    group_scores = by_group[..., -2:].sum(axis=-1)
    group_order = np.argsort(-group_scores, axis=-1, kind="stable")
    kept = np.zeros((tokens, groups), bool)
    np.put_along_axis(kept, group_order[:, :kept_groups], True, axis=-1)
    candidates = np.where(np.repeat(kept, experts // groups, axis=-1), biased, -np.inf)
    order = np.argsort(-candidates, axis=-1, kind="stable")
    best = order[:, :chosen]
    weights = np.take_along_axis(scores, best, axis=-1)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20) * scaling
    margins = Margins(
        _margin(candidates, order, chosen, kept_groups * (experts // groups)),
        _margin(group_scores, group_order, kept_groups, groups),
    )
    return Routing(best, weights, margins)


def _margin(scores: Array, order: Array, taken: int, available: int) -> float:
    """Smallest difference, over tokens, between the last score taken and the first one left."""
    if taken >= available or not len(scores):
        return float("inf")
    ranked = np.take_along_axis(scores, order[:, taken - 1 : taken + 1], axis=-1)
    return float(np.min(ranked[:, 0] - ranked[:, 1]))
