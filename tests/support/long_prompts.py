"""Long prompts: a model whose attention over 100,000 tokens takes seconds, and the plain model's logits at some of
them.

The model has no routed experts: among 100,000 tokens, some choices would be so close to a tie that rounding decides.
"""

from collections.abc import Sequence
from unittest import mock

import numpy as np

from ling3export.verify import formulas
from ling3export.verify.reference import Reference

FIELDS = {
    "num_hidden_layers": 2, "layer_group_size": 2, "first_k_dense_replace": 2, "num_nextn_predict_layers": 0,
    "num_attention_heads": 2, "head_dim": 32, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64,
    "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "eos_token_id": 63,
    "rope_theta": 6e6, "max_position_embeddings": 131072,
}  # fmt: skip


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens; a shorter prompt with the same seed is the beginning of a longer one."""
    return np.random.default_rng(seed).integers(0, FIELDS["vocab_size"], length).tolist()


def logits_at(reference: Reference, ids: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """The plain model's logits at ``positions``.

    The last layer attends only at these positions, since no later layer reads the others: all pairs of 100,000 tokens
    are 5e9 for each head.
    """
    plain = formulas.causal_attention

    def rows_alone(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
        out = np.zeros_like(v)
        for position in positions:
            scores = scale * np.einsum("hk,thk->ht", q[position], k[: position + 1])
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[position] = np.einsum("ht,thv->hv", weights, v[: position + 1])
        return out

    last_alone = reference.config.attention_kinds.count("mla") == 1 and reference.config.attention_kinds[-1] == "mla"
    with mock.patch.object(formulas, "causal_attention", rows_alone if last_alone else plain):
        return reference.logits_many([ids], [positions])[0]
