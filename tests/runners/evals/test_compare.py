"""Causes of failures, the comparison of two runs, and the check of task files."""

import json

import pytest
from click.testing import CliRunner

from ling3export.runners.cli.main import main
from ling3export.runners.evals.compare import Divergence, diff
from ling3export.runners.evals.report import diagnose
from ling3export.runners.evals.run import run_suite
from ling3export.runners.evals.run_file import read_run
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.tasks import Task
from ling3export.runners.evals.trials import EvalError, RunConfig
from tests.support.eval_fakes import NUMERIC, FakeBackend, half, numbered


def call(*arguments):
    return CliRunner().invoke(main, ["eval", *map(str, arguments)])


def finished(path, answer, tasks=None, stop_reason="eos", **settings):
    run_suite(Suite("s", tasks or numbered(10)), FakeBackend(answer, stop_reason), path, RunConfig(**settings))
    return path


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
    assert diagnose(read_run(run).trials) == {group: ["t0"]}


def test_diff_blocks_regressions(tmp_path):
    a = finished(tmp_path / "a", half)
    b = finished(tmp_path / "b", lambda prompt: "42" if int(prompt) < 5 else "41")
    changes = diff(a, b)
    assert (changes.broken, changes.fixed, changes.both, changes.neither) == (["t6", "t8"], ["t1", "t3"], 3, 3)
    done = call("diff", a, b)
    assert done.exit_code == 6
    assert done.stdout.splitlines() == [
        "broken  t6",
        "broken  t8",
        "fixed   t1",
        "fixed   t3",
        "2 broken, 2 fixed, 3 solved by both, 3 by neither",
        "differs t0 at token 0: 84, 52",
        *[f"differs t{n} at token 0: 84, 52" for n in range(1, 10)],
        "0 of 10 trials have the same tokens",
    ]
    done = call("diff", a, finished(tmp_path / "c", lambda prompt: "42"))
    assert (done.exit_code, done.stdout.splitlines()[5]) == (0, "0 broken, 5 fixed, 5 solved by both, 0 by neither")


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
    b = finished(
        tmp_path / "b", half, [Task.model_validate({"id": "t0", "input": {"prompt": "00"}, "graders": [NUMERIC]})]
    )
    with pytest.raises(EvalError, match="no task has the same prompt in both"):
        diff(a, b)


class Flips(FakeBackend):
    """Answers task 2 with another token at place 4, and ends task 0 at place 3."""

    def complete(self, prompt):
        done = super().complete(prompt)
        if prompt.prompt == "2":
            done.token_ids[4] = ord("X")
        if prompt.prompt == "0":
            del done.token_ids[3:]
        return done


def test_diff_finds_an_injected_flip(tmp_path):
    """The same suite run twice must give the same tokens."""
    a = finished(tmp_path / "a", half, numbered(4))
    run_suite(Suite("s", numbered(4)), Flips(half), tmp_path / "b", RunConfig())
    flips = [Divergence("t0", 3, ord(" "), None), Divergence("t2", 4, ord("a"), ord("X"))]
    assert (diff(a, tmp_path / "b").divergences, diff(a, tmp_path / "b").trials) == (flips, 4)
    done = call("diff", a, tmp_path / "b", "--tokens")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (3, "2 of 4 trials have the same tokens")
    assert call("diff", a, tmp_path / "b").exit_code == 0
    again = finished(tmp_path / "c", half, numbered(4))
    assert call("diff", a, again, "--tokens").exit_code == 0


def test_a_sound_task_passes_the_check(tmp_path):
    path = tmp_path / "cats.yaml"
    path.write_text(
        "task:\n  id: cats\n  input: {prompt: 'How many legs do 3 cats have?'}\n  target: '12'\n"
        "  graders: [last_numeric]\n  reference_solution: 3 * 4 = 12\n"
    )
    done = call("check", path)
    assert (done.exit_code, done.stdout) == (0, "1 tasks: the reference solution passes, an empty answer fails\n")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"graders": ["last_numeric"]}, "it has no reference_solution, so nothing shows that it can be solved"),
        (
            {"graders": ["last_numeric"], "reference_solution": "41"},
            "its reference solution fails last_numeric (expected 42, found 41)",
        ),
        (
            {"graders": [{"kind": "response_contains", "value": ""}], "reference_solution": "42"},
            "an empty answer passes, so it grades nothing",
        ),
    ],
)
def test_check_finds_what_is_not_sound(tmp_path, fields, message):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"id": "a", "input": {"prompt": "?"}, "target": "42", **fields}))
    done = call("check", path)
    assert done.exit_code == 1
    assert f"task `a`: {message}\n" in done.stderr
    assert "error: check `t.json`: 1 tasks have 1 mistakes" in done.stderr
