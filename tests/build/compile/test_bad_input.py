"""Bad input gives a clear error on stderr, exit code 1 or 2, empty stdout, no traceback and no partial output."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ling3export.cli import main as cli
from tests.support.builds import SMALLEST
from tests.support.refusals import refusal
from tests.support.tiny import tiny_fields, tiny_weights, write_tiny

Fields = dict[str, Any]
Tensors = dict[str, np.ndarray]

# Checkpoints


@pytest.fixture
def build_refusal(tmp_path: Path) -> Callable[..., str]:
    """Builds a tiny checkpoint with changes; checks that no files are left, and returns the error."""

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


NORM = "model.norm.weight"
SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("fields", lambda fields: fields.pop("hidden_size"), "error: config field `hidden_size`: expected"),
        ("fields", lambda fields: fields.update(new_trick=1), "error: config field `new_trick`: expected"),
        ("tensors", lambda tensors: tensors.pop(NORM), f"error: tensor `{NORM}`, BF16 [32]: missing"),
        ("folder", lambda path: (path / "config.json").write_text("[" * 100_000), "config.json"),
        ("folder", lambda path: (path / "config.json").unlink(), "config.json"),
        ("folder", lambda path: os.truncate(path / SECOND, 100), f"shard `{SECOND}`: expected a readable safetensors"),
        ("folder", lambda path: (path / SECOND).unlink(), f"shard `{SECOND}`: the file with"),
        ("folder", lambda path: (path / "tokenizer.json").write_text("{}"), "`tokenizer.json`: expected one that"),
        (
            "folder",
            lambda path: (path / "generation_config.json").write_text("x"),
            "`generation_config.json`: expected JSON",
        ),
    ],
)
def test_a_checkpoint_that_is_not_whole(build_refusal, part, change, message):
    """One of each kind through the command line; test_config.py and test_checkpoint.py have every error."""
    assert message in build_refusal(**{part: change})


def test_weights_that_are_not_finite(build_refusal):
    """Regression: the error was "the programs do not compute what the model computes", after minutes of compiling."""
    said = build_refusal(tensors=lambda tensors: tensors[NORM].__setitem__(3, np.nan))
    assert "error: vectors: expected finite logits of the plain model, found NaN or infinity in sequence 0" in said
    assert "hint: some weight of the checkpoint is not finite" in said


# The plan: one option of each kind through the command line; test_plan.py has every error.


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--paddings", text], 1, f"error: --paddings: expected {wanted}")
        for text, wanted in [
            ("-16", "a positive multiple of 16, found -16"),
            ("", "integers with commas between, found ``"),
            ("16,x", "integers with commas between, found `16,x`"),
        ]
    ]
    + [
        (["--decode-paddings", "2,1"], 1, "error: --decode-paddings: expected ascending paddings, found 2 before 1"),
        (["--tp", "8"], 1, "error: --tp: expected a divisor of 4 (the common divisor of heads 4, experts 16"),
        (["--tp", "x"], 2, "Error: Invalid value for '--tp'"),
        (["--max-running", "100000000"], 1, "error: --state-memory: expected room for 100000001 slots and one page ("),
        (["--state-memory", "much"], 1, "error: --state-memory: expected a size, found `much`"),
        (["--target", "rocm"], 1, "error: target `rocm`: expected a platform of cpu, tpu, cuda, found `rocm`"),
        (["--dtype", "float16"], 2, "Error: Invalid value for '--dtype'"),
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
    assert "output `x`: its parent folder does not exist" in said(tmp_path / "no" / "x")
    assert "found File name too long" in said(tmp_path / ("x" * 300))
    assert "found File name too long" in said(tmp_path / ("x" * 240))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "there"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_paths_without_an_artifact_are_refused(command, tmp_path):
    (tmp_path / "file").touch()
    for name, message in {
        "nothing": "artifact `nothing`: expected a folder, found nothing",
        "file": "artifact `file`: expected a folder, found a file",
        ".": "it has no manifest.json",
    }.items():
        said = refusal(cli.main, command, tmp_path / name)
        assert message in said
        assert "\nhint: " in said
