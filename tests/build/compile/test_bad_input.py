"""Bad input: each a clear error on stderr, exit 1 or 2, stdout empty, no traceback, nothing half-written."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ling3export.cli import main as cli
from tests.support.builds import SMALLEST
from tests.support.refusals import refusal
from tests.support.tiny import tiny_fields, tiny_weights, write_tiny

Fields = dict[str, Any]
Tensors = dict[str, np.ndarray]

# Checkpoints


@pytest.fixture
def build_refusal(tmp_path: Path) -> Callable[..., str]:
    """Builds a tiny checkpoint with changes; gives what is said, once nothing was found to be left."""

    def build(
        *options: object,
        fields: Callable[[Fields], object] = dict,
        tensors: Callable[[Tensors], object] = dict,
        folder: Callable[[Path], object] = Path,
    ) -> str:
        config = tiny_fields()
        weights = tiny_weights(config)
        fields(config)
        tensors(weights)
        checkpoint = write_tiny(tmp_path / "checkpoint", config, weights)
        folder(checkpoint)
        before = sorted(tmp_path.rglob("*"))
        said = refusal(cli.main, "build", checkpoint, tmp_path / "x.ling3", *SMALLEST, *options)
        assert sorted(tmp_path.rglob("*")) == before
        return said

    return build


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields.pop("hidden_size"), "`hidden_size`: expected"),
        (lambda fields: fields.update(new_trick=1), "`new_trick`: expected"),
        (lambda fields: fields.update(hidden_size="32"), "`hidden_size`: expected an integer of at least 1, found"),
        (lambda fields: fields.update(rms_norm_eps=None), "`rms_norm_eps`: expected"),
        (lambda fields: fields.update(num_experts=15), "`n_group`: expected groups of two or more that divide 15"),
    ],
)
def test_a_config_field_missing_unknown_or_ill_typed(build_refusal, change, message):
    said = build_refusal(fields=change)
    assert said.startswith(f"error: config field {message}")
    assert "found" in said
    assert "config.json" in said


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\ufeff{}", '{"a": NaN}', "[" * 100_000])
def test_a_config_that_is_no_json_object(build_refusal, text):
    said = build_refusal(folder=lambda path: (path / "config.json").write_text(text))
    assert re.match(r"error: .*expected .*found .*", said), said
    assert "config.json" in said


NORM = "model.norm.weight"
BETA = "model.layers.0.attention.b_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"tensor `{NORM}`: expected BF16 [32], found none"),
        (lambda tensors: tensors.update(extra=tensors[NORM]), "tensor `extra`: expected no such tensor"),
        (
            lambda tensors: tensors.update({BETA: tensors[BETA].T.copy()}),
            f"tensor `{BETA}`: expected shape [4, 32], found [32, 4]",
        ),
        (
            lambda tensors: tensors.update({NORM: tensors[NORM].astype(np.float32)}),
            f"tensor `{NORM}`: expected dtype BF16, found F32",
        ),
    ],
)
def test_a_tensor_missing_extra_or_mis_shaped(build_refusal, change, message):
    assert build_refusal(tensors=change).startswith(f"error: {message}")


def double(checkpoint: Path) -> None:
    """Puts the final norm into a third shard as well."""
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    save_file(
        {NORM: np.ones(32, ml_dtypes.bfloat16), "model.x": np.ones(1, np.float32)}, checkpoint / "model-3.safetensors"
    )
    index["weight_map"]["model.x"] = "model-3.safetensors"
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (double, f"tensor `{NORM}`: expected once, found twice"),
        (lambda path: os.truncate(path / SECOND, os.stat(path / SECOND).st_size - 1), "`: expected a file of"),
        (lambda path: os.truncate(path / SECOND, 100), f"shard `{SECOND}`: expected a header of"),
        (lambda path: os.truncate(path / SECOND, 0), f"shard `{SECOND}`: expected a safetensors header, found 0 bytes"),
        (lambda path: (path / SECOND).unlink(), f"shard `{SECOND}`: expected a file with"),
        (lambda path: (path / "config.json").unlink(), "config.json"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "tokenizer `tokenizer.json`: expected one that"),
        (lambda path: (path / "generation_config.json").write_text("x"), "`generation_config.json`: expected JSON"),
    ],
)
def test_files_of_a_checkpoint(build_refusal, change, message):
    assert message in build_refusal(folder=change)


def test_weights_that_are_not_finite(build_refusal):
    """They once ended in "the programs do not compute what the model computes", after minutes of compiling."""
    said = build_refusal(tensors=lambda tensors: tensors[NORM].__setitem__(3, np.nan))
    assert "error: vectors: expected finite logits of the plain model, found NaN or infinity in sequence 0" in said
    assert "hint: some weight of the checkpoint is not finite" in said


# The plan: one option of each kind through the command line; test_plan.py has every refusal


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--paddings", text], 1, f"error: --paddings: expected {wanted}")
        for text, wanted in [
            ("32,16", "ascending paddings, found 32 before 16"),
            ("16,16", "ascending paddings"),
            ("0", "a positive multiple of 16, found 0"),
            ("-16", "a positive multiple of 16, found -16"),
            ("17", "a positive multiple of 16, found 17"),
            ("", "integers with commas between, found ``"),
            ("16,x", "integers with commas between, found `16,x`"),
        ]
    ]
    + [
        (["--decode-paddings", "2,1"], 1, "error: --decode-paddings: expected ascending paddings, found 2 before 1"),
        (["--decode-paddings", "0"], 1, "error: --decode-paddings: expected a positive number, found 0"),
        (["--decode-paddings", "x"], 1, "error: --decode-paddings: expected integers with commas between, found `x`"),
        (["--tp", "8"], 1, "error: --tp: expected a divisor of 4 (the common divisor of heads 4, experts 16"),
        (["--tp", "x"], 2, "Error: Invalid value for '--tp'"),
        (["--max-running", "100000000"], 1, "error: --state-memory: expected room for 100000001 slots and one page ("),
        (["--pages", "100000000"], 1, "+ 100000000 pages of 16 tokens (4.50 KiB each) = 429.15 GiB on 1 device"),
        (["--state-memory", "1KiB"], 1, "found 1.00 KiB\nhint: lower --max-running, --context or --pages"),
        (["--state-memory", "much"], 1, "error: --state-memory: expected a size, found `much`"),
        (["--context", "513"], 1, "error: --context: expected 2 to 512 (max_position_embeddings), found 513"),
        (["--target", "rocm"], 1, "error: target `rocm`: expected a platform of cpu, tpu, cuda, found `rocm`"),
        (["--dtype", "float16"], 2, "Error: Invalid value for '--dtype'"),
        (["--jobs", "0"], 2, "Error: Invalid value for '--jobs'"),
        (["--frobnicate"], 2, "Error: No such option"),
        (["third"], 2, "Error: Got unexpected extra argument"),
    ],
)
def test_options_of_a_build(tmp_path, options, code, message):
    fields = tiny_fields()
    checkpoint = write_tiny(tmp_path / "checkpoint", fields, tiny_weights(fields))
    before = sorted(tmp_path.rglob("*"))
    assert message in refusal(cli.main, "build", checkpoint, tmp_path / "x.ling3", *SMALLEST, *options, code=code)
    assert sorted(tmp_path.rglob("*")) == before


def test_places_that_cannot_be_built_into(tmp_path):
    there, fields = tmp_path / "there", tiny_fields()
    checkpoint = write_tiny(tmp_path / "checkpoint", fields, tiny_weights(fields))
    there.mkdir()

    def said(place: Path, *options: str) -> str:
        return refusal(cli.main, "build", checkpoint, place, *SMALLEST, *options)

    assert "output `there`: expected a free name, found one that exists" in said(there)
    assert "hint: choose another name, or replace it with --force" in said(there)
    assert "output `there`: expected a folder whose manifest.json ling3export wrote" in said(there, "--force")
    assert "output `x`: expected an existing parent folder" in said(tmp_path / "no" / "x")
    assert "found File name too long" in said(tmp_path / ("x" * 300))
    assert "found File name too long" in said(tmp_path / ("x" * 240))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "there"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_artifact(command, tmp_path):
    (tmp_path / "file").touch()
    for name, message in {
        "nothing": "artifact `nothing`: expected a folder, found nothing",
        "file": "artifact `file`: expected a folder, found a file",
        ".": "expected manifest.json, found none",
    }.items():
        said = refusal(cli.main, command, tmp_path / name)
        assert message in said
        assert "\nhint: " in said
