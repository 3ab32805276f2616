"""A decode step cut at each layer's experts: what attention processes compute, what FFN workers compute, and the joint.

One layer's way, for the B tokens of a micro batch and the Y pairs of a token and one of its experts:

    attend@B    hidden -> residual, tokens, expert ids and weights; the state of the sequences goes on
    dispatch@Y  tokens of many micro batches -> the same, ordered by layer and expert (``ffn_worker_batching``)
    experts@Y   ordered tokens -> what each token's expert makes of it
    combine@B   residual + the weighted sum of a token's results -> hidden
    head@B      the last hidden -> logits

``attend`` holds all that is not a routed expert: the embedding (layer 0), dense layers, the shared expert. Which layer
a call computes is a number of its batch. Layers of one kind share code where their weights are stacked; where some are
arguments by layer (the form ``tiles``), every layer is a branch of its own.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

from ling3export.foundation.dtypes import MASK
from ling3export.model.decoder import Layer, Ling3, static_layer
from ling3export.model.ffn.dispatch import FLOAT16, INT8, ffn_worker_batching
from ling3export.model.geometry import AXIS
from ling3export.model.inputs import decode_rows
from ling3export.model.layers import State, fill_rows, rms_norm, swiglu, take
from ling3export.model.moe import MixtureOfExperts, route, tile_layout, tile_rows
from ling3export.model.products import times
from ling3export.model.quantized import at, leading, of_layer, value_of

Tree = dict[str, Any]


def attend(model: Ling3, state: State, fields: Tree, batch: Tree) -> tuple[State, Tree]:
    """One layer without its routed experts, of the sequences of a decode step.

    ``hidden [B, D]`` comes from the layer before it; layer 0 embeds the tokens instead.

    Returns:
        ``residual [B, D]`` in fp32, with the shared expert or the dense MLP; ``tokens [B, D]`` for the routed experts,
        in the model dtype or as rows of ``quantized``; ``expert_ids`` and ``weights [B, K]``: MASK for padding and in
        dense layers.
    """
    config, geometry, number = model.config, model.geometry, fields["layer"][0]
    count = fields["slot"].shape[0]
    fields = {name: value for name, value in fields.items() if name != "layer"}
    rows = decode_rows(fields, state["last_token"], geometry)
    hidden = fill_rows(batch["hidden"], geometry.fewest_rows)
    x = lax.cond(number == 0, lambda: model.embed(rows.token), lambda: hidden)
    layers = [static_layer(config, index) for index in range(config.num_hidden_layers)]
    keys = [layer if geometry.tiled else (layer.attention, layer.mlp) for layer in layers]
    branches = dict(zip(keys, layers, strict=True))  # a layer for each branch
    which = [list(branches).index(key) for key in keys]
    places = jnp.array([(layer.attention_index, layer.mlp_index) for layer in layers], jnp.int32)

    def run(x: jax.Array, state: State, layer: Layer) -> Any:
        if not geometry.tiled:
            layer = Layer(number, layer.attention, places[number, 0], layer.mlp, places[number, 1])
        return _half_layer(model, layer, x, state, rows)

    out, state = lax.switch(
        jnp.array(which)[number], [partial(run, layer=layer) for layer in branches.values()], x, state
    )
    return state, {name: value[:count] for name, value in out.items()}


def _half_layer(model: Ling3, layer: Layer, x: Float32[Array, "B D"], state: State, rows: Any) -> tuple[Tree, State]:
    """``Ling3.run_layer`` without the routed experts."""
    eps, dtype = model.config.rms_norm_eps, jnp.dtype(model.geometry.dtype)
    weight = take(model.layers["input_layernorm"][...], layer.number, split=False)
    part, state = model.attention(rms_norm(x, weight, eps), layer, state, rows)
    x = x + lax.psum(part, AXIS)
    normed = rms_norm(x, take(model.layers["post_attention_layernorm"][...], layer.number, split=False), eps)
    tokens = normed.astype(dtype)
    if layer.mlp == "dense":
        shape = (x.shape[0], model.config.num_experts_per_tok)
        chosen, weights = jnp.full(shape, MASK, jnp.int32), jnp.zeros(shape, jnp.float32)
        local = model.dense_mlp(normed, layer.mlp_index)
    else:
        assert model.moe is not None
        chosen, weights = route(*model.moe.scores(normed, layer.mlp_index), model.config)
        chosen = jnp.where(rows.valid[:, None], chosen, MASK)
        local = model.moe.shared(tokens, layer.mlp_index)
    residual = x + lax.psum(local, AXIS)
    tokens = quantized(normed) if model.geometry.token_dtype == "int8" else tokens
    return {"residual": residual, "tokens": tokens, "expert_ids": chosen, "weights": weights}, state


def quantized(x: Float32[Array, "B D"]) -> UInt8[Array, "B HS"]:
    """Rows of ``D`` int8 values and their fp32 scale, as bytes: the largest of a row becomes 127 or -127."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=1), 1e-30) / 127
    values = jnp.clip(jnp.round(x / scale[:, None]), -127, 127).astype(jnp.int8)
    return jnp.concatenate([lax.bitcast_convert_type(part, jnp.uint8) for part in (values, scale)], axis=1)


def dispatch(model: Any, state: State, fields: Tree, batch: Tree) -> tuple[State, Tree]:
    """The operator, for pairs that are rows of their own: so one program serves any number of sessions and tokens.

    Rows of ``token_data [Y, HS]`` are tokens, or those of ``quantized``, whose scales then come out as
    ``dynamic_scale [Y]``. ``layer_ids [Y]`` count the layers that have experts.
    """
    config, token_data = model.config, batch["token_data"]
    layers, (pairs, sent), dim = len(config.layers("moe")), token_data.shape, config.hidden_size
    kind = INT8 if token_data.dtype == jnp.uint8 else FLOAT16  # floats stay what they are
    rows = jnp.arange(pairs, dtype=jnp.int32)
    ordered = ffn_worker_batching(
        token_data.reshape(pairs, 1, 1, 1, sent),
        fields["expert_ids"].reshape(pairs, 1, 1),
        rows,
        jnp.zeros_like(rows),
        expert_num=layers * config.num_experts,
        max_out_shape=(pairs, 1, 1, dim),
        token_dtype=kind,
        layer_ids=fields["layer_ids"],
        layer_num=layers,
        out_num=fields["out_num"][0],
    )
    scale = {"dynamic_scale": ordered.dynamic_scale} if kind == INT8 else {}
    return state, scale | {
        "y": ordered.y,
        "group_list": ordered.group_list,
        "gather_idx": ordered.gather_idx,
        "actual_token_num": ordered.actual_token_num[None],
        "dropped": ordered.dropped[None],
    }


def experts(model: Ling3, state: State, fields: Tree, batch: Tree) -> tuple[State, Tree]:
    assert model.moe is not None
    return state, {"results": expert_rows(model.moe, **batch)}


def combine(model: Any, state: State, fields: Tree, batch: Tree) -> tuple[State, Tree]:
    return state, {"hidden": combine_rows(**batch)}


def expert_rows(
    moe: MixtureOfExperts,
    y: Shaped[Array, "Y D"],
    group_list: Int32[Array, "N 2"],
    dynamic_scale: Float32[Array, "Y"] | None = None,
) -> Float[Array, "Y D"]:
    """Each row through its expert, unweighted; zero for rows without an expert. ``dynamic_scale`` is that of int8 rows.

    Rows are ordered by expert number, ``layer * E + expert``, and may be of several layers. Each device multiplies the
    rows of its own experts, a tile of rows of one expert after the other; the devices' results are added up.
    """
    if dynamic_scale is not None:
        y = (y.astype(jnp.float32) * dynamic_scale[:, None]).astype(moe.geometry.dtype)
    layered, total = moe.geometry.tiled, moe.config.num_experts
    stacks = moe.experts_gate_up_proj, moe.experts_down_proj
    first: Any = stacks[0][f"{0:03}"] if layered else stacks[0]
    outer = leading(value_of(first))
    shards, per_shard = outer[0], outer[1 if layered else 2]
    count, dim = y.shape
    local, layers = shards * per_shard, group_list.shape[0] // total
    groups = group_list[:count]  # a group has a row at least, so there are no more
    ends, row = jnp.cumsum(groups[:, 1]), jnp.arange(count, dtype=jnp.int32)
    entry = jnp.searchsorted(ends, row, side="right", method="compare_all")
    number = groups[jnp.minimum(entry, len(groups) - 1), 0]
    mine = number % total - lax.axis_index(AXIS) * local
    is_local = (row < ends[-1]) & (mine >= 0) & (mine < local)
    rows = tile_rows(count, total)
    local_number = jnp.where(is_local, number // total * local + mine, layers * local)
    place, tile_expert, _, tiles = tile_layout(local_number, layers * local, rows)
    capacity = tile_expert.shape[0] * rows
    source = jnp.zeros((capacity + 1,), jnp.int32).at[place].set(row)

    def multiply(layer: int | jax.Array, expert: jax.Array, inputs: jax.Array) -> Float32[Array, "rows D"]:
        shard, number = expert // per_shard, expert % per_shard
        if layered:
            gate_up, down = (at(of_layer(stack, layer, split=True), (shard, number)) for stack in stacks)
        else:
            gate_up, down = (at(value_of(stack), (shard, layer, number)) for stack in stacks)
        wide = times(inputs, gate_up, moe.geometry)
        middle = wide.shape[1] // 2
        hidden = swiglu(wide[:, :middle], wide[:, middle:], moe.routed_limit(layer))
        return times(hidden.astype(inputs.dtype), down, moe.geometry)

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        layer, expert = tile_expert[i] // local, tile_expert[i] % local
        inputs = y[lax.dynamic_slice_in_dim(source, i * rows, rows)]
        if layered:
            branches = [lambda expert, inputs, at=at: multiply(at, expert, inputs) for at in range(layers)]
            done = lax.switch(layer, branches, expert, inputs)
        else:
            done = multiply(layer, expert, inputs)
        return lax.dynamic_update_slice_in_dim(out, done, i * rows, axis=0)

    with jax.named_scope("tiles"):
        done = lax.fori_loop(0, tiles, tile, jnp.zeros((capacity + 1, dim), jnp.float32))
    return lax.psum(jnp.where(is_local[:, None], done[place], 0.0), AXIS).astype(y.dtype)


def combine_rows(
    residual: Float32[Array, "B D"],
    results: Float[Array, "B K D"],
    expert_ids: Int32[Array, "B K"],
    weights: Float32[Array, "B K"],
) -> Float32[Array, "B D"]:
    """The layer's output: the residual plus each token's weighted results; pairs without an expert count nothing."""
    live = (expert_ids >= 0) & (expert_ids < MASK)
    values = jnp.where(live[:, :, None], results.astype(jnp.float32), 0.0)
    share = jnp.where(live, weights, 0.0)
    return residual + jnp.einsum("bkd,bk->bd", values, share, precision=lax.Precision.HIGHEST)
