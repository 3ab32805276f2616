"""The published checkpoint's names, shapes and stored dtypes, in torch's order ([out, in]), derived from the config.

One table a kind of layer; the writer of synthetic checkpoints and the reader's checks both go by it.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from ling3export.model.config import Config

Shape = tuple[int, ...]


class TensorInfo(NamedTuple):
    """A stored tensor: its shape, and the safetensors dtypes it may have (the first is what we write)."""

    shape: Shape
    dtypes: tuple[str, ...] = ("BF16",)


_F32 = ("F32",)
_ROUTER = ("F32", "BF16")  # the public release stores the router's weight in bf16


def expected_tensors(config: Config) -> dict[str, TensorInfo]:
    """Every tensor that the model needs, in the order in which a forward pass meets them."""
    c = config
    tensors = {"model.word_embeddings.weight": TensorInfo((c.vocab_size, c.hidden_size))}
    for i, (attention, mlp) in enumerate(zip(c.attention_kinds, c.mlp_kinds, strict=True)):
        layer = {**_norms(c), **(_kda(c) if attention == "kda" else _mla(c)), **(_moe(c) if mlp == "moe" else _mlp(c))}
        tensors.update({f"model.layers.{i}.{name}": info for name, info in layer.items()})
    tensors["model.norm.weight"] = TensorInfo((c.hidden_size,))
    tensors["lm_head.weight"] = TensorInfo((c.vocab_size, c.hidden_size))
    return tensors


def mtp_tensors(config: Config) -> dict[str, TensorInfo]:
    """The multi-token-prediction layers behind the last layer, as published: MLA, MoE, and the merge of two inputs."""
    c, width = config, config.hidden_size
    extra = {name: TensorInfo((width,)) for name in ("enorm.weight", "hnorm.weight", "final_layernorm.weight")}
    layer = {"eh_proj.weight": TensorInfo((width, 2 * width)), **extra, **_norms(c), **_mla(c), **_moe(c)}
    return {
        f"model.layers.{c.num_hidden_layers + j}.{name}": info
        for j in range(c.num_nextn_predict_layers)
        for name, info in layer.items()
    }


_MTP_NAME = re.compile(
    r"model\.layers\.(0|[1-9][0-9]*)\."
    r"(attention|input_layernorm|post_attention_layernorm|mlp|eh_proj|enorm|hnorm|final_layernorm)\..+"
)


def is_mtp(name: str, config: Config) -> bool:
    """Whether a tensor belongs to a multi-token-prediction layer, which we skip."""
    match = _MTP_NAME.fullmatch(name)
    return match is not None and 0 <= int(match[1]) - config.num_hidden_layers < config.num_nextn_predict_layers


def _linears(shapes: dict[str, Shape]) -> dict[str, TensorInfo]:
    return {f"{name}.weight": TensorInfo(shape) for name, shape in shapes.items()}


def _norms(c: Config) -> dict[str, TensorInfo]:
    return _linears({"input_layernorm": (c.hidden_size,), "post_attention_layernorm": (c.hidden_size,)})


def _kda(c: Config) -> dict[str, TensorInfo]:
    heads, width = c.num_attention_heads, c.num_attention_heads * c.head_dim
    return {
        **_linears({f"attention.{name}_proj": (width, c.hidden_size) for name in "qkvfg"}),
        **_linears({f"attention.{name}_conv1d": (width, 1, c.short_conv_kernel_size) for name in "qkv"}),
        **_linears({"attention.b_proj": (heads, c.hidden_size)}),
        "attention.A_log": TensorInfo((heads,), _F32),
        "attention.dt_bias": TensorInfo((width,), _F32),
        **_linears({"attention.o_norm": (c.head_dim,), "attention.o_proj": (c.hidden_size, width)}),
    }


def _mla(c: Config) -> dict[str, TensorInfo]:
    heads, queries = c.num_attention_heads, c.num_attention_heads * c.qk_head_dim
    if c.q_lora_rank is None:
        query: dict[str, Shape] = {"q_proj": (queries, c.hidden_size)}
    else:
        query = {
            "q_a_proj": (c.q_lora_rank, c.hidden_size),
            "q_a_layernorm": (c.q_lora_rank,),
            "q_b_proj": (queries, c.q_lora_rank),
        }
    shapes: dict[str, Shape] = {
        **query,
        "kv_a_proj_with_mqa": (c.latent_dim, c.hidden_size),
        "kv_a_layernorm": (c.kv_lora_rank,),
        "kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "g_proj": (heads, c.hidden_size),
        "dense": (c.hidden_size, heads * c.v_head_dim),
    }
    return _linears({f"attention.{name}": shape for name, shape in shapes.items()})


def _mlp(c: Config) -> dict[str, TensorInfo]:
    return _linears(dict(_gated("mlp", c.hidden_size, c.intermediate_size)))


def _moe(c: Config) -> dict[str, TensorInfo]:
    return {
        "mlp.gate.weight": TensorInfo((c.num_experts, c.hidden_size), _ROUTER),
        "mlp.gate.expert_bias": TensorInfo((c.num_experts,), _F32),
        **_linears(
            {
                name: shape
                for expert in range(c.num_experts)
                for name, shape in _gated(f"mlp.experts.{expert}", c.hidden_size, c.moe_intermediate_size)
            }
        ),
        **_linears(dict(_gated("mlp.shared_experts", c.hidden_size, c.shared_intermediate_size))),
    }


def _gated(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj", (width, hidden)
    yield f"{prefix}.up_proj", (width, hidden)
    yield f"{prefix}.down_proj", (hidden, width)
