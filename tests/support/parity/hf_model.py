"""Loads a checkpoint of the published layout into Hugging Face transformers' `bailing_hybrid` model.

Runs in an interpreter of its own (torch, transformers, numpy, safetensors) and imports nothing of this project, so that
it is an independent second implementation. It maps tensors by exact name instead of calling `from_pretrained`, because
transformers knows only the flat query projection and shared experts as wide as the routed ones. Where a checkpoint
differs, these modules are replaced.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as modeling
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig

# Fields with the same name and meaning on both sides. `head_dim` is KDA's; transformers later overwrites it with the
# rope width.
SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "routed_scaling_factor",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
    "qk_nope_head_dim",
    "n_group",
    "topk_group",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "norm_topk_prob",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "head_dim",
    "short_conv_kernel_size",
    "layer_group_size",
    "kda_safe_gate",
    "kda_lower_bound",
)
# transformers keeps these in fp32, whatever the model's dtype.
FLOAT32_PARTS = ("e_score_correction_bias", "conv1d", "dt_bias", "A_log")
RENAMED = {
    "attention.A_log": "self_attn.forget_gate.A_log",
    "attention.dt_bias": "self_attn.forget_gate.dt_bias",
    "attention.f_proj.weight": "self_attn.forget_gate.f_proj.weight",
    "attention.dense.weight": "self_attn.o_proj.weight",
    "attention.q_a_proj.weight": "self_attn.q_proj.0.weight",
    "attention.q_a_layernorm.weight": "self_attn.q_proj.1.weight",
    "attention.q_b_proj.weight": "self_attn.q_proj.2.weight",
    "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
}


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def hf_config(fields: dict, *, attention: str, experts: str | None) -> BailingHybridConfig:
    """The configuration in transformers' names. An incomplete last layer group has to be declared as MLA."""
    if limits := [name for name in fields if name.endswith("swiglu_limit_list") and fields[name]]:
        raise SystemExit(f"transformers' model has no limits of SwiGLU: found {', '.join(limits)}")
    layers, size = fields["num_hidden_layers"], fields["layer_group_size"]
    mla = [(layer + 1) % size == 0 or layer >= layers - layers % size for layer in range(layers)]
    config = BailingHybridConfig(
        **{name: fields[name] for name in SAME_FIELDS},
        num_key_value_heads=fields["num_attention_heads"],
        n_shared_experts=fields["num_shared_experts"],
        num_local_experts=fields["num_experts"],
        num_mtp_layers=0,
        rope_scaling=fields["rope_scaling"],
        layer_types=["full_attention" if full else "linear_attention" for full in mla],
        pad_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = attention
    config._experts_implementation = experts
    return config


def load(
    folder: Path, dtype: torch.dtype, *, attention: str = "eager", experts: str | None = "eager"
) -> modeling.BailingHybridForCausalLM:
    """Loads the model in evaluation mode, converting one tensor at a time.

    Args:
        folder: A checkpoint of the published layout.
        dtype: Dtype of the weights; with bfloat16, the parts that transformers keeps in fp32 stay fp32.
        attention: transformers' attention implementation: eager or sdpa.
        experts: transformers' experts implementation: eager, batched_mm, grouped_mm; None for its default.

    Raises:
        SystemExit: A tensor is left over or missing.
    """
    fields = json.loads((folder / "config.json").read_text())
    config = hf_config(fields, attention=attention, experts=experts)
    with torch.device("meta"):
        model = modeling.BailingHybridForCausalLM(config)
        if fields["q_lora_rank"] is not None:
            _replace_query(model, config, fields["q_lora_rank"])
        if fields["moe_shared_expert_intermediate_size"] != fields["moe_intermediate_size"]:
            _replace_shared(model, config, fields["moe_shared_expert_intermediate_size"])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data = tensor.data.to(torch.float32 if _is_float32(name, dtype) else dtype)
    model.to_empty(device="cpu")
    model.model.rotary_emb = modeling.BailingHybridRotaryEmbedding(config)
    _fill(model, folder, fields)
    return model.eval().requires_grad_(False)


def _is_float32(name: str, dtype: torch.dtype) -> bool:
    return dtype != torch.float64 and any(part in name for part in FLOAT32_PARTS)


def _replace_query(model: nn.Module, config: BailingHybridConfig, rank: int) -> None:
    """Replaces q_proj by q_b(norm(q_a x)), named q_proj.0, .1 and .2."""
    width = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    for layer, kind in zip(model.model.layers, config.layer_types, strict=True):
        if kind == "full_attention":
            layer.self_attn.q_proj = nn.Sequential(
                nn.Linear(config.hidden_size, rank, bias=False),
                modeling.BailingHybridRMSNorm(rank),
                nn.Linear(rank, width, bias=False),
            )


def _replace_shared(model: nn.Module, config: BailingHybridConfig, width: int) -> None:
    """Replaces the shared experts by ones that are `width` wide."""
    for layer in model.model.layers[config.first_k_dense_replace :]:
        layer.mlp.shared_experts = modeling.BailingHybridMLP(config, width * config.n_shared_experts)


@torch.no_grad()
def _fill(model: nn.Module, folder: Path, fields: dict) -> None:
    targets = dict(model.named_parameters())
    targets |= {name: buffer for name, buffer in model.named_buffers() if "rotary_emb" not in name}
    left = {name: tensor.numel() for name, tensor in targets.items()}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():
                place = _place(name, fields)
                if place is None:
                    continue
                target, part = place
                if target not in targets:
                    raise SystemExit(f"tensor {name} has no place in the model")
                view = targets[target] if part is None else targets[target][part]
                view.copy_(shard.get_tensor(name).reshape(view.shape))
                left[target] -= view.numel()
    wrong = [name for name, count in left.items() if count]
    if wrong:
        raise SystemExit(f"tensors not filled exactly once: {wrong[:5]}")


def _place(name: str, fields: dict) -> tuple[str, object] | None:
    """Parameter name and index to which a checkpoint tensor belongs; None for the MTP layers."""
    if name == "model.word_embeddings.weight":
        return "model.embed_tokens.weight", None
    parts = name.split(".")
    if parts[:2] != ["model", "layers"]:
        return name, None
    if int(parts[2]) >= fields["num_hidden_layers"]:
        return None
    prefix, rest = ".".join(parts[:3]), ".".join(parts[3:])
    if rest in RENAMED:
        return f"{prefix}.{RENAMED[rest]}", None
    if parts[4].endswith("_conv1d"):
        width = fields["num_attention_heads"] * fields["head_dim"]
        start = "qkv".index(parts[4][0]) * width
        return f"{prefix}.self_attn.conv1d.weight", slice(start, start + width)
    if rest.startswith("mlp.experts."):
        expert, width = int(parts[5]), fields["moe_intermediate_size"]
        if parts[6] == "down_proj":
            return f"{prefix}.mlp.experts.down_proj", expert
        start = width if parts[6] == "up_proj" else 0
        return f"{prefix}.mlp.experts.gate_up_proj", (expert, slice(start, start + width))
    if parts[3] == "attention":
        return f"{prefix}.self_attn.{'.'.join(parts[4:])}", None
    return name, None


def compute_in_double() -> None:
    """Computes transformers' fixed fp32 parts in fp64, so that a float64 comparison shows formulas, not rounding.

    Rotary angles stay fp32: there fp32 belongs to the model, and position ids are integers, which `float` leaves alone.
    """
    to_float = torch.Tensor.float
    torch.Tensor.float = lambda tensor: tensor if tensor.dtype == torch.float64 else to_float(tensor)
    modeling.torch = _Double()


class _Double:
    """`torch` for the model's module, with float32 replaced by float64; `torch.float`, used for angles, stays."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)
