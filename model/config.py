"""config.json, read strictly: every field that changes the numbers is stated, typed and checked; none has a default.

A missing, unknown or ill-typed field is refused by name: a reader that fills gaps in silence builds a wrong model.
:class:`Config` is the table of the fields that are read. The tables after it name the fields that may hold only one
modelled value, those that repeat others, and those without effect.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ling3export.foundation.errors import ConfigError, listed, shown
from ling3export.foundation.reading import read_bytes
from ling3export.foundation.strict_json import LARGEST, DoubledKeyError, parse_json
from ling3export.model.fields import FieldRule, at_least, is_int, is_number, only, refused
from ling3export.model.quantization import quantization
from ling3export.model.yarn import FIELDS as YARN_FIELDS
from ling3export.model.yarn import Yarn, yarn_of

AttentionKind = Literal["kda", "mla"]
MlpKind = Literal["dense", "moe"]


def _is_limits(value: Any) -> bool:
    numbers = isinstance(value, list) and all(limit is None or (is_number(limit) and limit >= 0) for limit in value)
    return value is None or numbers


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(is_int(item) and item >= 0 for item in value)


def _is_token_ids(value: Any) -> bool:
    return is_int(value) or (isinstance(value, list) and bool(value) and all(is_int(item) for item in value))


Size = Annotated[int, at_least(1)]
OptionalSize = Annotated[
    int | None,
    FieldRule("an integer of at least 1, or null", lambda value: value is None or at_least(1).accepts(value)),
]
Even = Annotated[
    int, FieldRule("an even integer of at least 2", lambda value: at_least(2).accepts(value) and not value % 2)
]
Positive = Annotated[float, FieldRule("a number above 0", lambda value: is_number(value) and value > 0)]
YARN = (
    "null, or an object with the type yarn, factor and original_max_position_embeddings; beta_fast, beta_slow, mscale "
    "and mscale_all_dim are optional"
)
Limits = Annotated[
    tuple[float, ...] | None, FieldRule("null, or a list of numbers, one a layer; 0 or null for no limit", _is_limits)
]
Numbers = Annotated[
    tuple[int, ...] | None,
    FieldRule("null, or a list of layer numbers", lambda value: value is None or _is_numbers(value)),
]
# Sixteen tokens of decay at -5 stay within e^-80, which fp32 still holds: the chunked form of KDA rests on it.
DecayBound = Annotated[
    float, FieldRule("a number from -5 to below 0", lambda value: is_number(value) and -5 <= value < 0)
]


@dataclass(frozen=True)
class Config:
    """The fields of config.json that decide what the model computes, under their own names, and what each may hold.

    ``head_dim`` is KDA's key and value width; an MLA head's query and key are ``qk_head_dim`` wide. ``from_dict`` and
    the others check every field; the constructor checks nothing.
    """

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    layer_group_size: Size
    first_k_dense_replace: Annotated[int, at_least(0)]
    num_experts: Size
    num_experts_per_tok: Size
    num_shared_experts: Size
    n_group: Size
    topk_group: Size
    moe_intermediate_size: Size
    moe_shared_expert_intermediate_size: Size
    routed_scaling_factor: Positive
    router_dtype: Annotated[str, only("fp32")]
    score_function: Annotated[str, only("sigmoid")]
    q_lora_rank: OptionalSize
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Even
    v_head_dim: Size
    head_dim: Size
    short_conv_kernel_size: Annotated[int, at_least(2)]
    kda_safe_gate: Annotated[bool, FieldRule("true or false", lambda value: isinstance(value, bool))]
    kda_lower_bound: DecayBound
    no_kda_lora: Annotated[bool, only(True)]
    rms_norm_eps: Positive
    rope_theta: Positive
    rope_interleave: Annotated[bool, only(True)]
    max_position_embeddings: Size
    gated_attention_proj_granularity_type: Annotated[str, only("head_wise")]
    eos_token_id: Annotated[int | tuple[int, ...], FieldRule("a token id, or a list of them", _is_token_ids)]
    num_nextn_predict_layers: Annotated[int, at_least(0)]
    rope_scaling: Annotated[Yarn | None, FieldRule(YARN, lambda value: value is None or yarn_of(value) is not None)]
    expert_swiglu_limit_list: Limits
    share_expert_swiglu_limit_list: Limits
    full_attn_layers: Numbers  # the layers with MLA, where they do not follow from layer_group_size

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
        data = dict.fromkeys(OPTIONAL) | _with_rope_scaling(_with_score_function(d, where), where)
        for name in ARCHITECTURE:  # before all fields of ours that another architecture lacks
            if data.get(name) is not None and not RULES[name].accepts(data[name]):
                raise refused(name, RULES[name].expected, shown(data[name]), where, ONLY)
        quantization(data, where)
        _check_fields(data, frozenset(ignore), where)
        values = {f.name: _normal(data[f.name], get_args(f.type)[0]) for f in fields(cls)}
        values["rope_scaling"] = yarn_of(data["rope_scaling"])
        config = cls(**values | dict.fromkeys(LIMITS))
        _check_structure(config, where)
        _check_repeated(config, d, where)
        routed, shared = (_limits(data[name], config.mlp_kinds) for name in LIMITS)
        return replace(config, expert_swiglu_limit_list=routed, share_expert_swiglu_limit_list=shared)

    @classmethod
    def from_path(cls, path: Path, ignore: Iterable[str] = ()) -> "Config":
        """Reads a config.json, or that of a checkpoint's folder. Raises ``ConfigError``, also where there is none."""
        file = path / "config.json" if path.is_dir() else path
        return cls.from_json(read_config(file), ignore, str(file))

    @classmethod
    def from_json(cls, data: bytes, ignore: Iterable[str] = (), where: str = "config.json") -> "Config":
        """Parses the bytes of a config.json. Raises ``ConfigError``, also where they are no JSON object."""
        return cls.from_dict(parsed(data, where), ignore=ignore, where=where)

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Per layer: MLA closes each group and fills an incomplete last one; all others are KDA.

        ``full_attn_layers`` names the layers with MLA instead.
        """
        count, size = self.num_hidden_layers, self.layer_group_size
        if self.full_attn_layers is not None:
            return tuple("mla" if i in self.full_attn_layers else "kda" for i in range(count))
        return tuple("mla" if (i + 1) % size == 0 or i >= count // size * size else "kda" for i in range(count))

    @property
    def groups(self) -> int:
        """How many whole groups of KDA layers and one MLA layer there are, which programs may run in a loop."""
        return 0 if self.full_attn_layers is not None else self.num_hidden_layers // self.layer_group_size

    @property
    def mlp_kinds(self) -> tuple[MlpKind, ...]:
        """Per layer: the first ``first_k_dense_replace`` are dense, the others MoE."""
        return tuple("dense" if i < self.first_k_dense_replace else "moe" for i in range(self.num_hidden_layers))

    def layers(self, kind: AttentionKind | MlpKind) -> tuple[int, ...]:
        """The layers that have that attention or MLP."""
        kinds = zip(self.attention_kinds, self.mlp_kinds, strict=True)
        return tuple(i for i, both in enumerate(kinds) if kind in both)

    @property
    def context(self) -> int:
        """The range of positions: ``max_position_embeddings``, or YaRN's multiple of the original ones."""
        return max(self.max_position_embeddings, self.rope_scaling.context if self.rope_scaling else 0)

    @property
    def softmax_scale(self) -> float:
        """The factor of MLA's scores."""
        scale: float = self.qk_head_dim**-0.5
        return scale * self.rope_scaling.softmax_factor if self.rope_scaling else scale

    @property
    def rope_factor(self) -> float:
        """The factor of the cosines and sines of positions."""
        return self.rope_scaling.rope_factor if self.rope_scaling else 1.0

    @property
    def rope_frequencies(self) -> NDArray[np.float32]:
        """Radians a position of each pair of rotary dimensions, ``[P / 2]``."""
        width = self.qk_rope_head_dim
        radians = self.rope_theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        radians = self.rope_scaling.frequencies(radians, self.rope_theta) if self.rope_scaling else radians
        return radians.astype(np.float32)  # rounded once: an ulp of the frequency is 5e-4 rad at position 8192

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA head's query and key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values that MLA caches for a token in a layer: the latent, and the roped key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of all shared experts together: they are stored as one MLP."""
        return self.num_shared_experts * self.moe_shared_expert_intermediate_size

    @property
    def tp_shards(self) -> int:
        """TP shards of every split weight: how many equal parts every split dimension divides into.

        A TP must divide it, and each device has as many neighbouring TP shards as any other.
        """
        dense = [self.intermediate_size] if self.layers("dense") else []
        moe = [self.num_experts, self.shared_intermediate_size] if self.layers("moe") else []
        return math.gcd(self.num_attention_heads, self.vocab_size, *dense, *moe)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def semantic(self) -> dict[str, Any]:
        """Every field that is compiled into a program (all but the end-of-text ids), ready for JSON.

        Those of OPTIONAL are left out where they hold nothing.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "eos_token_id"}
        values = {name: value for name, value in values.items() if value is not None or name not in OPTIONAL}
        if self.rope_scaling is not None:
            values["rope_scaling"] = {"rope_type": "yarn"} | asdict(self.rope_scaling)
        return values


READ: dict[str, FieldRule] = {f.name: get_args(f.type)[1] for f in fields(Config)}

# Not read, because nothing but this value is modelled. Where that is null or false, absent is as good.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "topk_method": "noaux_tc",
    "use_mla_nope": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "tie_word_embeddings": False,
}

# Fields that are read, and as good absent as null.
LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
OPTIONAL = ("rope_scaling", *LIMITS, "full_attn_layers")

# Carried along by the public releases, some from sibling architectures: without effect at these values or where empty.
PUBLISHED: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "group_norm_size": 1,
    "linear_silu": True,
    "max_window_layers": 20,
    "num_kv_heads_for_linear_attn": 0,
    "pregate_inference": False,
    "seq_aux": True,
}

ARCHITECTURE = ("architectures", "model_type")
ONLY = "no other value is modelled"
MOST_LAYERS, MOST_EXPERTS = 1024, 2**17  # of all layers together: a name is made for each of their tensors
RULES = READ | {name: only(value) for name, value in (FIXED | PUBLISHED).items()}

# These repeat other fields: they may be absent, and must agree where present (checked against the finished Config;
# readers of the tensors check quantization_config).
REPEATED = frozenset({"num_key_value_heads", "qk_head_dim", "rotary_dim", "rope_parameters", "quantization_config"})

ROPE = {"partial_rotary_factor", *YARN_FIELDS}  # what `rope_parameters` may have next to the type and theta

# Without effect on what the model computes, whatever they hold; so are all `…_dropout` and `mtp_…`,
# and all `pregate_…` where `pregate_inference`, which is in PUBLISHED, is false.
IGNORED = frozenset(
    "use_qk_norm partial_rotary_factor initializer_range use_cache pad_token_id bos_token_id torch_dtype dtype "
    "transformers_version auto_map".split()
)


def _check_fields(data: dict[str, Any], ignore: frozenset[str], where: str) -> None:
    """Refuses a field that is missing, ill-typed or unknown, or whose value is not modelled."""
    _check_presence(data, where)
    for name in sorted(ignore & (RULES.keys() | REPEATED)):
        raise refused(name, "an unknown field to ignore", "one with a meaning", where)
    for name, rule in READ.items():
        if not rule.accepts(data[name]):
            raise refused(name, rule.expected, shown(data[name]), where)
    for name, value in data.items():
        empty = (value is None or value is False) and not FIXED.get(name)
        ignored = name in IGNORED | ignore or name.endswith("_dropout") or name.startswith(("mtp_", "pregate_"))
        if name in READ or name in REPEATED or empty or (ignored and name not in RULES):
            continue
        if name not in RULES:
            hint = f"if it does not change what the model computes, --ignore-config-field {name}"
            raise refused(name, "no such field", shown(value), where, hint)
        if not RULES[name].accepts(value):
            raise refused(name, RULES[name].expected, shown(value), where, ONLY)


def _with_score_function(d: dict[str, Any], where: str) -> dict[str, Any]:
    """Folds ``scoring_func``, the other name of ``score_function``, into it."""
    data = dict(d)
    if "scoring_func" in data:
        alias = data.pop("scoring_func")
        if data.setdefault("score_function", alias) != alias:
            expected = f"the same as `score_function`, {shown(data['score_function'])}"
            raise refused("scoring_func", expected, shown(alias), where)
    return data


def _with_rope_scaling(d: dict[str, Any], where: str) -> dict[str, Any]:
    """Takes YaRN's fields out of ``rope_parameters``, where transformers 5 has them."""
    rope = d.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type") != "yarn":
        return d
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    if d.get("rope_scaling") is not None and yarn_of(d["rope_scaling"]) != yarn_of(scaling):
        raise refused("rope_parameters", f"the same as `rope_scaling`, {shown(d['rope_scaling'])}", shown(rope), where)
    return d | {"rope_scaling": scaling}


def _limits(limits: list[int | float | None] | None, kinds: tuple[MlpKind, ...]) -> tuple[float, ...] | None:
    """A limit for each layer, 0 for none: in dense layers, and past the list's end."""
    padded = (limits or []) + [None] * len(kinds)
    whole = tuple(float(limit or 0) if kind == "moe" else 0.0 for limit, kind in zip(padded, kinds, strict=False))
    return whole if any(whole) else None


def _check_presence(data: dict[str, Any], where: str) -> None:
    missing = [name for name in RULES if name not in data and (name in READ or FIXED.get(name))]
    if data.get("architectures") is None and data.get("model_type") is None:
        missing.append("model_type")
    if len(missing) == 1:
        raise refused(missing[0], RULES[missing[0]].expected, "none", where)
    if missing:
        names = listed([f"`{name}`" for name in missing])
        raise ConfigError(f"config fields {names}: these are missing, in {where}")


def _normal(value: Any, annotation: Any) -> Any:
    """One type per field: 6000000 and 6000000.0 are the same ``rope_theta``; a list would not hash."""
    if isinstance(value, list):
        return tuple(value)
    return float(value) if annotation is float else value


def _check_structure(config: Config, where: str) -> None:
    """Refuses fields that are well typed but contradict each other."""
    c = config
    if c.num_hidden_layers > MOST_LAYERS:
        raise refused("num_hidden_layers", f"at most {MOST_LAYERS:,}", str(c.num_hidden_layers), where)
    if c.num_experts > (most := MOST_EXPERTS // c.num_hidden_layers):
        raise refused("num_experts", f"at most {most:,} in each of so many layers", str(c.num_experts), where)
    if c.num_experts % c.n_group or c.num_experts // c.n_group < 2:
        raise refused("n_group", f"groups of two or more that divide {c.num_experts} experts", str(c.n_group), where)
    kept = c.num_experts // c.n_group * c.topk_group
    for name, most, what in (
        ("first_k_dense_replace", c.num_hidden_layers, "the number of layers"),
        ("topk_group", c.n_group, "the number of groups"),
        ("num_experts_per_tok", kept, f"the experts in {c.topk_group} kept groups"),
    ):
        if getattr(c, name) > most:
            raise refused(name, f"at most {most}, {what}", str(getattr(c, name)), where)
    if c.full_attn_layers and c.full_attn_layers[-1:] != (max(c.full_attn_layers),):
        raise refused("full_attn_layers", "ascending numbers", shown(list(c.full_attn_layers)), where)
    if c.full_attn_layers and max(c.full_attn_layers) >= c.num_hidden_layers:
        raise refused(
            "full_attn_layers", f"numbers below {c.num_hidden_layers}", shown(list(c.full_attn_layers)), where
        )
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
    plain = {name: value for name, value in rope.items() if name not in ROPE} if isinstance(rope, dict) else None
    if config.rope_scaling is not None and plain == wanted | {"rope_type": "yarn"}:
        return  # whose fields are compared where they are read
    if plain != wanted:
        raise refused("rope_parameters", shown(wanted), shown(rope), where)


def refuse_gguf(path: Path) -> None:
    """Raises ``ConfigError`` where ``path`` is a GGUF file, or a folder of such files without safetensors."""
    files = [path] if path.is_file() else sorted(path.glob("*.gguf")) if not any(path.glob("*.safetensors")) else []
    if files and files[0].suffix == ".gguf":
        raise ConfigError(
            f"checkpoint `{path}`: expected a folder with config.json and safetensors, found GGUF ({files[0].name})",
            "take the bf16, FP8 or INT4 checkpoint that the GGUF files were made from; llama.cpp runs GGUF",
        )


def read_config(path: Path) -> bytes:
    """The bytes of a config.json. Raises ``ConfigError`` where they cannot be read."""
    refuse_gguf(path if path.suffix == ".gguf" else path.parent)
    try:
        return read_bytes(path.parent, path.name, LARGEST, links=True)
    except FileNotFoundError:
        raise ConfigError(f"config `{path}`: there is no such file", _hint_of_absent(path)) from None
    except OSError as error:
        raise ConfigError(f"config `{path}`: expected a readable file, found {error.strerror}") from None


def _hint_of_absent(path: Path) -> str:
    """The hint where config.json is absent: the folder is an artifact, the name of a download, or any other."""
    folder = path.parent if path.name == "config.json" else path
    if (folder / "manifest.json").is_file():
        return f"`{folder}` is an artifact: run it with ling3-runner, or add a target with build --into {folder}"
    if not folder.exists() and len(folder.parts) == 2 and not folder.is_absolute():
        return f"download the checkpoint first: hf download {folder} --local-dir {folder.name}"
    return "a checkpoint is a folder with config.json, safetensors files and a tokenizer"


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """The object of a config.json, read strictly. Raises ``ConfigError`` where there is none."""
    try:
        value = parse_json(data)
    except DoubledKeyError as error:
        raise refused(error.key, "once", "twice", where) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config `{where}`: expected a readable file, found {error}") from None
    except ValueError as error:
        raise ConfigError(f"config `{where}`: expected JSON, found {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"config `{where}`: expected a JSON object, found {shown(value)}")
    return value
