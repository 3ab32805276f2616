"""Runs on a fake backend: the completion line, infrastructure errors, kill and resume, the report, what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.runners.cli.eval import lines
from ling3export.runners.cli.main import main
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.evals import folder
from ling3export.runners.evals.compare import diff
from ling3export.runners.evals.folder import Prediction, read_predictions
from ling3export.runners.evals.run import run_suite
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.trials import EvalError, GraderError, RunConfig, trial_seed
from tests.support import eval_fakes
from tests.support.eval_fakes import FakeBackend, half, numbered
from tests.support.limits import file_size_limit
from tests.support.waiting import until

LINE = re.compile(r"^正确率: \d+/\d+ = (0\.\d{4}|1\.0000)$")
PREDICTIONS, RUN, TASKS = folder.PREDICTIONS, folder.RUN, folder.TASKS
REPORT = Path(__file__).parents[2] / "data/eval_report.md"


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Runs ``eval run`` on 10 problems with a fake backend."""
    problems = tmp_path / "ten.json"
    problems.write_text(json.dumps([{"prompt": str(n), "answer": "#### 42"} for n in range(10)]))

    def call(backend, *arguments, suite=problems, folder="run"):
        monkeypatch.setattr("ling3export.runners.cli.eval.open_backend", lambda *_: backend)
        command = ["eval", "run", "artifact", tmp_path / folder, "--suite", suite, *arguments]
        return CliRunner().invoke(main, list(map(str, command)))

    return call


def test_half_of_ten_tasks(evaluate, tmp_path):
    """A4."""
    done = evaluate(FakeBackend(half))
    assert done.exit_code == 0
    assert done.stdout == "正确率: 5/10 = 0.5000\n"
    assert LINE.match(done.stdout.strip())
    folder = tmp_path / "run"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["predictions.jsonl", "report.md", "run.json", "tasks.jsonl"]
    lines = (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [tuple(json.loads(line)) for line in lines] == [tuple(Prediction.__dataclass_fields__)] * 10
    assert json.loads(lines[1]) == {
        "idx": 1,
        "task_id": "ten-1",
        "trial": 0,
        "prompt_sha256": "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b",
        "text": "The answer is 41.",
        "output_token_ids": [ord(c) for c in "The answer is 41."],
        "stop_reason": "eos",
        "answer": "41",
        "target": "#### 42",
        "passed": False,
        "infra": None,
        "ttft_ms": 10.0,
        "e2e_ms": 20.0,
        "n_prompt": 1,
        "n_output": 17,
    }


class FailsOn(FakeBackend):
    """Raises whenever a batch holds one prompt."""

    def __init__(self, bad, error, times=1000):
        super().__init__(lambda prompt: "42")
        self.bad, self.error, self.times = bad, error, times

    def generate(self, asks):
        if any(ask.prompt == self.bad for ask in asks) and self.times:
            self.times -= 1
            raise self.error
        return super().generate(asks)


def test_one_infrastructure_error_of_ten(evaluate, tmp_path):
    """A6: strict 9/10, adjusted 9/9, exit 4, and the line still comes last."""
    done = evaluate(FailsOn("3", RuntimeError("RESOURCE_EXHAUSTED: no memory")))
    assert done.exit_code == 4
    assert done.stdout == "INVALID: infra rate 0.1000 > 0.0100\n正确率: 9/10 = 0.9000\n"
    totals = json.loads((tmp_path / "run/run.json").read_text())["totals"]
    figures = [totals[name] for name in ("infra", "passed", "success_rate", "adjusted_success_rate")]
    assert figures == [1, 9, 0.9, 1]
    record = read_predictions(tmp_path / "run")[3]
    attempt = {"kind": "oom", "message": "RuntimeError: RESOURCE_EXHAUSTED: no memory"}
    assert asdict(record.infra) == {"ended": True, "attempts": [attempt, attempt]}  # in the batch, and alone
    assert (record.passed, record.stop_reason, record.text) == (None, "error", "")
    assert evaluate(FailsOn("3", RuntimeError("x")), "--max-infra", "0.1", folder="b").exit_code == 0


def test_the_trial_at_fault_is_found_by_halves(tmp_path):
    backend = FailsOn("5", RuntimeError("no memory"))
    summary = run_suite(Suite("s", numbered(64)), backend, tmp_path / "r", RunConfig())
    assert (summary.passed, summary.infra) == (63, 1)
    assert [len(batch) for batch in backend.batches] == [4, 1, 2, 8, 16, 32]  # those that worked


class TooLong(FakeBackend):
    """Refuses the prompt 3 as the engine does: alone by ``check``, and with its whole batch by ``generate``."""

    checks = True

    def check(self, ask):
        if self.checks and ask.prompt == "3":
            raise RequestError(f"{ask.name}: too long", "shorten the prompt")

    def generate(self, asks):
        if any(ask.prompt == "3" for ask in asks):
            raise RequestError("task `ten-3`: too long", "shorten the prompt")
        return super().generate(asks)


@pytest.mark.parametrize("checks", [True, False])
def test_a_prompt_that_is_too_long_is_a_failure_of_its_own_and_no_infrastructure_error(evaluate, tmp_path, checks):
    """Finding 9: such a run was INVALID, and the other trials' records carried the message of this one."""
    backend = TooLong(half)
    backend.checks = checks
    done = evaluate(backend)
    assert (done.exit_code, done.stdout) == (0, "正确率: 5/10 = 0.5000\n")
    assert not checks or [len(batch) for batch in backend.batches] == [9]  # the others are run as one batch
    records = read_predictions(tmp_path / "run")
    assert [record.infra for record in records if record.idx != 3] == [None] * 9
    refused = records[3]
    assert (refused.passed, refused.stop_reason, refused.text, refused.answer) == (False, "refused", "", None)
    assert asdict(refused.infra) == {
        "ended": False,
        "attempts": [{"kind": "refused", "message": "task `ten-3`: too long"}],
    }
    totals = json.loads((tmp_path / "run/run.json").read_text())["totals"]
    assert (totals["infra"], totals["success_rate"], totals["adjusted_success_rate"]) == (0, 0.5, 0.5)
    assert "| the prompt was refused: it can never be served | 1 | ten-3 |" in (tmp_path / "run/report.md").read_text()


def test_an_error_that_passes_is_kept_and_not_counted(evaluate, tmp_path):
    done = evaluate(FailsOn("3", TimeoutError("late"), times=1))
    assert (done.exit_code, done.stdout) == (0, "正确率: 10/10 = 1.0000\n")
    kept = {"ended": False, "attempts": [{"kind": "timeout", "message": "TimeoutError: late"}]}
    assert [asdict(record.infra) for record in read_predictions(tmp_path / "run")] == [kept] * 10


def test_a_first_batch_that_is_refused_as_a_whole_ends_the_run(evaluate, tmp_path):
    error = RequestError("task: text in: expected an artifact with a tokenizer, found none", "give token ids")

    def refuse(prompt):
        raise error

    done = evaluate(FakeBackend(refuse))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"error: {error.message}\nhint: give token ids\n"
    assert evaluate(FakeBackend(half)).exit_code == 0  # nothing is lost: the run goes on


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
    assert (tmp_path / "run/predictions.jsonl.partial").read_bytes().count(b"\n") == 4


def test_an_engine_that_stopped_ends_the_run_at_once_and_it_goes_on_later(evaluate, tmp_path):
    """Not trial by trial: every further one would only hear the same."""
    error = EngineStopped("engine: expected every step to run, found RuntimeError: device lost", "load it again")
    backend = FailsOn("5", error)
    done = evaluate(backend, "--batch", "2")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "error: engine: expected every step to run, found RuntimeError: device lost\n"
        "hint: 4 of 10 trials are kept: the same command goes on from there\n"
    )
    assert (backend.times, len(backend.batches)) == (999, 2)
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "running"
    again = FakeBackend(half)
    done = evaluate(again, "--batch", "2")
    assert (done.exit_code, done.stdout, len(again.batches)) == (0, "正确率: 7/10 = 0.7000\n", 3)


def test_an_empty_suite_is_a_usage_error(evaluate, tmp_path):
    done = evaluate(FakeBackend(half), "--limit", "0")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "expected at least one task, found none" in done.stderr
    with pytest.raises(EvalError, match="suite `s`: expected at least one task, found none"):
        run_suite(Suite("s", []), FakeBackend(half), tmp_path / "r", RunConfig())


def test_a_broken_grader_fails_the_run_and_keeps_what_was_done(tmp_path):
    tasks = numbered(4)
    tasks[2] = replace(tasks[2], graders=[lambda *_: 1 / 0])
    with pytest.raises(GraderError, match="of task `t2`"):
        run_suite(Suite("s", tasks), FakeBackend(half), tmp_path / "r", RunConfig(batch=1))
    assert len((tmp_path / "r/predictions.jsonl.partial").read_text().splitlines()) == 2
    with pytest.raises(EvalError, match=r"run `r`: expected predictions.jsonl, found none"):
        read_predictions(tmp_path / "r")


def test_kill_9_and_resume_give_the_file_of_an_uninterrupted_run(tmp_path):
    """A7: nothing twice, nothing lost; also where the kill cut a line short."""
    partial = tmp_path / "killed/predictions.jsonl.partial"
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, eval_fakes.__file__, tmp_path / "killed", "0.05"], env=here) as process:
        until(lambda: partial.exists() and partial.read_bytes().count(b"\n") >= 5, of=process)
        os.kill(process.pid, signal.SIGKILL)
    killed = partial.read_bytes()
    assert 5 <= killed.count(b"\n") < 40
    partial.write_bytes(killed + b'{"idx": 17, "task')
    backend, suite = FakeBackend(half), Suite("slow", numbered(40))
    run_suite(suite, backend, tmp_path / "killed", RunConfig(batch=1))
    assert len(backend.batches) == 40 - killed.count(b"\n")
    run_suite(suite, FakeBackend(half), tmp_path / "whole", RunConfig(batch=1))
    for name in ("predictions.jsonl", "report.md", "run.json", "tasks.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_run_of_another_record_is_refused_and_kept(evaluate, tmp_path):
    class Other(FakeBackend):
        def environment(self):
            return super().environment() | {"weights": "c" * 64}

    stop = FailsOn("9", KeyboardInterrupt())
    evaluate(stop, "--batch", "1")
    partial = tmp_path / "run/predictions.jsonl.partial"
    before = partial.read_bytes()
    assert before.count(b"\n") == 9
    done = evaluate(Other(half), "--seed", "1", "--batch", "1")
    assert done.exit_code == 1
    assert done.stderr == (
        "error: run `run`: expected the same run to resume, found another config.seed, environment.weights, in "
        f"{tmp_path}\nhint: nothing was changed: choose another folder, or begin anew with --force\n"
    )
    assert partial.read_bytes() == before
    assert evaluate(Other(half), "--force").exit_code == 0
    done = evaluate(Other(half))
    assert "expected a run to resume, found a finished one" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"task_id": "ten-4"', b'"task_id": "ten-3"', "line 5: expected each trial of this run once, found it again"),
        (b'"prompt_sha256": "4', b'"prompt_sha256": "5', "found a record of another run"),
        (b'{"idx": 3', b'{"idx": 13', "line 4: expected each trial of this run once, found a record of another run"),
        (b'"trial": 0', b'"trial": 1', "line 1: expected each trial of this run once, found a record of another run"),
        (b'{"idx": 0', b'[]\n{"idx": 0', "line 1: expected the record of a trial, found another: expected an object"),
        (b'"n_prompt"', b'"n"', "line 1: expected the record of a trial, found another: expected only the fields idx"),
        (b"\n", b"\n{\n", "line 2: expected the record of a trial, found another: Expecting property name"),
    ],
)
def test_predictions_of_another_run_or_damaged_ones_are_refused_and_kept(evaluate, tmp_path, old, new, message):
    evaluate(FailsOn("9", KeyboardInterrupt()), "--batch", "1")
    partial = tmp_path / "run/predictions.jsonl.partial"
    partial.write_bytes(partial.read_bytes().replace(old, new, 1) + b"half a li")
    before = partial.read_bytes()
    done = evaluate(FakeBackend(half), "--batch", "1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert message in done.stderr
    assert partial.read_bytes() == before


def test_folders_that_are_no_run(evaluate, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("mine")
    for more in ([], ["--force"]):
        done = evaluate(FakeBackend(half), *more)
        assert (done.exit_code, "expected a new or empty folder, found other files" in done.stderr) == (1, True)
    (tmp_path / "file").write_text("mine")
    assert (
        "expected a folder that can be written, found File exists" in evaluate(FakeBackend(half), folder="file").stderr
    )
    assert evaluate(FakeBackend(half), folder="file/run").stderr == (
        f"error: run `run`: expected a folder that can be written, found Not a directory, in {tmp_path / 'file'}\n"
    )
    with pytest.raises(EvalError) as caught:
        read_predictions(tmp_path / "nope")
    assert str(caught.value) == f"run `nope`: expected run.json, found No such file or directory, in {tmp_path}"
    for text, found in (
        ("[]", "run.json: expected an object, found a list of 0"),
        ('{"format": 1}', "run.json: expected the field suite, config, environment, sha256, found none"),
        ("[" * 1_000_000, "run.json: more than 16 levels of objects and lists"),
    ):
        (tmp_path / "run/run.json").write_text(text)
        with pytest.raises(EvalError, match=found):
            read_predictions(tmp_path / "run")


def test_tasks_of_another_run_are_replaced_with_force_only_and_those_of_a_user_never(evaluate, tmp_path):
    evaluate(FakeBackend(half), "--limit", "3")
    for name in ("run.json", "predictions.jsonl", "report.md"):
        (tmp_path / "run" / name).unlink()
    tasks = tmp_path / "run/tasks.jsonl"
    for kept in (tasks.read_bytes(), b'{"prompt": "mine"}\n'):
        tasks.write_bytes(kept)
        done = evaluate(FakeBackend(half))
        assert (done.exit_code, "expected a new or empty folder, found other files" in done.stderr) == (1, True)
        assert tasks.read_bytes() == kept
        if b"graders" not in kept:
            assert evaluate(FakeBackend(half), "--force").exit_code == 1
            assert tasks.read_bytes() == kept
    tasks.write_bytes(tasks.read_bytes().replace(kept, b""))
    assert evaluate(FakeBackend(half), "--force").exit_code == 0


@pytest.mark.parametrize("force", [True, False])
def test_a_run_killed_at_any_file_of_its_begin_can_be_gone_on_with(evaluate, tmp_path, monkeypatch, force):
    """Finding 26: every write and every removal fails once, as if the process had been killed there."""
    write, unlink, left = folder.replace_file, folder.remove, [0]

    def counted(real, *arguments, **named):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    for count in range(8):
        name, left[0] = f"run{count}", count
        if force:
            assert evaluate(FakeBackend(half), folder=name).exit_code == 0
        with monkeypatch.context() as patched:
            patched.setattr(folder, "replace_file", partial(counted, write))
            patched.setattr(folder, "remove", partial(counted, unlink))
            evaluate(FakeBackend(half), *(["--force"] if force else []), folder=name)
        done = evaluate(FakeBackend(half), folder=name)
        assert done.exit_code == 0 or "found a finished one" in done.stderr, (count, done.stderr)
        assert len(read_predictions(tmp_path / name)) == 10
        assert len((tmp_path / name / "tasks.jsonl").read_text().splitlines()) == 10


def test_a_run_is_not_written_through_a_link(tmp_path):
    """Whoever could write the folder once had a file elsewhere appended to, and cut at its last line break."""
    outside, partial_file = tmp_path / "outside", tmp_path / "run/predictions.jsonl.partial"
    outside.write_text("mine\nhalf a line")
    with pytest.raises(KeyboardInterrupt):
        run_suite(Suite("s", numbered(2)), FailsOn("1", KeyboardInterrupt()), tmp_path / "run", RunConfig())
    partial_file.unlink()
    partial_file.symlink_to(outside)
    with pytest.raises(ArtifactError, match="expected a writable file, found a symbolic link, in "):
        run_suite(Suite("s", numbered(2)), FakeBackend(half), tmp_path / "run", RunConfig())
    assert outside.read_text() == "mine\nhalf a line"


def test_a_full_disk_is_named_with_the_file(tmp_path):
    """Finding 19: it was "output: expected to be readable or writable"."""
    run_suite(Suite("s", numbered(1)), FakeBackend(half), tmp_path / "small", RunConfig())
    largest = max(path.stat().st_size for path in (tmp_path / "small").iterdir()) + 1000
    with (
        file_size_limit(largest),
        pytest.raises(ArtifactError, match=r"write `predictions\.jsonl\.partial`: expected room"),
    ):
        run_suite(Suite("s", numbered(1)), FakeBackend(lambda prompt: "42" * largest), tmp_path / "r", RunConfig())


def test_two_processes_cannot_write_one_run(tmp_path):
    suite = Suite("s", numbered(2))

    class Nested(FakeBackend):
        def generate(self, asks):
            with pytest.raises(EvalError, match="run `r`: expected no other process, found one writing it"):
                run_suite(suite, FakeBackend(half), tmp_path / "r", RunConfig(batch=1))
            return super().generate(asks)

    run_suite(suite, Nested(half), tmp_path / "r", RunConfig(batch=1))


def test_asks_carry_settings_and_a_seed_of_the_trial(tmp_path):
    backend = FakeBackend(half)
    config = RunConfig(trials=2, max_tokens=7, temperature=0.5, stop=("\n",), seed=3, batch=3)
    summary = run_suite(Suite("s", numbered(2)), backend, tmp_path / "r", config)
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


def report_run(folder):
    """The run whose report is kept: failures of several kinds, categories, trials, a reference."""
    tasks = [*numbered(6, category="even | odd"), *numbered(3)]
    for place, task in enumerate(tasks):
        task.id = f"t{place}"
    answers = {"1": "41\n\nQuestion: next?", "2": "I do not know, whoever asks me.", "5": "4 " * 60}

    def answer(prompt):
        if prompt == "4":
            raise RuntimeError("UNAVAILABLE: gone")
        return answers.get(prompt, "42")

    suite = Suite("gsm8k", tasks, {"test.jsonl": "c" * 64}, 0.85, notes=("only the first 9 tasks",))
    return run_suite(suite, FakeBackend(answer), folder, RunConfig(trials=3, batch=4, seed=7))


def test_golden_report(tmp_path):
    """To renew: ``UPDATE_GOLDEN=1``, then read the difference."""
    report_run(tmp_path / "r")
    found = (tmp_path / "r/report.md").read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN"):
        REPORT.write_text(found, encoding="utf-8")
    assert found == REPORT.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        (PREDICTIONS, "output_token_ids", [1, "2"], "found another: expected a whole number, found '2', at output_"),
        (PREDICTIONS, "n_output", True, "found another: expected a whole number, found True, at n_output"),
        (
            PREDICTIONS,
            "infra",
            {"ended": True},
            "found another: expected the field attempts or null, found an object of 1, at infra",
        ),
        (PREDICTIONS, "passed", None, "found another: expected an error of a trial without a verdict, found none"),
        (TASKS, "id", 3, "line 1: expected the record of a task, found another: expected a text, found 3, at id"),
        (RUN, "format", 2, "run.json: expected 1, found 2, at format"),
        (RUN, "environment", [], "run.json: expected an object, found a list of 0, at environment"),
        (RUN, "environment", {}, "expected settings of sha256"),
        (RUN, "shard", "2/2/2", "run.json: expected a shard I/N, found '2/2/2', at shard"),
        (RUN, "shard", 3, "run.json: expected a text, found 3, at shard"),
        (RUN, "config", {"batch": 0}, "run.json: `batch`: expected 1 or more, found 0"),
        (RUN, "config", {"trials": "2"}, "run.json: expected a whole number, found '2', at config.trials"),
    ],
)
def test_values_of_other_types_in_the_folder_of_a_run_are_refused_by_name(tmp_path, name, field, value, message):
    """Each once ended a command with a traceback, or went unseen."""
    run = tmp_path / "r"
    run_suite(Suite("s", numbered(2)), FakeBackend(half), run, RunConfig())
    path = run / name
    first, *rest = path.read_text().splitlines() if name != RUN else [path.read_text()]
    record = json.loads(first)
    changed = record[field] | value if field == "config" else value
    path.write_text("\n".join([json.dumps(record | {field: changed}), *rest]) + "\n")
    with pytest.raises(EvalError, match=re.escape(message)):
        diff(run, run)


def test_a_pipe_in_the_folder_of_a_run_is_not_waited_for(tmp_path):
    run_suite(Suite("s", numbered(2)), FakeBackend(half), tmp_path / "r", RunConfig())
    (tmp_path / "r" / TASKS).unlink()
    os.mkfifo(tmp_path / "r" / TASKS)
    with pytest.raises(EvalError, match=r"file `tasks.jsonl`: expected a readable file, found a pipe"):
        diff(tmp_path / "r", tmp_path / "r")


class Telling(FakeBackend):
    """Says of each prompt that it ended, as an engine does."""

    def generate(self, asks):
        done = super().generate(asks)
        for _ in asks:
            self.ended()
        return done


def test_trials_are_counted_as_they_end(tmp_path):
    """The bar jumped from 0 to 100 % where all trials were one batch."""
    told = []
    suite = Suite("ten", numbered(10))
    run_suite(suite, Telling(half), tmp_path / "run", RunConfig(batch=8), progress=lambda *each: told.append(each))
    done = [number for number, total in told if total == 10]
    assert len(done) == len(told) and done == [*range(1, 9), 8, 9, 10, 10]


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(capsys):
    now = iter([0.0, 3.0, 10.5, 10.5, 12.0, 30.0, 30.0])
    tell = lines("eval ten", lambda: next(now))
    for done in (1, 2, 3, 1204):
        tell(done, 2000)
    assert capsys.readouterr().err == "eval ten: 2 of 2,000\neval ten: 1,204 of 2,000\n"
