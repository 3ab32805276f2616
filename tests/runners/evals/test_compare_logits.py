"""``eval compare-logits``: KL over the vocabulary, equal best tokens and perplexities, against numpy."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from ling3export.artifacts.manifest import file_record, read_manifest, write_manifest
from ling3export.runners.cli.main import main
from ling3export.runners.evals import compare_logits
from ling3export.runners.evals.compare_logits import judge
from ling3export.runners.evals.trials import EvalError
from ling3export.runners.load.loader import load
from ling3export.runners.text.tokenizer import TokenizerFiles
from tests.support import toy_artifact
from tests.support.artifacts_fixture import Artifacts, digest_of, kept_folder, sources_of, versions
from tests.support.kept_reference import KeptReference

TEXT = "Once upon a time there was a queen who counted her plums, and 17 of them were sour. " * 2
FIGURES = ("kl_mean", "kl_error", "kl_median", "kl_p99", "kl_max", "same_best", "perplexity_a", "perplexity_b")


def call(*arguments):
    return CliRunner().invoke(main, ["eval", "compare-logits", *map(str, arguments)])


def compared(*arguments):
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def toys() -> tuple[Path, Path]:
    """The toy, and one with another table."""
    made_of = [sources_of("ling3export.compile.lower"), digest_of({"toy": Path(toy_artifact.__file__)}), versions()]
    other = Artifacts(kept_folder()).kept("toy-5.ling3", made_of, lambda path: toy_artifact.build_toy(path, seed=5))
    return toy_artifact.shared(), other


@pytest.fixture(scope="module")
def loaded(toys):
    return load(toys[0], check="programs", report=lambda line: None)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text"
    file.write_text(TEXT)
    return file


def ids_of(artifact: Path) -> list[int]:
    return TokenizerFiles(artifact, read_manifest(artifact).tokenizer).tokenizer("text").encode(TEXT)


def figures(a: np.ndarray, b: np.ndarray, tokens: list[int]) -> dict[str, float]:
    """The figures that the command prints, in float64, for logits [T, V] and the next tokens."""
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (a.astype(np.float64), b.astype(np.float64)))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    kl, each = np.sum(p * np.log(p / q), -1), np.arange(len(tokens))
    perplexities = [float(np.exp(-np.log(x[each, tokens]).mean())) for x in (p, q)]
    error = kl.std(ddof=1) / math.sqrt(len(kl))
    same = np.mean(a.argmax(-1) == b.argmax(-1))
    found = (kl.mean(), error, np.median(kl), np.quantile(kl, 0.99), kl.max(), same, *perplexities)
    return {"tokens": len(tokens), **dict(zip(FIGURES, map(float, found), strict=True))} | {
        "perplexity_ratio": perplexities[1] / perplexities[0]
    }


def wanted(toys: tuple[Path, Path], window: int, tokens: int) -> tuple[list[int], int, list[np.ndarray]]:
    """The used ids of the text, half a window, and both toys' logits for each scored token."""
    ids, half = ids_of(toys[0]), min(window, toy_artifact.CONTEXT) // 2
    ids, rows = ids[: half + tokens], []
    for at in range(half, len(ids)):
        start = (at - half) // half * half
        rows.append(sum(ids[start:at]) % toy_artifact.VOCAB)
    return ids, half, [toy_artifact.table(seed)[rows] for seed in (0, 5)]


@pytest.mark.parametrize(("window", "tokens"), [(512, 4096), (16, 4096), (10, 33), (2, 3)])
def test_every_token_after_half_a_window_is_compared_by_a_whole_row(toys, loaded, window, tokens):
    """Windows as long as the context, a chunk, or parts of a chunk, in batches of one for each slot."""
    ids, half, (rows, _) = wanted(toys, window, tokens)
    steps = [*compare_logits.steps(loaded, ids, half)]
    assert sorted(place for places, _ in steps for place in places) == [*range(len(ids) - half)]
    assert all((logits == rows[places]).all() for places, logits in steps)


def test_two_artifacts_are_compared_by_all_their_rows(toys, text):
    ids, half, rows = wanted(toys, 512, 4096)
    found = compared(*toys, "--text", text)
    assert found == pytest.approx({"window": 2 * half, **figures(*rows, ids[half:])}, rel=1e-9)


def test_an_artifact_is_no_nat_from_itself(toys, text):
    found = compared(toys[0], toys[0], "--text", text)
    assert {found[name] for name in FIGURES if name.startswith("kl")} == {0.0}
    assert found["same_best"] == found["perplexity_ratio"] == 1.0
    assert found["perplexity_a"] == found["perplexity_b"] > 1


def test_a_short_text_is_judged_from_its_middle_on(toys, tmp_path):
    (tmp_path / "text").write_text(" a b c")
    found = compared(*toys, "--text", tmp_path / "text")
    assert 0 < found["tokens"] <= 3 and found["window"] <= 6


def test_other_tokenizers_and_vocabularies_are_refused(toys, text, tmp_path, monkeypatch):
    """With vocabularies of equal size the logits could be compared, but would mean something else."""
    other = Path(shutil.copytree(toys[0], tmp_path / "other.ling3"))
    file = other / "tokenizer/tokenizer.json"
    said = json.loads(file.read_text())
    said["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(said))
    manifest = read_manifest(other)
    records = tuple(file_record(other, each.path) for each in manifest.tokenizer)
    write_manifest(other, replace(manifest, tokenizer=records))
    done = call(toys[0], other, "--text", text)
    assert done.exit_code == 1
    assert "tokenizers: expected the same tokens of the text, found others from token 0 on, in " in done.stderr
    larger = replace(manifest, config={**manifest.config, "vocab_size": 321})
    monkeypatch.setattr(compare_logits, "read_trusted", lambda folder, _: larger if folder == other else manifest)
    done = call(toys[0], other, "--text", text)
    assert done.exit_code == 1 and "vocabularies: expected the same, found 320 tokens in " in done.stderr


def test_numbers_that_are_not_finite_are_refused():
    row = np.zeros(8, np.float32)
    for bad in (np.nan, np.inf):
        with pytest.raises(EvalError, match="logits of B: a number is not finite"):
            judge(row, np.where(np.arange(8) == 3, bad, row), 0)


@pytest.mark.extras
def test_models_are_compared_as_the_reference_in_float64_does(artifact, text):
    """Artifacts with different weights, on one device and on two, with windows cut by pages and prefill calls."""
    names = ("micro-tp2", "micro-tp1-seed2")
    folders = [artifact(name) for name in names]
    found = compared(*folders, "--text", text, "--window", 48, "--tokens", 60)
    ids = ids_of(folders[0])[: 24 + 60]
    windows = [ids[start : start + 48] for start in range(0, len(ids) - 24, 24)]
    a, b = (
        np.concatenate([rows[23:-1] for rows in KeptReference(artifact.checkpoint(name)).logits_many(windows)])
        for name in names
    )
    assert found == pytest.approx({"window": 48, **figures(a, b, ids[24:])}, rel=1e-3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "text: expected two tokens or more, found 0, at "),
        (b"ab\xff", "text: expected a file in UTF-8, found 'utf-8' codec can't decode byte 0xff in position 2"),
        (None, "text: expected a file in UTF-8, found No such file or directory, at "),
    ],
)
def test_an_unreadable_text_is_refused_before_anything_is_loaded(toys, tmp_path, data, said):
    if data is not None:
        (tmp_path / "text").write_bytes(data)
    done = call(*toys, "--text", tmp_path / "text")
    assert done.exit_code == 1 and done.stderr.startswith(f"error: {said}"), done.stderr
    assert "loaded" not in done.stderr
