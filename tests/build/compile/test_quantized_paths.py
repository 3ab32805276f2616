"""Quantized weights in every feature of the product: results equal those of the whole artifact."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from ling3export.artifacts.calibration import beside, read_calibration
from ling3export.artifacts.manifest import read_manifest
from ling3export.checkpoint.synth import synthesize
from ling3export.cli.main import main
from ling3export.foundation.phases import SPLIT
from ling3export.runners.cli.main import main as runner
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request
from ling3export.runners.ffn.worker import FfnWorker
from ling3export.runners.transfer.options import Transfer
from tests.support.artifacts_fixture import RECIPES, Artifacts
from tests.support.hosting import hosting
from tests.support.refusals import said
from tests.support.transfers import moved

NAMES = ["micro-tp2-int4", pytest.param("micro-tp2-int4-small", marks=pytest.mark.extras)]
SIZES = {"int4": "0.84 MB in 6 files, 43 tensors", "int4-small": "0.70 MB in 6 files, 43 tensors"}
PROMPT, TOKENS = [*range(1, 19)], 6
QUIET = {"check": "programs", "report": lambda text: None}


def answer(engine: Engine) -> list[int]:
    (done,) = engine.generate([PROMPT], max_tokens=TOKENS, ignore_eos=True)
    return [*done.token_ids]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """The artifact of each form."""
    return request.param


@pytest.fixture(scope="module")
def expected(artifact: Artifacts, name: str) -> list[int]:
    """The tokens of one engine."""
    with Engine(artifact(name), **QUIET) as engine:
        return answer(engine)


@pytest.mark.extras
def test_decode_cut_at_the_experts_has_receipts(artifact: Artifacts, name: str):
    receipts = artifact.manifest(name).vectors.receipts["cpu-tp2"]
    phases = {name.partition("@")[0] for name, each in receipts.cells.items() if each.status == "passed"}
    assert {*SPLIT, "offload", "onload", "copy"} <= phases
    assert max(receipts.agreement.values()) < 1e-5


def test_a_worker_computes_quantized_experts_for_an_attention_process(
    artifact: Artifacts, name: str, expected: list[int]
):
    shared = f"quantized-{os.getpid()}"
    thread = threading.Thread(target=FfnWorker(artifact(name), shared, **QUIET).run)
    thread.start()
    with Engine(artifact(name), ffn=shared, **QUIET) as engine:
        assert answer(engine) == expected
    thread.join(60)
    assert not thread.is_alive()


def test_a_prompt_of_one_server_is_answered_by_another(artifact: Artifacts, name: str, expected: list[int]):
    how = Transfer("shm", deadline=60.0)
    with Engine(artifact(name), transfer=how, **QUIET) as give, Engine(artifact(name), transfer=how, **QUIET) as take:
        _, taking = moved(give, Request(tuple(PROMPT), TOKENS, ignore_eos=True))
        (done,) = take.complete([taking])
        assert (done.token_ids, done.cached_tokens) == (expected, len(PROMPT))


@pytest.mark.extras
def test_a_state_of_the_same_checkpoint_in_another_form_is_refused(artifact: Artifacts, name: str, expected: list[int]):
    """Weights in bf16 would continue with other numbers."""
    how = Transfer("shm", deadline=60.0)
    other = artifact("micro-tp2-snapshots")
    with Engine(artifact(name), transfer=how, **QUIET) as give, Engine(other, transfer=how, **QUIET) as take:
        _, taking = moved(give, Request(tuple(PROMPT), TOKENS, ignore_eos=True))
        take.complete([taking])
        assert take.stats()["transfer"]["other_state"] == 1


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.hosts
@pytest.mark.extras
def test_hosts_load_their_own_shards_of_q_and_scale_and_answer_as_one(
    artifact: Artifacts, name: str, tmp_path: Path, expected: list[int]
):
    """The target of two hosts is added to an existing artifact; each host loads only its own shards."""
    both = tmp_path / "both.ling3"
    shutil.copytree(artifact(name), both)
    said(main, "build", "--into", both, "--target", "cpu:2x1")
    assert read_manifest(both).vectors.receipts["cpu-2x1-tp2"].passed
    ids = ",".join(map(str, PROMPT))
    words = ("--prompt-ids", ids, "--max-tokens", TOKENS, "--ignore-eos", "--json")
    with hosting([["generate", both, *words, "--target", "cpu-2x1-tp2"] for _ in range(2)]) as processes:
        done = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], done
    assert json.loads(done[0][0])["token_ids"] == expected
    assert "bytes of weights; following host 0" in done[1][1]


@pytest.mark.usefixtures("unoptimized")
def test_programs_with_attached_weights_equal_the_whole_artifact(artifact: Artifacts, name: str, tmp_path: Path):
    """Dummy weights are rounded to the form, too, and are not kept."""
    form = RECIPES[name].weights
    options, whole, alone = RECIPES[name].options(), artifact.manifest(name), tmp_path / "alone.ling3"
    config = artifact.checkpoint(name) / "config.json"
    said(main, "build", config, alone, "--no-weights", "--dummy-weights", 3, *options)
    before = read_manifest(alone)
    cells, wanted = (each.targets["cpu-tp2"].cells for each in (before, whole))
    assert not before.has_weights and [each.stablehlo for each in cells.values()] == [
        each.stablehlo for each in wanted.values()
    ]
    assert before.vectors.receipts["cpu-tp2"].passed
    assert before.vectors.source.endswith(f"on dequantized {form} weights; dummy weights of seed 3, not kept")
    assert f"none: ling3export attach writes those of a checkpoint, as {form}" in said(main, "inspect", alone)
    said(main, "attach", alone, artifact.checkpoint(name))
    assert read_manifest(alone).weights == whole.weights
    assert read_manifest(alone).vectors.receipts["cpu-tp2"].passed


def test_a_calibration_and_the_doctor_take_it(artifact: Artifacts, name: str, tmp_path: Path):
    folder = tmp_path / "micro.ling3"
    shutil.copytree(artifact(name), folder)
    said(main, "verify", folder, "--time")
    found = read_calibration(beside(folder))
    assert found.cells.keys() == read_manifest(folder).targets["cpu-tp2"].cells.keys() and found.receipts.passed
    assert "micro.ling3, target cpu-tp2: fits this machine" in said(runner, "doctor", folder)
    shown = said(main, "inspect", folder)
    form = RECIPES[name].weights
    assert f"weights     {form}: {SIZES[form]}" in shown


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("weights", "q", "scale"), [("int8-channel", {"int8"}, "float32"), ("int4", {"int8", "uint8"}, "bfloat16")]
)
def test_programs_for_a_tpu_chip_take_q_and_scale(tmp_path: Path, weights: str, q: set[str], scale: str):
    """libtpu compiles for a chip that this machine does not have; weights come later, and nothing runs."""
    synthesize(tmp_path / "model", "micro", 0, layers=2, overrides={"layer_group_size": 2})
    sizes = "--paddings 16 --decode-paddings 1 --max-running 1 --context 256 --target tpu:v6e:1x1".split()
    folder = tmp_path / "chip.ling3"
    said(main, "build", tmp_path / "model", folder, "--no-weights", "--weights", weights, *sizes)
    said(main, "attach", folder, tmp_path / "model")
    manifest = read_manifest(folder)
    (target,) = manifest.targets.values()
    found = {part: {row.dtype for row in target.parameters if row.tensor.endswith(part)} for part in (".q", ".scale")}
    assert (manifest.plan.forms, found) == (weights, {".q": q, ".scale": {scale}})
    assert "digests: " in said(main, "verify", folder) and not manifest.vectors.receipts
