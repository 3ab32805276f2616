"""The demo's training loss, from the product's own layer functions, over whole sequences from fresh state.

The served steps have loops whose length depends on data, and update pools in place: neither has a gradient. So this
module connects the same layers without pools. KDA runs its chunks one after the other, MLA attends within the sequence,
and every expert runs on every token, weighted by the router.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ling3export.model.config import Config
from ling3export.model.decoder import Layer, Ling3, static_layer
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.model.inputs import Chunks, chunks_of
from ling3export.model.kda import layer as kda
from ling3export.model.kda.recurrence import ChunkTerms, Inputs, chunk_step, chunk_terms, is_factored
from ling3export.model.layers import rms_norm, take
from ling3export.model.moe import route
from ling3export.model.program import bind

Tree = dict[str, Any]


class Sums(NamedTuple):
    """Sums over rows: weighted loss, its weight, right answer tokens, answer tokens, tokens by MoE layer and expert."""

    loss: jax.Array
    weight: jax.Array
    right: jax.Array
    answers: jax.Array
    load: jax.Array


def geometry(config: Config, dtype: str = "float32") -> Geometry:
    """One device, with pools that are never used."""
    return Geometry(tp=1, dtype=dtype, slots=1, pages=1, page_size=CHUNK, max_pages=1, latent_row=config.latent_dim)


def one_sequence(length: int) -> Chunks:
    """The chunks of ``length`` token slots, all of one fresh sequence."""
    count = length // CHUNK
    one = jnp.ones((count,), jnp.int32)
    return chunks_of(
        {
            "chunk_slot": one,
            "chunk_start": CHUNK * jnp.arange(count, dtype=jnp.int32),
            "chunk_len": CHUNK * one,
            "fresh": (jnp.arange(count) == 0).astype(jnp.int32),
            "page_table": one[:, None],
        }
    )


def attend_kda(layers: kda.KimiDeltaAttention, x: jax.Array, layer: int) -> jax.Array:
    """``x [B, T, D]`` to ``[B, T, D]``: chunk after chunk, all sequences at once."""
    batch, length, width = x.shape
    raw, g, gate, beta = layers._project(x.reshape(-1, width), layer)
    raw, g, beta = (y.reshape(batch, length, *y.shape[1:]) for y in (raw, g, beta))
    history = jnp.zeros((batch, layers.config.short_conv_kernel_size - 1, *raw.shape[2:]), raw.dtype)
    conv = kda.causal_conv(history, raw, layers._taps(layer)[:, 0])
    inputs = layers._inputs(conv, g, beta)
    heads, key = g.shape[2:]
    terms = chunk_terms(Inputs(*(y.reshape(-1, CHUNK, *y.shape[2:]) for y in inputs)), is_factored(layers.config))
    steps = (jnp.swapaxes(y.reshape(batch, -1, *y.shape[1:]), 0, 1) for y in terms)
    state = jnp.zeros((batch, heads, key, key), jnp.float32)
    _, out = lax.scan(jax.vmap(chunk_step), state, ChunkTerms(*steps))  # [N, B, H, C, K]
    out = jnp.transpose(out, (1, 0, 3, 2, 4)).reshape(batch * length, heads, key)
    return layers._output(out, gate, layer, x.dtype).reshape(batch, length, -1)


def attend_mla(model: Ling3, x: jax.Array, layer: int, chunks: Chunks) -> jax.Array:
    """``x [T, D]`` to ``[T, D]``."""
    mla = model.mla
    assert mla is not None
    p = mla._project(x, layer, chunks.position)
    part = mla._within(p, layer, chunks)
    return mla._output(part.acc / part.l[..., None], p, layer)


def all_experts(model: Ling3, x: jax.Array, index: int) -> tuple[jax.Array, jax.Array]:
    """A MoE layer of ``x [B, T, D]`` fp32, normed, in which every expert runs on every token.

    Returns:
        Its output, of x's shape, and how many tokens choose each expert: ``[E]``, without a gradient.
    """
    assert model.moe is not None
    rows, dtype = x.reshape(-1, x.shape[-1]), jnp.dtype(model.geometry.dtype)
    chosen, share = route(*model.moe.scores(rows, index), model.config)
    places = jax.nn.one_hot(chosen, model.config.num_experts)
    weights = jnp.einsum("tae,ta->et", places, share, precision=lax.Precision.HIGHEST)
    out = model.moe.all_local(rows.astype(dtype), index, weights) + model.moe.shared(rows.astype(dtype), index)
    return out.reshape(x.shape), jnp.sum(lax.stop_gradient(weights) > 0, axis=1, dtype=jnp.float32)


def run_layer(model: Ling3, x: jax.Array, layer: Layer, chunks: Chunks) -> tuple[jax.Array, jax.Array | None]:
    """``x [B, T, D]`` fp32 through one layer; and the load of its experts, where it has any."""
    assert isinstance(layer.number, int) and isinstance(layer.attention_index, int) and isinstance(layer.mlp_index, int)
    eps, dtype = model.config.rms_norm_eps, jnp.dtype(model.geometry.dtype)
    normed = rms_norm(x, take(model.layers["input_layernorm"][...], layer.number, split=False), eps).astype(dtype)
    if layer.attention == "kda":
        assert model.kda is not None
        x = x + attend_kda(model.kda, normed, layer.attention_index)
    else:
        index = layer.attention_index
        x = x + jax.vmap(lambda rows: attend_mla(model, rows, index, chunks))(normed)
    normed = rms_norm(x, take(model.layers["post_attention_layernorm"][...], layer.number, split=False), eps)
    if layer.mlp == "moe":
        out, load = all_experts(model, normed, layer.mlp_index)
        return x + out, load
    return x + jax.vmap(lambda rows: model._mlp(rows, layer, chunks.valid))(normed), None


def logits(model: Ling3, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``tokens [B, T]`` to fp32 logits ``[B, T, V]``, and the loads ``[MoE layers, E]``; inside ``shard_map``."""
    batch, length = tokens.shape
    chunks = one_sequence(length)
    x = model.embed(tokens.reshape(-1)).reshape(batch, length, -1)
    load = []
    for index in range(model.config.num_hidden_layers):
        x, chosen = run_layer(model, x, static_layer(model.config, index), chunks)
        load += [] if chosen is None else [chosen]
    return model.logits(x.reshape(batch * length, -1)).reshape(batch, length, -1), jnp.stack(load)


def sums_of(config: Config, params: Tree, batch: dict[str, jax.Array], form: Geometry) -> tuple[jax.Array, Sums]:
    """The summed loss and the counts.

    Args:
        config: The model.
        params: Its parameters.
        batch: ``tokens [B, T + 1]``; the ``weight [B, T]`` of each predicted token, and whether it is part of an
            ``answer [B, T]``.
        form: The result of :func:`geometry`.
    """
    model = bind(config, form)(params)
    scores, load = logits(model, batch["tokens"][:, :-1])
    wanted = batch["tokens"][:, 1:]
    spread = jax.nn.logsumexp(scores, axis=-1)
    loss = spread - jnp.take_along_axis(scores, wanted[..., None], axis=-1)[..., 0]
    weighted = jnp.sum(loss * batch["weight"])
    answer = batch["answer"]
    right = jnp.sum((jnp.argmax(scores, axis=-1) == wanted) & answer, dtype=jnp.float32)
    return weighted, Sums(weighted, jnp.sum(batch["weight"]), right, jnp.sum(answer, dtype=jnp.float32), load)
