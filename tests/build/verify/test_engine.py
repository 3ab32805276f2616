"""The engine's receipt: right answers pass, and each kind of wrong answer fails."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from ling3export.artifacts.manifest import read_manifest
from ling3export.cli.main import main
from ling3export.runners.engine.engine import Engine
from ling3export.verify import engine as receipts
from ling3export.verify.engine import ANSWER, answers, judged, prompts_of


@pytest.mark.parametrize(
    "name", ["micro-tp2-snapshots", pytest.param("micro-tp1-kernels-int4", marks=pytest.mark.extras)]
)
def test_verify_judges_the_answers_of_the_engine(artifact, name):
    said = CliRunner().invoke(main, ["verify", str(artifact(name)), "--json"])
    assert said.exit_code == 0, said.output
    ((_, record),) = json.loads(said.stdout)["targets"].items()
    receipt, moves = record["engine"], "snapshots" in name
    assert receipt["passed"] and receipt["wrong"] == 0 and receipt["prompts"] == 5
    assert receipt["tokens"] == receipt["prompts"] * ANSWER
    assert (receipt["moved"], receipt["cached"] > 0) == ((5, True) if moves else (0, False))
    assert receipt["measure"] == ("largest" if moves else "median")


def test_prompts_are_longer_than_a_call_and_fit_into_the_pools(artifact):
    manifest = read_manifest(artifact("micro-tp2-snapshots"))
    (target,) = manifest.targets.values()
    prompts = prompts_of(manifest, target)
    assert max(map(len, prompts)) > max(target.paddings("prefill")) and len(prompts) > target.state.slots
    assert all(len(prompt) + ANSWER <= manifest.plan.context for prompt in prompts)
    assert prompts[4][:32] == prompts[3][:32]


class Wrong:
    """An engine that makes one mistake in its answers, from the given call on."""

    def __init__(self, engine, call, change):
        self._engine, self._left, self._change = engine, call, change

    def complete(self, requests):
        done = self._engine.complete(requests)
        self._left -= 1
        return [self._change(done[0]), *done[1:]] if self._left < 0 else done


def other_token(done):
    return replace(done, token_ids=[*done.token_ids[:-1], (done.token_ids[-1] + 1) % 320])


def other_logits(done):
    return done if done.logits is None else replace(done, logits=np.roll(done.logits, 1, axis=0))


@pytest.fixture(scope="module")
def engine(artifact):
    with Engine(artifact("micro-tp1-snapshots"), report=lambda _: None) as opened:
        yield opened


@pytest.mark.parametrize(("call", "change"), [(0, other_token), (1, other_token), (0, other_logits)])
def test_a_wrong_token_or_logit_is_found(artifact, engine, call, change):
    folder = artifact("micro-tp1-snapshots")
    manifest = read_manifest(folder)
    prompts = prompts_of(manifest, manifest.targets[engine.target])
    first, wrong, _, _ = answers(Wrong(engine, call, change), prompts, moves=False)
    assert wrong > 0
    if change is other_logits:
        assert max(judged(manifest, folder, prompts, first)[0]) > 0.1


def test_a_failed_receipt_fails_the_verification(artifact, monkeypatch):
    folder = artifact("micro-tp1-snapshots")
    good = receipts.EngineReceipt(5, 30, 0, 1e-6, 1e-7, 1e-5, "largest", 0, 0, 0)
    assert good.passed and not replace(good, relative=1e-4).passed and not replace(good, wrong=1).passed
    assert replace(good, measure="median", relative=1.0).passed
    monkeypatch.setattr("ling3export.verify.verify.engine_apart", lambda *_: replace(good, wrong=1))
    said = CliRunner().invoke(main, ["verify", str(folder)])
    assert said.exit_code == 1 and "engine: failed" in said.stdout, said.output
    assert CliRunner().invoke(main, ["verify", str(folder), "--no-engine"]).exit_code == 0
