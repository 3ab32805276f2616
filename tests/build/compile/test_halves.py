"""Programs without weights are the same as with a checkpoint; weights are attached without a compiler."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from ling3export.artifacts.manifest import read_manifest, recorded_files
from ling3export.artifacts.schema import PortableReceipts, Receipts, Tolerance
from ling3export.checkpoint.convert import store_files
from ling3export.checkpoint.load_plan import load_plan
from ling3export.checkpoint.reader import Checkpoint
from ling3export.checkpoint.synth import config_fields
from ling3export.checkpoint.synth_weights import DummyWeights
from ling3export.cli import main as cli
from ling3export.compile import pool
from ling3export.compile.attach import still_measured
from ling3export.model.config import Config
from ling3export.model.parameters import expected_tensors, mtp_tensors
from ling3export.runners.cli import main as runner_cli
from ling3export.runners.engine.engine import Engine
from ling3export.verify.verify import check_digests
from tests.support import toy_artifact
from tests.support.artifacts_fixture import RECIPES
from tests.support.builds import copying
from tests.support.refusals import refusal, said, succeeded

PROMPT = [5, 9, 2]


@pytest.fixture(scope="module")
def config(artifact, tmp_path_factory) -> Path:
    """A checkpoint's config.json in a folder of its own."""
    return Path(shutil.copy(artifact.checkpoint("micro-tp1") / "config.json", tmp_path_factory.mktemp("config")))


@pytest.fixture(scope="module")
def programs(artifact, config, tmp_path_factory) -> Path:
    """An artifact without weights; the cache has its programs from the complete artifact."""
    artifact("micro-tp1")
    folder = tmp_path_factory.mktemp("programs") / "p.ling3"
    built = succeeded(cli.main, "build", config, folder, "--no-weights", *RECIPES["micro-tp1"].options()).output
    assert "not run: no weights" in built and "(no weights)" in built
    return folder


@pytest.fixture
def no_compiler(monkeypatch) -> None:
    def refused(*arguments, **options):
        raise AssertionError("a compiler was started")

    monkeypatch.setattr(pool.Compilers, "__init__", refused)


def test_programs_without_a_checkpoint_are_those_of_a_build_with_one(artifact, programs):
    """The cache keys are the same, so this holds without cache entries, too."""
    alone, whole = read_manifest(programs), artifact.manifest("micro-tp1")
    assert not alone.has_weights and alone.weights_digest is None and not (programs / "weights").exists()
    assert list(alone.source.digests) == ["config.json"]
    cells, wanted = (manifest.targets["cpu-tp1"].cells for manifest in (alone, whole))
    assert [cell.stablehlo for cell in cells.values()] == [cell.stablehlo for cell in wanted.values()]
    for name, cell in cells.items():
        origin, other = cell.origin, wanted[name].origin
        assert origin is not None and other is not None
        assert (origin.key, origin.program) == (other.key, other.program)
    assert check_digests(programs, alone) == (3 * len(cells) + 1, 0)  # one more is the program that makes the state
    verified = succeeded(cli.main, "verify", programs).output
    assert "cpu-tp1: not run here: no weights" in verified
    assert "weights     none" in said(cli.main, "inspect", programs)


def test_a_runner_refuses_programs_without_weights_and_names_attach(programs):
    assert refusal(runner_cli.main, "generate", programs, "--prompt-ids", "1,2", "--max-tokens", "1") == (
        f"error: artifact `p.ling3`: expected weights, found programs alone, in {programs}\n"
        f"hint: write them with: ling3export attach {programs} CHECKPOINT\n"
    )


@pytest.mark.extras
def test_weights_of_two_fine_tunes_are_attached_and_nothing_is_compiled(artifact, programs, no_compiler, tmp_path):
    before, whole = read_manifest(programs), artifact.manifest("micro-tp1")
    here = shutil.copytree(programs, tmp_path / "p.ling3")
    said(cli.main, "attach", here, artifact.checkpoint("micro-tp1"))
    attached = read_manifest(here)
    assert attached.weights == whole.weights and attached.weights_digest == whole.weights_digest
    assert attached.targets["cpu-tp1"].cells == before.targets["cpu-tp1"].cells
    assert attached.programs_digest == before.programs_digest
    assert attached.state_of("cpu-tp1") == whole.state_of("cpu-tp1")
    assert attached.vectors.receipts["cpu-tp1"].passed
    assert sorted(recorded_files(attached)) == sorted(recorded_files(whole))
    other = tmp_path / "other.ling3"
    said(cli.main, "attach", here, artifact.checkpoint("micro-tp1-seed2"), other)
    tuned = read_manifest(other)
    assert tuned.weights_digest != attached.weights_digest
    assert tuned.targets == before.targets and tuned.programs_digest == before.programs_digest
    assert tuned.state_of("cpu-tp1") != attached.state_of("cpu-tp1"), "states must not be shared"
    assert read_manifest(here) == attached
    for folder, same in ((here, "micro-tp1"), (other, "micro-tp1-seed2")):
        with Engine(folder, report=lambda text: None) as engine, Engine(artifact(same), report=lambda _: None) as built:
            found, wanted = (each.generate([PROMPT], max_tokens=8)[0] for each in (engine, built))
            assert found.token_ids == wanted.token_ids
            assert engine.stats()["compile_events"] == 0


def test_receipts_stay_with_the_same_weights_and_are_named_where_others_come():
    """Regression: results from other machines or of portable programs were dropped without a message."""
    manifest = read_manifest(toy_artifact.shared())
    fresh = replace(manifest.vectors, receipts={}, portable=None)
    found = Receipts(Tolerance("largest", 1e-3), {}, {})
    portable = PortableReceipts(**asdict(found), compiler="jaxlib 1", lacking={})
    measured = replace(fresh, receipts={"cpu-tp2": found}, portable={"tpu": portable})
    manifest, notes = replace(manifest, vectors=measured), list[str]()
    report = SimpleNamespace(note=notes.append)
    assert still_measured(manifest, manifest.weights, fresh, ["cpu-tp2"], report) == measured and not notes
    other = replace(manifest.weights, index={})
    assert still_measured(manifest, other, fresh, ["cpu-tp2"], report) == fresh
    assert notes == [
        "tpu: its receipts were those of other weights and are dropped; measure it again with: "
        "ling3export verify ARTIFACT --target tpu --portable"
    ]
    still_measured(manifest, other, fresh, [], report)
    assert notes[1].endswith(": ling3export verify ARTIFACT --target cpu-tp2") and len(notes) == 3


@pytest.mark.extras
def test_native_kernels_stay_with_the_programs_that_call_them(artifact, no_compiler, tmp_path):
    """Regression: ``attach`` left the kernels out, and the artifact could not be loaded."""
    out = tmp_path / "out.ling3"
    said(cli.main, "attach", artifact("micro-tp1-kernels"), artifact.checkpoint("micro-tp1-kernels"), out, "--no-run")
    manifest = read_manifest(out)
    original = artifact.manifest("micro-tp1-kernels")
    assert manifest.targets["cpu-tp1"].kernels is not None and manifest.targets == original.targets
    # Each is checked against its own manifest: the number of numpy's threads changes the last digits of expectations.
    assert check_digests(out, manifest) == check_digests(artifact("micro-tp1-kernels"), original)


def test_another_config_or_weights_that_are_there_are_refused_and_nothing_changes(artifact, programs, tmp_path):
    before = {path: path.read_bytes() for path in programs.rglob("*") if path.is_file()}
    flat = artifact.checkpoint("micro-tp4-flat")
    assert refusal(cli.main, "attach", programs, flat) == (
        f"error: checkpoint `{flat.name}`: expected the config that `p.ling3` was built from, "
        f"found q_lora_rank null instead of 32, in {flat}\n"
        "hint: build programs for it: ling3export build CONFIG.json ARTIFACT --no-weights\n"
    )
    whole, checkpoint = artifact("micro-tp1"), artifact.checkpoint("micro-tp1")
    assert "found weights of" in refusal(cli.main, "attach", whole, checkpoint)
    assert {path: path.read_bytes() for path in programs.rglob("*") if path.is_file()} == before


def test_programs_are_proved_with_dummy_weights_that_are_not_kept(artifact, config, monkeypatch, tmp_path):
    target = artifact.manifest("micro-tp1").targets["cpu-tp1"]
    monkeypatch.setattr(pool.Compilers, "run", copying(artifact("micro-tp1") / "programs" / "cpu-tp1", target))
    options = RECIPES["micro-tp1"].options()
    said(cli.main, "build", config, tmp_path / "p.ling3", "--no-weights", "--dummy-weights", "7", *options)
    manifest = read_manifest(tmp_path / "p.ling3")
    assert not manifest.has_weights and manifest.vectors.receipts["cpu-tp1"].passed
    assert manifest.vectors.source.endswith("; dummy weights of seed 7, not kept")
    assert sorted(path.name for path in (tmp_path / "p.ling3").iterdir()) == ["manifest.json", "programs"]


def test_dummy_weights_follow_from_seed_name_and_index():
    config = Config.from_dict(config_fields("micro", {}))
    one, other = DummyWeights(config, 1), DummyWeights(config, 2)
    for name, info in expected_tensors(config).items():
        tensor = one.tensor(name).astype(np.float32)
        assert tensor.shape == info.shape and np.isfinite(tensor).all()
        if "norm" in name:
            assert (tensor == 1).all()
        elif name.endswith("expert_bias"):
            assert (tensor == 0).all()
        elif name.endswith("A_log"):
            assert tensor.min() >= 0 and tensor.max() <= math.log(16)
        else:
            assert abs(tensor.std() / 0.02 - 1) < 0.3 and abs(tensor.mean()) < 0.02
            assert (tensor == DummyWeights(config, 1).tensor(name).astype(np.float32)).all()
            assert (tensor != other.tensor(name).astype(np.float32)).any()


def test_the_load_plan_names_every_tensor_of_the_checkpoint_once_and_every_one_of_the_store(artifact):
    printed = json.loads(said(cli.main, "inspect", artifact("micro-tp1"), "--load-plan"))
    source = Checkpoint.open(artifact.checkpoint("micro-tp1"))
    assert printed == load_plan(source.config, "float32")
    keys = [key for row in printed["stored"] for key in row["from"]["keys"]]
    twice = [key for key in keys if keys.count(key) > 1]
    assert all("kv_b_proj" in key for key in twice)  # its rows are those of keys and values
    assert set(keys) == set(expected_tensors(source.config))
    (skipped,) = printed["skipped"]
    assert skipped["keys"] == list(mtp_tensors(source.config))
    index = artifact.manifest("micro-tp1").weights.index
    for row in printed["stored"]:
        stored = index[row["tensor"]]
        assert (row["file"], tuple(row["shape"]), row["shards"]) == (stored.file, stored.shape, stored.shards)
        assert all(list(source.tensor(key).shape) == row["from"]["shape"] for key in row["from"]["keys"])
    assert {row["tensor"] for row in printed["stored"]} == set(index)
    steps = {row["tensor"]: row["from"]["steps"] for row in printed["stored"]}
    assert steps["mla.w_uk"] == [
        "cut axis 0 into 4",
        "take rows 0 to 16 of each part",
        "put 1 of 4 parts into each shard",
        "stack 2 layers along axis 1",
        "convert to float32",
    ]
    assert len(printed["stored"]) == sum(map(len, store_files(source.config, "float32").values()))
