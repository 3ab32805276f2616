"""The kernels of ``quantized.cc`` as functions of arrays: products with weights of 8 or 4 bits, ``q`` and ``scale``.

They are called for any number of rows, wherever 32 numbers of the last axis share a scale. Rows of ``x`` become
8 bits, too, by group (``quantized.cc`` has the rule). Axis letters as in ``model/products.py``; G is D / 32.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int8, Int32, UInt8

from ling3export.model.geometry import Geometry
from ling3export.model.layers import Index
from ling3export.model.native.calls import call

GROUP = 32  # numbers that share a scale

Values = Int8[Array, "..."] | UInt8[Array, "..."]  # 8 bits, or two numbers of 4 bits a byte


def fits(q: Values, scale: Array, geometry: Geometry) -> bool:
    """Whether programs call kernels for a quantized weight."""
    numbers = q.shape[-1] * (2 if q.dtype == jnp.uint8 else 1)
    return bool(geometry.kernels) and scale.dtype == jnp.bfloat16 and numbers == GROUP * scale.shape[-1]


def _name(name: str, q: Values) -> str:
    return f"{name}_q4" if q.dtype == jnp.uint8 else f"{name}_q8"


def columns(
    x: BFloat16[Array, "T D"], q: Values, scale: BFloat16[Array, "s n *out G"], layer: Index, geometry: Geometry
) -> Float32[Array, "T s *out"]:
    """Products over the last axis of the weights."""
    shards, _, *out, _ = scale.shape
    y = call(_name("columns", q), geometry, (x.shape[0], shards, math.prod(out)), x, q, scale, jnp.int32(layer))
    return y.reshape(x.shape[0], shards, *out)


def rows(
    x: BFloat16[Array, "T F"], q: Values, scale: BFloat16[Array, "s n D G"], layer: Index, geometry: Geometry
) -> Float32[Array, "T D"]:
    """The sum over all TP shards of products over the last axis of the weights, of each with its own part of ``x``."""
    return call(_name("rows", q), geometry, (x.shape[0], scale.shape[2]), x, q, scale, jnp.int32(layer))


def experts(
    x: BFloat16[Array, "T D"],
    gate_up: tuple[Values, BFloat16[Array, "s n e 2 F G"]],
    down: tuple[Values, BFloat16[Array, "s n e D _"]],
    layer: Index,
    chosen: Int32[Array, "T A"],
    share: Float32[Array, "T A"],
    limit: Float32[Array, ""] | None,
    geometry: Geometry,
) -> Float32[Array, "T D"]:
    """As ``calls.experts``; what lies between the two products is rounded to bf16, and then to 8 bits as ``x`` is."""
    name, limit = _name("experts", gate_up[0]), jnp.full(1, jnp.inf, jnp.float32) if limit is None else limit.reshape(1)
    return call(name, geometry, x.shape, x, *gate_up, *down, jnp.int32(layer), chosen, share, limit)
