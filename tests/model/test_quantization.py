"""The quantizations that a config.json may name, and the modules that they leave out."""

import time
from typing import Any

import pytest

from ling3export.checkpoint.synth import config_fields
from ling3export.foundation.errors import ConfigError, shown
from ling3export.model.config import Config
from ling3export.model.quantization import HINT, quantization

TINY = config_fields("full", {})
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["b_proj", "5.attention.g_proj", "lm_head"],
}
INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
    "observer": "minmax",
    "actorder": None,
    "block_structure": None,
}
INT4_GROUP = {"weights": INT4_WEIGHTS, "targets": ["Linear"], "input_activations": None, "output_activations": None}
INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": INT4_GROUP},
    "ignore": ["lm_head", "q_b_proj", "re:.*attention.*", "re:.*mlp\\.(gate|up|down)_proj$", "re:.*shared_experts.*"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "version": "0.20.0",
}


def refusal(fields: dict[str, Any], ignore: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        Config.from_dict(fields, ignore=ignore or [])
    return str(error.value)


@pytest.mark.parametrize("said", [FP8_CONFIG, INT4_CONFIG, {"quant_method": "fp8"}])
def test_the_published_quantizations_are_the_same_model(said: dict[str, Any]):
    """The computation is the same, so programs fit; but the field must be read, since the weights are not floats."""
    assert Config.from_dict(TINY | {"quantization_config": said}) == Config.from_dict(TINY)
    found = refusal(TINY | {"quantization_config": said}, ignore=["quantization_config"])
    assert "`quantization_config`: expected an unknown field to ignore, found one with a meaning" in found


def with_weights(**changes: Any) -> dict[str, Any]:
    return INT4_CONFIG | {"config_groups": {"group_0": INT4_GROUP | {"weights": INT4_WEIGHTS | changes}}}


METHODS = "fp8 or compressed-tensors"
SIMPLE = "simple regular expressions (at most 3 repeats, none of a group)"
WEIGHTS = ".config_groups.group_0.weights"
OTHER_QUANTIZATIONS = [
    ({"quant_method": "gptq", "bits": 4}, ".quant_method", METHODS, '"gptq"'),
    ({"quant_method": "awq", "bits": 4}, ".quant_method", METHODS, '"awq"'),
    ({"bits": 4, "group_size": 64, "mode": "affine"}, ".quant_method", METHODS, "null"),
    ("fp8", "", "an object", '"fp8"'),
    (FP8_CONFIG | {"fmt": "e5m2"}, ".fmt", '"e4m3"', '"e5m2"'),
    (FP8_CONFIG | {"scale_fmt": "float32"}, ".scale_fmt", '"ue8m0"', '"float32"'),
    (FP8_CONFIG | {"weight_block_size": [1, 128]}, ".weight_block_size", "[128, 128]", "[1, 128]"),
    (FP8_CONFIG | {"activation_scheme": "static"}, ".activation_scheme", '"dynamic"', '"static"'),
    (FP8_CONFIG | {"rotation": "hadamard"}, ".rotation", "no such field", '"hadamard"'),
    (FP8_CONFIG | {"modules_to_not_convert": [5]}, ".modules_to_not_convert", "a list of modules' names", "[5]"),
    (INT4_CONFIG | {"format": "nvfp4-pack-quantized"}, ".format", '"pack-quantized"', '"nvfp4-pack-quantized"'),
    (INT4_CONFIG | {"config_groups": {}}, ".config_groups", "one group", "{}"),
    (INT4_CONFIG | {"transform_config": {"a": 1}}, ".transform_config", "no such field", '{"a": 1}'),
    (with_weights(num_bits=8), f"{WEIGHTS}.num_bits", "4", "8"),
    (with_weights(type="float"), f"{WEIGHTS}.type", '"int"', '"float"'),
    (with_weights(symmetric=False), f"{WEIGHTS}.symmetric", "true", "false"),
    (with_weights(strategy="channel"), f"{WEIGHTS}.strategy", '"group"', '"channel"'),
    (with_weights(group_size=128), f"{WEIGHTS}.group_size", "32", "128"),
    (with_weights(actorder="group"), f"{WEIGHTS}.actorder", "no such field", '"group"'),
    *(
        (INT4_CONFIG | {"ignore": [f"re:{pattern}"]}, ".ignore", SIMPLE, shown(pattern))
        for pattern in ("(a+)+", "(a|b)*c", "[\\][](a+)+]", "a?a?a?a?", ".*" * 5, "(?=a)", "(", "a|" * 9, "a" * 257)
    ),
]


@pytest.mark.parametrize(("said", "field", "expected", "found"), OTHER_QUANTIZATIONS)
def test_other_quantizations_are_refused_by_name(said: Any, field: str, expected: str, found: str):
    message = refusal(TINY | {"quantization_config": said})
    assert message.startswith(f"config field `quantization_config{field}`: expected {expected}, found {found}, in")
    assert refusal(TINY | {"quantization": {"bits": 4}}).endswith(f"hint: {HINT}")


def test_no_regular_expression_takes_long():
    """The worst expression that is accepted, applied to the longest name."""
    worst = INT4_CONFIG | {"ignore": ["re:" + ".*a" * 3 + "$"] * 64}
    said = quantization({"quantization_config": worst}, "config.json")
    assert said is not None
    start = time.process_time()
    assert said.covers("a" * 63 + "b")
    assert time.process_time() - start < 5


def test_all_regular_expressions_together_take_a_bounded_time(monkeypatch: pytest.MonkeyPatch):
    """Regression: expressions that pass one by one took 20 minutes over the names of a large model."""
    monkeypatch.setattr("ling3export.model.quantization.MOST_SECONDS", 0.05)
    worst = INT4_CONFIG | {"ignore": ["re:" + ".*a" * 3 + "$"] * 64}
    said = quantization({"quantization_config": worst}, "config.json")
    assert said is not None
    with pytest.raises(ConfigError) as error:
        all(said.covers(f"layers.{n}." + "a" * 63 + "b") for n in range(10_000))
    assert error.value.message == (
        "config field `quantization_config.ignore`: expected regular expressions that take at most 0.05 s for all "
        'names, found longer ones, such as ".*a.*a.*a$", in config.json'
    )


def test_modules_are_named_by_their_ends_at_a_dot():
    """`b_proj` does not match `q_b_proj`, and `5.attention.g_proj` is layer 5's."""
    fp8, int4 = (quantization({"quantization_config": said}, "config.json") for said in (FP8_CONFIG, INT4_CONFIG))
    assert fp8 is not None
    assert int4 is not None
    modules = ["attention.b_proj", "attention.q_b_proj", "attention.g_proj", "mlp.gate_proj", "mlp.experts.3.up_proj"]
    covered = {layer: [fp8.covers(f"model.layers.{layer}.{each}") for each in modules] for layer in (5, 15)}
    assert covered == {5: [False, True, False, True, True], 15: [False, True, True, True, True]}
    assert [int4.covers(f"model.layers.5.{each}") for each in modules] == [False, False, False, False, True]
    assert not int4.covers("model.layers.5.mlp.shared_experts.up_proj")
    targets = INT4_CONFIG | {
        "config_groups": {"group_0": INT4_GROUP | {"targets": ["re:.*layers.*experts\\.[0-9]+\\..*"]}}
    }
    some = quantization({"quantization_config": targets}, "config.json")
    assert some is not None
    assert [some.covers(each) for each in ("layers.1.experts.10.up_proj", "layers.1.gate_proj")] == [True, False]


GGUF = "expected a folder with config.json and safetensors, found GGUF (ling3-q4.gguf)"
