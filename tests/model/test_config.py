"""config.json is read strictly: accepted and refused configs, and the error for each."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ling3export.artifacts.records import from_json, to_json
from ling3export.checkpoint.synth import config_fields
from ling3export.foundation.errors import ConfigError
from ling3export.model.config import FIXED, OPTIONAL, READ, YARN, Config

TINY = config_fields("full", {})

# Fields that the public releases of the same architecture add or set to other values.
PUBLIC = TINY | {
    "rope_theta": 6000000,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_type": "default"},
    "kda_lower_bound": -5,
    "max_position_embeddings": 131072,
    "eos_token_id": 156895,
    "num_nextn_predict_layers": 0,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_bailing_moe_v3.BailingMoeV3Config"},
    "dtype": "bfloat16",
    "group_norm_size": 1,
    "linear_silu": True,
    "max_window_layers": 20,
    "mtp_loss_scaling_factor": 0,
    "mtp_use_kda": False,
    "num_kv_heads_for_linear_attn": 0,
    "output_router_logits": False,
    "seq_aux": True,
    "use_kda_lora": False,
    "value_norm": False,
    "transformers_version": "5.8.1",
}

FLASH = config_fields("flash", {})
YARN_OF = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 131072}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in TINY.items() if key != name}


def refusal(fields: dict[str, Any], **kwargs) -> str:
    with pytest.raises(ConfigError) as error:
        Config.from_dict(fields, **kwargs)
    return str(error.value)


def test_ling3_tiny():
    config = Config.from_dict(TINY)
    assert config.layers("mla") == (3, 7, 11, 15, 19, 23)
    assert len(config.layers("kda")) == 18
    assert config.layers("dense") == (0,)
    assert config.layers("moe") == tuple(range(1, 24))
    assert (config.qk_head_dim, config.latent_dim, config.head_dim) == (192, 576, 128)
    assert config.tp_shards == 16
    assert config.eos_token_ids == (156892,)
    assert config.rope_theta == 10000.0


def test_the_page_of_the_model_lists_the_fields_and_what_they_may_hold():
    page = (Path(__file__).parents[2] / "docs" / "model.md").read_text()
    rows = [f"| `{name}` | {json.dumps(TINY.get(name))} | {rule.expected} |" for name, rule in READ.items()]
    assert "\n".join(["| field | Ling3-Tiny | may hold |", "|---|---|---|", *rows, ""]) in page


def test_public_release_with_the_fields_it_carries_along():
    config = Config.from_dict(PUBLIC)
    assert (config.rope_theta, config.num_nextn_predict_layers) == (6e6, 0)
    assert isinstance(config.rope_theta, float)
    assert isinstance(config.kda_lower_bound, float)


def test_flash_structure():
    config = Config.from_dict(FLASH)
    assert config.layers("mla") == (5, 11, 17, 23, 29, 35, 41)
    assert config.layers("dense") == (0, 1)
    assert config.tp_shards == 32
    assert config.q_lora_rank is None and config.context == 262144
    assert config.expert_swiglu_limit_list == (*[0] * 35, *[4] * 7)
    assert config.share_expert_swiglu_limit_list == (*[0] * 34, *[5] * 6, 7, 7)


def test_yarn_is_read_under_each_of_its_names_and_doubles_the_context():
    """The names are ``rope_scaling`` with ``type`` or ``rope_type``, and transformers 5's ``rope_parameters``."""
    scaling = {name: value for name, value in YARN_OF.items() if name != "rope_type"}
    parameters = YARN_OF | {"rope_theta": 6000000, "partial_rotary_factor": 0.5}
    found = [
        Config.from_dict(PUBLIC | {"rope_scaling": YARN_OF}),
        Config.from_dict(PUBLIC | {"rope_scaling": scaling | {"type": "yarn"}}),
        Config.from_dict(PUBLIC | {"rope_parameters": parameters}),
        Config.from_dict(PUBLIC | {"rope_parameters": parameters, "rope_scaling": YARN_OF}),
    ]
    assert len(set(found)) == 1 and found[0].context == 262144
    assert Config.from_dict(PUBLIC | found[0].semantic()) == found[0]
    assert "`rope_parameters`: expected the same as `rope_scaling`" in refusal(
        PUBLIC | {"rope_parameters": parameters | {"factor": 4.0}, "rope_scaling": YARN_OF}
    )


def test_partial_rotary_factor_is_not_applied_to_the_rope_dimensions_again():
    """The factor says that 64 of a head's 128 dimensions turn; these 64 have 32 frequencies, with it or without."""
    plain = PUBLIC | {"rope_parameters": {"rope_theta": 6000000, "rope_type": "default"}}
    for fields in (plain, PUBLIC, PUBLIC | {"partial_rotary_factor": 0.5}):
        np.testing.assert_allclose(Config.from_dict(fields).rope_frequencies, 6e6 ** (-np.arange(32) / 32))


@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": YARN_OF}], ids=["none", "yarn"])
def test_a_config_goes_to_another_process_as_json(scaling):
    """Regression: a build's compiling process could not read YaRN's fields in its task."""
    config = Config.from_dict(PUBLIC | scaling)
    assert from_json(Config, json.loads(json.dumps(to_json(config)))) == config


def test_yarn_has_deepseek_v3s_frequencies_and_magnitudes():
    """DeepSeek-V3's own setting, computed by hand: factor 40 over 4096 tokens, 64 dimensions, theta 10000.

    Pair 10.47 of 32 turns 32 times within 4096 tokens, so the ramp begins at 10; pair 22.5 turns once, so it ends at
    23. The attention's scale grows by (0.1 ln 40 + 1)².
    """
    given = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1}
    config = Config.from_dict(TINY | {"rope_scaling": given})
    plain = Config.from_dict(TINY).rope_frequencies
    ratio = config.rope_frequencies / plain
    np.testing.assert_allclose(ratio[:11], 1)
    np.testing.assert_allclose(ratio[23:], 1 / 40, rtol=1e-6)
    np.testing.assert_allclose(ratio[14], 1 - (4 / 13) * (1 - 1 / 40), rtol=1e-6)
    assert config.softmax_scale == pytest.approx(192**-0.5 * 1.368888**2, rel=1e-6) and config.rope_factor == 1
    default = Config.from_dict(TINY | {"rope_scaling": YARN_OF})
    assert default.rope_factor == pytest.approx(1.0693147, rel=1e-6) and default.softmax_scale == 192**-0.5


def test_limits_count_for_the_layer_whose_number_they_have():
    """Null, 0 and entries after the list's end mean no limit; dense layers have none."""
    config = Config.from_dict(
        FLASH | {"expert_swiglu_limit_list": [7, 7, None, 0, 10], "share_expert_swiglu_limit_list": [0] * 42}
    )
    assert config.expert_swiglu_limit_list == (0, 0, 0, 0, 10, *[0] * 37)
    assert config.share_expert_swiglu_limit_list is None


def test_edge0_carries_fields_of_a_pregate_that_has_no_effect():
    config = PUBLIC | {"pregate_inference": False, "pregate_hidden_size": 256, "pregate_topk": 8}
    assert Config.from_dict(config) == Config.from_dict(PUBLIC)


@pytest.mark.parametrize(
    ("layers", "group", "expected"),
    [(6, 3, "kkmkkm"), (7, 3, "kkmkkmm"), (8, 3, "kkmkkmmm"), (2, 4, "mm"), (3, 1, "mmm")],
)
def test_layers_of_an_incomplete_last_group_are_mla(layers: int, group: int, expected: str):
    config = Config.from_dict(TINY | {"num_hidden_layers": layers, "layer_group_size": group})
    assert "".join(kind[0] for kind in config.attention_kinds) == expected


def test_tp_shards_count_only_the_widths_that_exist():
    assert Config.from_dict(TINY | {"intermediate_size": 4600}).tp_shards == 8
    assert Config.from_dict(TINY | {"intermediate_size": 4600, "first_k_dense_replace": 0}).tp_shards == 16


def test_several_end_of_text_ids():
    config = Config.from_dict(TINY | {"eos_token_id": [156892, 156895]})
    assert config.eos_token_ids == (156892, 156895)
    assert hash(config) == hash(Config.from_dict(TINY | {"eos_token_id": [156892, 156895]}))


def test_semantic_fields_are_json_and_leave_out_the_end_of_text():
    semantic = Config.from_dict(TINY).semantic()
    assert json.loads(json.dumps(semantic)) == semantic
    assert semantic.keys() == READ.keys() - {"eos_token_id", *OPTIONAL}
    assert semantic == Config.from_dict(TINY | {"eos_token_id": 7, "pad_token_id": 1}).semantic()


@pytest.mark.parametrize(
    "name", [*(each for each in READ if each not in OPTIONAL), *(name for name, value in FIXED.items() if value)]
)
def test_no_field_has_a_default(name: str):
    fields = without(name)
    fields.pop("scoring_func", None)
    message = refusal(fields)
    assert message.startswith(f"config field `{name}`: expected ")
    assert message.endswith(", found none, in config.json")


def test_several_missing_fields_are_listed():
    assert refusal({"architectures": ["BailingMoeV3ForCausalLM"]}) == (
        "config fields `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads` "
        f"and {len(READ) - len(OPTIONAL) + 4 - 5} more: these are missing, in config.json"
    )


def test_one_of_the_two_names_of_the_score_function_is_enough():
    assert Config.from_dict(without("score_function")) == Config.from_dict(TINY)
    assert Config.from_dict(without("scoring_func")) == Config.from_dict(TINY)


LIMIT = "null, or a list of numbers, one a layer; 0 or null for no limit"
GROUPS = "groups of two or more that divide 128 experts"
REFUSALS = [
    ("vocab_size", 0, "an integer of at least 1", "0"),
    ("hidden_size", "1536", "an integer of at least 1", '"1536"'),
    ("num_hidden_layers", True, "an integer of at least 1", "true"),
    ("vocab_size", 10**30, "an integer of at least 1", "1" + "0" * 30),
    ("rms_norm_eps", 0, "a number above 0", "0"),
    ("rope_theta", float("inf"), "a number above 0", "Infinity"),
    ("q_lora_rank", 0, "an integer of at least 1, or null", "0"),
    ("qk_rope_head_dim", 63, "an even integer of at least 2", "63"),
    ("kda_safe_gate", 1, "true or false", "1"),
    ("kda_lower_bound", -5.5, "a number from -5 to below 0", "-5.5"),
    ("no_kda_lora", False, "true", "false"),
    ("router_dtype", "bf16", '"fp32"', '"bf16"'),
    ("gated_attention_proj_granularity_type", "element_wise", '"head_wise"', '"element_wise"'),
    ("eos_token_id", [], "a token id, or a list of them", "[]"),
    ("eos_token_id", 157184, "an id from 0 to 157183", "157184"),
    ("first_k_dense_replace", 25, "at most 24, the number of layers", "25"),
    ("n_group", 7, GROUPS, "7"),
    ("topk_group", 9, "at most 8, the number of groups", "9"),
    ("num_experts_per_tok", 65, "at most 64, the experts in 4 kept groups", "65"),
    ("num_key_value_heads", 4, "16, which is num_attention_heads", "4"),
    ("qk_head_dim", 128, "192, which is qk_nope_head_dim + qk_rope_head_dim", "128"),
    ("rotary_dim", 32, "64, which is qk_rope_head_dim", "32"),
    (
        "rope_parameters",
        {"rope_type": "linear", "rope_theta": 10000.0},
        '{"rope_type": "default", "rope_theta": 10000.0}',
        '{"rope_type": "linear", "rope_theta": 10000.0}',
    ),
    ("rope_scaling", {"type": "yarn"}, YARN, '{"type": "yarn"}'),
    ("rope_scaling", YARN_OF | {"type": "linear"}, YARN, json.dumps(YARN_OF | {"type": "linear"})[:60] + "…"),
    ("rope_scaling", YARN_OF | {"factor": 0.5}, YARN, json.dumps(YARN_OF | {"factor": 0.5})[:60] + "…"),
    ("rope_scaling", YARN_OF | {"truncate": 0}, YARN, json.dumps(YARN_OF | {"truncate": 0})[:60] + "…"),
    ("expert_swiglu_limit_list", [0, -4], LIMIT, "[0, -4]"),
    ("share_expert_swiglu_limit_list", 4, LIMIT, "4"),
    ("scoring_func", "softmax", 'the same as `score_function`, "sigmoid"', '"softmax"'),
]


@pytest.mark.parametrize(("name", "value", "expected", "found"), REFUSALS)
def test_refused_by_name(name: str, value: Any, expected: str, found: str):
    message = f"config field `{name}`: expected {expected}, found {found}, in config.json"
    assert refusal(TINY | {name: value}) == message


NOT_MODELLED = [
    ("hidden_act", "gelu", '"silu"', '"gelu"'),
    ("norm_topk_prob", False, "true", "false"),
    ("topk_method", None, '"noaux_tc"', "null"),
    ("use_qkv_bias", True, "false", "true"),
    ("tie_word_embeddings", True, "false", "true"),
    ("pregate_inference", True, "false", "true"),
    ("group_norm_size", 4, "1", "4"),
    ("model_type", "bailing_moe", '"bailing_hybrid"', '"bailing_moe"'),
    ("architectures", ["BailingMoeV2ForCausalLM"], '["BailingMoeV3ForCausalLM"]', '["BailingMoeV2ForCausalLM"]'),
]


@pytest.mark.parametrize(("name", "value", "expected", "found"), NOT_MODELLED)
def test_unsupported_features_of_a_model_are_refused_by_name(name: str, value: Any, expected: str, found: str):
    assert refusal(TINY | {name: value}) == (
        f"config field `{name}`: expected {expected}, found {found}, in config.json\nhint: no other value is modelled"
    )


def test_unknown_fields_are_refused_unless_empty_or_ignored():
    assert refusal(TINY | {"logit_scale": 2.0}) == (
        "config field `logit_scale`: expected no such field, found 2.0, in config.json\n"
        "hint: if it does not change what the model computes, --ignore-config-field logit_scale"
    )
    config = Config.from_dict(TINY)
    assert Config.from_dict(TINY | {"logit_scale": None, "use_nGPT": False}) == config
    assert Config.from_dict(TINY | {"logit_scale": 2.0}, ignore=["logit_scale"]) == config
    assert refusal(TINY | {"logit_scale": 0}).startswith("config field `logit_scale`: expected no such field, found 0,")


def test_a_field_with_a_meaning_cannot_be_ignored():
    assert refusal(TINY | {"expert_swiglu_limit_list": [4]}, ignore=["expert_swiglu_limit_list"]) == (
        "config field `expert_swiglu_limit_list`: expected an unknown field to ignore, found one with a meaning, "
        "in config.json"
    )


def test_absent_is_as_good_where_null_or_false_is_wanted():
    fields = {name: value for name, value in TINY.items() if FIXED.get(name, True)}
    assert Config.from_dict(fields) == Config.from_dict(TINY)


BROKEN_FILES = [
    (b"{", "config `{path}`: expected JSON, found Expecting property name enclosed in double quotes"),
    (b"[]", "config `{path}`: expected a JSON object, found []"),
    (b'{"rope_theta": NaN}', "config `{path}`: expected JSON, found the number NaN"),
    (b'{"a":' * 1_000_000, "config `{path}`: expected JSON, found more than 16 levels of objects and lists"),
    (b" " * (8 << 20) + b"{}", "config `{path}`: expected a readable file, found more than 8,388,608 bytes"),
    (b'{"a": 1, "a": 2}', "config field `a`: expected once, found twice, in {path}"),
    (b"\xff", "config `{path}`: expected a readable file, found 'utf-8' codec can't decode byte 0xff"),
]


@pytest.mark.parametrize(("raw", "message"), BROKEN_FILES)
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, raw: bytes, message: str):
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as error:
        Config.from_path(path)
    assert str(error.value).startswith(message.format(path=path))


def test_an_absent_file(tmp_path: Path):
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError) as error:
        Config.from_path(path)
    assert str(error.value) == (
        f"config `{path}`: there is no such file\n"
        "hint: a checkpoint is a folder with config.json, safetensors files and a tokenizer"
    )


def test_an_artifact_and_the_name_of_a_download_in_place_of_a_checkpoint_get_the_next_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        Config.from_path(Path("maker/Some-model"))
    assert error.value.hint == "download the checkpoint first: hf download maker/Some-model --local-dir Some-model"
    (tmp_path / "a.ling3").mkdir()
    (tmp_path / "a.ling3/manifest.json").touch()
    with pytest.raises(ConfigError) as error:
        Config.from_path(Path("a.ling3"))
    assert (
        error.value.hint
        == "`a.ling3` is an artifact: run it with ling3-runner, or add a target with build --into a.ling3"
    )


def test_another_architecture_is_refused_as_such():
    """Regression: the error for a Llama config listed the 28 fields that it lacks."""
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "vocab_size": 32000}
    assert refusal(llama) == (
        'config field `architectures`: expected ["BailingMoeV3ForCausalLM"], found ["LlamaForCausalLM"], '
        "in config.json\nhint: no other value is modelled"
    )
    assert 'config field `model_type`: expected "bailing_hybrid", found "llama"' in refusal({"model_type": "llama"})
    ling_2_6 = TINY | {"architectures": ["BailingMoeV2_5ForCausalLM"]}  # the model_type is bailing_hybrid here, too
    assert 'expected ["BailingMoeV3ForCausalLM"], found ["BailingMoeV2_5ForCausalLM"]' in refusal(ling_2_6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers`: expected at most 1,024, found 1000000000"),
        ({"num_experts": 10**9}, "`num_experts`: expected at most 5,461 in each of so many layers, found 1000000000"),
    ],
)
def test_a_config_whose_tensors_nobody_could_list_is_refused_at_once(fields, message):
    """Regression: for a billion experts, a billion names were listed first."""
    assert message in refusal(TINY | fields)


def test_many_fields_cost_no_more_than_their_number():
    """Regression: 40,000 fields were compared with each other."""
    began = time.process_time()
    Config.from_dict(TINY | {f"mtp_{number}": number for number in range(40_000)})
    assert "such field" in refusal(TINY | {f"x{number}": number for number in range(40_000)})
    assert time.process_time() - began < 5


def test_a_config_may_be_a_link_into_the_blobs_of_its_hub_cache_and_nowhere_else(tmp_path: Path):
    snapshot = tmp_path / "snapshots" / "abc"
    for folder in (snapshot, tmp_path / "blobs"):
        folder.mkdir(parents=True)
    for place, loads in ((tmp_path / "blobs" / "123", True), (tmp_path / "config.json", False)):
        place.write_text(json.dumps(TINY))
        (snapshot / "config.json").unlink(missing_ok=True)
        (snapshot / "config.json").symlink_to(place)
        if loads:
            assert Config.from_path(snapshot / "config.json") == Config.from_dict(TINY)
        else:
            with pytest.raises(ConfigError, match="found a symbolic link that leads out of the folder"):
                Config.from_path(snapshot / "config.json")
