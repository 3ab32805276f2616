"""Batches and evaluations on Ray on this machine give the answers of one engine, even if an actor is killed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import toy_artifact
from tests.support.waiting import until

pytestmark = [pytest.mark.extras, pytest.mark.jit]

SETTINGS = ["--max-tokens", 6, "--temperature", 1, "--seed", 5, "--model", "toy"]
RAY = ["--ray", "local", "--replicas", 2, "--resources", '{"CPU": 0.5}']


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("LING3_TEST_RAY", str(tmp_path))  # marks the processes that a test starts
    monkeypatch.setenv("RAY_worker_niceness", "0")  # with the default of 15, actors get no time next to other processes


def started(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ling3export.runners.cli", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def call(*words: object) -> str:
    process = started(*words)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def actors(folder: Path) -> list[int]:
    """The processes of Ray Data's actors that a test with this folder started."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, variables = ((process / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if b"ray::MapWorker" in command and f"LING3_TEST_RAY={folder}\0".encode() in variables:
            pids.append(int(process.name))
    return pids


def test_an_actor_that_is_killed_in_the_middle_of_a_batch_loses_nothing(tmp_path):
    lines = [{"prompt_ids": [1, 2, 3 + n % 50], "custom_id": f"n{n}"} for n in range(2000)]
    source, partial = tmp_path / "in.jsonl", tmp_path / "out.partial"
    source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"messages": []}]))
    call("batch", toy_artifact.shared(), source, tmp_path / "whole", *SETTINGS)
    process = started("batch", toy_artifact.shared(), source, tmp_path / "out", *SETTINGS, *RAY)
    until(lambda: partial.exists() and partial.stat().st_size, of=process)
    os.kill(actors(tmp_path)[0], signal.SIGKILL)
    assert partial.read_bytes().count(b"\n") < 1500
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    timeless = [re.sub(r'"created": \d+', "", (tmp_path / name).read_text()) for name in ("out", "whole")]
    assert timeless[0] == timeless[1]
    assert timeless[0].count("\n") == 2001


def test_an_evaluation_on_a_cluster_is_that_of_one_engine(tmp_path):
    graded = {"graders": ["last_numeric"], "target": "42"}
    tasks = tmp_path / "tasks.json"
    tasks.write_text(
        json.dumps([{"id": f"t{n}", "input": {"prompt_ids": [n % 9 + 1, 2]}, **graded} for n in range(40)])
    )
    options = ["--suite", tasks, "--batch", 4, "--max-tokens", 5]
    one = call("eval", "run", toy_artifact.shared(), tmp_path / "one", *options)
    many = call("eval", "run", toy_artifact.shared(), tmp_path / "many", *options, *RAY)
    assert one == many
    lines = [
        [json.loads(line) | {"ttft_ms": 0, "e2e_ms": 0} for line in (tmp_path / name).read_text().splitlines()]
        for name in ("one", "many")
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 1 + 40 + 40


def test_work_that_a_cluster_cannot_do_is_refused(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [1]}\n')
    (tmp_path / "nothing").mkdir()
    process = started("batch", tmp_path / "nothing", tmp_path / "in.jsonl", tmp_path / "out", *RAY)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, "error: artifact `nothing`: " in err) == (1, True), err
