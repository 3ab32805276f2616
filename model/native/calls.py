"""The native kernels as functions of arrays: products with weights of bf16 (``products.cc``) and of 8 or 4 bits
(``quantized.cc``), and what a decode step does between them (``decode.cc``): one token of KDA, and attention over
pages; the router; and the best of many logits.

A kernel gets the whole stack and a layer's number, so that no weight is copied before it is read. The names that XLA
looks up end in ``geometry.kernels``: processes that run programs of several artifacts keep their kernels apart. Axis
letters as in ``model/products.py``.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float32, Int32

from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.layers import NORM_L2_EPS, Index, Weight
from ling3export.model.quantized import Matrix, Quantized, group_of, leading, value_of

# Rows up to which a kernel is called: reading the weights takes longer than multiplying. Beyond, XLA's own products are
# faster, which use a processor's matrix unit (docs/log/kernels-cpu.md, 2026-11-22).
FEW = 16
FEW_EACH = 2  # the same of one expert's rows, where all experts are chosen alike (docs/log/kernels-cpu.md)
# Processors without dot products of bf16: XLA widens what it multiplies again and again. Kernels over columns of a
# weight are faster for any number of rows (docs/log/kernels-cpu.md, 2026-11-24).
WIDENED = ("avx512_vnni", "avx_vnni", "avx2")
GROUP = 32  # numbers that share a scale, where kernels multiply quantized weights, by any number of rows
# Processors without a matrix unit: kernels for experts are faster for any number of rows, the others up to FEW_PLAIN.
NO_UNIT = ("avx512_bf16", *WIDENED)
FEW_PLAIN = 64


class KdaWeights(NamedTuple):
    """KDA's parameters for :func:`token`, all layers stacked."""

    b_proj: BFloat16[Array, "s n h D"]
    conv1d: BFloat16[Array, "s n h 3 K W"]
    a_log: Float32[Array, "s n h"]
    dt_bias: Float32[Array, "s n h K"]
    o_norm: BFloat16[Array, "n K"]


def are_there(weights: Weight, few: bool, geometry: Geometry) -> bool:
    """Whether the program that is being traced calls a kernel for products of ``few`` rows with a parameter.

    Kernels for quantized weights are faster for any number of rows, and round activations to 8 bits.
    """
    if not geometry.kernels:
        return False
    value = value_of(weights)
    if isinstance(value, Quantized):
        grouped = value.form != "int8-channel" and group_of(value) == GROUP
        return geometry.activations == "int8" and grouped
    return few and bool(value.dtype == jnp.bfloat16)


def are_few(rows: int, geometry: Geometry) -> bool:
    return rows <= (FEW_PLAIN if geometry.kernels.startswith(NO_UNIT) else FEW)


def do_columns(weights: Weight, rows: int, geometry: Geometry) -> bool:
    """Whether the program calls a kernel for products of ``rows`` rows over the last axis of a parameter."""
    return are_there(weights, geometry.kernels.startswith(WIDENED) or are_few(rows, geometry), geometry)


def do_experts(stacks: Sequence[Weight], pairs: int, experts: int, geometry: Geometry) -> bool:
    """Whether the program calls a kernel for ``pairs`` of a token and one of a layer's ``experts``."""
    few = geometry.kernels.startswith(NO_UNIT) or pairs <= FEW_EACH * experts
    return all(are_there(weights, few, geometry) for weights in stacks)


def _call(name: str, geometry: Geometry, shape: tuple[int, ...], *arguments: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.ffi.ffi_call(f"ling3_{name}.{geometry.kernels}", out)(*arguments, devices=np.int32(geometry.tp))


def _named(name: str, weights: Matrix) -> str:
    if not isinstance(weights, Quantized):
        return name
    return f"{name}_{weights.form}"


def columns(x: BFloat16[Array, "T D"], stacked: Matrix, layer: Index, geometry: Geometry) -> Float32[Array, "T s *out"]:
    """Products over the last axis of the weights ``[s, n, *out, D]``."""
    (shards, _, *out), parts = leading(stacked), jax.tree.leaves(stacked)
    shape = (x.shape[0], shards, math.prod(out))
    y = _call(_named("columns", stacked), geometry, shape, x, *parts, jnp.int32(layer))
    return y.reshape(x.shape[0], shards, *out)


def rows(x: BFloat16[Array, "T F"], stacked: Matrix, layer: Index, geometry: Geometry) -> Float32[Array, "T D"]:
    """The sum over all TP shards of products with their own parts of ``x``.

    Over the last but one axis of weights ``[s, n, each, D]``, over the last one of quantized ``[s, n, D, each]``.
    """
    width = leading(stacked)[2] if isinstance(stacked, Quantized) else stacked.shape[-1]
    arguments = x, *jax.tree.leaves(stacked), jnp.int32(layer)
    return _call(_named("rows", stacked), geometry, (x.shape[0], width), *arguments)


def heads(
    x: BFloat16[Array, "T H X"], stacked: BFloat16[Array, "s n h _ _"], layer: Index, axis: int, geometry: Geometry
) -> Float32[Array, "T H Y"]:
    """Each head's rows times its own matrix ``[X, Y]``, or ``[Y, X]`` where ``axis`` is 1."""
    shape = (*x.shape[:2], stacked.shape[4 - axis])
    return _call(("rows", "columns")[axis], geometry, shape, x, stacked, jnp.int32(layer))


@jax.named_scope("experts")
def experts(
    x: BFloat16[Array, "T D"],
    gate_up: Matrix,
    down: Matrix,
    layer: Index,
    chosen: Int32[Array, "T A"],
    share: Float32[Array, "T A"],
    limit: Float32[Array, ""] | None,
    geometry: Geometry,
) -> Float32[Array, "T D"]:
    """``sum over a of share down(swiglu(gate x, up x, limit))`` for the ``chosen`` of this device's ``s e`` experts.

    ``gate_up`` is ``[s, n, e, 2, F, D]``, ``down [s, n, e, D, F]``. A number outside of 0 to ``s e - 1`` chooses none.
    """
    limit = jnp.full(1, jnp.inf, jnp.float32) if limit is None else limit.reshape(1)
    parts = jax.tree.leaves((gate_up, down))
    return _call(_named("experts", gate_up), geometry, x.shape, x, *parts, jnp.int32(layer), chosen, share, limit)


@jax.named_scope("router")
def route(
    x: Float32[Array, "T D"],
    gate: Float32[Array, "n E D"],
    bias: Float32[Array, "n E"],
    layer: Index,
    config: Config,
    geometry: Geometry,
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"]]:
    """``moe.route`` from the router's input: expert ids, and their weights; -1 for rows of padding."""
    shape = (x.shape[0], config.num_experts_per_tok)
    out = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
    make = jax.ffi.ffi_call(f"ling3_route.{geometry.kernels}", out)
    numbers = {"devices": geometry.tp, "groups": config.n_group, "open": config.topk_group}
    attributes = {name: np.int32(value) for name, value in numbers.items()}
    scale = np.float32(config.routed_scaling_factor)
    chosen, share = make(x, gate, bias, jnp.int32(layer), **attributes, scale=scale)
    return chosen, share


def token(
    pool: Float32[Array, "n slots H K K"],
    windows: BFloat16[Array, "n slots H WX"],
    y: Float32[Array, "B H X"],
    x: BFloat16[Array, "B D"],
    weights: KdaWeights,
    layer: Index,
    slot: Int32[Array, "B"],
    used: Int32[Array, ""],
    config: Config,
    geometry: Geometry,
) -> tuple[Float32[Array, "n slots H K K"], BFloat16[Array, "n slots H WX"], BFloat16[Array, "B H K"]]:
    """KDA between its two large products, for one token of each of the first ``used`` sequences.

    Their states and windows change where they lie in the pools; the outputs of other rows are zeros.

    Args:
        y: ``qkvfg_proj`` of the layer's input: q, k, v, the decay's and the output gate's input of each head.
        x: The layer's input, normed.
    """
    row = jax.ShapeDtypeStruct((y.shape[0], y.shape[1], config.head_dim), jnp.bfloat16)
    out = (*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (pool, windows)), row)
    make = jax.ffi.ffi_call(f"ling3_token.{geometry.kernels}", out, input_output_aliases={0: 0, 1: 1})
    bound = config.kda_lower_bound if config.kda_safe_gate else 0.0
    numbers = {"lower_bound": bound, "l2_eps": NORM_L2_EPS, "eps": config.rms_norm_eps}
    attributes = {"devices": np.int32(geometry.tp)} | {name: np.float32(value) for name, value in numbers.items()}
    pool, windows, heads = make(pool, windows, y, x, *weights, jnp.int32(layer), slot, used, **attributes)
    return pool, windows, heads


def best(logits: Float32[Array, "R v"], offset: Int32[Array, ""], geometry: Geometry) -> Float32[Array, "3 R"]:
    """``sample.best_of_own``; ``offset`` is the token of the first column."""
    return _call("best", geometry, (3, logits.shape[0]), logits, offset)


def attention(
    query: BFloat16[Array, "B H row"],
    pool: BFloat16[Array, "n pages page row"],
    layer: Index,
    table: Int32[Array, "B M"],
    length: Int32[Array, "B"],
    rank: int,
    geometry: Geometry,
) -> Float32[Array, "B H R"]:
    """Absorbed attention of each sequence over its first ``length`` cached tokens; zeros where that is 0.

    ``query`` is scaled, and zero beyond latent and rope; ``rank`` is R, the part of a row that is also the value. No
    page beyond ``length`` is read.
    """
    return _call("attention", geometry, (*query.shape[:2], rank), query, pool, jnp.int32(layer), table, length)
