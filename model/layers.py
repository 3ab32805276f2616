"""Small pieces that every layer shares: norm, matmul, RoPE, gated MLP."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

NORM_L2_EPS = 1e-6  # KDA's q and k; added to the sum of squares, inside the root


def fill_rows(x: jax.Array, fewest: int, value: float = 0) -> jax.Array:
    """``x [T, ...]`` with rows of ``value`` behind it up to ``fewest``."""
    missing = max(0, fewest - x.shape[0])
    return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1), constant_values=value) if missing else x


def of_layer(weights: nnx.Param | nnx.Dict, layer: int | jax.Array, *, split: bool) -> jax.Array:
    """One layer's weight, of a stack or of arguments by layer (those only where ``layer`` is known when tracing)."""
    if isinstance(weights, nnx.Dict):
        return weights[f"{layer:03}"][...]
    return take(weights[...], layer, split=split)


def take(stacked: jax.Array, index: int | jax.Array, *, split: bool) -> jax.Array:
    """One layer of a stacked parameter: ``[s, n, ...] -> [s, ...]`` when split, else ``[n, ...] -> [...]``."""
    return lax.dynamic_index_in_dim(stacked, index, axis=1 if split else 0, keepdims=False)


def sum_of_squares(x: jax.Array, by_product: bool) -> jax.Array:
    """Of fp32 ``[..., X]`` over its last axis: ``[..., 1]``, or in each of ``[..., X]`` where by a product with ones.

    XLA:TPU fuses the root and the scaling that follow into a product, but neither into a sum (docs/log.md): one
    operation instead of three, worth it for narrow axes.
    """
    if by_product:
        return jnp.matmul(x * x, jnp.ones((x.shape[-1],) * 2), precision=lax.Precision.HIGHEST)
    return jnp.sum(x * x, axis=-1, keepdims=True)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, by_product: bool = False) -> jax.Array:
    """``x * rsqrt(mean(x²) + eps) * weight`` over the last axis, in fp32 throughout; returns fp32."""
    x = x.astype(jnp.float32)  # the mean of squares loses all meaning in bf16
    mean = sum_of_squares(x, by_product) / x.shape[-1]
    return x * lax.rsqrt(mean + eps) * weight.astype(jnp.float32)


def l2_norm(x: jax.Array, by_product: bool = False) -> jax.Array:
    """``x / sqrt(Σx² + 1e-6)`` over the last axis."""
    return x * lax.rsqrt(sum_of_squares(x, by_product) + NORM_L2_EPS)


def precision(dtype: jnp.dtype) -> lax.Precision | None:
    """Highest for fp32 operands (accelerators round them otherwise), the default for bf16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def dot(x: jax.Array, weight: jax.Array, fill: bool = False) -> jax.Array:
    """``x [T, D]`` times ``weight [..., D]`` over D: ``[T, ...]`` in fp32.

    One bf16 row is computed as two: XLA:CPU upcasts the whole weight to fp32 for a matrix-vector product
    (docs/log.md, 2026-11-21: 1.8 against 16 GB/s of weights). A single column is filled up to 128 on
    request: XLA:TPU keeps a product of one column from its matrix units (5.8 against 2.7 µs at 512 rows).
    """
    rows, shape = x.shape[0], weight.shape[:-1]
    if rows == 1 and x.dtype == jnp.bfloat16:
        x = jnp.concatenate([x, x])
    weight = weight.reshape(-1, weight.shape[-1])  # a dot over more axes transposes the weight on CPU
    columns = weight.shape[0]
    if fill and columns == 1:
        weight = jnp.pad(weight, ((0, 127), (0, 0)))
    dims = (((1,), (1,)), ((), ()))
    y = lax.dot_general(x, weight, dims, precision=precision(x.dtype), preferred_element_type=jnp.float32)
    return y[:rows, :columns].reshape(rows, *shape)


def dot_heads(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """``jnp.einsum`` with a batch axis of heads, in fp32.

    bf16 operands are widened first: XLA:CPU has no batched bf16 product with an fp32 result, and on accelerators the
    default precision takes them back to bf16, exactly.
    """
    exact = precision(x.dtype)
    return jnp.einsum(equation, x.astype(jnp.float32), weight.astype(jnp.float32), precision=exact)


def dot_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x [T, F]`` times ``weight [s, F/s, D]``: this device's partial sum ``[T, D]`` in fp32."""
    rows = x.shape[0]
    if rows == 1 and x.dtype == jnp.bfloat16:
        x = jnp.concatenate([x, x])
    weight = weight.reshape(-1, weight.shape[-1])
    y = jnp.matmul(x, weight, precision=precision(x.dtype), preferred_element_type=jnp.float32)
    return y[:rows]


def rope(x: jax.Array, position: jax.Array, theta: float, by_product: bool = False) -> jax.Array:
    """Rotates interleaved pairs (2i, 2i+1) of the last axis by ``position * theta^(-2i/P)``, angles in fp32.

    Args:
        x: ``[T, ..., P]``.
        position: ``[T]`` int32.
        theta: The base of the frequencies.
        by_product: Swap the pairs by a product with ones, exact too: on TPU, one operation instead of four.

    Returns:
        fp32, of x's shape.
    """
    width = x.shape[-1]
    # Rounded once from float64: an ulp of the frequency is 5e-4 rad at position 8192.
    frequency = (theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)).astype(np.float32)
    angle = position.astype(jnp.float32).reshape((-1,) + (1,) * (x.ndim - 1)) * frequency
    if by_product:
        at = np.arange(0, width, 2)
        swap = np.zeros((width, width), np.float32)
        swap[at + 1, at], swap[at, at + 1] = -1, 1
        x, angle = x.astype(jnp.float32), jnp.repeat(angle, 2, axis=-1)
        return x * jnp.cos(angle) + jnp.matmul(x, swap, precision=lax.Precision.HIGHEST) * jnp.sin(angle)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], width // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
