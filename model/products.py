"""Products with the model's weights, accumulated in fp32: column-parallel, row-parallel, and of single heads.

A split weight is stacked ``[s, n, ...]``, TP shards before layers. Where a device owns several TP shards, one layer of
the stack is several ranges of memory, which XLA:CPU copies into one matrix before a product. In the form ``loops``,
large layers are therefore multiplied one TP shard after the other, so that each range goes through the caches once:
24 against 12 GB/s of weights for one row, 11.5 against 8.3 for 16 rows, equal for 512 (docs/log/kernels-cpu.md). On
accelerators one large product is the better form.

Executables for cpu may call native kernels instead (``native/``), which read a layer where it lies. A quantized weight
is widened as ``quantized.py`` says: in the form ``loops`` a TP shard of a layer at a time, so that little is held.

Axis letters as in ``model/parameters.py``: s TP shards, n stacked layers, h heads of one TP shard. ``layer`` is always
an index into the stack, and ``geometry`` says which form the products have.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from ling3export.model.geometry import Geometry
from ling3export.model.layers import Index, Weight, swiglu
from ling3export.model.native import calls
from ling3export.model.quantized import (
    Matrix,
    Quantized,
    activations,
    at,
    is_quantized,
    leading,
    of_heads,
    of_layer,
    value_of,
    widened,
)

CACHED = 4 * 2**20  # bytes of one layer's weight that stay in the caches between a copy and the product
PIECE = 1024  # rows of the vocabulary at a time: 2 to 4 MB, as fast as the TP shards of the layers


def precision(dtype: jnp.dtype) -> lax.Precision | None:
    """Highest for fp32 operands (accelerators round them otherwise), the default for bf16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def product(x: Float[Array, "T X"], weight: Float[Array, "_ _"], axis: int) -> Float32[Array, "T Y"]:
    """``x`` times a matrix over the matrix's ``axis``."""
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, weight, dims, precision=precision(x.dtype), preferred_element_type=jnp.float32)


def times(x: Float[Array, "T X"], weight: Matrix, geometry: Geometry) -> Float32[Array, "T Y"]:
    """``x`` times a matrix over the last axis, whose others are merged."""
    values, scale = widened(weight, geometry)
    y = product(_operand(x, weight, values, geometry), values.reshape(-1, values.shape[-1]), 1)
    return y if scale is None else y * scale.reshape(-1)


def _operand(x: Float[Array, "T X"], weight: Matrix, values: jax.Array, geometry: Geometry) -> Float[Array, "T X"]:
    return activations(x, weight, geometry).astype(values.dtype) if isinstance(weight, Quantized) else x


def einsum(equation: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.einsum(equation, x, y, precision=precision(x.dtype), preferred_element_type=jnp.float32)


def dot(x: Float[Array, "T D"], weight: Matrix, geometry: Geometry) -> Float32[Array, "T *out"]:
    """``x`` times ``weight`` over D.

    For TPUs a single column is filled up to 128: XLA:TPU keeps a product of one column from its matrix units (5.8
    against 2.7 µs at 512 rows).
    """
    rows, shape = x.shape[0], leading(weight)
    values, scale = widened(weight, geometry)
    x = _more_than_one_row(_operand(x, weight, values, geometry), geometry)
    values = values.reshape(-1, values.shape[-1])  # a dot over more axes transposes the weight on CPU
    columns = values.shape[0]
    if geometry.sum_by_matmul and columns == 1:
        values = jnp.pad(values, ((0, 127), (0, 0)))
    y = product(x, values, 1)[:rows, :columns].reshape(rows, *shape)
    return y if scale is None else y * scale


def dot_merged(x: Float[Array, "T F"], weight: Matrix, geometry: Geometry) -> Float32[Array, "T D"]:
    """``x`` times one layer of a row-parallel weight, whose TP shards are merged first: this device's partial sum.

    ``weight`` is ``[s, each, D]``, or quantized ``[s, D, each]``, where every TP shard has the same scales of outputs.
    """
    if isinstance(weight, Quantized):
        shards = weight.q.shape[0]
        if shards == 1:
            return dot(x, at(weight, (0,)), geometry)
        values, scale = widened(weight, geometry)
        x = _operand(x, weight, values, geometry)
        y = einsum("tsf,sdf->td", x.reshape(x.shape[0], shards, -1), values)
        return y if scale is None else y * scale[0]
    if geometry.unrolled and x.shape[0] == 1:
        parts = einsum("sf,sfd->sd", x.reshape(weight.shape[:2]), weight)
        return jnp.sum(lax.optimization_barrier(parts), axis=0, keepdims=True)
    return product(_more_than_one_row(x, geometry), weight.reshape(-1, weight.shape[-1]), 0)[: x.shape[0]]


def _more_than_one_row(x: Float[Array, "T D"], geometry: Geometry) -> Float[Array, "rows D"]:
    """One bf16 row becomes two: XLA:CPU upcasts the whole weight to fp32 for a matrix-vector product.

    docs/log/kernels-cpu.md, 2026-11-21: 1.8 against 16 GB/s of weights.
    """
    return jnp.concatenate([x, x]) if x.shape[0] == 1 and x.dtype == jnp.bfloat16 and not geometry.tiled else x


def dot_heads(
    equation: str, x: Float[Array, "..."], weight: Float[Array, "..."], geometry: Geometry
) -> Float32[Array, "..."]:
    """``jnp.einsum`` with a batch axis of heads, in fp32.

    Except on a card, bf16 operands are widened first. XLA:TPU takes them back to bf16, exactly; XLA:GPU would write
    them in fp32.
    """
    if geometry.unrolled:
        return einsum(equation, x, weight)
    exact = precision(x.dtype)
    return jnp.einsum(equation, x.astype(jnp.float32), weight.astype(jnp.float32), precision=exact)


def column_parallel(
    x: Float[Array, "T D"], weights: Weight, layer: Index, geometry: Geometry
) -> Float32[Array, "T s *out"]:
    """A column-parallel matmul: the output axis is split over devices, and nothing needs to be summed.

    ``x`` is the same on every device; ``weights`` are ``[s, n, ..., D]``, or arguments ``[s, ..., D]`` a layer.
    """
    if calls.do_columns(weights, x.shape[0], geometry):
        return calls.columns(x, value_of(weights), layer, geometry)
    if not _one_by_one(weights, geometry):
        return dot(x, of_layer(weights, layer, split=True), geometry)
    stacked = value_of(weights)
    (shards, _, *out), rows = leading(stacked), x.shape[0]

    def shard(s: jax.Array, y: jax.Array) -> jax.Array:
        own = times(x, _shard(stacked, s, layer), geometry)
        return lax.dynamic_update_slice(y, own[:, None], (0, s, 0))

    y = jnp.zeros((rows, shards, math.prod(out)), jnp.float32)
    return lax.fori_loop(0, shards, shard, y).reshape(rows, shards, *out)


def replicated(x: Float[Array, "T D"], weights: Weight, layer: Index, geometry: Geometry) -> Float32[Array, "T out"]:
    """A matmul with ``weights [n, out, D]``, which every device has whole."""
    if calls.do_columns(weights, x.shape[0], geometry):
        whole = jax.tree.map(lambda leaf: leaf[None], value_of(weights))
        return calls.columns(x, whole, layer, geometry)[:, 0]
    return dot(x, of_layer(weights, layer, split=False), geometry)


def row_parallel(x: Float[Array, "T F"], weights: Weight, layer: Index, geometry: Geometry) -> Float32[Array, "T D"]:
    """A row-parallel matmul with ``weights [s, n, F/s, D]``, or quantized ``[s, n, D, F/s]``: the input axis is split.

    Returns:
        This device's partial sum, to be added up over devices in fp32: rounded first it would depend on TP.
    """
    if calls.are_there(weights, calls.are_few(x.shape[0], geometry), geometry):
        return calls.rows(x, value_of(weights), layer, geometry)
    if not _one_by_one(weights, geometry):
        return dot_merged(x, of_layer(weights, layer, split=True), geometry)
    stacked = value_of(weights)
    shards, dim = leading(stacked)[0], leading(stacked)[2] if isinstance(stacked, Quantized) else stacked.shape[3]
    width = x.shape[1] // shards

    def shard(s: jax.Array, total: jax.Array) -> jax.Array:
        own, weight = lax.dynamic_slice_in_dim(x, s * width, width, axis=1), _shard(stacked, s, layer)
        return total + (times(own, weight, geometry) if isinstance(weight, Quantized) else product(own, weight, 0))

    return lax.fori_loop(0, shards, shard, jnp.zeros((x.shape[0], dim), jnp.float32))


def vocab_parallel(x: Float[Array, "T D"], weights: Weight, geometry: Geometry) -> Float32[Array, "T rows"]:
    """``x`` times this device's part of the output head ``[s, each, D]``, ``s * each`` rows of the vocabulary.

    One row of ``x`` goes through pieces of the table, and any rows through pieces of a quantized one: for the whole,
    XLA:CPU would widen all of it to fp32 first.
    """
    table = value_of(weights)
    rows = math.prod(leading(table))
    if calls.do_columns(weights, x.shape[0], geometry):
        stack = jax.tree.map(lambda leaf: leaf[:, None], table)
        return calls.columns(x, stack, 0, geometry).reshape(x.shape[0], rows)
    few = x.shape[0] == 1 or is_quantized(weights)
    if not few or geometry.tiled or rows * x.shape[1] * x.dtype.itemsize <= CACHED:
        return dot(x, table, geometry).reshape(x.shape[0], rows)
    size = max(size for size in range(1, PIECE + 1) if rows % size == 0)
    pieces = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[2:]), table)

    def piece(i: jax.Array, out: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(out, times(x, at(pieces, (i,)), geometry), i * size, axis=1)

    return lax.fori_loop(0, rows // size, piece, jnp.zeros((x.shape[0], rows), jnp.float32))


def per_head(
    x: Float[Array, "T H X"], weights: Weight, layer: Index, axis: int, geometry: Geometry
) -> Float32[Array, "T H Y"]:
    """Each head's rows times a matrix of its own, over the ``axis`` 0 or 1 of the matrix.

    ``weights`` are ``[s, n, h, X, Y]``, or ``[s, n, h, Y, X]`` for ``axis`` 1. In the form ``loops`` one head follows
    the other: XLA:CPU has no batched bf16 product with an fp32 result, and in fp32 2 MB took it 3 ms.
    """
    if geometry.tiled:
        return dot_heads(("thx,hxy->thy", "thx,hyx->thy")[axis], x, of_heads(weights, layer), geometry)
    stacked = weights[...]
    if calls.are_there(weights, calls.are_few(x.shape[0], geometry), geometry):
        return calls.heads(x, stacked, layer, axis, geometry)
    shards, _, heads = stacked.shape[:3]
    sizes = (1, 1, 1, *stacked.shape[3:])

    def head(h: jax.Array, out: jax.Array) -> jax.Array:
        weight = lax.dynamic_slice(stacked, (h // heads, layer, h % heads, 0, 0), sizes).reshape(sizes[3:])
        own = lax.dynamic_index_in_dim(x, h, axis=1, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, product(own, weight, axis), h, axis=1)

    out = jnp.zeros((x.shape[0], shards * heads, stacked.shape[4 - axis]), jnp.float32)
    return lax.fori_loop(0, shards * heads, head, out)


def gated_mlp(
    x: Float[Array, "T D"],
    gate_up: Weight,
    down: Weight,
    layer: Index,
    geometry: Geometry,
    limit: Float32[Array, ""] | None = None,
) -> Float32[Array, "T D"]:
    """``down(silu(gate x) * up x)``, this device's partial sum; ``limit`` as :func:`swiglu` has it.

    ``x`` has the model dtype; ``gate_up`` is ``[s, n, 2, F/s, D]`` and ``down [s, n, F/s, D]``.
    """
    y = column_parallel(x, gate_up, layer, geometry)
    hidden = swiglu(y[:, :, 0], y[:, :, 1], limit)
    return row_parallel(hidden.reshape(x.shape[0], -1).astype(x.dtype), down, layer, geometry)


def _one_by_one(weights: Weight, geometry: Geometry) -> bool:
    """Whether the TP shards of a layer are multiplied one after the other."""
    if geometry.tiled:
        return False
    if is_quantized(weights):
        return leading(value_of(weights))[0] > 1
    stacked = weights[...]
    return stacked.shape[0] > 1 and stacked.nbytes // stacked.shape[1] > CACHED


def _shard(stacked: Matrix, s: jax.Array, layer: Index) -> Matrix:
    def own(leaf: jax.Array) -> jax.Array:
        sizes = (1, 1, *leaf.shape[2:])
        return lax.dynamic_slice(leaf, (s, layer, *[0] * (leaf.ndim - 2)), sizes).reshape(sizes[2:])

    return jax.tree.map(own, stacked)
