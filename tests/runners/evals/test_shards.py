"""Shards of a run, each a run of its own; their files, one after the other, are those of the whole run."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.foundation.shards import Shard
from ling3export.runners.cli.main import main
from ling3export.runners.evals.compare import diff
from ling3export.runners.evals.report import report
from ling3export.runners.evals.run import run_suite
from ling3export.runners.evals.run_file import read_run
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.trials import EvalError, RunConfig
from tests.support.eval_fakes import FakeBackend, half, numbered

CONFIG = RunConfig(trials=2, batch=3, transcripts=True)
SUITE = Suite("gsm8k", numbered(8, category="sums"), {"test.jsonl": "c" * 64})  # 16 trials: 6 batches


def answer(prompt: str) -> str:
    if prompt == "5":
        raise RuntimeError("UNAVAILABLE: gone")
    return half(prompt)


def run(path: Path, shard: str = "0/1", *, suite: Suite = SUITE, config: RunConfig = CONFIG, **more) -> FakeBackend:
    backend = FakeBackend(answer)
    run_suite(suite, backend, path, config, shard=Shard.parse(shard), **more)
    return backend


def shards(folder: Path, count: int) -> list[Path]:
    parts = [folder / f"part{index}" for index in range(count)]
    for index, part in enumerate(parts):
        run(part, f"{index}/{count}")
    return parts


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_shards_one_after_the_other_are_one_run(tmp_path, count):
    """In any order; with seven shards of six batches, one is empty."""
    run(tmp_path / "whole")
    whole, parts = read_run(tmp_path / "whole"), shards(tmp_path, count)[::-1]
    (tmp_path / "joined").write_bytes(b"".join(part.read_bytes() for part in parts))
    for joined in (read_run(tmp_path / "joined"), read_run(*parts)):
        assert (joined.tasks, joined.trials, report(joined)) == (whole.tasks, whole.trials, report(whole))
    summary = joined.summary
    assert (summary.total, summary.passed, summary.infra) == (16, 8, 2)


def test_a_shard_runs_whole_batches_in_the_company_that_they_have_in_one_run(tmp_path):
    found = {}
    for shard in ("0/1", "0/2", "1/2"):
        backend = FakeBackend(half)
        run_suite(SUITE, backend, tmp_path / shard, CONFIG, shard=Shard.parse(shard))
        found[shard] = [[(prompt.name, prompt.sampling.seed) for prompt in batch] for batch in backend.batches]
    assert [len(batch) for batch in found["0/1"]] == [3, 3, 3, 3, 3, 1]
    assert (found["0/2"], found["1/2"]) == (found["0/1"][::2], found["0/1"][1::2])


def test_the_command_line_gives_the_score_of_one_run(tmp_path, monkeypatch):
    problems = tmp_path / "ten.json"
    problems.write_text(json.dumps([{"prompt": str(n), "answer": "42"} for n in range(10)]))
    monkeypatch.setattr("ling3export.runners.cli.eval.open_backend", lambda *_: FakeBackend(half))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")

    def call(*words):
        return CliRunner().invoke(main, ["eval", *map(str, words)], catch_exceptions=False)

    for name, shard in (("a", "0/2"), ("b", "auto/2")):
        done = call("run", "artifact", tmp_path / name, "--suite", problems, "--batch", 3, "--shard", shard)
        assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"{tmp_path / 'b'}: shard 1/2: 1 of 4 trials passed\n"
    done = call("report", tmp_path / "a", tmp_path / "b")
    assert (done.exit_code, "\n正确率: 5/10 = 0.5000\n" in done.stdout) == (0, True)


def test_a_shard_goes_on_where_it_was_and_is_no_other_shard(tmp_path):
    run(tmp_path / "whole", "1/2")

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "part", "1/2", progress=interrupt)
    with pytest.raises(EvalError, match="it differs in shard, 1/2"):
        run(tmp_path / "part", "0/2")
    assert len(run(tmp_path / "part", "1/2").batches[0]) == 3
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_shard_is_no_whole_run(tmp_path):
    parts = shards(tmp_path, 2)
    for look in (lambda: read_run(parts[0]), lambda: diff(*parts)):
        with pytest.raises(EvalError, match="run `part0`: 9 of 16 trials are there") as caught:
            look()
        assert "name the files of all shards" in str(caught.value)


def test_shards_that_do_not_belong_together_are_refused(tmp_path):
    parts = shards(tmp_path, 2)
    run(tmp_path / "third", "1/3")
    run(tmp_path / "seed", "1/2", config=RunConfig(trials=2, batch=3, transcripts=True, seed=7))
    run(tmp_path / "suite", "1/2", suite=Suite("gsm8k", numbered(7)))
    lines = parts[1].read_bytes().splitlines(keepends=True)
    (tmp_path / "lost").write_bytes(b"".join(lines[:-1]))
    (tmp_path / "cut").write_bytes(b"".join(lines)[:-5])
    (tmp_path / "headless").write_bytes(b"".join(lines[1:]))
    (tmp_path / "tasks").write_bytes(b"".join([lines[0], lines[1].replace(b"42", b"43"), *lines[2:]]))
    for paths, message in (
        ([parts[0], parts[0]], "line 28: a trial that is there already"),
        ([parts[0], tmp_path / "third"], "a trial that is there already"),
        ([parts[0], tmp_path / "seed"], "line 19: another run, which differs in config.seed"),
        ([parts[0], tmp_path / "suite"], "differs in suite.files, suite.tasks, suite.tasks_sha256"),
        ([parts[0], tmp_path / "lost"], "15 of 16 trials are there"),
        ([parts[0], tmp_path / "cut"], "15 of 16 trials are there"),
        ([tmp_path / "headless", parts[0]], "line 1: no header stands before it"),
        ([parts[0], tmp_path / "tasks"], "another task `t0`"),
        ([parts[0], tmp_path / "none"], "run `none`: it cannot be read: No such file"),
    ):
        with pytest.raises(EvalError, match=re.escape(message)):
            read_run(*paths)
