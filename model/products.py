"""Products with one layer's split weight out of its stack ``[s, n, ...]``, without putting its slabs together first.

Where a device owns several slabs, one layer of a stack is several ranges of memory. XLA:CPU copies them into one matrix
before a product; slab by slab each range goes through the caches once. docs/log.md, 2026-11-21: 24 against 12 GB/s of
weights for one row, 11.5 against 8.3 for 16, equal for 512. On accelerators one large product is the better form.

Axis letters as in ``model/parameters.py``: s slabs, n stacked layers, h heads of one slab.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ling3export.model.geometry import Geometry
from ling3export.model.layers import dot, dot_heads, dot_rows, of_layer, precision, take

Index = int | jax.Array

CACHED = 4 * 2**20  # bytes of one layer's weight that stay in the caches between a copy and the product
PIECE = 1024  # rows of a table at a time: 2 to 4 MB, as fast as the slabs of the layers


def dot_split(x: jax.Array, weights: nnx.Param | nnx.Dict, layer: Index, geometry: Geometry) -> jax.Array:
    """``x [T, D]`` times one layer of ``[s, n, ..., D]``, or of arguments by layer: fp32 ``[T, s, ...]``."""
    if isinstance(weights, nnx.Dict) or not _one_by_one(weights[...], geometry):
        return dot(x, of_layer(weights, layer, split=True), geometry.tiled)
    stacked = weights[...]
    shape, rows = stacked.shape, x.shape[0]

    def slab(s: jax.Array, out: jax.Array) -> jax.Array:
        weight = _slab(stacked, s, layer).reshape(-1, shape[-1])
        y = lax.dot_general(
            x, weight, (((1,), (1,)), ((), ())), precision=precision(x.dtype), preferred_element_type=jnp.float32
        )
        return lax.dynamic_update_slice(out, y[:, None], (0, s, 0))

    out = jnp.zeros((rows, shape[0], math.prod(shape[2:-1])), jnp.float32)
    return lax.fori_loop(0, shape[0], slab, out).reshape(rows, shape[0], *shape[2:-1])


def dot_table(x: jax.Array, table: jax.Array, geometry: Geometry) -> jax.Array:
    """``x [T, D]`` times ``table [s, V/s, D]``: fp32 ``[T, V]``.

    One row goes through pieces of the table: for the whole, XLA:CPU would widen all of it to fp32 first.
    """
    rows, dim = math.prod(table.shape[:-1]), table.shape[-1]
    if x.shape[0] > 1 or geometry.tiled or table.nbytes <= CACHED:
        return dot(x, table).reshape(x.shape[0], rows)
    size = max(size for size in range(1, PIECE + 1) if rows % size == 0)
    pieces = table.reshape(-1, size, dim)

    def piece(i: jax.Array, out: jax.Array) -> jax.Array:
        y = lax.dot_general(x, pieces[i], (((1,), (1,)), ((), ())), precision=precision(x.dtype),
                            preferred_element_type=jnp.float32)  # fmt: skip
        return lax.dynamic_update_slice_in_dim(out, y, i * size, axis=1)

    return lax.fori_loop(0, rows // size, piece, jnp.zeros((1, rows), jnp.float32))


def dot_rows_split(x: jax.Array, weights: nnx.Param, layer: Index, geometry: Geometry) -> jax.Array:
    """``x [T, F]`` times one layer of ``[s, n, F/s, D]``: this device's partial sum ``[T, D]`` in fp32."""
    stacked = weights[...]
    if not _one_by_one(stacked, geometry):
        return dot_rows(x, take(stacked, layer, split=True))
    slabs, _, width, dim = stacked.shape

    def slab(s: jax.Array, total: jax.Array) -> jax.Array:
        own = lax.dynamic_slice_in_dim(x, s * width, width, axis=1)
        y = jnp.matmul(own, _slab(stacked, s, layer), precision=precision(x.dtype), preferred_element_type=jnp.float32)
        return total + y

    return lax.fori_loop(0, slabs, slab, jnp.zeros((x.shape[0], dim), jnp.float32))


def dot_heads_split(x: jax.Array, weights: nnx.Param, layer: Index, axis: int, geometry: Geometry) -> jax.Array:
    """Each head's ``x [T, H, X]`` times its own matrix of ``[s, n, h, ., .]``, over axis 0 or 1: fp32 ``[T, H, Y]``.

    Head by head on CPU: XLA has no batched bf16 product with an fp32 result there, and in fp32 2 MB took it 3 ms.
    """
    stacked = weights[...]
    slabs, _, heads = stacked.shape[:3]
    if geometry.tiled:
        weight = take(stacked, layer, split=True)
        equation = ("thx,hxy->thy", "thx,hyx->thy")[axis]
        return dot_heads(equation, x, weight.reshape(-1, *weight.shape[2:]))
    sizes = (1, 1, 1, *stacked.shape[3:])

    def head(h: jax.Array, out: jax.Array) -> jax.Array:
        weight = lax.dynamic_slice(stacked, (h // heads, layer, h % heads, 0, 0), sizes).reshape(sizes[3:])
        own = lax.dynamic_index_in_dim(x, h, axis=1, keepdims=False)
        y = lax.dot_general(
            own, weight, (((1,), (axis,)), ((), ())), precision=precision(x.dtype), preferred_element_type=jnp.float32
        )
        return lax.dynamic_update_index_in_dim(out, y, h, axis=1)

    out = jnp.zeros((x.shape[0], slabs * heads, stacked.shape[4 - axis]), jnp.float32)
    return lax.fori_loop(0, slabs * heads, head, out)


def gated_mlp(x: jax.Array, gate_up: nnx.Param, down: nnx.Param, layer: Index, geometry: Geometry) -> jax.Array:
    """``down(silu(gate x) * up x)``, this device's partial sum.

    Args:
        x: ``[T, D]`` in the model dtype.
        gate_up: ``[s, n, 2, F/s, D]``.
        down: ``[s, n, F/s, D]``.
        layer: Index into both stacks.
        geometry: The form of the products.

    Returns:
        fp32 ``[T, D]``, to be summed over devices.
    """
    y = dot_split(x, gate_up, layer, geometry)
    hidden = jax.nn.silu(y[:, :, 0]) * y[:, :, 1]
    return dot_rows_split(hidden.reshape(x.shape[0], -1).astype(x.dtype), down, layer, geometry)


def _one_by_one(stacked: jax.Array, geometry: Geometry) -> bool:
    layer = stacked.nbytes // stacked.shape[1]
    return not geometry.tiled and stacked.shape[0] > 1 and layer > CACHED


def _slab(stacked: jax.Array, s: jax.Array, layer: Index) -> jax.Array:
    sizes = (1, 1, *stacked.shape[2:])
    return lax.dynamic_slice(stacked, (s, layer, *[0] * (stacked.ndim - 2)), sizes).reshape(sizes[2:])
