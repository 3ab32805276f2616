"""An evaluation on 4 processes of 4 virtual devices. One writes and prints; all compare their sampled tokens."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from ling3export.runners.evals.run_file import read_run
from tests.support import diverging
from tests.support.hosting import ENDED, RUNNER, hosting, wait_until_following
from tests.support.waiting import until

pytestmark = pytest.mark.hosts

COUNT = 4
ANY = {"kind": "response_contains", "value": ""}
TASKS = [{"id": f"t{n}", "input": {"prompt_ids": list(range(1, 5 + n))}, "graders": [ANY]} for n in range(32)]
DIVERGED = (
    "error: sampled tokens: expected the same on 4 processes, found others than on process 0 on 2\n"
    "hint: every process must load the same artifact and see the same environment\n"
)


@pytest.fixture
def command(artifact, tmp_path):
    """The command with paths relative to host 0's folder, the only place where the files exist."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0/all.json").write_text(json.dumps(TASKS))
    return ["eval", "run", artifact("micro-4x1"), "run", "--suite", "all.json", "--max-tokens", 3, "--batch", 2]


@pytest.fixture
def folders(tmp_path):
    found = [tmp_path / str(number) for number in range(COUNT)]
    for folder in found:
        folder.mkdir(exist_ok=True)
    return found


@pytest.mark.extras
def test_a_killed_process_ends_the_run_and_the_same_command_finishes_it(command, folders):
    """Finished trials are kept. Then there is one predictions file and one printed line, both from host 0."""
    run = folders[0] / "run"
    with hosting([command] * COUNT, folders=folders) as processes:
        wait_until_following(processes[2])
        lines = until(lambda: len(kept(run)) >= 2 and kept(run), of=processes[0])
        os.kill(processes[2].pid, signal.SIGKILL)
        said = [process.communicate(timeout=60) for process in processes]
        assert [process.returncode for process in processes] == [1, 1, -signal.SIGKILL, 1]
    assert [out for out, _ in said] == [""] * COUNT
    assert said[0][1].endswith(ENDED.format(2))
    killed = kept(run)
    assert len(lines) <= len(killed) < len(TASKS)
    with hosting([command] * COUNT, folders=folders) as processes:
        said = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0] * COUNT, said
    assert [out for out, _ in said] == [f"正确率: {len(TASKS)}/{len(TASKS)} = 1.0000\n", "", "", ""]
    assert [record.task_id for record in read_run(run).trials] == [task["id"] for task in TASKS]
    assert kept(run)[: len(killed)] == killed
    assert [list(folder.iterdir()) for folder in folders[1:]] == [[], [], []]


def kept(run: Path) -> list[str]:
    """The lines of finished trials."""
    lines = run.read_text().split("\n")[:-1] if run.exists() else []
    return [line for line in lines if line.startswith('{"kind": "trial"')]


def test_a_process_that_samples_other_tokens_is_named_by_all(command, folders):
    """The last read of the first batch is wrong: it is not written, and every process exits with 5."""
    programs = [RUNNER, RUNNER, (sys.executable, diverging.__file__, 3), RUNNER]
    with hosting([command] * COUNT, folders=folders, programs=programs) as processes:
        said = [process.communicate(timeout=60) for process in processes]
        assert [process.returncode for process in processes] == [5] * COUNT, said
    assert [out for out, _ in said] == [""] * COUNT
    assert all(err.endswith(DIVERGED) for _, err in said), said
    assert kept(folders[0] / "run") == []
