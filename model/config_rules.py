"""What a config.json may hold, as tables: the fields read, those with one modelled value, and those without effect."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ling3export.errors import ConfigError, listed


class Rule(NamedTuple):
    """What a field may hold: in words, for the message, and as a test."""

    expected: str
    accepts: Callable[[Any], bool]


def shown(value: Any, limit: int = 60) -> str:
    """A value as JSON, cut to ``limit`` characters for a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def is_number(value: Any) -> bool:
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def at_least(least: int) -> Rule:
    return Rule(f"an integer of at least {least}", lambda value: is_int(value) and value >= least)


def only(wanted: Any) -> Rule:
    """Exactly ``wanted``, its type included: true is not 1."""
    return Rule(shown(wanted), lambda value: type(value) is type(wanted) and value == wanted)


POSITIVE = Rule("a number above 0", lambda value: is_number(value) and value > 0)
BOOLEAN = Rule("true or false", lambda value: isinstance(value, bool))
RANK = Rule("an integer of at least 1, or null", lambda value: value is None or (is_int(value) and value >= 1))
EVEN = Rule("an even integer of at least 2", lambda value: is_int(value) and value >= 2 and value % 2 == 0)
# Sixteen tokens of decay at -5 stay within e^-80, which fp32 still holds: the chunked form of KDA rests on it.
DECAY_BOUND = Rule("a number from -5 to below 0", lambda value: is_number(value) and -5 <= value < 0)
TOKEN_IDS = Rule(
    "a token id, or a list of them",
    lambda value: is_int(value) or (isinstance(value, list) and bool(value) and all(is_int(item) for item in value)),
)

READ: dict[str, Rule] = {
    "vocab_size": at_least(1),
    "hidden_size": at_least(1),
    "intermediate_size": at_least(1),
    "num_hidden_layers": at_least(1),
    "num_attention_heads": at_least(1),
    "layer_group_size": at_least(1),
    "first_k_dense_replace": at_least(0),
    "num_experts": at_least(1),
    "num_experts_per_tok": at_least(1),
    "num_shared_experts": at_least(1),
    "n_group": at_least(1),
    "topk_group": at_least(1),
    "moe_intermediate_size": at_least(1),
    "moe_shared_expert_intermediate_size": at_least(1),
    "routed_scaling_factor": POSITIVE,
    "router_dtype": only("fp32"),
    "score_function": only("sigmoid"),
    "q_lora_rank": RANK,
    "kv_lora_rank": at_least(1),
    "qk_nope_head_dim": at_least(1),
    "qk_rope_head_dim": EVEN,
    "v_head_dim": at_least(1),
    "head_dim": at_least(1),
    "short_conv_kernel_size": at_least(2),
    "kda_safe_gate": BOOLEAN,
    "kda_lower_bound": DECAY_BOUND,
    "no_kda_lora": only(True),
    "rms_norm_eps": POSITIVE,
    "rope_theta": POSITIVE,
    "rope_interleave": only(True),
    "max_position_embeddings": at_least(1),
    "gated_attention_proj_granularity_type": only("head_wise"),
    "eos_token_id": TOKEN_IDS,
    "num_nextn_predict_layers": at_least(0),
}

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
    "rope_scaling": None,
    "expert_swiglu_limit_list": None,
    "share_expert_swiglu_limit_list": None,
}

# Carried along by the public releases, some from sibling architectures: without effect at these values, else unknown.
PUBLISHED: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "group_norm_size": 1,
    "linear_silu": True,
    "max_window_layers": 20,
    "num_kv_heads_for_linear_attn": 0,
    "seq_aux": True,
}

# These repeat other fields: they may be absent, and must agree where present (checked against the finished Config).
REPEATED = frozenset({"num_key_value_heads", "qk_head_dim", "rotary_dim", "rope_parameters"})

IGNORED = frozenset(
    "use_qk_norm partial_rotary_factor initializer_range use_cache pad_token_id bos_token_id torch_dtype dtype "
    "transformers_version auto_map".split()
)


def is_ignored(name: str) -> bool:
    return name in IGNORED or name.endswith("_dropout") or name.startswith("mtp_")


def refused(name: str, expected: str, found: str, where: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"config field `{name}`: expected {expected}, found {found}, in {where}", hint)


def check_fields(d: dict[str, Any], ignore: frozenset[str], where: str) -> dict[str, Any]:
    """Checks each field by itself and returns those that the model reads.

    Raises:
        ConfigError: a field is missing, ill-typed, unknown, or holds what is not modelled; it is named.
    """
    found = _with_score_function(d, where)
    _check_presence(found, where)
    for name in sorted(ignore & (READ.keys() | FIXED.keys() | PUBLISHED.keys() | REPEATED)):
        raise refused(name, "an unknown field to ignore", "one with a meaning", where)
    for name, rule in READ.items():
        if not rule.accepts(found[name]):
            raise refused(name, rule.expected, shown(found[name]), where)
    for name, value in found.items():
        if name in READ or name in REPEATED or name in ignore or is_ignored(name):
            continue
        if (value is None or value is False) and not FIXED.get(name):
            continue
        allowed = FIXED | PUBLISHED
        if name not in allowed:
            hint = f"if it does not change what the model computes, --ignore-config-field {name}"
            raise refused(name, "no such field", shown(value), where, hint)
        if not only(allowed[name]).accepts(value):
            raise refused(name, shown(allowed[name]), shown(value), where, "no other value is modelled")
    return {name: found[name] for name in READ}


def _with_score_function(d: dict[str, Any], where: str) -> dict[str, Any]:
    """Folds ``scoring_func``, the other name of ``score_function``, into it."""
    found = dict(d)
    if "scoring_func" in found:
        alias = found.pop("scoring_func")
        if found.setdefault("score_function", alias) != alias:
            expected = f"the same as `score_function`, {shown(found['score_function'])}"
            raise refused("scoring_func", expected, shown(alias), where)
    return found


def _check_presence(found: dict[str, Any], where: str) -> None:
    missing = [name for name in READ if name not in found]
    missing += [name for name, value in FIXED.items() if value and name not in found]
    if found.get("architectures") is None and found.get("model_type") is None:
        missing.append("model_type")
    if len(missing) == 1:
        expected = READ[missing[0]].expected if missing[0] in READ else shown((FIXED | PUBLISHED)[missing[0]])
        raise refused(missing[0], expected, "none", where)
    if missing:
        names = listed([f"`{name}`" for name in missing])
        raise ConfigError(f"config fields {names}: expected each of them, found none, in {where}")
