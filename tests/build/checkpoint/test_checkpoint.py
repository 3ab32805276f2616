"""Checkpoints are opened strictly: if files and config disagree, the error names both."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from ling3export.checkpoint.reader import INDEX, Checkpoint, expected_tensors, is_mtp
from ling3export.checkpoint.synth import config_fields, synthesize
from ling3export.foundation.errors import CheckpointError, ConfigError
from ling3export.model.config import Config
from tests.support.shards import Tensors, edit, edit_index, home, read_shard, write_raw, write_shard

KDA_V = "model.layers.0.attention.v_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, KDA with a dense MLP and MLA with experts, and the MTP layer."""
    folder = tmp_path_factory.mktemp("checkpoints") / "micro"
    synthesize(folder, "micro", 0, layers=2, overrides={"layer_group_size": 2})
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "micro"))


AGAIN = "\nhint: download or copy this file again"


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    return str(error.value)


def test_tensors_are_mapped_and_equal_to_what_safetensors_reads(pristine: Path):
    checkpoint = Checkpoint.open(pristine)
    for path in pristine.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name in set(file.keys()) & expected_tensors(checkpoint.config).keys():
                tensor = checkpoint.tensor(name)
                assert not tensor.flags.owndata
                assert not tensor.flags.writeable
                assert tensor.flags.aligned
                np.testing.assert_array_equal(tensor, file.get_tensor(name))
    assert checkpoint.tensor(KDA_V).dtype == ml_dtypes.bfloat16
    assert checkpoint.tensor("model.layers.0.attention.A_log").dtype == np.float32


def test_the_properties_of_a_checkpoint(pristine: Path):
    checkpoint = Checkpoint.open(pristine)
    assert checkpoint.config == Config.from_path(pristine / "config.json")
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    assert [*checkpoint.tokenizer_files()] == names
    names = [*expected_tensors(checkpoint.config)]
    assert checkpoint.nbytes == sum(checkpoint.tensor(name).nbytes for name in names)
    digests = checkpoint.digests()
    assert [*digests] == ["config.json", INDEX, *sorted(path.name for path in pristine.glob("*.safetensors"))]
    assert digests == Checkpoint.open(pristine).digests()


def test_expected_tensors_of_ling3_tiny():
    """Shapes of the published table, one of each kind."""
    tensors = expected_tensors(Config.from_dict(config_fields("full", {})))
    shapes = {
        "model.word_embeddings.weight": (157184, 1536),
        "model.layers.0.attention.g_proj.weight": (2048, 1536),
        "model.layers.3.attention.g_proj.weight": (16, 1536),
        "model.layers.0.attention.q_conv1d.weight": (2048, 1, 4),
        "model.layers.0.attention.A_log": (16,),
        "model.layers.0.attention.dt_bias": (2048,),
        "model.layers.0.mlp.down_proj.weight": (1536, 4608),
        "model.layers.3.attention.q_b_proj.weight": (3072, 256),
        "model.layers.3.attention.kv_a_proj_with_mqa.weight": (576, 1536),
        "model.layers.3.attention.kv_b_proj.weight": (4096, 512),
        "model.layers.23.mlp.experts.127.down_proj.weight": (1536, 512),
        "model.layers.1.mlp.gate.expert_bias": (128,),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (512, 1536),
        "lm_head.weight": (157184, 1536),
    }
    assert {name: tensors[name].shape for name in shapes} == shapes
    # 18 KDA, 6 MLA, 1 dense, 23 MoE; two norms a layer; embedding, last norm and head.
    assert len(tensors) == 18 * 13 + 6 * 8 + 3 + 23 * (2 + 3 * 128 + 3) + 24 * 2 + 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.24.eh_proj.weight", True),
        ("model.layers.24.mlp.experts.0.up_proj.weight", True),
        ("model.layers.24.embed_tokens.weight", False),
        ("model.layers.24.mlp", False),
        ("model.layers.25.eh_proj.weight", False),
        ("model.layers.23.eh_proj.weight", False),
        ("model.layers.024.eh_proj.weight", False),
        ("x.model.layers.24.eh_proj.weight", False),
    ],
)
def test_mtp_names_match_exactly(name: str, expected: bool):
    assert is_mtp(name, Config.from_dict(config_fields("full", {}))) is expected


def test_a_single_file_needs_no_index(folder: Path):
    tensors: Tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= read_shard(path)
        path.unlink()
    (folder / INDEX).unlink()
    write_shard(folder / "model.safetensors", tensors)
    assert Checkpoint.open(folder).tensor(KDA_V).shape == (64, 64)


def test_the_router_may_be_stored_in_bf16(tmp_path: Path):
    synthesize(tmp_path / "micro", "micro", 0, layers=2, gate_dtype="BF16")
    assert Checkpoint.open(tmp_path / "micro").tensor("model.layers.1.mlp.gate.weight").dtype == ml_dtypes.bfloat16


def test_mtp_tensors_are_skipped_and_may_be_missing(folder: Path):
    name = "model.layers.2.eh_proj.weight"
    edit(folder, name, lambda tensors: tensors.pop(name))
    edit_index(folder, lambda weight_map: weight_map.pop(name))
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder).tensor("model.layers.2.enorm.weight")
    assert str(error.value) == (
        f"tensor `model.layers.2.enorm.weight`: the model has no such tensor; it is in {folder}"
    )


KDA_BIAS, OTHER = "model.layers.0.attention.q_proj.bias", "model.layers.0.attention.v.weight"
VALUE = bytes(2 * 64 * 64)
# Changes of KDA_V in the shard and the index, the error, and the tensor that it names.
WRONG_TENSORS = [
    ({}, f"`{KDA_V}`, BF16 [64, 64]: missing in {{folder}}"),
    (
        {OTHER: ("BF16", [64, 64], VALUE)},
        f"`{KDA_V}`, BF16 [64, 64]: missing in {{folder}}\nhint: not in the model: {OTHER}",
    ),
    (
        {KDA_V: ("BF16", [64, 64], VALUE), KDA_BIAS: ("BF16", [1], b"ab")},
        f"`{KDA_BIAS}`: expected no such tensor, found in {{shard}}, in {{folder}}",
    ),
    ({KDA_V: ("BF16", [32, 128], VALUE)}, f"`{KDA_V}`: expected shape [64, 64], found [32, 128], in {{shard}}"),
    ({KDA_V: ("F16", [64, 64], VALUE)}, f"`{KDA_V}`: expected dtype BF16, found F16, in {{shard}}"),
]


@pytest.mark.parametrize(("tensors", "message"), WRONG_TENSORS)
def test_a_tensor_that_is_missing_renamed_unknown_or_of_another_form(folder: Path, tensors: Tensors, message: str):
    def change(old: dict[str, Any]) -> None:
        del old[KDA_V]
        old |= tensors

    shard = edit(folder, KDA_V, change)
    edit_index(folder, lambda weight_map: [weight_map.pop(KDA_V), weight_map.update(dict.fromkeys(tensors, shard))])
    assert refusal(folder) == f"tensor {message.format(folder=folder, shard=shard)}"


def test_tensor_in_two_shards(folder: Path):
    first = home(folder, KDA_V).name
    value = read_shard(folder / first)[KDA_V]
    second = edit(folder, "lm_head.weight", lambda tensors: tensors.update({KDA_V: value}))
    assert refusal(folder) == f"tensor `{KDA_V}`: expected once, found twice, in {first} and {second}"


def test_tensor_in_another_shard_than_the_index_says(folder: Path):
    found, said = home(folder, KDA_V).name, home(folder, "lm_head.weight").name
    edit_index(folder, lambda weight_map: weight_map.update({KDA_V: said}))
    assert refusal(folder) == f"tensor `{KDA_V}`: expected in {said}, as {INDEX} says, found in {found}"


def test_absent_shard(folder: Path):
    """Regression in other ports: they began to load and failed in the middle."""
    shard = home(folder, "lm_head.weight")
    names = [*read_shard(shard)]
    shard.unlink()
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    first = next(name for name, file in weight_map.items() if file == shard.name)
    assert refusal(folder) == (
        f"shard `{shard.name}`: the file with {len(names)} tensors ({first} and {len(names) - 1} more) "
        f"is missing, in {folder}\nhint: download the checkpoint again, all files"
    )


def test_shard_that_the_index_does_not_know(folder: Path):
    write_shard(folder / "model-00009-of-00009.safetensors", {})
    assert refusal(folder) == (
        f"shard `model-00009-of-00009.safetensors`: expected in {INDEX}, found no entry for it, in {folder}"
    )


def test_no_folder_and_no_weights(tmp_path: Path, pristine: Path):
    assert refusal(tmp_path / "absent") == f"checkpoint `{tmp_path / 'absent'}`: expected a folder, found nothing"
    assert refusal(pristine / "config.json") == (
        f"checkpoint `{pristine / 'config.json'}`: expected a folder, found a file"
    )
    with pytest.raises(ConfigError):
        Checkpoint.open(tmp_path)
    shutil.copy(pristine / "config.json", tmp_path)
    assert refusal(tmp_path) == (
        f"checkpoint `{tmp_path}`: expected {INDEX}, or model.safetensors alone, found neither"
    )


BROKEN_INDEXES = [
    ("{", "readable JSON, found Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("[]", "an object with a `weight_map`, found []"),
    ("[" * 1_000_000, "readable JSON, found more than 16 levels of objects and lists"),
    ('{"weight_map": NaN}', "readable JSON, found the number NaN"),
    (
        '{"weight_map": {"a": "../b.safetensors"}}',
        'a .safetensors file of the same folder for `a`, found "../b.safetensors"',
    ),
    ('{"weight_map": {"a": 3}}', "a .safetensors file of the same folder for `a`, found 3"),
    ('{"metadata": [], "weight_map": {}}', "`metadata` to be an object, found []"),
    ('{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}', "`a` once, found it twice"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN_INDEXES)
def test_broken_index(folder: Path, text: str, message: str):
    (folder / INDEX).write_text(text)
    assert refusal(folder) == f"index `{INDEX}`: expected {message}, in {folder}"


ENTRY = '{"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}'
FLOAT = '{"dtype": "F32", "shape": %s, "data_offsets": [0, 2]}'
BROKEN_SHARDS = [
    (None, b"", "header too small"),
    (None, b"\x01" + bytes(6), "header too small"),
    (None, b"\x02" + bytes(7), "invalid header length"),
    (None, b"\xff" * 100, "header too large"),
    ("{]", b"", "invalid JSON in header"),
    ("3", b"", "invalid JSON in header"),
    ('{"a":' * 1_000_000, b"", "invalid JSON in header"),
    ('{"a": 3}', b"", "invalid JSON in header"),
    (f'{{"a": {ENTRY.replace("U8", "Q8")}}}', b"xy", "invalid JSON in header"),
    (f'{{"a": {ENTRY.replace("U8", "F4").replace("[2]", "[4]")}}}', b"xy", "`a` in F4"),
    (f'{{"a": {ENTRY}}}', b"xyz", "incomplete metadata, file not fully covered"),
    (f'{{"a": {ENTRY}}}', b"x", "incomplete metadata, file not fully covered"),
    (f'{{"a": {ENTRY}, "b": {ENTRY}}}', b"xy", "invalid offset for tensor"),
    (f'{{"a": {ENTRY}, "a": {ENTRY.replace("[0, 2]", "[2, 4]")}}}', b"xyxy", "invalid offset for tensor"),
    (f'{{"a": {FLOAT % "[1]"}}}', b"xy", "invalid shape, data type, or offset for tensor"),
    (f'{{"a": {FLOAT % ([2**61] * 300)}}}', b"xy", "overflow computing buffer size"),
]


@pytest.mark.parametrize(("header", "data", "message"), BROKEN_SHARDS)
def test_a_broken_shard(folder: Path, header: str | None, data: bytes, message: str):
    path = home(folder, KDA_V)
    if header is None:
        path.write_bytes(data)
    else:
        write_raw(path, header.encode(), data)
    said = refusal(folder)
    assert said.startswith(f"shard `{path.name}`: expected a readable safetensors file, found {message}")
    assert said.endswith(f", in {folder}{AGAIN}")


@pytest.mark.parametrize("kept", [100, -1])
def test_truncated_shard(folder: Path, kept: int):
    path = home(folder, KDA_V)
    path.write_bytes(path.read_bytes()[:kept])
    assert f"shard `{path.name}`: expected a readable safetensors file, found in" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", INDEX, None])
def test_a_pipe_or_a_device_in_a_checkpoint_is_refused_and_not_waited_for(folder: Path, name: str | None):
    """Regression: a pipe in place of a shard hung the build."""
    path = folder / name if name else home(folder, KDA_V)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises((ConfigError, CheckpointError), match=r"expected a readable .*file.*, found a pipe"):
        Checkpoint.open(folder)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises((ConfigError, CheckpointError), match="found a symbolic link that leads out of the folder"):
        Checkpoint.open(folder)


def test_a_tokenizer_file_that_leads_out_is_refused_and_what_no_runner_reads_is_left(folder: Path, tmp_path: Path):
    """Regression: ``special_tokens_map.json → id_rsa`` and ``merges.txt → /etc/passwd`` got into the artifact."""
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    for name in ("special_tokens_map.json", "merges.txt", "vocab.json", "added_tokens.json"):
        (folder / name).symlink_to(secret)
    assert secret.read_bytes() not in Checkpoint.open(folder).tokenizer_files().values()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"tokenizer file `chat_template\.jinja`: .* found a symbolic link that"):
        Checkpoint.open(folder).tokenizer_files()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match="of at most 1,048,576 bytes, found more than 1,048,576 bytes"):
        Checkpoint.open(folder).tokenizer_files()


def test_a_snapshot_of_a_hub_cache_is_read_through_its_links(pristine: Path, tmp_path: Path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(pristine, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.digests() == Checkpoint.open(pristine).digests()
    assert checkpoint.tokenizer_files() == Checkpoint.open(pristine).tokenizer_files()
    np.testing.assert_array_equal(checkpoint.tensor(KDA_V), Checkpoint.open(pristine).tensor(KDA_V))


def test_a_shard_is_the_file_whose_header_was_read(folder: Path):
    """Regression: the file was opened again to read tensors, when another file could have had its name."""
    checkpoint, path = Checkpoint.open(folder), home(folder, KDA_V)
    expected = np.array(checkpoint.tensor(KDA_V))
    os.replace(shutil.copy(path, path.with_suffix(".new")), path)
    path.write_bytes(bytes(path.stat().st_size))
    np.testing.assert_array_equal(checkpoint.tensor(KDA_V), expected)


def test_no_escape_of_an_index_or_a_header_reaches_the_terminal(folder: Path):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][KDA_V] = "model-\x1b[2J.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(folder).replace("\n", "").isprintable()
    path = home(folder, KDA_V)
    write_raw(path, b'{"\\u001b[2J": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"x")
    (folder / INDEX).unlink()
    assert refusal(folder).replace("\n", "").isprintable()
