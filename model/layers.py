"""Small pieces that every layer shares: one layer of a stack, norms, RoPE."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

Weight = nnx.Param | nnx.Dict  # a parameter; or its layers, or q and scale of one that is quantized, by their keys
Index = int | Int32[Array, ""]  # a layer's number in its stack, traced inside a loop over layers
State = dict[str, jax.Array]  # the rows of model/state.py by name, this device's part

# For slots and pages, which come from the block manager, and for numbers made from them: a bounds check costs XLA:CPU
# the in-place update, and XLA:TPU an operation.
IN_BOUNDS = "promise_in_bounds"
WIDE = 512  # a wider axis is summed into one column: a square matrix of ones would take longer to read than a sum
COLUMNS = 128  # what a matrix unit takes at least; of fewer columns XLA:TPU makes a sum
NORM_L2_EPS = 1e-6  # KDA's q and k; added to the sum of squares, inside the root


def fill_rows(x: Shaped[Array, "T ..."], fewest: int) -> Shaped[Array, "rows ..."]:
    """``x``, filled up with rows of zeros to at least ``fewest`` rows."""
    missing = max(0, fewest - x.shape[0])
    return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1)) if missing else x


def take(stacked: Shaped[Array, "..."], index: Index, *, split: bool) -> Shaped[Array, "..."]:
    """One layer of a stacked parameter: ``[s, n, ...] -> [s, ...]`` when split, else ``[n, ...] -> [...]``."""
    return lax.dynamic_index_in_dim(stacked, index, axis=1 if split else 0, keepdims=False)


def sum_of_squares(x: Float32[Array, "*rows X"], sums: str | None, times: float = 1.0) -> Float32[Array, "*rows _"]:
    """The sum of squares over the last axis: ``[..., 1]``, or X times, ``[..., X]``, with ``sums``, times a number.

    ``sums`` is ``Geometry.sums``: the squares are multiplied in that precision by a matrix of ones, of one column for
    an axis wider than WIDE. XLA:TPU fuses the root and the scaling that follow into a product, but not into a sum
    (docs/log/programs-tpu.md): one operation instead of three.
    """
    if sums is None:
        total = jnp.sum(x * x, axis=-1, keepdims=True)
        return total if times == 1 else total * times
    width = x.shape[-1]
    if width > WIDE:
        return jnp.matmul(x * x, np.full((width, COLUMNS), times, np.float32), precision=sums)[..., :1]
    return jnp.matmul(x * x, np.full((width, width), times, np.float32), precision=sums)


@jax.named_scope("norm")
def rms_norm(
    x: Float[Array, "*rows X"], weight: Float[Array, "X"], eps: float, sums: str | None = None
) -> Float32[Array, "*rows X"]:
    """``x * rsqrt(mean(x²) + eps) * weight`` over the last axis, in fp32 throughout (docs/model.md, "Layers")."""
    x = x.astype(jnp.float32)  # the mean of squares loses all meaning in bf16
    mean = sum_of_squares(x, sums) / x.shape[-1]
    return x * lax.rsqrt(mean + eps) * weight.astype(jnp.float32)


def l2_norm(x: Float32[Array, "*rows X"], sums: str | None = None, scale: float = 1.0) -> Float32[Array, "*rows X"]:
    """``x * scale / sqrt(Σx² + 1e-6)`` over the last axis, with the scale under the root: one operation of XLA:TPU."""
    return x * lax.rsqrt(sum_of_squares(x, sums, scale**-2) + NORM_L2_EPS * scale**-2)


def rope(
    x: Float[Array, "T *heads P"],
    position: Int32[Array, "T"],
    frequency: np.ndarray,
    factor: float = 1.0,
    sum_by_matmul: bool = False,
) -> Float32[Array, "T *heads P"]:
    """Rotates interleaved pairs (2i, 2i+1) of the last axis by ``position * frequency[i]``, angles in fp32.

    Cosines and sines are multiplied by ``factor``. ``sum_by_matmul`` swaps the pairs by a product with ones, exact too:
    on TPU, one operation instead of four.
    """
    width = x.shape[-1]
    angle = position.astype(jnp.float32).reshape((-1,) + (1,) * (x.ndim - 1)) * frequency
    if sum_by_matmul:
        at = np.arange(0, width, 2)
        swap = np.zeros((width, width), np.float32)
        swap[at + 1, at], swap[at, at + 1] = -1, 1
        x, angle = x.astype(jnp.float32), jnp.repeat(angle, 2, axis=-1)
        cos, sin = _scaled(jnp.cos(angle), factor), _scaled(jnp.sin(angle), factor)
        return x * cos + jnp.matmul(x, swap, precision=lax.Precision.HIGHEST) * sin
    cos, sin = _scaled(jnp.cos(angle), factor), _scaled(jnp.sin(angle), factor)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], width // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor


def swiglu(
    gate: Float32[Array, "*rows F"],
    up: Float32[Array, "*rows F"],
    limit: Float32[Array, ""] | None = None,
    share: Float32[Array, "*rows 1"] | None = None,
) -> Float32[Array, "*rows F"]:
    """``silu(gate) * up``; with a limit L ``min(silu(gate), L) * clip(up, -L, L)``, as vLLM's SwigluStepAndMul.

    Times ``share``, which saves a multiplication where it is what the sigmoid divides.
    """
    if limit is None and share is not None:
        return gate * up * (share / (1 + jnp.exp(-gate)))
    if limit is None:
        return jax.nn.silu(gate) * up
    hidden = jnp.minimum(jax.nn.silu(gate), limit) * jnp.clip(up, -limit, limit)
    return hidden if share is None else hidden * share
