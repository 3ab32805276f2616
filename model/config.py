"""config.json, read strictly: every field that changes the numbers is stated, typed and checked; none has a default.

A missing, unknown or ill-typed field is refused by name, because a reader that fills gaps in silence is known to build
a wrong model. ``config_rules`` holds the tables; here are the fields that are read and what follows from them.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ling3export.errors import ConfigError
from ling3export.model.config_rules import check_fields, only, refused, shown

AttentionKind = Literal["kda", "mla"]
MlpKind = Literal["dense", "moe"]


@dataclass(frozen=True)
class Config:
    """The fields of config.json that decide what the model computes, under their own names.

    ``head_dim`` is KDA's key and value width; an MLA head's query and key are ``qk_head_dim`` wide. Made by
    ``from_dict`` or ``from_file``, which check every field; the constructor itself checks nothing.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_group_size: int
    first_k_dense_replace: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    n_group: int
    topk_group: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    routed_scaling_factor: float
    router_dtype: str
    score_function: str
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    head_dim: int
    short_conv_kernel_size: int
    kda_safe_gate: bool
    kda_lower_bound: float
    no_kda_lora: bool
    rms_norm_eps: float
    rope_theta: float
    rope_interleave: bool
    max_position_embeddings: int
    gated_attention_proj_granularity_type: str
    eos_token_id: int | tuple[int, ...]
    num_nextn_predict_layers: int

    @classmethod
    def from_dict(cls, d: dict[str, Any], *, ignore: Iterable[str] = (), where: str = "config.json") -> "Config":
        """Checks every field of ``d`` and keeps those that the model reads.

        Args:
            d: The parsed config.json.
            ignore: Unknown fields to accept whatever they hold (``--ignore-config-field``).
            where: The file, for messages.

        Raises:
            ConfigError: a field is missing, unknown, ill-typed, not modelled, or at odds with another one.
        """
        read = check_fields(d, frozenset(ignore), where)
        config = cls(**{f.name: _normal(read[f.name], f.type) for f in fields(cls)})
        _check_structure(config, where)
        _check_repeated(config, d, where)
        return config

    @classmethod
    def from_file(cls, path: str | Path, ignore: Iterable[str] = ()) -> "Config":
        """Reads a config.json. Raises ``ConfigError``, also where the file is absent or not a JSON object."""
        return cls.from_dict(_read_object(Path(path)), ignore=ignore, where=str(path))

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Per layer: MLA closes each group and fills an incomplete last one; all others are KDA."""
        whole = self.num_hidden_layers // self.layer_group_size * self.layer_group_size
        return tuple(
            "mla" if (i + 1) % self.layer_group_size == 0 or i >= whole else "kda"
            for i in range(self.num_hidden_layers)
        )

    @property
    def mlp_kinds(self) -> tuple[MlpKind, ...]:
        """Per layer: the first ``first_k_dense_replace`` are dense, the others MoE."""
        return tuple("dense" if i < self.first_k_dense_replace else "moe" for i in range(self.num_hidden_layers))

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.attention_kinds) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.attention_kinds) if kind == "mla")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.mlp_kinds) if kind == "dense")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.mlp_kinds) if kind == "moe")

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA head's query and key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """What MLA caches for a token in a layer: the latent, and the roped key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of all shared experts together: they are stored as one MLP."""
        return self.num_shared_experts * self.moe_shared_expert_intermediate_size

    @property
    def slabs(self) -> int:
        """Into how many equal parts every split dimension divides; a TP must divide it."""
        dense = [self.intermediate_size] if self.dense_layers else []
        moe = [self.num_experts, self.shared_intermediate_size] if self.moe_layers else []
        return math.gcd(self.num_attention_heads, self.vocab_size, *dense, *moe)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def semantic(self) -> dict[str, Any]:
        """Every field that is compiled into a program (all but the end-of-text ids), ready for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "eos_token_id"}


def _normal(value: Any, annotation: Any) -> Any:
    """One type per field: 6000000 and 6000000.0 are the same ``rope_theta``; a list would not hash."""
    if isinstance(value, list):
        return tuple(value)
    return float(value) if annotation is float else value


def _check_structure(config: Config, where: str) -> None:
    """Refuses fields that are well typed but contradict each other."""
    c = config
    if c.first_k_dense_replace > c.num_hidden_layers:
        expected = f"at most {c.num_hidden_layers}, the number of layers"
        raise refused("first_k_dense_replace", expected, str(c.first_k_dense_replace), where)
    if c.num_experts % c.n_group or c.num_experts // c.n_group < 2:
        expected = f"groups of two or more that divide {c.num_experts} experts"
        raise refused("n_group", expected, str(c.n_group), where)
    if c.topk_group > c.n_group:
        raise refused("topk_group", f"at most {c.n_group}, the number of groups", str(c.topk_group), where)
    kept = c.num_experts // c.n_group * c.topk_group
    if c.num_experts_per_tok > kept:
        expected = f"at most {kept}, the experts in {c.topk_group} kept groups"
        raise refused("num_experts_per_tok", expected, str(c.num_experts_per_tok), where)
    for token in c.eos_token_ids:
        if not 0 <= token < c.vocab_size:
            raise refused("eos_token_id", f"an id from 0 to {c.vocab_size - 1}", str(token), where)


def _check_repeated(config: Config, d: dict[str, Any], where: str) -> None:
    """Refuses a field that repeats others and does not agree with them."""
    repeated = {
        "num_key_value_heads": (config.num_attention_heads, "num_attention_heads"),
        "qk_head_dim": (config.qk_head_dim, "qk_nope_head_dim + qk_rope_head_dim"),
        "rotary_dim": (config.qk_rope_head_dim, "qk_rope_head_dim"),
    }
    for name, (value, source) in repeated.items():
        if d.get(name) is not None and not only(value).accepts(d[name]):
            raise refused(name, f"{value}, which is {source}", shown(d[name]), where)
    rope = d.get("rope_parameters")
    if rope is None:
        return
    wanted = {"rope_type": "default", "rope_theta": config.rope_theta}
    if not isinstance(rope, dict) or {k: v for k, v in rope.items() if k != "partial_rotary_factor"} != wanted:
        raise refused("rope_parameters", shown(wanted), shown(rope), where)


def _read_object(path: Path) -> dict[str, Any]:
    """Parses a JSON object; a repeated key, NaN and Infinity are errors."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(
            f"config `{path}`: expected a file, found none", "a checkpoint is a folder that holds one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config `{path}`: expected a readable file, found {error}") from None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise refused(twice[0], "once", "twice", str(path))
        return dict(pairs)

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config `{path}`: expected JSON, found {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"config `{path}`: expected a JSON object, found {shown(value)}")
    return value
