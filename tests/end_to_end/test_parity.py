"""Our logits against Hugging Face transformers, which runs in an interpreter of its own (`make parity`)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ling3export.model.config import Config
from ling3export.verify.reference import Reference
from tests.support.tiny import tiny_fields, tiny_weights, write_tiny
from tests.support.transformers_peer import transformers_logits

pytestmark = pytest.mark.extras

ROOT = Path(__file__).resolve().parents[2]
# Both compute in float64; the rest is transformers' fp32 cosine and sine of the rotary angles (measured 3e-8).
TOLERANCE = 2e-7
LENGTHS = (1, 3, 70, 130)  # shorter than the conv, and more than one and two of transformers' chunks of 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "beta_fast": 4, "beta_slow": 0.1}
VARIANTS: dict[str, dict[str, Any]] = {
    "flat": {"q_lora_rank": None},
    "q_lora": {"q_lora_rank": 12},
    "softplus": {"kda_safe_gate": False},
    "deep": {"first_k_dense_replace": 3, "num_hidden_layers": 8, "num_shared_experts": 2},
    # Positions within and beyond the original context: one of four pairs is unchanged, one interpolated, two divided by
    # the factor.
    "yarn": {"qk_rope_head_dim": 8, "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    # A small Ling-3.0-flash, without the limits of SwiGLU, which transformers' model does not have.
    "flash": {"qk_rope_head_dim": 8, "rope_scaling": YARN, "q_lora_rank": None, "first_k_dense_replace": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_equals_transformers(variant: str, tmp_path: Path):
    fields = tiny_fields(**VARIANTS[variant])
    weights = tiny_weights(fields)
    prompts = [np.random.default_rng(n).integers(0, fields["vocab_size"], n).tolist() for n in LENGTHS]
    theirs = transformers_logits(write_tiny(tmp_path / "checkpoint", fields, weights), prompts)
    reference = Reference(Config.from_dict(fields), weights.__getitem__)
    for found, expected in zip(theirs, reference.logits_many(prompts), strict=True):
        errors = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert errors.max() < TOLERANCE
    assert min(reference.margins) > 5e-6
