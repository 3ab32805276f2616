"""Scoring in the runner: its calls, each request's numbers, that everything is given back, and ``--into``."""

import hashlib
import json
import math
import random
import shlex
import shutil
import sys
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import SequenceRecord as VectorSequence
from ling3export.artifacts.schema import Tolerance
from ling3export.checkpoint.reader import Checkpoint
from ling3export.cli import main as cli
from ling3export.foundation.errors import ArtifactError, Ling3Error
from ling3export.runners.calibrate.receipts import ScoredSequence, log_softmax, score_receipt
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Completion, Request
from ling3export.runners.engine.score import pair_ids, scored
from ling3export.verify.reference import Reference
from tests.support.artifacts_fixture import Artifacts, run
from tests.support.builds import UNOPTIMIZED, environment
from tests.support.fake_backend import VOCAB, FakeBackend, next_token
from tests.support.refusals import said
from tests.support.scheduler_rig import Rig, prompt
from tests.support.tolerances import FLOAT32, MARGIN


def likelihood(tokens: list[int], following: int) -> float:
    """The log-probability of ``following`` after ``tokens`` in the fake model: exact in fp32."""
    return -float(hashlib.sha256(repr((tokens, following)).encode()).digest()[0]) / 16


def score_request(ids, context, name="pair"):
    return Request(tuple(ids), 0, name=name, score_from=context)


class ScoringBackend(FakeBackend):
    """Scores tokens read through slots and pages; ``unlikely`` overrides the log-probability of some tokens."""

    unlikely: ClassVar[dict[int, float]] = {}

    def score(self, padding, fields):
        self.calls.append(("score", padding))
        rows = self._prefill(padding, fields)
        logprob, best = np.full(padding, np.nan, np.float32), np.full(padding, -7, np.int32)
        for place, following in enumerate(fields["next_token"].tolist()):
            if following >= 0:
                n, offset = divmod(place, self.chunk)
                tokens = rows[n][: int(fields["chunk_start"][n]) + offset + 1]
                logprob[place], best[place] = likelihood(tokens, following), next_token(tokens)
                logprob[place] = self.unlikely.get(following, logprob[place])
        return {"logprob": logprob, "best": best, "best_logprob": np.full_like(logprob, np.nan)}


class ScoreRig(Rig):
    """A core that also scores."""

    def __init__(self, score=(8, 16), **options):
        super().__init__(score=score, backend=ScoringBackend, **options)

    def ask(self, ids, context):
        return self.submit(ids, 0, score_from=context, name="pair")

    @property
    def done(self):
        return [sequence for sequence in self.ended if sequence.scoring]

    def check(self):
        super().check()
        asked = [sequence for sequence in self.sequences if sequence.scoring]
        assert {id(s) for s in self.done} == {id(s) for s in asked if s.stop_reason == "scored"}
        assert len(self.done) == len(set(map(id, self.done)))
        for sequence in self.done:
            ids, first = list(sequence.request.prompt_ids), sequence.request.score_from
            score = scored(sequence.completion(), sequence.request)
            assert score.context_ids + score.token_ids == ids
            assert score.logprobs == [likelihood(ids[:at], ids[at]) for at in range(first, len(ids))]
            assert score.best_ids == [next_token(ids[:at]) for at in range(first, len(ids))]


def test_scores_that_fail_end_only_their_request(monkeypatch):
    rig = ScoreRig()
    mine, other, plain = rig.ask(range(20), 3), rig.ask(range(5, 30), 4), rig.submit([1, 2, 3], 9)
    monkeypatch.setattr(mine, "accept_scores", Mock(side_effect=IndexError("mine")))
    rig.run()
    assert (mine.stop_reason, other.stop_reason, plain.stop_reason) == ("failed", "scored", "length")
    assert mine.error.message == "pair: expected its scores to be taken, found IndexError: mine"
    rig.sequences.remove(mine)
    rig.ended.remove(mine)
    rig.check()


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_scoring_and_generating_at_random_times(seed, ahead):
    """With pools so small that sequences are pre-empted, and with cancels: the oracle's numbers, and no leaks."""
    rng = random.Random(seed)
    rig = ScoreRig(slots=rng.randint(1, 5), pages=rng.choice([20, 24, 40]), ahead=ahead)
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 1, 2])):
            ids = prompt(rng, rng.randint(2, 60))
            if rng.random() < 0.6:
                rig.ask(ids, rng.randint(1, len(ids) - 1))
            else:
                rig.submit(ids[:30], rng.randint(1, 40))
        rig.step()
        if rig.sequences and rng.random() < 0.1:
            rig.cancel(rng.choice(rig.sequences))
    rig.run()
    rig.check()
    assert {s.stop_reason for s in rig.sequences if s.scoring} <= {"scored", "cancelled"}


def test_several_share_a_call_and_long_ones_take_several():
    rig = ScoreRig(slots=4, score=(8, 16))
    for length in (5, 6, 40):
        rig.ask(list(range(length)), 1)
    rig.run()
    rig.check()
    # Without their last tokens 4 + 5 + 39: chunks of 4 make 4 + 8 + 4, then 16, 16 and 3 of 4 slots in the smaller one.
    assert rig.backend.calls == [("score", 16), ("score", 16), ("score", 16), ("score", 8)]
    assert rig.counters.record()["cells"] == {
        "score@16": {"calls": 3, "padding_waste": 0.0625},
        "score@8": {"calls": 1, "padding_waste": 0.625},
    }
    assert [(step.kind, step.tokens) for step in rig.done[2].completion().steps] == [
        ("score", 4),
        ("score", 16),
        ("score", 16),
        ("score", 3),
    ]


def test_scoring_takes_turns_with_decode_and_the_oldest_decides():
    rig = ScoreRig(slots=4)
    rig.submit([1, 2, 3], 8)
    rig.step()
    rig.ask(list(range(40)), 1)
    rig.submit([4, 5], 2)
    rig.run()
    rig.check()
    phases = [phase for phase, _ in rig.backend.calls if phase != "sample"]
    assert phases == "prefill decode score decode score decode score decode prefill decode decode decode".split()


def test_pairs_of_texts_are_cut_after_the_contexts_tokens():
    def encode(text):
        return (1, *map(ord, text))

    assert pair_ids("ab ", "c", encode, "pair") == ((1, 97, 98, 32, 99), 3)
    assert pair_ids([7, 8], (9,), encode, "pair") == ((7, 8, 9), 2)


@pytest.mark.parametrize(
    ("context", "continuation", "message"),
    [
        ([1], "b", "pair: expected two texts or two lists of token ids, found one of each"),
        ([1, 2.5], [3], "pair: expected token ids, found 2.5 at place 1"),
        ([], [3], "pair: expected a context of at least one token, found an empty one"),
        ([3], [], "pair: expected a continuation of at least one token, found an empty one"),
        ([3], [VOCAB], "pair: expected token ids from 0 to 96, found 97 at place 1"),
        ([3] * 50, [4] * 31, "pair: expected context and continuation within 80 tokens, found 50 + 31 = 81"),
    ],
)
def test_invalid_pairs_are_not_scored(context, continuation, message):
    rig = Rig()
    with pytest.raises(Ling3Error) as raised:
        rig.limits.check(score_request(*pair_ids(context, continuation, str.encode, "pair"), "pair"))
    assert raised.value.message == message


def test_pages_are_counted_without_the_last_token():
    rig = Rig(slots=1, pages=4, page_size=4)
    rig.limits.check(score_request(list(range(17)), 1, "pair"))
    with pytest.raises(Ling3Error) as raised:
        rig.limits.check(score_request(list(range(18)), 1, "pair"))
    assert raised.value.message == "pair: expected at most 4 pages of 4 tokens, found 17 tokens = 5 pages"


def test_a_cancelled_request_has_no_score():
    completion = Completion([1, 2, 3], [], None, "cancelled", 0.0, 0.0)
    with pytest.raises(Ling3Error) as raised:
        scored(completion, score_request((1, 2, 3), 1))
    assert raised.value.message == "pair: expected it scored, found it cancelled"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_only_a_score_that_is_not_finite_fails(value):
    """The pair has the token 7 at place 5 of 12, in calls that it shares with others."""
    rig = ScoreRig(score=(8, 16))
    rig.backend.unlikely = {7: value}
    bad = rig.ask([1, 2, 3, 4, 5, 7, *range(10, 16)], 1)
    others = [rig.ask(list(range(20, 20 + length)), 1) for length in (3, 9)]
    rig.run()
    assert (bad.stop_reason, {other.stop_reason for other in others}) == ("failed", {"scored"})
    assert bad.error is not None
    assert bad.error.message == "logits of pair: expected finite numbers, found NaN or infinity, at position 5"
    rig.sequences.remove(bad)
    rig.ended.remove(bad)
    rig.check()


def receipt(change, measure="largest"):
    """The receipt of two sequences of a model of 8 tokens; the second one is changed."""
    rng = np.random.default_rng(3)
    sequences = [VectorSequence(tuple(rng.integers(0, 8, 6).tolist()), 1, (), "") for _ in range(2)]
    expected = {(n, at): rng.normal(size=8) for n in range(2) for at in range(6)}
    said = []
    for n, sequence in enumerate(sequences):
        after = np.array([log_softmax(expected[n, at])[sequence.ids[at + 1]] for at in range(5)])
        best = np.array([int(np.argmax(expected[n, at])) for at in range(5)])
        said.append(ScoredSequence({3: expected[n, 3]}, after, best))
    change(said[1])
    return score_receipt(said, sequences, expected, Tolerance(measure, 1e-5))


def test_a_receipt_fails_where_scores_or_best_tokens_are_wrong():
    def worse(said):
        said.logprob[2] *= 1.001

    def other(at):
        def change(said):
            said.best[at] = (said.best[at] + 1) % 8

        return change

    good = receipt(lambda said: None)
    assert (good.status, good.wrong_best) == ("passed", 0)
    assert good.relative == good.log_probabilities < 1e-12
    bad = receipt(worse)
    assert (bad.status, bad.wrong_best) == ("failed", 0)
    assert 1e-5 < bad.log_probabilities == bad.relative < 1e-2
    assert [receipt(other(at)).status for at in (1, 3)] == ["failed", "failed"]
    # In bf16, rounding swaps best tokens: only the program's own logits, here at position 3, show an error.
    assert [receipt(other(at), "median").status for at in (1, 3)] == ["passed", "failed"]


@pytest.fixture(scope="module")
def extended(artifact: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that got its score programs from the command in the engine's hint."""
    path = shutil.copytree(artifact("micro-tp1"), tmp_path_factory.mktemp("score") / "x.ling3")
    with Engine(path, report=lambda text: None) as engine, pytest.raises(ArtifactError) as raised:
        engine.score([([1], [2])])
    assert raised.value.message == "scoring: target `cpu-tp1` has no score programs"
    hint = f"add them: ling3export build --into {path} --target cpu@1 --score-paddings 128 --force"
    assert raised.value.hint == hint
    words = shlex.split(hint.removeprefix("add them: ling3export "))
    before = read_manifest(path)
    empty = tmp_path_factory.mktemp("cache")  # the tests' cache has the programs of the last run
    command = sys.executable, "-m", "ling3export.cli", *words, "--cache-dir", empty
    done = run(*command, environment=environment(UNOPTIMIZED))
    assert f"cells: {len(before.targets['cpu-tp1'].cells) + 1} compiled, 0 from the cache" in done.stderr
    after = read_manifest(path)
    (old,), (new,) = before.targets.values(), after.targets.values()
    assert sorted(set(new.cells) - set(old.cells)) == ["score@128"]
    for name, cell in old.cells.items():
        assert new.cells[name].stablehlo.sha256 == cell.stablehlo.sha256
    assert new.paddings("score") == (128,)
    assert [path.name for path in (path / "programs").iterdir()] == ["cpu-tp1.2"]
    measured = after.receipt("cpu-tp1", "score@128")
    assert (measured.status, measured.wrong_best) == ("passed", 0)
    assert measured.log_probabilities < FLOAT32
    return path


def test_the_engine_says_what_the_reference_says(extended: Path, artifact: Artifacts):
    """Packed, over several calls, with a request that generates; then nothing is held."""
    checkpoint = Checkpoint.open(artifact.checkpoint("micro-tp1"))
    reference = Reference(checkpoint.config, checkpoint.tensor)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, checkpoint.config.vocab_size, size).tolist() for size in (240, 33, 17, 2)]
    truth = reference.logits_many(sequences)
    assert min(reference.margins) > MARGIN
    firsts = (1, 20, 16, 1)
    with Engine(extended, report=lambda text: None) as engine:
        (running,) = engine.submit(Request((5, 6, 7), 60, ignore_eos=True))
        scores = engine.score([(ids[:first], ids[first:]) for ids, first in zip(sequences, firsts, strict=True)])
        assert len(running.result(60).token_ids) == 60
        stats = engine.stats()
        assert engine.limits.context == 1024
        with pytest.raises(Ling3Error, match=r"within 1024 tokens, found 1000 \+ 25 = 1025"):
            engine.score([([1] * 1000, [2] * 25)])
    assert (stats["live"], stats["free"]) == (0, stats["pools"])
    assert stats["compile_events"] == 0
    assert stats["cells"]["score@128"]["calls"] == 3
    for ids, first, rows, score in zip(sequences, firsts, truth, scores, strict=True):
        expected = np.array([log_softmax(rows[at - 1])[ids[at]] for at in range(first, len(ids))])
        assert np.linalg.norm(np.array(score.logprobs) - expected) < FLOAT32 * np.linalg.norm(expected)
        assert score.best_ids == [int(np.argmax(rows[at - 1])) for at in range(first, len(ids))]
        assert score.logprob == pytest.approx(float(np.sum(expected)), rel=FLOAT32)
        assert score.is_greedy == (score.best_ids == ids[first:])


def test_greedy_answers_are_greedy(extended: Path):
    with Engine(extended, report=lambda text: None) as engine:
        (done,) = engine.generate([[9, 8, 7]], max_tokens=12, ignore_eos=True)
        (same, other) = engine.score(
            [([9, 8, 7], done.token_ids), ([9, 8, 7], [*done.token_ids[:-1], (done.token_ids[-1] + 1) % 320])]
        )
    assert (same.is_greedy, other.is_greedy) == (True, False)
    assert same.logprob > other.logprob


def test_inspect_shows_the_score_programs(extended: Path):
    shown = said(cli.main, "inspect", extended)
    assert "plan        prefill [128], decode [8], score [128], float32" in shown and "score@128" in shown


def test_plan_shows_score_programs():
    arguments = ["plan", "--target", "tpu:v6e:2x2", "--paddings", "16,512", "--score-paddings", "512", "--json"]
    record = json.loads(said(cli.main, *arguments))
    cells = record["targets"]["tpu-v6e-2x2-tp4"]["cells"]
    assert record["score_paddings"] == [512]
    # The head, 512 x 128, for all 512 slots instead of 32: two operations a weight, and each device has a quarter.
    more = cells["score@512"]["flops"] - cells["prefill@512"]["flops"]
    assert more == 2 * (512 - 32) * 512 * 128 // 4
    assert cells["score@512"]["bytes"] == cells["prefill@512"]["bytes"]
