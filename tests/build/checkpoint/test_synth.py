"""Synthetic checkpoints: the published layout, equal bytes for equal seeds, and weights that make mistakes visible."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from ling3export.checkpoint import synth
from ling3export.checkpoint.reader import INDEX, Checkpoint
from ling3export.checkpoint.synth import config_fields, synthesize
from ling3export.foundation.errors import ArtifactError, CheckpointError, ConfigError
from ling3export.model.config import Config
from ling3export.model.parameters import expected_tensors, mtp_tensors
from ling3export.verify.reference import Reference
from tests.support.limits import file_size_limit

EXPERT = "model.layers.7.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "micro"
    synthesize(folder, "micro", 0)
    return folder


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def test_files_of_the_published_layout(micro: Path):
    shards = [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    others = ["config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json"]
    others += ["chat_template.jinja"]
    assert sorted(path.name for path in micro.iterdir()) == sorted(shards + others)
    index = json.loads((micro / INDEX).read_text())
    sizes: dict[str, int] = {}
    for shard in shards:
        with safe_open(micro / shard, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            sizes |= {name: file.get_tensor(name).nbytes for name in file.keys()}
            assert all(index["weight_map"][name] == shard for name in file.keys())
    assert sizes.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(sizes.values())
    config = Config.from_path(micro / "config.json")
    assert sizes.keys() == expected_tensors(config).keys() | mtp_tensors(config).keys()


@pytest.mark.parametrize(("preset", "alone", "with_mtp"), [("full", 7.9, 8.2), ("flash", 124.4, 127.5)])
def test_full_and_flash_are_as_large_as_the_public_models(preset: str, alone: float, with_mtp: float):
    config = Config.from_dict(config_fields(preset, {}))
    count = sum(math.prod(info.shape) for info in expected_tensors(config).values())
    mtp = sum(math.prod(info.shape) for info in mtp_tensors(config).values())
    assert (round(count / 1e9, 1), round((count + mtp) / 1e9, 1)) == (alone, with_mtp)


def test_a_tensor_depends_only_on_its_name_and_the_seed(micro: Path, tmp_path: Path):
    """Shards and other layers do not matter; the digest pins the bytes for every machine and version."""
    first = Checkpoint.open(micro).tensor(EXPERT)
    synthesize(tmp_path / "other", "micro", 0, layers=10, shard_bytes=100_000)
    other = Checkpoint.open(tmp_path / "other")
    assert len([*(tmp_path / "other").glob("*.safetensors")]) > 10
    np.testing.assert_array_equal(first, other.tensor(EXPERT))
    assert sha256(first) == "01cc165142471d5a"
    assert sha256(other.tensor("model.layers.0.attention.A_log")) == "db7d64328e3a960e"
    assert sha256(other.tensor("model.layers.0.attention.q_conv1d.weight")) == "7197ed65df5d45dc"
    assert not np.array_equal(first, other.tensor(EXPERT.replace(".3.", ".4.")))
    synthesize(tmp_path / "seed", "micro", 1)
    assert not np.array_equal(first, Checkpoint.open(tmp_path / "seed").tensor(EXPERT))


OVERRIDES: list[dict[str, Any]] = [
    {"q_lora_rank": None},
    {"kda_safe_gate": False},
    {"first_k_dense_replace": 3},
    {"num_hidden_layers": 6, "num_nextn_predict_layers": 0, "rope_theta": 6e6},
    {"eos_token_id": [316, 317]},
    {"num_attention_heads": 2},
]


@pytest.mark.parametrize("overrides", OVERRIDES, ids=str)
def test_overrides(overrides: dict[str, Any], tmp_path: Path):
    synthesize(tmp_path / "out", "micro", 0, overrides=overrides)
    checkpoint = Checkpoint.open(tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert overrides.items() <= fields.items()
    logits = Reference(checkpoint.config, checkpoint.tensor).logits([5, 6, 7, 8, 9])
    assert 1 < logits.std() < 3


def test_tokenizer(micro: Path):
    config = Config.from_path(micro / "config.json")
    tokenizer = Tokenizer.from_file(str(micro / "tokenizer.json"))
    text = "the price of twelve apples, \n in Zürich: 3½ €… <b>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert max(ids) < config.vocab_size
    assert tokenizer.token_to_id("<|endoftext|>") == config.eos_token_id
    assert tokenizer.encode("a<|endoftext|>").ids[-1] == config.eos_token_id
    assert max(tokenizer.get_vocab().values()) < config.vocab_size


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_quantized_weight_is_made_once_for_all_its_tensors(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made, quantized = [], synth.quantized
    monkeypatch.setattr(
        synth, "quantized", lambda form, name, values: made.append(name) or quantized(form, name, values)
    )
    synthesize(tmp_path / "out", "micro", 0, layers=2, form=form, shard_bytes=1 << 30)
    assert sorted(made) == sorted({*made, *Checkpoint.open(tmp_path / "out").forms})


def test_an_existing_folder_is_replaced_only_by_force(tmp_path: Path):
    synthesize(tmp_path / "out", "micro", 0)
    with pytest.raises(ArtifactError):
        synthesize(tmp_path / "out", "micro", 1)
    before = Checkpoint.open(tmp_path / "out").tensor(EXPERT).copy()
    synthesize(tmp_path / "out", "micro", 1, force=True)
    assert not np.array_equal(before, Checkpoint.open(tmp_path / "out").tensor(EXPERT))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    index = tmp_path / "out" / INDEX
    published = json.loads(index.read_text())
    del published["metadata"]["producer"]
    index.write_text(json.dumps(published))  # like a checkpoint of another project
    with pytest.raises(ArtifactError, match=f"expected a folder whose {INDEX} ling3export wrote"):
        synthesize(tmp_path / "out", "micro", 1, force=True)
    assert Checkpoint.open(tmp_path / "out").tensor(EXPERT).size


def test_a_full_disk_leaves_no_files(tmp_path: Path):
    with (
        file_size_limit(100_000),
        pytest.raises(ArtifactError, match=r"write `model-0000.-of-00004.safetensors`: expected room for .* bytes"),
    ):
        synthesize(tmp_path / "out", "micro", 0)
    assert [*tmp_path.iterdir()] == []


def test_invalid_presets_and_overrides_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        synthesize(tmp_path / "out", "tiny", 0)
    assert str(error.value) == "preset `tiny`: expected one of micro, small, aligned, full, flash, found no such preset"
    with pytest.raises(ConfigError) as error:
        synthesize(tmp_path / "out", "micro", 0, layers=0)
    assert str(error.value) == (
        "config field `num_hidden_layers`: expected an integer of at least 1, found 0, in preset micro"
    )
    with pytest.raises(CheckpointError) as checkpoint_error:
        synthesize(tmp_path / "out", "micro", 0, gate_dtype="F16")
    assert str(checkpoint_error.value) == "gate dtype `F16`: it must be F32 or BF16"
    assert [*tmp_path.iterdir()] == []


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Median over positions of the relative L2 error of a row."""
    return float(np.median(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))


def test_logits_are_well_conditioned_and_every_part_counts(micro: Path):
    """fp32 stays close to float64, while leaving out the output norm's eps or the router's bias shows."""
    checkpoint = Checkpoint.open(micro)
    config, read = checkpoint.config, checkpoint.tensor
    ids = np.random.default_rng(0).integers(0, 300, 48).tolist()
    logits = Reference(config, read).logits(ids)
    assert 1 < logits.std() < 3
    assert relative(Reference(config, read, np.float32).logits(ids), logits) < 1e-5
    no_eps = Reference(dataclasses.replace(config, rms_norm_eps=1e-30), read).logits(ids)
    assert relative(no_eps, logits) > 0.07
    no_bias = Reference(config, lambda name: 0 * read(name) if "expert_bias" in name else read(name)).logits(ids)
    assert relative(no_bias, logits) > 0.07


def test_decays_range_from_weak_to_strong(micro: Path):
    """At a mean input, some channels keep their content for hundreds of tokens, and some lose it at once."""
    checkpoint = Checkpoint.open(micro)
    for layer in checkpoint.config.layers("kda"):
        a_log = checkpoint.tensor(f"model.layers.{layer}.attention.A_log")
        dt_bias = checkpoint.tensor(f"model.layers.{layer}.attention.dt_bias").reshape(len(a_log), -1)
        log_decay = -5 / (1 + np.exp(-np.exp(a_log)[:, None] * dt_bias))
        assert log_decay.min() < -2.6
        assert log_decay.max() > -0.05
