"""Micro-size configurations and random weights in the published layout, for tests that need no real checkpoint.

The weights are built so that mistakes show. Norm weights are not 1, and conv taps are asymmetric. Every second KDA
layer has a tiny v, so that the output norm's eps counts. A token has more experts than kept groups, and the bias
changes choices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ling3export.checkpoint.synth import config_fields
from ling3export.model.config import Config
from ling3export.model.parameters import expected_tensors

FLOAT32_SUFFIXES = ("A_log", "dt_bias", "expert_bias")
SIZES = {
    "num_hidden_layers": 7, "layer_group_size": 3, "hidden_size": 32, "head_dim": 16, "vocab_size": 96,
    "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
    "intermediate_size": 48, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "max_position_embeddings": 512, "num_nextn_predict_layers": 0, "eos_token_id": 95,
}  # fmt: skip


def tiny_fields(**changes: Any) -> dict[str, Any]:
    """config.json of a micro model: layers KDA KDA MLA, KDA KDA MLA and an incomplete last group, MLA; one is dense."""
    return config_fields("micro", SIZES | changes)


def tiny_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Stored shapes by name, without the MTP layers. test_checkpoint.py and test_parity.py check them."""
    shapes = {name: info.shape for name, info in expected_tensors(Config.from_dict(fields)).items()}
    # the seed was chosen for this order
    first = ("model.word_embeddings.weight", "lm_head.weight", "model.norm.weight")
    return {name: shapes[name] for name in (*first, *shapes)}


def tiny_weights(fields: dict[str, Any], seed: int = 2) -> dict[str, np.ndarray]:
    """Random weights with the published names, shapes and dtypes (bf16; fp32 for A_log, dt_bias, expert_bias)."""
    rng = np.random.default_rng(seed)
    return {
        name: _tiny_tensor(name, shape, rng).astype(
            np.float32 if name.endswith(FLOAT32_SUFFIXES) else ml_dtypes.bfloat16
        )
        for name, shape in tiny_shapes(fields).items()
    }


def _tiny_tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name.endswith("norm.weight"):
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith("A_log"):
        return rng.uniform(-1, 1, shape)
    if name.endswith("dt_bias"):
        return rng.normal(-1, 1, shape)
    if name.endswith("expert_bias"):
        return rng.normal(0, 0.1, shape)
    if name.endswith("conv1d.weight"):
        return rng.normal(0, 0.5, shape)
    if name.endswith("word_embeddings.weight"):
        return rng.normal(0, 1, shape)
    scale = shape[-1] ** -0.5
    if name.endswith("v_proj.weight") and int(name.split(".")[2]) % 2 == 1:
        scale *= 2e-3
    return rng.normal(0, scale, shape)


def write_tiny(folder: Path, fields: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    """Writes a checkpoint folder of two shards, their index and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(weights)
    shards = {f"model-0000{part + 1}-of-00002.safetensors": names[part::2] for part in range(2)}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
        "weight_map": {name: file for file, held in shards.items() for name in held},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    return folder
