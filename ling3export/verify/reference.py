"""The plain model in numpy: the independent reference that programs and receipts are measured against.

Nothing here is clever: KDA is its recurrence, one token after the other; MLA expands keys and values and keeps no
pages; each chosen expert is a matrix product over the tokens that chose it. It shares no code with the product model.

Dimension letters: T tokens, D hidden. Weights stay in torch's [out, in] order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ling3export.foundation.errors import RequestError, listed
from ling3export.verify import formulas
from ling3export.verify.formulas import NO_MARGINS, Array

if TYPE_CHECKING:
    from ling3export.model.config import Config

# Fixed in the published code, whatever rms_norm_eps says: the norms of the MLA query and key-value latents.
LATENT_NORM_EPS = 1e-6
# Rows of lm_head converted at a time: bounds the memory in use.
VOCAB_BLOCK = 4096


class Reference:
    """The whole model over a checkpoint's tensors, a layer at a time.

    Memory in use beyond what ``read`` maps: the activations of all tokens, one converted tensor, and the logits asked
    for. Only the experts that some token chose are read, one after the other.

    Args:
        read: Returns a tensor of the checkpoint by name, in any float dtype and in torch's order.
        dtype: Precision of everything but the rotary angles: float64, or float32 where time matters.

    Attributes:
        margins: The closest routing decisions over all tokens and layers of the last call.
        observer: Gets values inside the model: ``(layer, name, value)``. Names are ``embed`` (layer -1), ``attention``
            and ``mlp``: the residual stream of all tokens [T, D] after that step, which must not be kept. And the state
            after each sequence, in order: ``kda_conv`` [W-1, 3, H, K], ``kda_recurrent`` [H, K, V], and ``mla_latent``
            [T, R + P].
    """

    def __init__(self, config: Config, read: Callable[[str], Array], dtype: DTypeLike = np.float64) -> None:
        self.config = config
        self.dtype = np.dtype(dtype)
        self.margins = NO_MARGINS
        self.observer: Callable[[int, str, Array], None] | None = None
        self._read = read

    def logits(self, token_ids: Sequence[int]) -> Array:
        """Logits at every position of one sequence: [T, vocab_size]. Raises RequestError for an unknown token."""
        return self.logits_many([token_ids])[0]

    def logits_many(
        self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]] | None = None
    ) -> list[Array]:
        """Logits of several sequences, streaming each layer's weights once for all of them.

        Args:
            sequences: Token ids; each sequence starts at position 0 from an empty state.
            positions: For each sequence the positions whose logits are wanted; None for all.

        Returns:
            For each sequence [number of its positions, vocab_size].

        Raises:
            RequestError: A token id is outside the vocabulary.
        """
        ids = self._checked(sequences)
        ends = np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64)
        spans = [slice(int(end) - len(sequence), int(end)) for sequence, end in zip(sequences, ends, strict=True)]
        self.margins = NO_MARGINS
        x = self._read("model.word_embeddings.weight")[ids].astype(self.dtype)
        self._observe(-1, "embed", x)
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, f"{prefix}input_layernorm")
            attend = self._mla if self._is_mla(layer) else self._kda
            x += attend(normed, spans, layer, f"{prefix}attention.")
            self._observe(layer, "attention", x)
            normed = self._norm(x, f"{prefix}post_attention_layernorm")
            dense = layer < self.config.first_k_dense_replace
            x += self._mlp(normed, f"{prefix}mlp.") if dense else self._moe(normed, layer, f"{prefix}mlp.")
            self._observe(layer, "mlp", x)
        wanted = [x[span] if positions is None else x[span][list(positions[i])] for i, span in enumerate(spans)]
        return self.head(wanted)

    def _observe(self, layer: int, name: str, value: Array) -> None:
        if self.observer is not None:
            self.observer(layer, name, value)

    def _checked(self, sequences: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        ids = np.array([token for sequence in sequences for token in sequence], np.int64)
        wrong = [str(token) for token in ids if not 0 <= token < self.config.vocab_size]
        if wrong:
            raise RequestError(
                f"token `token_ids`: expected 0 to {self.config.vocab_size - 1}, found {listed(wrong)}, in the prompt"
            )
        return ids

    def _is_mla(self, layer: int) -> bool:
        """The last layer of each group, and all of an incomplete last group; or the layers that the config names."""
        if self.config.full_attn_layers is not None:
            return layer in self.config.full_attn_layers
        size, layers = self.config.layer_group_size, self.config.num_hidden_layers
        return (layer + 1) % size == 0 or layer >= layers // size * size

    def _weight(self, name: str) -> Array:
        return self._read(f"{name}.weight").astype(self.dtype)

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self._weight(name).T

    def _norm(self, x: Array, name: str, eps: float | None = None) -> Array:
        return formulas.rms_norm(x, self._weight(name), self.config.rms_norm_eps if eps is None else eps)

    def _kda(self, x: Array, spans: list[slice], layer: int, prefix: str) -> Array:
        """Kimi delta attention of all sequences: x [T, D] → [T, D]."""
        heads, width = self.config.num_attention_heads, self.config.head_dim
        split = (len(x), heads, width)
        mixed, before = {}, self.config.short_conv_kernel_size - 1
        tails = np.zeros((len(spans), before, 3, heads, width), self.dtype)
        for at, name in enumerate("qkv"):
            raw, taps = self._linear(x, f"{prefix}{name}_proj"), self._weight(f"{prefix}{name}_conv1d")[:, 0]
            for span, tail in zip(spans, tails, strict=True):
                last = raw[span][-before:].reshape(-1, heads, width)
                tail[before - len(last) :, at] = last
                raw[span] = formulas.silu(formulas.causal_conv(raw[span], taps))
            mixed[name] = raw.reshape(split)
        q, k = formulas.l2_norm(mixed["q"]) * width**-0.5, formulas.l2_norm(mixed["k"])
        log_decay = formulas.kda_log_decay(
            self._linear(x, f"{prefix}f_proj").reshape(split),
            self._read(f"{prefix}A_log").astype(self.dtype),
            self._read(f"{prefix}dt_bias").astype(self.dtype).reshape(heads, width),
            self.config.kda_lower_bound if self.config.kda_safe_gate else None,
        )
        beta = formulas.sigmoid(self._linear(x, f"{prefix}b_proj"))
        out = mixed["v"]
        for span, tail in zip(spans, tails, strict=True):
            out[span], state = formulas.kda_recurrence(q[span], k[span], out[span], log_decay[span], beta[span])
            self._observe(layer, "kda_conv", tail)
            self._observe(layer, "kda_recurrent", state)
        gate = formulas.sigmoid(self._linear(x, f"{prefix}g_proj")).reshape(split)
        return self._linear((self._norm(out, f"{prefix}o_norm") * gate).reshape(len(x), -1), f"{prefix}o_proj")

    def _mla(self, x: Array, spans: list[slice], layer: int, prefix: str) -> Array:
        """Gated multi-head latent attention of all sequences, keys and values expanded: x [T, D] → [T, D]."""
        config, tokens = self.config, len(x)
        heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        if config.q_lora_rank is None:
            q = self._linear(x, f"{prefix}q_proj")
        else:
            q = self._norm(self._linear(x, f"{prefix}q_a_proj"), f"{prefix}q_a_layernorm", LATENT_NORM_EPS)
            q = self._linear(q, f"{prefix}q_b_proj")
        q = q.reshape(tokens, heads, nope + config.qk_rope_head_dim)
        kv = self._linear(x, f"{prefix}kv_a_proj_with_mqa")
        latent = self._norm(kv[:, :rank], f"{prefix}kv_a_layernorm", LATENT_NORM_EPS)
        expanded = self._linear(latent, f"{prefix}kv_b_proj").reshape(tokens, heads, nope + config.v_head_dim)
        out = np.empty((tokens, heads, config.v_head_dim), self.dtype)
        yarn = asdict(config.rope_scaling) if config.rope_scaling else None
        whole = formulas.yarn_magnitude(yarn, "mscale_all_dim")
        factor, scale = formulas.yarn_magnitude(yarn, "mscale") / whole, q.shape[-1] ** -0.5 * whole**2
        for span in spans:
            angles = formulas.rope_angles(span.stop - span.start, config.qk_rope_head_dim, config.rope_theta, yarn)
            roped = formulas.rope(kv[span, None, rank:], angles, factor)
            self._observe(layer, "mla_latent", np.concatenate([latent[span], roped[:, 0]], axis=-1))
            shared = np.repeat(roped, heads, axis=1)
            keys = np.concatenate([expanded[span, :, :nope], shared], axis=-1)
            queries = np.concatenate([q[span, :, :nope], formulas.rope(q[span, :, nope:], angles, factor)], axis=-1)
            out[span] = formulas.causal_attention(queries, keys, expanded[span, :, nope:], scale)
        gate = formulas.sigmoid(self._linear(x, f"{prefix}g_proj"))
        return self._linear((out * gate[:, :, None]).reshape(tokens, -1), f"{prefix}dense")

    def _mlp(self, x: Array, prefix: str, limit: float = 0.0) -> Array:
        """down(silu(gate x) * up x): x [T, D] → [T, D]; with a limit L, min(silu(gate x), L) * clip(up x, -L, L)."""
        gate, up = formulas.silu(self._linear(x, f"{prefix}gate_proj")), self._linear(x, f"{prefix}up_proj")
        if limit:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return self._linear(gate * up, f"{prefix}down_proj")

    def _moe(self, x: Array, layer: int, prefix: str) -> Array:
        """Σ weight · expert(x) over the chosen experts + shared_expert(x): x [T, D] → [T, D]."""
        config = self.config
        scores = formulas.sigmoid(self._linear(x, f"{prefix}gate"))
        bias = self._read(f"{prefix}gate.expert_bias").astype(self.dtype)
        routing = formulas.route(
            scores, bias, config.n_group, config.topk_group, config.num_experts_per_tok, config.routed_scaling_factor
        )
        self.margins = self.margins.smaller(routing.margins)
        limits = self.config.expert_swiglu_limit_list, self.config.share_expert_swiglu_limit_list
        routed, shared = (0.0 if of_layers is None else of_layers[layer] for of_layers in limits)
        out = self._mlp(x, f"{prefix}shared_experts.", shared)
        for expert in np.unique(routing.experts):
            tokens, choice = np.nonzero(routing.experts == expert)
            weights = routing.weights[tokens, choice, None]
            out[tokens] += weights * self._mlp(x[tokens], f"{prefix}experts.{expert}.", routed)
        return out

    def head(self, rows: list[Array]) -> list[Array]:
        """Logits of residual streams, each [T, D], converting a block of the vocabulary at a time."""
        rows = [self._norm(x, "model.norm") for x in rows]
        weight = self._read("lm_head.weight")
        out = [np.empty((len(x), len(weight)), self.dtype) for x in rows]
        for start in range(0, len(weight), VOCAB_BLOCK):
            block = weight[start : start + VOCAB_BLOCK].astype(self.dtype).T
            for x, logits in zip(rows, out, strict=True):
                logits[:, start : start + VOCAB_BLOCK] = x @ block
        return out
