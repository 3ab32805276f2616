"""A SavedModel's signatures against the same steps under jit, and the errors for models that cannot be exported."""

import json
import os
import sys
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from ling3export.artifacts.schema import WeightsRecord
from ling3export.checkpoint.convert import store_bytes
from ling3export.checkpoint.reader import Checkpoint
from ling3export.cli import main as cli
from ling3export.compile.lower import collective_counts, device_mesh
from ling3export.foundation import processes
from ling3export.foundation.errors import Ling3Error, PlanError
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.parameters import weight_table
from ling3export.model.program import build_step
from ling3export.plan.options import Options
from ling3export.savedmodel import export as savedmodel
from tests.support.artifacts_fixture import run, sources_of, versions
from tests.support.builds import UNOPTIMIZED
from tests.support.direct import Direct, pack, relative
from tests.support.numerics import Quick
from tests.support.tiny import tiny_fields

pytestmark = pytest.mark.extras

CALLS = Path(__file__).parents[2] / "support" / "savedmodel_calls.py"
SIZES = ("--paddings", "32", "--decode-paddings", "2", "--max-running", "2", "--context", "128", "--page-size", "32")
TOKENS = np.arange(7, 27, dtype=np.int32)  # a chunk and a quarter


def export(artifact, weights: str) -> tuple[Path, Path]:
    """(checkpoint, SavedModel) of the micro model in fp32, with weights in one of their forms."""
    checkpoint = artifact.checkpoint("micro-tp1")
    form = () if weights == "bf16" else ("--weights", weights)
    command = ("build", checkpoint, "--format", "savedmodel", "--dtype", "float32", *SIZES, *form)
    model = artifact.kept(
        f"micro-{weights}.savedmodel",
        [sources_of("ling3export.savedmodel.export"), *map(str, command), versions()],
        lambda path: run(sys.executable, "-m", "ling3export.cli", *command[:2], path, *command[2:]),
    )
    return checkpoint, model


@pytest.fixture(scope="session")
def exported(artifact) -> tuple[Path, Path]:
    return export(artifact, "bf16")


def calls_of(direct: Direct) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Calls that prefill slot 1, decode one token, and sample the next one greedily and with a seed."""
    table = direct.tables[1]
    none = np.zeros_like(table)
    prefill = {
        "tokens": np.concatenate([TOKENS, np.zeros(12, np.int32)]),
        "chunk_slot": np.array([1, 1], np.int32),
        "chunk_start": np.array([0, 16], np.int32),
        "chunk_len": np.array([16, 4], np.int32),
        "fresh": np.array([1, 0], np.int32),
        "page_table": np.stack([table, table]),
    }
    decode = {
        "slot": np.array([1, 0], np.int32),
        "position": np.array([20, 0], np.int32),
        "page_table": np.stack([table, none]),
        "token": np.array([99, 0], np.int32),
    }
    sample = {
        "slot": np.array([1, 2], np.int32),
        "position": np.array([21, 5], np.int32),
        "temperature": np.array([0.0, 0.9], np.float32),
        "top_k": np.array([0, 7], np.int32),
        "top_p": np.array([1.0, 0.8], np.float32),
        "min_p": np.array([0.0, 0.01], np.float32),
        "seed": np.array([0, -5], np.int32),
    }
    again = decode | {"position": np.array([21, 0], np.int32), "token": np.array([-1, 0], np.int32)}
    return [("prefill@32", prefill), ("decode@2", decode), ("sample@2", sample), ("decode@2", again)]


def under_jit(direct: Direct) -> list[dict[str, np.ndarray]]:
    """Results of the same calls under jit."""
    results, logits = [], None
    for name, fields in calls_of(direct):
        phase, padding = name.split("@")
        step, call = direct.step(phase, int(padding))
        held = {key: direct.state[key] for key in step.arguments[1]}
        batch = {"packed": pack(step.fields, **fields)} | ({"logits": logits} if phase == "sample" else {})
        state, out = call(direct.params if step.arguments[0] else {}, held, batch)
        direct.state.update(state)
        logits = out.get("logits", logits)
        results.append({key: np.asarray(value) for key, value in (state | out).items()})
    return results


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_signatures_compute_what_the_steps_compute_under_jit(artifact, tmp_path, weights):
    checkpoint, model = export(artifact, weights)
    source = Checkpoint.open(checkpoint)
    direct = Quick(source.config, source.tensor, slots=2, page_size=32, max_pages=4, weights=weights)
    inputs = {f"state.{name}": np.asarray(value) for name, value in direct.state.items()}
    calls = calls_of(direct)
    for number, (_, fields) in enumerate(calls):
        inputs |= {f"{number}.{name}": value for name, value in fields.items()}
    np.savez(tmp_path / "in.npz", **inputs)
    (tmp_path / "calls.json").write_text(json.dumps([name for name, _ in calls]))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    done = run(
        sys.executable,
        CALLS,
        model,
        tmp_path / "calls.json",
        tmp_path / "in.npz",
        tmp_path / "out.npz",
        environment=os.environ | quiet | UNOPTIMIZED,
    )
    found = np.load(tmp_path / "out.npz")
    expected = under_jit(direct)
    assert sorted(found.files) == sorted(f"{n}.{key}" for n, values in enumerate(expected) for key in values)
    for number, values in enumerate(expected):
        for name, value in values.items():
            got = found[f"{number}.{name}"]
            assert (got.shape, got.dtype) == (value.shape, value.dtype)
            if value.dtype == np.int32:
                assert got.tolist() == value.tolist(), name
            else:
                assert relative(got.reshape(1, -1), value.reshape(1, -1)) <= 1e-5, (number, name)
    assert not np.array_equal(found["0.kda_recurrent"], inputs["state.kda_recurrent"])
    assert not np.array_equal(found["1.kda_recurrent"], found["0.kda_recurrent"])

    said = json.loads(done.stdout)  # the weights are stored once, whatever the number of signatures
    assert said["signatures"] == ["decode@2", "prefill@32", "sample@2"]
    assert said["variables"] == sum(len(row.tensors("float32")) for row in weight_table(source.config, weights))
    assert said["bytes"] == store_bytes(source.config, "float32", weights)


def test_the_folder_holds_a_model_and_its_description_and_nothing_else(exported):
    checkpoint, model = exported
    names = sorted(path.name for path in model.iterdir())
    assert names == ["assets", "fingerprint.pb", "ling3.json", "saved_model.pb", "variables"]
    record = json.loads((model / "ling3.json").read_text())
    config = Checkpoint.open(checkpoint).config
    vocabulary = {"shape": [2, config.vocab_size], "dtype": "float32"}
    assert sorted(record["signatures"]) == ["decode@2", "prefill@32", "sample@2"]
    decode = record["signatures"]["decode@2"]
    assert sorted(decode["inputs"]) == sorted([*record["state"], "page_table", "position", "slot", "token"])
    assert decode["outputs"] == record["state"] | {"logits": vocabulary}
    assert record["signatures"]["sample@2"]["inputs"]["logits"] == vocabulary
    assert set(record["producer"]) == {"ling3export", "jax", "jaxlib", "orbax-export", "tensorflow-cpu"}
    # the graphs contain no weights
    assert (model / "saved_model.pb").stat().st_size < store_bytes(config, "float32") / 4


@pytest.mark.parametrize(("phase", "padding"), [("prefill", 32), ("decode", 2), ("sample", 2)])
def test_a_step_without_a_mesh_has_no_collectives(artifact, phase, padding):
    config = Checkpoint.open(artifact.checkpoint("micro-tp1")).config
    geometry = Geometry(1, "float32", 2, 8, 32, 4, config.latent_dim)
    found = []
    for mesh in (None, device_mesh(1)):
        step = build_step(config, geometry, phase, padding, mesh)
        found.append(collective_counts(jax.jit(step.call).lower(*step.arguments).as_text()))
    assert found[0] == {}
    assert found[1] != {}


def test_an_existing_folder_is_replaced_only_on_request(exported, tmp_path):
    checkpoint, _ = exported
    (tmp_path / "there.savedmodel").mkdir()
    command = ["build", str(checkpoint), str(tmp_path / "there.savedmodel"), "--format", "savedmodel", *SIZES]
    told = CliRunner().invoke(cli.main, command)
    assert told.exit_code == 1
    assert "output `there.savedmodel`: expected a free name, found one that exists" in told.stderr
    told = CliRunner().invoke(cli.main, [*command, "--force"])
    assert (
        "output `there.savedmodel`: expected a folder whose ling3.json ling3export wrote, found something else"
        in told.stderr
    )


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (Options(targets=("tpu:v6e:4x4",)), "tpu:v6e:4x4"),
        (Options(targets=("cpu", "cuda:h200")), "cpu, cuda:h200"),
        (Options(tp=4), "cpu at TP=4"),
    ],
)
def test_other_targets_are_refused(options, found):
    with pytest.raises(PlanError) as caught:
        savedmodel.one_device(options)
    assert caught.value.message == f"--format savedmodel: expected target cpu at TP=1, found {found}"
    assert caught.value.hint == "leave out --target and --tp"


@pytest.mark.parametrize("flag", [("--cache", "off"), ("--jobs", "2"), ("--cache-dir", "x")])
def test_options_that_mean_nothing_here_are_refused(artifact, tmp_path, flag):
    checkpoint = str(artifact.checkpoint("micro-tp1"))
    told = CliRunner().invoke(cli.main, ["build", checkpoint, str(tmp_path / "m"), "--format", "savedmodel", *flag])
    assert told.exit_code == 2
    assert told.stderr.endswith(f"Error: --format: expected no {flag[0]} with it, found one.\n")


def test_a_missing_extra_is_named_before_any_work(monkeypatch, tmp_path):
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(Ling3Error) as caught:
        savedmodel.build_savedmodel(tmp_path / "no checkpoint", tmp_path / "m", Options(), None)  # type: ignore[arg-type]
    assert caught.value.message == (
        "--format savedmodel: expected the packages of the extra `savedmodel`, found no orbax-export, tensorflow-cpu"
    )
    assert caught.value.hint == "in the checkout: pip install '.[savedmodel]'"


def test_a_process_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "command", lambda module: [sys.executable, "-c", "raise SystemExit('no room')"])
    config = Config.from_dict(tiny_fields())
    job = savedmodel.ExportJob(
        config, Geometry(1, "float32", 2, 8, 32, 4, 56), (), tmp_path, WeightsRecord({}, {}), tmp_path
    )
    with pytest.raises(Ling3Error) as caught:
        savedmodel.run_worker(job, None)  # type: ignore[arg-type]
    assert caught.value.message == (
        "savedmodel: expected the exporting process to end well, found it ended with code 1: no room"
    )
