"""Shards of a run, each as a run of its own, and what they give together."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.shards import Shard
from ling3export.runners.cli.main import main
from ling3export.runners.evals.compare import diff
from ling3export.runners.evals.folder import read_predictions, read_run
from ling3export.runners.evals.merge import merge
from ling3export.runners.evals.run import run_suite
from ling3export.runners.evals.suites import PLUMBING, Suite
from ling3export.runners.evals.trials import EvalError, RunConfig
from tests.support.eval_fakes import FakeBackend, half, numbered

CONFIG = RunConfig(trials=2, batch=3, transcripts=True)
SUITE = Suite("gsm8k", numbered(8, category="sums"), {"test.jsonl": "c" * 64}, 0.85)  # 16 trials: 6 batches


def answer(prompt: str) -> str:
    if prompt == "5":
        raise RuntimeError("UNAVAILABLE: gone")
    return half(prompt)


def run(folder: Path, shard: str = "0/1", *, suite: Suite = SUITE, config: RunConfig = CONFIG, **more) -> FakeBackend:
    backend = FakeBackend(answer)
    run_suite(suite, backend, folder, config, shard=Shard.parse(shard), **more)
    return backend


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards(folder: Path, count: int) -> list[Path]:
    parts = [folder / f"part{index}" for index in range(count)]
    for index, part in enumerate(parts):
        run(part, f"{index}/{count}")
    return parts


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_merged_shards_are_the_folder_of_one_run(tmp_path, count):
    """Byte for byte: predictions, transcripts, record and report; seven shards of six batches leave one empty."""
    run(tmp_path / "whole")
    parts = shards(tmp_path, count)
    summary, _ = merge(parts[::-1], tmp_path / "merged")
    assert files(tmp_path / "merged") == files(tmp_path / "whole")
    assert len(files(tmp_path / "merged")) == 4 + 16
    assert (summary.total, summary.passed, summary.infra) == (16, 8, 2)


def test_a_shard_runs_whole_batches_in_the_company_that_they_have_in_one_run(tmp_path):
    found = {}
    for shard in ("0/1", "0/2", "1/2"):
        backend = FakeBackend(half)
        run_suite(SUITE, backend, tmp_path / shard, CONFIG, shard=Shard.parse(shard))
        found[shard] = [[(ask.name, ask.sampling.seed) for ask in batch] for batch in backend.batches]
    assert [len(batch) for batch in found["0/1"]] == [3, 3, 3, 3, 3, 1]
    assert (found["0/2"], found["1/2"]) == (found["0/1"][::2], found["0/1"][1::2])
    assert not (tmp_path / "0/2/report.md").exists()


def test_the_command_line_gives_the_line_of_one_run(tmp_path, monkeypatch):
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
    done = call("merge", tmp_path / "a", tmp_path / "b", "--to", tmp_path / "merged")
    assert (done.exit_code, done.stdout) == (0, "正确率: 5/10 = 0.5000\n")
    assert done.stderr.splitlines()[0] == f"report: {tmp_path / 'merged/report.md'}"


@pytest.mark.parametrize("count", [1, 2])
def test_product_smoke_says_above_its_rate_that_it_tests_the_plumbing(tmp_path, monkeypatch, count):
    """`正确率: 4/4` of random weights read like a score; `eval merge` prints that line, too, and said nothing."""
    monkeypatch.setattr("ling3export.runners.cli.eval.open_backend", lambda *_: FakeBackend(lambda prompt: "any"))
    command, parts = ["eval", "run", "artifact", "--suite", "product-smoke"], [tmp_path / str(n) for n in range(count)]
    for index, part in enumerate(parts):
        done = CliRunner().invoke(main, [*command, str(part), "--shard", f"{index}/{count}"], catch_exceptions=False)
    if count > 1:
        done = CliRunner().invoke(main, ["eval", "merge", *map(str, parts), "--to", str(tmp_path / "merged")])
    assert (done.exit_code, done.stdout) == (0, "正确率: 4/4 = 1.0000\n")
    assert f"note: {PLUMBING}\n" in done.stderr


def test_a_shard_goes_on_where_it_was_and_is_no_other_shard(tmp_path):
    run(tmp_path / "whole", "1/2")

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "part", "1/2", progress=interrupt)
    with pytest.raises(EvalError, match="expected the same run to resume, found another shard, 1/2"):
        run(tmp_path / "part", "0/2")
    assert len(run(tmp_path / "part", "1/2").batches[0]) == 3
    assert files(tmp_path / "part") == files(tmp_path / "whole")


def test_a_merge_that_was_broken_off_goes_on(tmp_path):
    run(tmp_path / "whole")
    parts = shards(tmp_path, 2)
    (parts[1] / "transcripts/7-1.json").rename(tmp_path / "kept")
    with pytest.raises(EvalError, match=re.escape("expected transcripts/7-1.json, found No such file")):
        merge(parts, tmp_path / "merged")
    assert (tmp_path / "merged/predictions.jsonl.partial").exists()
    (tmp_path / "kept").rename(parts[1] / "transcripts/7-1.json")
    merge(parts, tmp_path / "merged")
    assert files(tmp_path / "merged") == files(tmp_path / "whole")
    with pytest.raises(EvalError, match="found a finished one"):
        merge(parts, tmp_path / "merged")
    merge(parts, tmp_path / "merged", force=True)
    assert files(tmp_path / "merged") == files(tmp_path / "whole")


def test_a_shard_is_no_whole_run(tmp_path):
    parts = shards(tmp_path, 2)
    for look in (lambda: read_predictions(parts[0]), lambda: diff(*parts)):
        with pytest.raises(EvalError, match="expected a whole run, found shard 0/2 of one") as caught:
            look()
        assert "ling3-runner eval merge" in str(caught.value)


def test_the_record_of_an_earlier_version_is_that_of_a_whole_run(tmp_path):
    run(tmp_path / "whole")
    path = tmp_path / "whole/run.json"
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "shard"})
    )
    assert read_run(tmp_path / "whole").shard == "0/1"
    assert len(read_predictions(tmp_path / "whole")) == 16


def changed(path: Path, change) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))


def test_shards_that_do_not_belong_together_are_refused(tmp_path):
    parts = shards(tmp_path, 2)
    run(tmp_path / "third", "1/3")
    run(tmp_path / "seed", "1/2", config=RunConfig(trials=2, batch=3, transcripts=True, seed=7))
    run(tmp_path / "suite", "1/2", suite=Suite("gsm8k", numbered(7)))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "unfinished", "1/2", progress=lambda done, of: (_ for _ in ()).throw(KeyboardInterrupt))
    for name, file, change in (
        ("lost", "predictions", lambda lines: lines[1:]),
        ("double", "predictions", lambda lines: [*lines[:-1], lines[0]]),
        ("prompt", "predictions", lambda lines: [lines[0] | {"prompt_sha256": "0" * 64}, *lines[1:]]),
        ("place", "predictions", lambda lines: [lines[0] | {"idx": 6}, *lines[1:]]),
    ):
        run(tmp_path / name, "1/2")
        changed(tmp_path / name / f"{file}.jsonl", change)
    run(tmp_path / "tasks", "0/2")
    changed(tmp_path / "tasks/tasks.jsonl", lambda lines: lines[::-1])
    for folders, message in (
        ([parts[0]], "expected 2 shards, found none with the index 1"),
        ([parts[0], parts[0]], "expected shard 0/2 once, found it in"),
        ([parts[0], tmp_path / "third"], "expected shards of 0/2, found 1/3"),
        ([parts[0], tmp_path / "seed"], "expected shards of one run, found other config.seed than in"),
        ([parts[0], tmp_path / "suite"], "found other suite.files, suite.reference, suite.tasks, suite.tasks_sha256"),
        ([parts[0], tmp_path / "unfinished"], "expected predictions.jsonl, found none"),
        ([parts[0], tmp_path / "lost"], "expected the 7 trials of shard 1/2, each once, found 6 records"),
        ([parts[0], tmp_path / "double"], "expected the 7 trials of shard 1/2, each once, found 7 records"),
        ([parts[0], tmp_path / "prompt"], "each once, found 7 records, t1#1 of another run"),
        ([parts[0], tmp_path / "place"], "each once, found 7 records, t1#1 of another run"),
        ([tmp_path / "tasks", parts[1]], "expected the tasks of the run's record, found others"),
        ([parts[0], tmp_path / "none"], "run `none`: expected run.json, found No such file"),
        ([], "expected outputs of shards, found none"),
    ):
        with pytest.raises(EvalError, match=re.escape(message)):
            merge(folders, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
    before = files(parts[0])
    with pytest.raises(EvalError, match="expected another folder than those of shards"):
        merge(parts, parts[0], force=True)
    assert files(parts[0]) == before


def test_a_forced_run_leaves_no_transcript_of_the_run_before(tmp_path):
    """They stayed, and told of tasks that the new run does not have. Files that no run wrote are kept."""
    folder = tmp_path / "run"
    run(folder)
    (folder / "transcripts/notes.json").write_text("mine")
    run(folder, suite=Suite("gsm8k", numbered(2)), config=RunConfig(transcripts=True), force=True)
    assert {path.name for path in (folder / "transcripts").iterdir()} == {"0-0.json", "1-0.json", "notes.json"}


def test_transcripts_of_another_place_are_not_removed(tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    run(folder)
    (folder / "transcripts").rename(other)
    (folder / "transcripts").symlink_to(other)
    with pytest.raises(ArtifactError, match="expected no symbolic link on the way to it"):
        run(folder, force=True)
    assert len(list(other.iterdir())) == 16
    assert read_run(folder).status == "complete"
