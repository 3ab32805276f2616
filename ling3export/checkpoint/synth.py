"""Writes a seeded checkpoint in the exact published layout: config, sharded safetensors, index, MTP keys, tokenizer.

Streams: a shard's header follows from names and shapes alone, and its tensors are then generated block by block into
the file, so memory stays in the megabytes whatever the size.
"""

import functools
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ling3export.artifacts.files import create, write_error
from ling3export.artifacts.staging import staged
from ling3export.checkpoint.forms import Form
from ling3export.checkpoint.shard import ITEM_BYTES
from ling3export.checkpoint.synth_forms import FORMS, form_of, quantization_config, quantized
from ling3export.checkpoint.synth_tokenizer import SPECIALS, write_json, write_tokenizer
from ling3export.checkpoint.synth_weights import blocks, whole
from ling3export.foundation.errors import CheckpointError, ConfigError
from ling3export.model.config import Config
from ling3export.model.parameters import TensorInfo, expected_tensors, mtp_tensors

LARGEST_SHARD = 4 << 30
FEWEST_SHARDS = 3
INDEX = "model.safetensors.index.json"


_COLUMNS = (
    "num_hidden_layers hidden_size num_attention_heads head_dim q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts num_experts_per_tok n_group topk_group "
    "moe_intermediate_size intermediate_size vocab_size eos_token_id"
).split()

# Config fields in which presets differ; all others are those of Ling3-Tiny, whose sizes are "full".
PRESETS: dict[str, dict[str, Any]] = {
    name: dict(zip(_COLUMNS, sizes, strict=True))
    for name, sizes in {
        "micro": (8, 64, 4, 16, 32, 48, 16, 8, 16, 16, 4, 4, 2, 32, 160, 320, 316),
        "small": (8, 256, 16, 32, 64, 128, 32, 16, 32, 32, 8, 8, 4, 64, 768, 2048, 2044),
        "aligned": (8, 256, 16, 128, 256, 512, 128, 64, 128, 32, 8, 8, 4, 128, 768, 2048, 2044),
        "full": (24, 1536, 16, 128, 256, 512, 128, 64, 128, 128, 8, 8, 4, 512, 4608, 157184, 156892),
        "flash": (42, 2560, 32, 128, None, 512, 128, 64, 128, 512, 8, 8, 4, 768, 6144, 157184, 156895),
    }.items()
}
# Ling-3.0-flash, in its long setting: its last layers limit the output of SwiGLU.
PRESETS["flash"] |= {
    "layer_group_size": 6,
    "first_k_dense_replace": 2,
    "rope_theta": 6e6,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 131072},
    "expert_swiglu_limit_list": [0] * 35 + [4] * 7,
    "share_expert_swiglu_limit_list": [0] * 34 + [5] * 6 + [7] * 2,
}

_COMMON: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "layer_group_size": 4,
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "short_conv_kernel_size": 4,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_interleave": True,
    "max_position_embeddings": 8192,
    "use_mla_nope": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
    "expert_swiglu_limit_list": None,
    "share_expert_swiglu_limit_list": None,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


def synthesize(
    directory: str | Path,
    preset: str,
    seed: int,
    *,
    layers: int | None = None,
    shard_bytes: int | None = None,
    overrides: dict[str, Any] | None = None,
    gate_dtype: str = "F32",
    form: str = "bf16",
    force: bool = False,
) -> int:
    """Writes a checkpoint to ``directory``, whole or not at all.

    Args:
        preset: A key of ``PRESETS``.
        seed: With the same seed a tensor of the same name and shape always has the same bytes.
        shard_bytes: Tensor bytes at which a shard ends; by default 4 GiB, or a third of a smaller checkpoint.
        overrides: Fields of config.json to set over the preset's, such as ``{"q_lora_rank": None}``.
        gate_dtype: "F32", or "BF16" as the public release stores the router's weight.
        form: A key of ``FORMS``: ``fp8`` and ``int4`` quantize the weights that the published checkpoints quantize.

    Returns:
        The bytes of all tensors.

    Raises:
        ConfigError: no such preset, or sizes that make no model.
        ArtifactError: ``directory`` exists and ``force`` is not set, or the disk is full.
    """
    fields = config_fields(preset, ({} if layers is None else {"num_hidden_layers": layers}) | (overrides or {}))
    config = Config.from_dict(fields, where=f"preset {preset}")
    if (chosen := FORMS[form]) is not None:
        fields |= {"quantization_config": quantization_config(chosen, config)}
    tensors = _stored(config, gate_dtype, chosen)
    total = sum(tensor.nbytes for tensor in tensors)
    shards = _shards(tensors, shard_bytes or min(LARGEST_SHARD, -(-total // FEWEST_SHARDS)))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with staged(Path(directory), force=force, mark=INDEX) as folder:
        write_json(folder / "config.json", fields)
        _write_tokenizer_files(folder, config, fields)
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        metadata = {"total_size": total, "producer": {"ling3export": version("ling3export")}}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(lambda name, shard: _write_shard(folder / name, shard, config, seed), names, shards))
    return total


def config_fields(preset: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a preset under ``overrides``; fields that repeat others follow them.

    Raises:
        ConfigError: no such preset.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset `{preset}`: expected one of {', '.join(PRESETS)}, found no such preset")
    fields = _COMMON | PRESETS[preset] | overrides
    eos = fields["eos_token_id"]
    repeated = {
        "num_key_value_heads": fields["num_attention_heads"],
        "moe_shared_expert_intermediate_size": fields["moe_intermediate_size"],
        "qk_head_dim": fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"],
        "rotary_dim": fields["qk_rope_head_dim"],
        "pad_token_id": min(eos) if isinstance(eos, list) else eos,  # other libraries take one number
    }
    return repeated | fields


class _Stored(NamedTuple):
    """A tensor to write, in the dtype chosen for it."""

    name: str
    info: TensorInfo
    dtype: str
    of: tuple[Form, str, TensorInfo] | None = None  # the quantized weight that it is a part of

    @property
    def nbytes(self) -> int:
        return math.prod(self.info.shape) * ITEM_BYTES[self.dtype]


def _stored(config: Config, gate_dtype: str, form: Form | None) -> list[_Stored]:
    tensors = expected_tensors(config) | mtp_tensors(config)
    gates = {name: gate_dtype for name in tensors if name.endswith(".mlp.gate.weight")}
    for name in gates:
        if gate_dtype not in tensors[name].dtypes:
            expected = " or ".join(tensors[name].dtypes)
            raise CheckpointError(f"gate dtype `{gate_dtype}`: it must be {expected}")
    stored = []
    for name, info in tensors.items():
        if (its := form_of(name, form, config)) is None:
            stored.append(_Stored(name, info, gates.get(name, info.dtypes[0])))
        else:
            parts = its.parts(name, info).items()
            stored += [_Stored(part, shape, shape.dtypes[0], (its, name, info)) for part, shape in parts]
    return stored


def _shards(tensors: list[_Stored], shard_bytes: int) -> list[list[_Stored]]:
    shards: list[list[_Stored]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def _write_shard(path: Path, tensors: list[_Stored], config: Config, seed: int) -> None:
    """Writes one safetensors file, header first; wider dtypes have lower places, so that every tensor is aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype]):
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.info.shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)

    @functools.lru_cache(maxsize=1)  # the parts of a weight follow each other
    def parts(of: tuple[Form, str, TensorInfo]) -> dict[str, NDArray[Any]]:
        form, name, info = of
        return quantized(form, name, whole(name, info, config, seed, "F32").astype(np.float32, copy=False))

    def data(tensor: _Stored) -> Iterator[memoryview]:
        if tensor.of is None:
            yield from blocks(tensor.name, tensor.info, config, seed, tensor.dtype)
        else:
            yield memoryview(parts(tensor.of)[tensor.name].view(np.uint8).reshape(-1))

    try:
        with open(create(path), "wb", buffering=0) as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for tensor in tensors:
                file.seek(8 + len(raw) + header[tensor.name]["data_offsets"][0])
                for block in data(tensor):
                    _write_all(file.fileno(), block)
    except OSError as error:
        raise write_error(error, path, end) from error


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]


def _write_tokenizer_files(folder: Path, config: Config, fields: dict[str, Any]) -> None:
    eos = config.eos_token_ids[0]
    if eos > 256 and eos + max(SPECIALS.values()) < config.vocab_size:
        write_tokenizer(folder, eos)
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": fields["eos_token_id"], "pad_token_id": fields["pad_token_id"], "do_sample": False},
    )
