"""What looks at runs and tasks: diagnose, diff, determinism, new and check."""

import json
from dataclasses import asdict

import pytest
from click.testing import CliRunner

from ling3export.runners.cli.main import main
from ling3export.runners.evals.backend import PromptRequest
from ling3export.runners.evals.compare import determinism, diff
from ling3export.runners.evals.folder import read_predictions
from ling3export.runners.evals.report import diagnose, goes_on
from ling3export.runners.evals.run import run_suite
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.tasks import Task
from ling3export.runners.evals.trials import EvalError, RunConfig
from tests.support.eval_fakes import NUMERIC, FakeBackend, half, numbered


def call(*arguments):
    return CliRunner().invoke(main, ["eval", *map(str, arguments)])


def finished(folder, answer, tasks=None, stop_reason="eos", **settings):
    run_suite(Suite("s", tasks or numbered(10)), FakeBackend(answer, stop_reason), folder, RunConfig(**settings))
    return folder


@pytest.mark.parametrize(
    ("text", "stop_reason", "group"),
    [
        ("It must be 41.", "eos", "wrong_answer"),
        ("I do not know, whoever asks me.", "eos", "no_answer"),
        ("Well.", "eos", "early_eos"),
        ("41 and then", "length", "truncated"),
        ("a" + 3 * "01234567890123456789", "length", "loop"),
        ("a" + 3 * "0123456789012345678", "length", "truncated"),  # 19 tokens
        ("a" + 100 * "01234", "length", "loop"),  # 20 tokens of 4 pieces
        (3 * "01234567890123456789" + "b", "eos", "loop"),
        (2 * "01234567890123456789" + "0123456789012345678", "eos", "wrong_answer"),
    ],
)
def test_failures_are_grouped_by_cause(tmp_path, text, stop_reason, group):
    run = finished(tmp_path / "r", lambda prompt: text, numbered(1), stop_reason)
    assert diagnose(read_predictions(run)) == {group: ["t0"]}


def test_texts_that_go_on():
    assert goes_on("42\n\nQuestion: next")
    assert not goes_on("42\n\nQuestion:")
    assert not goes_on("Question: first")


def test_diagnose_prints_groups(tmp_path):
    def answer(prompt):
        if prompt == "3":
            raise RuntimeError("UNAVAILABLE: gone")
        return half(prompt)

    done = call("diagnose", finished(tmp_path / "r", answer))
    assert done.stdout.splitlines() == [
        "infra             1  ended in an infrastructure error: t3",
        "wrong_answer      4  an answer, but not the right one: t1, t5, t7, t9",
        "5 of 10 trials failed",
    ]
    assert call("diagnose", tmp_path).exit_code == 1


def test_diff_blocks_regressions(tmp_path):
    a = finished(tmp_path / "a", half)
    b = finished(tmp_path / "b", lambda prompt: "42" if int(prompt) < 5 else "41")
    found = diff(a, b)
    assert (found.broken, found.fixed, found.both, found.neither) == (["t6", "t8"], ["t1", "t3"], 3, 3)
    done = call("diff", a, b)
    assert done.exit_code == 6
    assert done.stdout.splitlines() == [
        "broken  t6",
        "broken  t8",
        "fixed   t1",
        "fixed   t3",
        "2 broken, 2 fixed, 3 solved by both, 3 by neither; McNemar's exact p = 1.0000",
    ]
    done = call("diff", a, finished(tmp_path / "c", lambda prompt: "42"))
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (
        0,
        "0 broken, 5 fixed, 5 solved by both, 0 by neither; McNemar's exact p = 0.0625",
    )


def test_diff_counts_a_task_by_its_threshold(tmp_path):
    def flaky(passes):
        left = dict.fromkeys(range(2), passes)

        def answer(prompt):
            left[int(prompt)] -= 1
            return "42" if left[int(prompt)] >= 0 else "41"

        return answer

    tasks = numbered(2, grading={"threshold": 0.6})
    a, b = (finished(tmp_path / f"{n}", flaky(n), tasks, trials=5) for n in (3, 2))
    assert diff(a, b).broken == ["t0", "t1"]
    assert diff(a, a).broken == []


def test_diff_needs_tasks_in_common(tmp_path):
    a = finished(tmp_path / "a", half)
    b = finished(tmp_path / "b", half, [Task(id="t0", input={"prompt": "00"}, graders=[NUMERIC])])
    with pytest.raises(EvalError, match="expected tasks in common, found none with the same prompt"):
        diff(a, b)


class Flips(FakeBackend):
    """Says another token at place 4 of task 2 in the second run."""

    def complete(self, ask):
        done = super().complete(ask)
        if ask.prompt == "2" and sum(ask.prompt == "2" for batch in self.batches for ask in batch) == 2:
            done.token_ids[4] = ord("X")
        return done


ASKS = [PromptRequest(f"t{n}", str(n), 20) for n in range(3)]


def test_determinism_finds_an_injected_flip():
    """A8."""
    found = determinism(Flips(half), ASKS)
    assert asdict(found) == {
        "identical": "2/3",
        "first_divergence": [{"task": "t2", "pos": 4, "id_a": ord("a"), "id_b": ord("X"), "logit_gap": -1.5}],
        "batch_invariance": None,
    }
    assert determinism(FakeBackend(half), ASKS, runs=3).identical == "3/3"


def test_batch_invariance_is_reported_not_judged():
    class Alone(FakeBackend):
        def generate(self, asks):
            done = super().generate(asks)
            if len(asks) == 1 and asks[0].prompt == "0":
                del done[0].token_ids[3:]
            return done

    found = determinism(Alone(half), ASKS, alone=2)
    assert (found.identical, found.first_divergence) == ("3/3", [])
    assert found.batch_invariance is not None
    assert asdict(found.batch_invariance) == {
        "identical": "1/2",
        "first_divergence": [{"task": "t0", "pos": 3, "id_a": ord(" "), "id_b": None, "logit_gap": None}],
    }


@pytest.mark.parametrize(("backend", "code"), [(Flips(half), 3), (FakeBackend(half), 0)])
def test_determinism_command(tmp_path, monkeypatch, backend, code):
    monkeypatch.setattr("ling3export.runners.cli.eval.open_backend", lambda *_: backend)
    suite = tmp_path / "t.json"
    suite.write_text(json.dumps([{"prompt": str(n), "answer": 42} for n in range(3)]))
    done = call("determinism", "artifact", "--suite", suite)
    assert done.exit_code == code
    assert json.loads(done.stdout)["identical"] == ("2/3" if code else "3/3")


@pytest.mark.parametrize("name", ["cats.yaml", "cats.json"])
def test_a_new_task_is_sound(tmp_path, name):
    path = tmp_path / name
    assert call("new", path).exit_code == 0
    done = call("check", path)
    assert (done.exit_code, done.stdout) == (0, "1 tasks: the reference solution passes, an empty answer fails\n")
    done = call("new", path)
    assert (done.exit_code, "expected no such file, found one" in done.stderr) == (1, True)
    assert call("new", path, "--force").exit_code == 0
    assert call("new", tmp_path / "cats.txt").exit_code == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"graders": ["last_numeric"]}, "expected a reference_solution, found none: nothing shows it can be solved"),
        (
            {"graders": ["last_numeric"], "reference_solution": "41"},
            "expected its reference solution to pass, found: last_numeric (expected 42, found 41)",
        ),
        (
            {"graders": [{"kind": "regex", "pattern": ".*"}], "reference_solution": "42"},
            "expected an empty answer to fail, found that it passes: it grades nothing",
        ),
    ],
)
def test_check_finds_what_is_not_sound(tmp_path, fields, message):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"id": "a", "input": {"prompt": "?"}, "target": "42", **fields}))
    done = call("check", path)
    assert done.exit_code == 1
    assert f"task `a`: {message}\n" in done.stderr
    assert "error: check `t.json`: expected 1 sound tasks, found 1 mistakes" in done.stderr
