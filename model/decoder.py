"""The whole model of one device: embedding, layers, final norm, logits.

``Ling3`` runs inside ``shard_map``: its parameters are this device's TP shards. Each layer has two all-reduces of fp32
partial sums, after attention and after the MLP; rounding the sums first would make results depend on TP.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.inputs import Chunks, DecodeRows, chunks_of
from ling3export.model.kda.layer import KimiDeltaAttention
from ling3export.model.kda.recurrence import is_factored
from ling3export.model.layers import IN_BOUNDS, Index, State, fill_rows, rms_norm, take
from ling3export.model.mla.layer import GatedMLA
from ling3export.model.moe import MixtureOfExperts
from ling3export.model.parameters import parameters
from ling3export.model.products import gated_mlp, vocab_parallel
from ling3export.model.quantized import exact, value_of
from ling3export.model.scopes import LOOPS, ONE_LAYER

Batch = DecodeRows | Chunks


class Layer(NamedTuple):
    """The rows of the stacks that a layer uses; the indices are traced inside the loop over groups.

    ``mlp`` is ``dense``, ``moe``, or ``either``: decided when it runs, by ``mlp_index``, which then is the layer's.
    """

    number: Index
    attention: str
    attention_index: Index
    mlp: str
    mlp_index: Index


class Ling3(nnx.Module):
    """Parameters as ``model/parameters.py`` lists them, this device's part."""

    def __init__(self, config: Config, geometry: Geometry) -> None:
        self.config, self.geometry = config, geometry
        weights: dict[str, dict[str, Any]] = {}
        for parameter in parameters(config, geometry):
            shape = parameter.shape
            if parameter.split:
                shape = (shape[0] // geometry.tp, *shape[1:])
            stack, *inner, last = parameter.path
            into: Any = weights.setdefault(stack, {})
            for key in inner:
                if key not in into:
                    into[key] = nnx.Dict({})
                into = into[key]
            into[last] = nnx.Param(jnp.zeros(shape, parameter.dtype))
        self.embeddings, self.layers = nnx.Dict(weights["embeddings"]), nnx.Dict(weights["layers"])
        self.kda = KimiDeltaAttention(config, geometry, weights["kda"]) if "kda" in weights else None
        self.mla = GatedMLA(config, geometry, weights["mla"]) if "mla" in weights else None
        self.moe = MixtureOfExperts(config, geometry, weights["moe"]) if "moe" in weights else None
        self.dense = nnx.Dict(weights["dense"]) if "dense" in weights else None

    @jax.named_scope("embed")
    def embed(self, tokens: Int32[Array, "T"]) -> Float32[Array, "T D"]:
        """Embeddings of tokens; each device looks up its own rows of the vocabulary."""
        table = value_of(self.embeddings["word_embeddings"])
        table = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), table)
        count = self.config.vocab_size // self.geometry.tp
        local = tokens - lax.axis_index(AXIS) * count
        inside = (local >= 0) & (local < count)
        at = jnp.where(inside, local, 0)
        rows = exact(jax.tree.map(lambda leaf: leaf.at[at].get(mode=IN_BOUNDS), table))
        return lax.psum(jnp.where(inside[:, None], rows, 0.0), AXIS)

    @jax.named_scope("logits")
    def logits(self, x: Float32[Array, "R D"]) -> Float32[Array, "R v"]:
        """Logits of this device's v = V/TP rows of the vocabulary, from ``x`` before the final norm."""
        x = rms_norm(x, self.embeddings["norm"][...], self.config.rms_norm_eps, self.geometry.sums).astype(
            jnp.dtype(self.geometry.dtype)
        )
        filled = fill_rows(x, self.geometry.fewest_rows)
        return vocab_parallel(filled, self.embeddings["lm_head"], self.geometry)[: x.shape[0]]

    def attention(
        self, x: Float32[Array, "T D"], layer: Layer, state: State, batch: Batch
    ) -> tuple[Float32[Array, "T D"], State]:
        attention = self.kda if layer.attention == "kda" else self.mla
        assert attention is not None
        if isinstance(batch, DecodeRows):
            return attention.decode(x, layer.attention_index, state, batch)
        return attention.prefill(x, layer.attention_index, state, batch)

    def _mlp(self, x: Float32[Array, "T D"], layer: Layer, valid: Bool[Array, "T"]) -> Float32[Array, "T D"]:
        if layer.mlp == "dense":
            return self.dense_mlp(x, layer.mlp_index)
        if layer.mlp == "moe":
            return self._moe_mlp(x, layer.mlp_index, valid)
        # Inside the loop over groups: the first layers are dense. Each branch clamps the index that is not its own.
        first = self.config.first_k_dense_replace
        return lax.cond(
            layer.mlp_index < first,
            lambda x: self.dense_mlp(x, jnp.minimum(layer.mlp_index, first - 1)),
            lambda x: self._moe_mlp(x, jnp.maximum(layer.mlp_index - first, 0), valid),
            x,
        )

    def _moe_mlp(self, x: jax.Array, index: Index, valid: jax.Array) -> jax.Array:
        assert self.moe is not None
        return self.moe(x, index, valid)

    @jax.named_scope("dense_mlp")
    def dense_mlp(self, x: jax.Array, index: Index) -> jax.Array:
        assert self.dense is not None
        x = x.astype(self.geometry.dtype)
        return gated_mlp(x, self.dense["gate_up_proj"], self.dense["down_proj"], index, self.geometry)

    def run_layer(
        self, layer: Layer, x: Float32[Array, "T D"], state: State, batch: Batch
    ) -> tuple[Float32[Array, "T D"], State]:
        """One pre-norm layer; ``x`` is the same on every device before and after it."""
        out, state = self.attention(self._normed(x, "input_layernorm", layer), layer, state, batch)
        with jax.named_scope(layer.attention), jax.named_scope("reduce"):
            x = self._without_padding(self._add(x, out), batch)
        out = self._mlp(self._normed(x, "post_attention_layernorm", layer), layer, batch.valid)
        with jax.named_scope("dense_mlp" if layer.mlp == "dense" else "experts"), jax.named_scope("reduce"):
            return self._add(x, out), state

    @jax.named_scope("norm")
    def _normed(self, x: Float32[Array, "T D"], name: str, layer: Layer) -> Float32[Array, "T D"]:
        weight = take(self.layers[name][...], layer.number, split=False)
        return rms_norm(x, weight, self.config.rms_norm_eps, self.geometry.sums)

    def _add(self, x: Float32[Array, "T D"], out: Float32[Array, "T D"]) -> Float32[Array, "T D"]:
        """``x`` and the sum of all devices' ``out``.

        In the form ``tiles`` the first device's part has ``x`` in it: XLA:TPU adds it where it computes ``out``, and
        an addition after the all-reduce would be an operation of its own.
        """
        if self.geometry.tiled:
            return lax.psum(out + jnp.where(lax.axis_index(AXIS) == 0, x, 0.0), AXIS)
        return x + lax.psum(out, AXIS)

    def _without_padding(self, x: Float32[Array, "T D"], batch: Batch) -> Float32[Array, "T D"]:
        """Rows of padding as zeros, for native kernels pass over zeros at the end; nothing else looks at them."""
        return jnp.where(batch.valid[:, None], x, 0.0) if self.geometry.kernels else x

    def run_layers(self, x: Float32[Array, "T D"], state: State, batch: Batch) -> tuple[Float32[Array, "T D"], State]:
        """All layers: one by one, or in a loop over whole groups and then an incomplete last one.

        The loop compiles each kind of layer once, whatever the depth.
        """
        config, size = self.config, self.config.layer_group_size
        groups = config.groups if not self.geometry.tiled else 0
        carry = (self._without_padding(x, batch), state)
        if groups:
            carry = lax.fori_loop(0, groups, self._group(batch), carry)
        for index in range(groups * size, config.num_hidden_layers):
            with jax.named_scope(ONE_LAYER.format(index)):
                carry = self.run_layer(static_layer(config, index), *carry, batch)
        return carry

    def chunks(self, fields: dict[str, Int32[Array, "..."]]) -> Chunks:
        """The chunks of a prefill call, with what KDA's form needs of them."""
        tiled = self.kda is not None and self.geometry.tiled and is_factored(self.config)
        return chunks_of(fields, self.config.short_conv_kernel_size - 1 if tiled else None)

    def _group(self, batch: Batch) -> Callable[[jax.Array, tuple[jax.Array, State]], tuple[jax.Array, State]]:
        """The body of the loop over groups: a loop over its KDA layers, then its MLA layer."""
        config, size = self.config, self.config.layer_group_size

        def layer(index: jax.Array, attention: str, attention_index: jax.Array) -> Layer:
            kinds = {
                mlp for kind, mlp in zip(config.attention_kinds, config.mlp_kinds, strict=True) if kind == attention
            }
            if len(kinds) == 2:
                return Layer(index, attention, attention_index, "either", index)
            mlp = kinds.pop()
            return Layer(index, attention, attention_index, mlp, index - (mlp == "moe") * config.first_k_dense_replace)

        def group(g: jax.Array, carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
            def kda(j: jax.Array, carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
                with jax.named_scope(LOOPS["kda"]):
                    return self.run_layer(layer(g * size + j, "kda", g * (size - 1) + j), *carry, batch)

            if size > 1:
                carry = lax.fori_loop(0, size - 1, kda, carry)
            with jax.named_scope(LOOPS["mla"]):
                return self.run_layer(layer(g * size + size - 1, "mla", g), *carry, batch)

        return group


def static_layer(config: Config, index: int) -> Layer:
    """The stacks' rows for a layer whose index is known when tracing."""
    attention, mlp = config.attention_kinds[index], config.mlp_kinds[index]
    return Layer(index, attention, config.layers(attention).index(index), mlp, config.layers(mlp).index(index))
