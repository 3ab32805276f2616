"""Weights that are not finite: requests that use them fail by name in every interface, and the others continue."""

import json
import shutil
from pathlib import Path

import httpx2
import numpy as np
import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.foundation.dtypes import BY_NAME
from ling3export.runners.cli.main import main
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import LogitsError
from ling3export.runners.engine.request import Sampling
from ling3export.runners.evals.backend import EngineBackend
from ling3export.runners.evals.run import run_suite
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.tasks import Task
from ling3export.runners.evals.trials import RunConfig
from ling3export.runners.serve.app import Policy, application
from tests.support import toy_artifact
from tests.support.artifacts_fixture import Artifacts
from tests.support.eval_fakes import NUMERIC
from tests.support.refusals import refusal, said
from tests.support.serving import answered

VOCAB = toy_artifact.VOCAB


def sums(prompt: list[int], count: int) -> list[int]:
    """The rows of the toy's table that are read for an answer of ``count`` tokens."""
    tokens = toy_artifact.answer(prompt, count)[0]
    return [(sum(prompt) + sum(tokens[:n])) % VOCAB for n in range(count)]


USED = {row for prompt in toy_artifact.PROMPTS for row in sums(prompt, 12)}
# A row that no answer to PROMPTS reads, and a prompt that begins with it.
ROW = next(row for row in range(1, VOCAB) if row not in USED)
SAID = "expected finite numbers, found NaN or infinity, at position 1"


def put_nan(artifact: Path, tensor: str, *place: int) -> None:
    """Sets an element of a weight, or a range of it, to NaN; ``--check programs`` does not detect it."""
    stored = read_manifest(artifact).weights.index[tensor]
    kind = BY_NAME[stored.dtype].numpy
    weights = np.memmap(artifact / stored.file, kind, "r+", stored.offset, stored.shape)
    weights[place] = np.nan
    weights.flush()


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with one NaN, in the logits of one row, on the second device."""
    folder = shutil.copytree(toy_artifact.shared(), tmp_path_factory.mktemp("nan") / "toy.ling3")
    put_nan(folder, "toy.table", 1, ROW, 3)
    return folder


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.9)])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_request_fails_and_the_others_go_on(spoiled: Path, overlap: bool, sampling: Sampling):
    """Also requests that get its slot and pages later."""
    with Engine(spoiled, check="programs", overlap=overlap, report=lambda text: None) as engine:
        for round_ in range(1, 4):
            (handle,) = engine.submit(engine.request([ROW], 8, sampling, name="mine"))
            toy_artifact.check_tokens(engine)
            with pytest.raises(LogitsError) as raised:
                handle.result(60)
            assert raised.value.message == f"logits of mine: {SAID}"
            stats = engine.stats()
            assert (stats["failed"], stats["live"], stats["free"]) == (round_, 0, stats["pools"])


def test_generate_says_which_prompt(spoiled: Path, tmp_path: Path):
    """Regression: 2147483647 was printed among the tokens, with exit code 0."""
    (tmp_path / "prompts").write_text(f'{{"prompt_ids": [1, 2, 3]}}\n{{"prompt_ids": [{ROW}]}}\n')
    command = ("generate", spoiled, "--prompt-file", tmp_path / "prompts", "--max-tokens", 4, "--check", "programs")
    said = refusal(main, *command)
    assert f"error: logits of prompt file `{tmp_path / 'prompts'}` line 2: {SAID}\nhint: some weight" in said


def test_a_line_of_a_batch_gets_the_error_as_its_answer(spoiled: Path, tmp_path: Path):
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in ([1, 2, 3], [ROW], [5] * 20)))
    command = ["batch", spoiled, source, output, "--max-tokens", 4, "--temperature", 0, "--check", "programs"]
    said(main, *command)
    good, bad, also = (json.loads(line)["response"] for line in output.read_text().splitlines())
    assert (good["status_code"], bad["status_code"], also["status_code"]) == (200, 500, 200)
    assert bad["body"]["error"]["message"] == f"logits of prompt: {SAID}"


def test_a_server_answers_500_by_name_and_goes_on(spoiled: Path):
    """Regression: a stream never ended, because the task that sent its pieces had died."""
    body = {"model": "toy", "prompt": [ROW], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    error = {"message": f"logits of prompt: {SAID}", "type": "server_error", "param": None, "code": "logits_not_finite"}

    def ask(app, **changes) -> httpx2.Response:
        return answered(app, "POST", "/v1/completions", json=body | changes)

    with Engine(spoiled, check="programs", report=lambda text: None) as engine:
        app = application(engine, Policy("toy", None, 4, 5000))
        whole = ask(app)
        assert (whole.status_code, whole.json()) == (500, {"error": error})
        stream = ask(app, stream=True)
        events = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
        assert (stream.status_code, json.loads(events[-1])) == (200, {"error": error})
        fine = ask(app, prompt=[1, 2, 3])
        assert fine.json()["choices"][0]["token_ids"] == toy_artifact.answer([1, 2, 3], 4)[0]
        assert engine.stopped is None


def test_an_evaluation_records_which_trial(spoiled: Path, tmp_path: Path):
    """The other trials of its batch are answered."""
    prompts = {"good": [1, 2, 3], "bad": [ROW], "also": [5] * 20}
    tasks = [Task(id=name, input={"prompt_ids": ids}, target="42", graders=[NUMERIC]) for name, ids in prompts.items()]
    with EngineBackend(Engine(spoiled, check="programs", overlap=False, prefix_cache=False)) as backend:
        run = run_suite(Suite("nan", tasks), backend, tmp_path / "run", RunConfig(max_tokens=4))
    good, bad, also = run.trials
    assert bad.infra is not None and bad.infra.message.startswith(f"LogitsError: logits of task `bad`: {SAID}")
    for record, name in ((good, "good"), (also, "also")):
        assert list(record.output_token_ids) == toy_artifact.answer(prompts[name], 4)[0]
        assert record.infra is None


@pytest.fixture
def micro(artifact: Artifacts, tmp_path: Path):
    """Gives the model's own artifact with a NaN in a weight."""

    def spoil(tensor: str, *place: int) -> Path:
        folder = shutil.copytree(artifact("micro-tp1"), tmp_path / "nan.ling3")
        put_nan(folder, tensor, *place)
        return folder

    return spoil


def test_a_layer_that_is_not_finite_fails_every_request(micro):
    with Engine(micro("kda.o_norm", 0), check="programs", report=lambda text: None) as engine:
        handles = engine.submit(*(engine.request(ids, 6) for ids in ([5, 1], [1, 2, 3], [9] * 40)))
        for handle in handles:
            with pytest.raises(LogitsError, match="expected finite numbers, found NaN or infinity"):
                handle.result(60)
        assert engine.stopped is None


def test_a_token_that_is_not_finite_fails_the_prompts_that_have_it(micro, artifact: Artifacts):
    """Later requests in their slots and pages, full of NaN, get the right tokens, and so do their neighbours.

    Regression: a prompt that shared a prefill call with such a prompt failed, since attention keeps a NaN at a weight
    of zero.
    """
    good = [[1, 2, 3], [9] * 40]
    with Engine(artifact("micro-tp1"), report=lambda text: None) as engine:
        expected = [done.token_ids for done in engine.generate(good, max_tokens=6)]
    with Engine(micro("embeddings.word_embeddings", 0, 5), check="programs", report=lambda text: None) as engine:
        for bad in ([5, 1], [2] * 70 + [5]):
            with pytest.raises(LogitsError, match=rf"at position {len(bad)}\s"):
                engine.generate([bad], max_tokens=6)
            assert [done.token_ids for done in engine.generate(good, max_tokens=6)] == expected
        for bad in ([5, 1], [7, 8, 9, 5], [2] * 20 + [5]):
            first, *others = engine.submit(*(engine.request(ids, 6) for ids in (bad, *good)))
            with pytest.raises(LogitsError):
                first.result(60)
            assert [other.result(60).token_ids for other in others] == expected
        assert (engine.stats()["live"], engine.stats()["free"]) == (0, engine.stats()["pools"])
