"""Runs on a fake backend: the completion line, infrastructure errors, kill and resume, the report, refused input."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ling3export.artifacts.records import to_json
from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.runners.cli.eval import duration, progress
from ling3export.runners.cli.main import main
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.evals.compare import diff
from ling3export.runners.evals.graders import GraderSpec
from ling3export.runners.evals.report import report
from ling3export.runners.evals.run import run_suite
from ling3export.runners.evals.run_file import read_run
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.trials import EvalError, GraderError, RunConfig, Trial, trial_seed
from tests.support import eval_fakes
from tests.support.eval_fakes import FakeBackend, half, numbered
from tests.support.limits import file_size_limit
from tests.support.waiting import until

LINE = re.compile(r"^正确率: \d+/\d+ = (0\.\d{4}|1\.0000)$")
REPORT = Path(__file__).parents[2] / "data/eval_report.md"


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Runs ``eval run`` on 10 problems with a fake backend."""
    problems = tmp_path / "ten.json"
    problems.write_text(json.dumps([{"prompt": str(n), "answer": "#### 42"} for n in range(10)]))

    def call(backend, *arguments, suite=problems, name="run"):
        monkeypatch.setattr("ling3export.runners.cli.eval.open_backend", lambda *_: backend)
        command = ["eval", "run", "artifact", tmp_path / name, "--suite", suite, *arguments]
        return CliRunner().invoke(main, list(map(str, command)))

    return call


def test_half_of_ten_tasks(evaluate, tmp_path):
    done = evaluate(FakeBackend(half))
    assert done.exit_code == 0
    assert done.stdout == "正确率: 5/10 = 0.5000\n"
    assert LINE.match(done.stdout.strip())
    lines = [json.loads(line) for line in (tmp_path / "run").read_text(encoding="utf-8").splitlines()]
    assert [line["kind"] for line in lines] == ["run", *["task"] * 10, *["trial"] * 10]
    assert [list(line) for line in lines[11:]] == [["kind", *Trial.__struct_fields__]] * 10
    assert lines[12] == {
        "kind": "trial",
        "task_id": "ten-1",
        "trial": 0,
        "status": "ok",
        "passed": False,
        "answer": "41",
        "text": "The answer is 41.",
        "output_token_ids": [ord(c) for c in "The answer is 41."],
        "stop_reason": "eos",
        "n_prompt": 1,
        "ttft_ms": 10.0,
        "e2e_ms": 20.0,
        "attempts": [],
        "grades": [
            {
                "name": "last_numeric",
                "score": 0.0,
                "passed": False,
                "answer": "41",
                "explanation": "expected 42, found 41",
                "required": True,
            }
        ],
        "details": None,
    }


class FailsOn(FakeBackend):
    """Raises whenever a batch has a given prompt."""

    def __init__(self, bad, error, times=1000):
        super().__init__(lambda prompt: "42")
        self.bad, self.error, self.times = bad, error, times

    def generate(self, prompts):
        if any(prompt.prompt == self.bad for prompt in prompts) and self.times:
            self.times -= 1
            raise self.error
        return super().generate(prompts)


def test_one_infrastructure_error_of_ten(evaluate, tmp_path):
    """The strict rate is 9/10, the adjusted one 9/9, the exit code 4; the completion line still comes last."""
    done = evaluate(FailsOn("3", RuntimeError("RESOURCE_EXHAUSTED: no memory")))
    assert done.exit_code == 4
    assert done.stdout == "INVALID: infra rate 0.1000 > 0.0100\n正确率: 9/10 = 0.9000\n"
    run = read_run(tmp_path / "run")
    totals = run.summary
    assert (totals.infra, totals.passed, totals.success_rate, totals.adjusted_success_rate) == (1, 9, 0.9, 1)
    trial = run.trials[3]
    attempt = {"kind": "oom", "message": "RuntimeError: RESOURCE_EXHAUSTED: no memory"}
    assert (trial.status, to_json(trial.attempts)) == ("infra_error", [attempt, attempt])  # in the batch, and by itself
    assert (trial.passed, trial.stop_reason, trial.text) == (None, "error", "")
    assert evaluate(FailsOn("3", RuntimeError("x")), "--max-infra", "0.1", name="b").exit_code == 0


def test_each_trial_of_a_batch_that_failed_is_tried_by_itself(tmp_path):
    backend = FailsOn("5", RuntimeError("no memory"))
    summary = run_suite(Suite("s", numbered(8)), backend, tmp_path / "r", RunConfig(batch=6)).summary
    assert (summary.passed, summary.infra) == (7, 1)
    assert [len(batch) for batch in backend.batches] == [1, 1, 1, 1, 1, 2]  # those that worked


class TooLong(FakeBackend):
    """Refuses the prompt 3 like the engine: one prompt in ``check``, its whole batch in ``generate``."""

    checks = True

    def check(self, prompt):
        if self.checks and prompt.prompt == "3":
            raise RequestError(f"{prompt.name}: too long", "shorten the prompt")

    def generate(self, prompts):
        if any(prompt.prompt == "3" for prompt in prompts):
            raise RequestError("task `ten-3`: too long", "shorten the prompt")
        return super().generate(prompts)


@pytest.mark.parametrize("checks", [True, False])
def test_a_prompt_that_is_too_long_is_a_failure_of_its_own_and_no_infrastructure_error(evaluate, tmp_path, checks):
    """Regression: such a run was INVALID, and the other trials' records had the message of this one."""
    backend = TooLong(half)
    backend.checks = checks
    done = evaluate(backend)
    assert (done.exit_code, done.stdout) == (0, "正确率: 5/10 = 0.5000\n")
    assert not checks or [len(batch) for batch in backend.batches] == [9]  # the others are run as one batch
    run = read_run(tmp_path / "run")
    refused, totals = run.trials[3], run.summary
    assert [trial.attempts for trial in run.trials if trial is not refused] == [()] * 9
    assert (refused.passed, refused.status, refused.text, refused.answer) == (False, "refused", "", None)
    assert to_json(refused.attempts) == [{"kind": "refused", "message": "task `ten-3`: too long"}]
    assert (totals.infra, totals.success_rate, totals.adjusted_success_rate) == (0, 0.5, 0.5)
    assert "| the prompt was refused: it can never be served | 1 | ten-3 |" in report(run)


def test_an_error_that_passes_is_kept_and_not_counted(evaluate, tmp_path):
    done = evaluate(FailsOn("3", TimeoutError("late"), times=1))
    assert (done.exit_code, done.stdout) == (0, "正确率: 10/10 = 1.0000\n")
    late = {"kind": "timeout", "message": "TimeoutError: late"}
    assert [to_json(trial.attempts) for trial in read_run(tmp_path / "run").trials] == [[late]] * 10


def test_a_first_batch_that_is_refused_as_a_whole_ends_the_run(evaluate, tmp_path):
    error = RequestError("task: text in: this artifact has no tokenizer", "give token ids")

    def refuse(prompt):
        raise error

    done = evaluate(FakeBackend(refuse))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"error: {error.message}\nhint: give token ids\n"
    assert evaluate(FakeBackend(half)).exit_code == 0  # nothing is lost: the run continues


def test_divergence_of_processes_exits_with_5_and_keeps_what_came_before(evaluate, tmp_path):
    class Diverges(FakeBackend):
        def digests(self):
            return [b"a" * 32, (b"a" if len(self.batches) < 3 else b"b") * 32]

    done = evaluate(Diverges(half), "--batch", "2")
    assert (done.exit_code, done.stdout) == (5, "")
    assert done.stderr == (
        "error: sampled tokens: expected the same on 2 processes, found others than on process 0 on 1\n"
        "hint: every process must load the same artifact and see the same environment\n"
    )
    assert len(read_run(tmp_path / "run", whole=False).trials) == 4


def test_an_engine_that_stopped_ends_the_run_at_once_and_it_goes_on_later(evaluate, tmp_path):
    """It does not continue with further trials, which would all get the same error."""
    error = EngineStopped("engine: expected every step to run, found RuntimeError: device lost", "load it again")
    backend = FailsOn("5", error)
    done = evaluate(backend, "--batch", "2")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "error: engine: expected every step to run, found RuntimeError: device lost\n"
        "hint: 4 of 10 trials are kept: the same command goes on from there\n"
    )
    assert (backend.times, len(backend.batches)) == (999, 2)
    assert len(read_run(tmp_path / "run", whole=False).trials) == 4
    again = FakeBackend(half)
    done = evaluate(again, "--batch", "2")
    assert (done.exit_code, done.stdout, len(again.batches)) == (0, "正确率: 7/10 = 0.7000\n", 3)


def test_an_empty_suite_is_a_usage_error(evaluate, tmp_path):
    done = evaluate(FakeBackend(half), "--limit", "0")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "suite `ten`: it has no task" in done.stderr
    with pytest.raises(EvalError, match="suite `s`: it has no task"):
        run_suite(Suite("s", []), FakeBackend(half), tmp_path / "r", RunConfig())


def test_a_broken_grader_fails_the_run_and_keeps_what_was_done(tmp_path):
    tasks = numbered(4)
    tasks[2].graders = [GraderSpec("callable", function=lambda *_: 1 / 0)]
    with pytest.raises(GraderError, match="of task `t2`"):
        run_suite(Suite("s", tasks), FakeBackend(half), tmp_path / "r", RunConfig(batch=1))
    assert len(read_run(tmp_path / "r", whole=False).trials) == 2
    with pytest.raises(EvalError, match="run `r`: 2 of 4 trials are there"):
        read_run(tmp_path / "r")


def test_kill_9_and_resume_give_the_file_of_an_uninterrupted_run(tmp_path):
    """No trial is repeated or lost, even if the kill cut a line short."""
    path, head = tmp_path / "killed", 41
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, eval_fakes.__file__, path, "0.05"], env=here) as process:
        until(lambda: path.exists() and path.read_bytes().count(b"\n") >= head + 5, of=process)
        os.kill(process.pid, signal.SIGKILL)
    killed = path.read_bytes()
    assert head + 5 <= killed.count(b"\n") < head + 40
    path.write_bytes(killed + b'{"kind": "trial", "idx": 17, "task')
    backend, suite = FakeBackend(half), Suite("slow", numbered(40))
    run_suite(suite, backend, path, RunConfig(batch=1))
    assert len(backend.batches) == head + 40 - killed.count(b"\n")
    run_suite(suite, FakeBackend(half), tmp_path / "whole", RunConfig(batch=1))
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("length", [0, 1, 500, 2500])
def test_a_run_killed_while_it_wrote_its_head_is_begun_again(tmp_path, length):
    """After a kill at any moment, the same command continues the file."""
    run_suite(Suite("s", numbered(10)), FakeBackend(half), tmp_path / "whole", RunConfig())
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:length])
    run_suite(Suite("s", numbered(10)), FakeBackend(half), tmp_path / "cut", RunConfig())
    assert (tmp_path / "cut").read_bytes() == whole


def test_a_run_of_another_record_is_refused_and_kept(evaluate, tmp_path):
    class Other(FakeBackend):
        def environment(self):
            return super().environment() | {"weights": "c" * 64}

    stop = FailsOn("9", KeyboardInterrupt())
    evaluate(stop, "--batch", "1")
    path = tmp_path / "run"
    before = path.read_bytes()
    assert before.count(b"\n") == 20
    done = evaluate(Other(half), "--seed", "1", "--batch", "1")
    assert done.exit_code == 1
    assert done.stderr == (
        f"error: run `run`: it differs in config.seed, environment.weights, in {tmp_path}\n"
        "hint: nothing was changed: choose another file, or begin again with --force\n"
    )
    assert path.read_bytes() == before
    assert evaluate(Other(half), "--force").exit_code == 0
    again = Other(half)
    assert (evaluate(again).exit_code, again.batches) == (0, [])  # a finished run: nothing is left to do


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"task_id": "ten-4"', b'"task_id": "ten-3"', "line 16: a trial that is there already"),
        (b'"task_id": "ten-3"', b'"task_id": "ten-13"', "line 15: a trial of another run"),
        (b'"trial": 0', b'"trial": 1', "line 12: a trial of another run"),
        (b'{"kind": "trial"', b'[]\n{"kind": "trial"', "line 12: expected an object"),
        (b'"n_prompt"', b'"n"', "line 12: expected only the fields task_id"),
        (b'{"kind": "trial"', b'{\n{"kind": "trial"', "line 12: Expecting property name"),
        (b'"kind": "trial"', b'"kind": "triad"', "line 12: kind 'triad': it is none of run, task and trial"),
    ],
)
def test_predictions_of_another_run_or_damaged_ones_are_refused_and_kept(evaluate, tmp_path, old, new, message):
    evaluate(FailsOn("9", KeyboardInterrupt()), "--batch", "1")
    path = tmp_path / "run"
    path.write_bytes(path.read_bytes().replace(old, new, 1) + b"half a li")
    before = path.read_bytes()
    done = evaluate(FakeBackend(half), "--batch", "1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert message in done.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine", "it has no line of a run"),
        ("mine\n", "line 1: Expecting value"),
        ("[]\n", "line 1: expected an object, found []"),
        ('{"kind": "trial"}\n', "line 1: expected the field task_id"),
        ('{"kind": "run", "format": 1, "config": {}}\n', "line 1: expected the field suite, environment, shard"),
        ("[" * 1_000_000 + "\n", "line 1: more than 16 levels of objects and lists"),
    ],
)
def test_files_that_are_no_run(evaluate, tmp_path, text, message):
    path = tmp_path / "run"
    path.write_text(text)
    done = evaluate(FakeBackend(half))
    assert (done.exit_code, message in done.stderr) == (1, True), done.stderr
    assert path.read_text() == text
    with pytest.raises(EvalError, match=re.escape(message)):
        read_run(path)


def test_files_that_cannot_be_read_or_written_are_named(evaluate, tmp_path):
    with pytest.raises(EvalError) as caught:
        read_run(tmp_path / "nope")
    assert str(caught.value) == f"run `nope`: it cannot be read: No such file or directory, in {tmp_path}"
    (tmp_path / "file").write_text("mine")
    assert "expected a writable file, found File exists" in evaluate(FakeBackend(half), name="file/run").stderr
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EvalError, match="run `pipe`: it cannot be read: a pipe"):
        read_run(tmp_path / "pipe")


def test_a_run_is_not_written_through_a_link(tmp_path):
    """Regression: through a link, a file elsewhere was extended, and cut at its last line break."""
    outside = tmp_path / "outside"
    outside.write_text("mine\nhalf a line")
    (tmp_path / "run").symlink_to(outside)
    with pytest.raises(ArtifactError, match="expected a writable file, found a symbolic link, in "):
        run_suite(Suite("s", numbered(2)), FakeBackend(half), tmp_path / "run", RunConfig())
    assert outside.read_text() == "mine\nhalf a line"


def test_a_full_disk_is_named_with_the_file(tmp_path):
    """Regression: the error was "output: expected to be readable or writable"."""
    run_suite(Suite("s", numbered(1)), FakeBackend(half), tmp_path / "small", RunConfig())
    largest = (tmp_path / "small").stat().st_size + 1000
    with file_size_limit(largest), pytest.raises(ArtifactError, match=r"write `r`: expected room"):
        run_suite(Suite("s", numbered(1)), FakeBackend(lambda prompt: "42" * largest), tmp_path / "r", RunConfig())


def test_two_processes_cannot_write_one_run(tmp_path):
    suite = Suite("s", numbered(2))

    class Nested(FakeBackend):
        def generate(self, prompts):
            with pytest.raises(EvalError, match="run `r`: another process writes it"):
                run_suite(suite, FakeBackend(half), tmp_path / "r", RunConfig(batch=1))
            return super().generate(prompts)

    run_suite(suite, Nested(half), tmp_path / "r", RunConfig(batch=1))


def test_asks_carry_settings_and_a_seed_of_the_trial(tmp_path):
    backend = FakeBackend(half)
    config = RunConfig(trials=2, max_tokens=7, temperature=0.5, stop=("\n",), seed=3, batch=3)
    summary = run_suite(Suite("s", numbered(2)), backend, tmp_path / "r", config).summary
    asks = [ask for batch in backend.batches for ask in batch]
    assert [len(batch) for batch in backend.batches] == [3, 1]
    assert [ask.sampling.seed for ask in asks] == [
        trial_seed(3, f"t{n}", trial) for n in range(2) for trial in range(2)
    ]
    assert {(ask.max_tokens, ask.sampling.temperature, ask.stop) for ask in asks} == {(7, 0.5, ("\n",))}
    assert summary.solved == ["t0"]


def test_settings_out_of_range_are_named():
    with pytest.raises(EvalError, match="`trials`: expected 1 or more, found 0"):
        RunConfig(trials=0)
    with pytest.raises(RequestError, match="sampling `temperature`"):
        RunConfig(temperature=-1)


def report_run(path):
    """The run of the golden report: failures of several kinds, trials."""
    tasks = [*numbered(6), *numbered(3)]
    for place, task in enumerate(tasks):
        task.id = f"t{place}"
    answers = {"1": "41\n\nQuestion: next?", "2": "I do not know, whoever asks me.", "5": "4 " * 60}

    def answer(prompt):
        if prompt == "4":
            raise RuntimeError("UNAVAILABLE: gone")
        return answers.get(prompt, "42")

    suite = Suite("gsm8k", tasks, {"test.jsonl": "c" * 64}, notes=("only the first 9 tasks",))
    return run_suite(suite, FakeBackend(answer), path, RunConfig(trials=3, batch=4, seed=7))


def test_golden_report(tmp_path):
    """To update the golden report, set ``UPDATE_GOLDEN=1`` and read the difference."""
    report_run(tmp_path / "r")
    done = CliRunner().invoke(main, ["eval", "report", str(tmp_path / "r")])
    assert done.exit_code == 4
    if os.environ.get("UPDATE_GOLDEN"):
        REPORT.write_text(done.stdout, encoding="utf-8")
    assert done.stdout == REPORT.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("number", "field", "value", "message"),
    [
        (3, "output_token_ids", [1, "2"], 'expected a whole number, found "2", at output_'),
        (3, "n_prompt", True, "expected a whole number, found true, at n_prompt"),
        (3, "attempts", [{"kind": "oom"}], "expected the field message, found none, at attempts[0]"),
        (3, "passed", None, "expected null after an infrastructure error only, found null, at passed"),
        (3, "status", "infra_error", "expected null after an infrastructure error only, found true, at passed"),
        (3, "status", "well", 'expected "ok" or "infra_error" or "refused", found "well", at status'),
        (1, "id", 3, "line 2: expected a text, found 3, at id"),
        (1, "target", "43", "its tasks are not those of its header"),
        (0, "format", 2, "expected 1, found 2, at format"),
        (0, "environment", [], "expected an object, found [], at environment"),
        (0, "shard", "2/2/2", "expected a share I/N, found `2/2/2`"),
        (0, "shard", 3, "expected a text, found 3, at shard"),
        (0, "config", {"batch": 0}, "`batch`: expected 1 or more, found 0"),
        (0, "config", {"trials": "2"}, 'expected a whole number, found "2", at config.trials'),
    ],
)
def test_values_of_other_types_in_the_file_of_a_run_are_refused_by_name(tmp_path, number, field, value, message):
    """Regression: each value ended a command with a traceback, or was not noticed."""
    path = tmp_path / "r"
    run_suite(Suite("s", numbered(2)), FakeBackend(half), path, RunConfig())
    lines = path.read_text().splitlines()
    record = json.loads(lines[number])
    changed = record[field] | value if field == "config" else value
    lines[number] = json.dumps(record | {field: changed})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(EvalError, match=re.escape(message)):
        diff(path, path)


class Telling(FakeBackend):
    """Reports that each prompt has ended, like an engine."""

    def generate(self, prompts):
        done = super().generate(prompts)
        for _ in prompts:
            self.ended()
        return done


def test_trials_are_counted_as_they_end(tmp_path):
    """Regression: the bar jumped from 0 to 100 % if all trials were one batch."""
    told = []
    suite = Suite("ten", numbered(10))
    run_suite(suite, Telling(half), tmp_path / "run", RunConfig(batch=8), progress=lambda *each: told.append(each))
    done = [number for number, total in told if total == 10]
    assert len(done) == len(told) and done == [*range(1, 9), 8, 9, 10, 10]


def test_the_remaining_time_follows_from_all_trials_of_this_start(monkeypatch, capsys):
    """Regression: the time jumped, because trials end in bursts, and no trials were counted. A pipe gets no line."""
    texts = []

    class Bar:
        pos = 0
        __enter__ = __exit__ = lambda *_: None

        def update(self, steps, text):
            self.pos += steps
            texts.append(text)

    now = iter([0.0, 10.0, 10.0, 20.0, 20.0])
    with monkeypatch.context() as patch:
        patch.setattr(click, "progressbar", lambda **_: Bar())
        patch.setattr(time, "monotonic", lambda: next(now, 20.0))
        with progress("eval") as report:
            for done in (5, 6, 7, 8, 10):  # an earlier start did four
                report(done, 10)
    times = "5 of 10, 0:50 left|6 of 10, 0:20 left|7 of 10, 0:20 left|8 of 10, 0:10 left|10 of 10"
    assert texts == times.split("|")
    assert (duration(59.1), duration(3725)) == ("1:00", "1:02:05")
    with progress("eval") as report:
        report(1, 2)
    assert capsys.readouterr().err == ""
