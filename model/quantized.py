"""Quantized matrices: what they are in a program, and products with them in plain XLA.

A matrix ``[..., out, in]`` is a pair: ``q``, and a ``scale`` of each group of values along the input, or of each
output; a weight is its value in ``q`` times its scale. artifacts/FORMAT.md says how both lie. XLA multiplies no groups,
so weights are widened before a product: a TP shard, an expert or a piece of the vocabulary at a time, to save memory.
The form ``loops`` widens to fp32, which holds the weights exactly; accelerators multiply bf16, so they are rounded
once. With a scale of each output only q is widened, exactly, and the product is scaled.

Axis letters as in ``model/products.py``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Integer, Shaped, UInt16

from ling3export.artifacts.parameters import FORMS, UNIT
from ling3export.model.geometry import Geometry
from ling3export.model.layers import Index, Weight, take


class Quantized(NamedTuple):
    """The two arrays of a matrix, or of a stack of them."""

    q: Integer[Array, "*any out _"]  # int8; or uint8, several values a byte
    scale: Shaped[Array, "..."]  # bf16 or uint16 of each group, in the place of the input; or fp32, without that axis

    @property
    def form(self) -> str:
        """The key of FORMS. Their dtypes tell it; both with words of two factors have groups of a power of two."""
        dtypes = (str(self.q.dtype), str(self.scale.dtype))
        names = [name for name, form in FORMS.items() if (form.q, form.scale) == dtypes]
        if len(names) == 1:
            return names[0]
        of_group = self.q.shape[-1] // self.scale.shape[-1]  # bytes
        return "code6" if of_group % 3 == 0 else "code4"


Matrix = jax.Array | Quantized


def is_quantized(weights: Weight) -> bool:
    """Whether a parameter, or its arguments by layer, are quantized."""
    if not isinstance(weights, nnx.Dict):
        return False
    return "q" in weights or is_quantized(next(iter(weights.values())))


def value_of(weights: Weight) -> Matrix:
    """A parameter's array, or its two."""
    return Quantized(weights["q"][...], weights["scale"][...]) if isinstance(weights, nnx.Dict) else weights[...]


def of_layer(weights: Weight, layer: Index, *, split: bool) -> Matrix:
    """One layer's weight, from a stack, or from arguments by layer, whose ``layer`` has to be known when tracing."""
    if isinstance(weights, nnx.Dict) and "q" not in weights:
        return value_of(weights[f"{layer:03}"])
    return jax.tree.map(lambda leaf: take(leaf, layer, split=split), value_of(weights))


def of_heads(weights: Weight, layer: Index) -> Shaped[Array, "H ..."]:
    """One layer of a parameter that is split by heads, its TP shards merged: ``[s, n, h, ...] -> [s h, ...]``."""
    value = of_layer(weights, layer, split=True)
    assert not isinstance(value, Quantized)
    return value.reshape(-1, *value.shape[2:])


def at(weights: Matrix, index: tuple[Index, ...]) -> Matrix:
    """The matrix at an index of a stack's leading axes."""
    return jax.tree.map(lambda leaf: leaf[index], weights)


def flattened(weights: Matrix, count: int) -> Matrix:
    """A stack of ``count`` matrices in all, as ``[count, out, in]``."""
    if isinstance(weights, Quantized) and _by_channel(weights):
        q, scale = weights
        return Quantized(q.reshape(count, -1, q.shape[-1]), scale.reshape(count, -1))
    return jax.tree.map(lambda leaf: leaf.reshape(count, -1, leaf.shape[-1]), weights)


def leading(weights: Matrix) -> tuple[int, ...]:
    """The shape of a stack but for its last axis, the input."""
    return (weights.q if isinstance(weights, Quantized) else weights).shape[:-1]


def _values(weights: Quantized) -> Shaped[Array, "*any out in"]:
    """q as int8, one value an element."""
    q, form = weights.q, FORMS[weights.form]
    if form.bits == 8:
        return q
    width = weights.scale.shape[-1] * group_of(weights)
    pairs = q[..., : width // 2].reshape(*q.shape[:-1], weights.scale.shape[-1], -1)
    both = jnp.concatenate([pairs & 15, pairs >> 4], axis=-1)
    if form.bits == 6:
        more = q[..., width // 2 :].reshape(*pairs.shape[:-1], -1)
        both |= jnp.concatenate([(more >> bits & 3) << 4 for bits in (0, 2, 4, 6)], axis=-1)
    if form.bits == 4 and form.values:
        both = jnp.asarray(form.values, jnp.int8)[both]
    else:
        both = both.astype(jnp.int8) - jnp.int8(1 << form.bits - 1)
    return both.reshape(*q.shape[:-1], -1)


def _factors(words: UInt16[Array, "*any out groups"]) -> Float32[Array, "*any out halves"]:
    """The scales of the halves of groups, from uint16."""
    wide = words.astype(jnp.int32)[..., None]
    factors = jnp.concatenate([wide >> 5, wide], axis=-1) << 27 >> 27  # five bits with their sign
    power = lax.bitcast_convert_type((wide >> 10) + (127 + UNIT) << 23, jnp.float32)
    return (factors.astype(jnp.float32) * power).reshape(*words.shape[:-1], -1)


def _by_channel(weights: Quantized) -> bool:
    return weights.scale.ndim < weights.q.ndim


def exact(weights: Matrix) -> Float32[Array, "*any out in"]:
    """The weights in fp32, which holds them exactly: a value has 8 bits at most, a scale of a group 8."""
    if not isinstance(weights, Quantized):
        return weights.astype(jnp.float32)
    values = _values(weights).astype(jnp.float32)
    scale = _factors(weights.scale) if weights.scale.dtype == jnp.uint16 else weights.scale.astype(jnp.float32)
    if _by_channel(weights):
        return values * scale[..., None]
    groups = values.reshape(*scale.shape, -1) * scale[..., None]
    return groups.reshape(values.shape)


def widened(weights: Matrix, geometry: Geometry) -> tuple[Float[Array, "*any out in"], Float32[Array, "..."] | None]:
    """The matrix to multiply by, and the scale of each output of the product; None for none."""
    if not isinstance(weights, Quantized):
        return weights, None
    if _by_channel(weights):
        return _values(weights).astype(geometry.dtype), weights.scale
    return exact(weights).astype(geometry.dtype if geometry.tiled else jnp.float32), None


def activations(x: Float[Array, "T X"], weights: Quantized, geometry: Geometry) -> Float[Array, "T X"]:
    """``x`` as it is multiplied: as it is, or with ``geometry.activations`` int8 rounded to 8 bits by group.

    A group's scale is the largest magnitude over 127, in fp32; zeros stay zeros.
    """
    if geometry.activations != "int8" or _by_channel(weights):
        return x
    groups = x.astype(jnp.float32).reshape(x.shape[0], -1, group_of(weights))
    scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / 127
    rounded = jnp.round(groups / jnp.where(scale == 0, 1.0, scale)) * scale
    return rounded.reshape(x.shape)


def group_of(weights: Quantized) -> int:
    """How many values along the input share a scale."""
    return 8 * weights.q.shape[-1] // FORMS[weights.form].bits // weights.scale.shape[-1]
