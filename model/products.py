"""Products with the model's weights, accumulated in fp32: column-parallel, row-parallel, and of single heads.

A split weight is stacked ``[s, n, ...]``, TP shards before layers. Where a device owns several TP shards, one layer of
the stack is several ranges of memory, which XLA:CPU copies into one matrix before a product. In the form ``loops``,
large layers are therefore multiplied one TP shard after the other, so that each range goes through the caches once:
24 against 12 GB/s of weights for one row, 11.5 against 8.3 for 16 rows, equal for 512 (docs/log/kernels-cpu.md). On
accelerators one large product is the better form.

Executables for cpu may call native kernels instead (``native/``), which read a layer where it lies.

Axis letters as in ``model/parameters.py``: s TP shards, n stacked layers, h heads of one TP shard. ``layer`` is always
an index into the stack, and ``geometry`` says which form the products have.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from ling3export.model.geometry import Geometry
from ling3export.model.layers import Index, of_heads, of_layer, swiglu, take
from ling3export.model.native import calls

CACHED = 4 * 2**20  # bytes of one layer's weight that stay in the caches between a copy and the product
PIECE = 1024  # rows of the vocabulary at a time: 2 to 4 MB, as fast as the TP shards of the layers


def precision(dtype: jnp.dtype) -> lax.Precision | None:
    """Highest for fp32 operands (accelerators round them otherwise), the default for bf16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def product(x: Float[Array, "T X"], weight: Float[Array, "_ _"], axis: int) -> Float32[Array, "T Y"]:
    """``x`` times a matrix over the matrix's ``axis``."""
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, weight, dims, precision=precision(x.dtype), preferred_element_type=jnp.float32)


def einsum(equation: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float32[Array, "..."]:
    """``jnp.einsum`` of operands of one dtype."""
    return jnp.einsum(equation, x, y, precision=precision(x.dtype), preferred_element_type=jnp.float32)


def dot(x: Float[Array, "T D"], weight: Float[Array, "*out D"], geometry: Geometry) -> Float32[Array, "T *out"]:
    """``x`` times ``weight`` over D.

    For TPUs a single column is filled up to 128: XLA:TPU keeps a product of one column from its matrix units (5.8
    against 2.7 µs at 512 rows).
    """
    rows, shape = x.shape[0], weight.shape[:-1]
    x = _more_than_one_row(x, geometry)
    weight = weight.reshape(-1, weight.shape[-1])  # a dot over more axes transposes the weight on CPU
    columns = weight.shape[0]
    if geometry.sum_by_matmul and columns == 1:
        weight = jnp.pad(weight, ((0, 127), (0, 0)))
    return product(x, weight, 1)[:rows, :columns].reshape(rows, *shape)


def dot_merged(x: Float[Array, "T F"], weight: Float[Array, "s each D"], geometry: Geometry) -> Float32[Array, "T D"]:
    """``x`` times one layer of a row-parallel weight, whose TP shards are merged first: this device's partial sum."""
    if geometry.unrolled and x.shape[0] == 1:
        parts = einsum("sf,sfd->sd", x.reshape(weight.shape[:2]), weight)
        return jnp.sum(lax.optimization_barrier(parts), axis=0, keepdims=True)
    return product(_more_than_one_row(x, geometry), weight.reshape(-1, weight.shape[-1]), 0)[: x.shape[0]]


def _more_than_one_row(x: Float[Array, "T D"], geometry: Geometry) -> Float[Array, "rows D"]:
    """One bf16 row becomes two: XLA:CPU upcasts the whole weight to fp32 for a matrix-vector product.

    docs/log/kernels-cpu.md, 2026-11-21: 1.8 against 16 GB/s of weights.
    """
    return jnp.concatenate([x, x]) if x.shape[0] == 1 and x.dtype == jnp.bfloat16 and not geometry.tiled else x


def dot_heads(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float32[Array, "..."]:
    """``jnp.einsum`` with a batch axis of heads, in fp32.

    bf16 operands are widened first: XLA:CPU has no batched bf16 product with an fp32 result, and on accelerators the
    default precision takes them back to bf16, exactly.
    """
    exact = precision(x.dtype)
    return jnp.einsum(equation, x.astype(jnp.float32), weight.astype(jnp.float32), precision=exact)


def column_parallel(
    x: Float[Array, "T D"], weights: nnx.Param | nnx.Dict, layer: Index, geometry: Geometry
) -> Float32[Array, "T s *out"]:
    """A column-parallel matmul: the output axis is split over devices, and nothing needs to be summed.

    ``x`` is the same on every device; ``weights`` are ``[s, n, ..., D]``, or one argument ``[s, ..., D]`` a layer.
    """
    if calls.do_columns(weights, x.shape[0], geometry):
        return calls.columns(x, weights[...], layer, geometry)
    if isinstance(weights, nnx.Dict) or not _one_by_one(weights[...], geometry):
        return dot(x, of_layer(weights, layer, split=True), geometry)
    stacked = weights[...]
    shape, rows = stacked.shape, x.shape[0]

    def shard(s: jax.Array, out: jax.Array) -> jax.Array:
        y = product(x, _shard(stacked, s, layer).reshape(-1, shape[-1]), 1)
        return lax.dynamic_update_slice(out, y[:, None], (0, s, 0))

    out = jnp.zeros((rows, shape[0], math.prod(shape[2:-1])), jnp.float32)
    return lax.fori_loop(0, shape[0], shard, out).reshape(rows, shape[0], *shape[2:-1])


def replicated(x: Float[Array, "T D"], weights: nnx.Param, layer: Index, geometry: Geometry) -> Float32[Array, "T out"]:
    """A matmul with ``weights [n, out, D]``, which every device has whole."""
    if calls.do_columns(weights, x.shape[0], geometry):
        return calls.columns(x, weights[...][None], layer, geometry)[:, 0]
    return dot(x, take(weights[...], layer, split=False), geometry)


def row_parallel(x: Float[Array, "T F"], weights: nnx.Param, layer: Index, geometry: Geometry) -> Float32[Array, "T D"]:
    """A row-parallel matmul with ``weights [s, n, F/s, D]``: the input axis is split over devices.

    Returns:
        This device's partial sum, to be added up over devices in fp32: rounded first it would depend on TP.
    """
    stacked = weights[...]
    if calls.are_there(weights, calls.are_few(x.shape[0], geometry), geometry):
        return calls.rows(x, stacked, layer, geometry)
    if not _one_by_one(stacked, geometry):
        return dot_merged(x, take(stacked, layer, split=True), geometry)
    shards, _, width, dim = stacked.shape

    def shard(s: jax.Array, total: jax.Array) -> jax.Array:
        own = lax.dynamic_slice_in_dim(x, s * width, width, axis=1)
        return total + product(own, _shard(stacked, s, layer), 0)

    return lax.fori_loop(0, shards, shard, jnp.zeros((x.shape[0], dim), jnp.float32))


def vocab_parallel(x: Float[Array, "T D"], weights: nnx.Param, geometry: Geometry) -> Float32[Array, "T rows"]:
    """``x`` times this device's part of the output head ``[s, each, D]``, ``s * each`` rows of the vocabulary.

    One row of ``x`` goes through pieces of the table: for the whole, XLA:CPU would widen all of it to fp32 first.
    """
    table = weights[...]
    rows, dim = math.prod(table.shape[:-1]), table.shape[-1]
    if calls.do_columns(weights, x.shape[0], geometry):
        return calls.columns(x, table[:, None], 0, geometry).reshape(x.shape[0], rows)
    if x.shape[0] > 1 or geometry.tiled or table.nbytes <= CACHED:
        return dot(x, table, geometry).reshape(x.shape[0], rows)
    size = max(size for size in range(1, PIECE + 1) if rows % size == 0)
    pieces = table.reshape(-1, size, dim)

    def piece(i: jax.Array, out: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(out, product(x, pieces[i], 1), i * size, axis=1)

    return lax.fori_loop(0, rows // size, piece, jnp.zeros((1, rows), jnp.float32))


def per_head(
    x: Float[Array, "T H X"], weights: nnx.Param, layer: Index, axis: int, geometry: Geometry
) -> Float32[Array, "T H Y"]:
    """Each head's rows times a matrix of its own, over the ``axis`` 0 or 1 of the matrix.

    ``weights`` are ``[s, n, h, X, Y]``, or ``[s, n, h, Y, X]`` for ``axis`` 1. In the form ``loops`` one head follows
    the other: XLA:CPU has no batched bf16 product with an fp32 result, and in fp32 2 MB took it 3 ms.
    """
    if geometry.tiled:
        return dot_heads(("thx,hxy->thy", "thx,hyx->thy")[axis], x, of_heads(weights, layer))
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
    gate_up: nnx.Param,
    down: nnx.Param,
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


def _one_by_one(stacked: jax.Array, geometry: Geometry) -> bool:
    """Whether the TP shards of a layer are multiplied one after the other."""
    layer = stacked.nbytes // stacked.shape[1]
    return not geometry.tiled and stacked.shape[0] > 1 and layer > CACHED


def _shard(stacked: jax.Array, s: jax.Array, layer: Index) -> jax.Array:
    sizes = (1, 1, *stacked.shape[2:])
    return lax.dynamic_slice(stacked, (s, layer, *[0] * (stacked.ndim - 2)), sizes).reshape(sizes[2:])
