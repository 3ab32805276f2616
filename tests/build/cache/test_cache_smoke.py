"""The smoke test's own checks, and the workflow file that shows how to keep its cache.

``.ci/run`` runs the smoke test.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from ling3export.cli import main as cli
from tests.support import smoke

ROOT = Path(__file__).parents[3]
WORKFLOW = ROOT / "deploy" / "ci-smoke.yml"
# The fields of a manifest's target that the checks read.
TARGET = SimpleNamespace(
    cells={f"{phase}@16": SimpleNamespace(phase=phase) for phase in ("decode", "prefill", "sample")}
)
BUILT = {"cells": 3, "compiled": 3, "from_program_cache": 0, "from_cache": 0, "traces": 9, "compiles": 3}
WARM = BUILT | {"compiled": 0, "from_cache": 3, "traces": 0, "compiles": 0}
TOKENS = [[list(range(smoke.TOKENS))] * 2]


def ran(**changes: Any) -> dict[str, Any]:
    stats = {"cells": {"decode@16": {"calls": 2}, "prefill@16": {"calls": 1}}, "compile_events": 0}
    return {"tokens": TOKENS, "stats": stats} | changes


def test_a_first_and_a_second_run_that_are_right_pass():
    smoke.check(BUILT, ran(), TARGET, None)
    smoke.check(WARM, ran(), TARGET, {"tokens": TOKENS})


@pytest.mark.parametrize(
    ("built", "found", "before", "message"),
    [
        (BUILT, ran(), {"tokens": TOKENS}, "second build: expected nothing traced and nothing compiled, "
         "found {'compiled': 3, 'traces': 9, 'compiles': 3}"),
        (WARM | {"from_program_cache": 1, "traces": 2}, ran(), {"tokens": TOKENS}, "second build: expected nothing "
         "traced and nothing compiled, found {'from_program_cache': 1, 'traces': 2}"),
        (WARM, ran(), {"tokens": [[[1]]]}, f"tokens: expected those of the first run, [[[1]]], found {TOKENS}"),
        (BUILT, ran(stats={"cells": {"decode@16": {"calls": 1}}, "compile_events": 0}), None,
         "cells: expected calls of every one, found none of prefill@16"),
        (BUILT, ran(stats=ran()["stats"] | {"compile_events": 1}), None,
         "runner: expected 0 compile events, found 1"),
        (BUILT, ran(tokens=[[[1, 2]]]), None, "runner: expected 12 tokens a sequence, found [[[1, 2]]]"),
        (BUILT, ran(tokens=[[[1] * 12, [2] * 12]]), None,
         f"runner: expected the same tokens for the same prompt, found {[[[1] * 12, [2] * 12]]}"),
    ],
)  # fmt: skip
def test_each_error_of_a_smoke_test_is_named(built, found, before, message):
    with pytest.raises(smoke.Failed, match=f"^{re.escape(message)}$"):
        smoke.check(built, found, TARGET, before)


def test_the_prompts_take_every_padding():
    lengths = [[len(prompt) for prompt in prompts] for prompts in smoke.batches([16, 128, 512], [16, 64])]
    assert lengths == [[1], [17], [129], [8], [8] * 17]


def test_the_fingerprint_follows_what_decides_the_programs(monkeypatch):
    first = smoke.fingerprint()
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert smoke.fingerprint() == first
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert smoke.fingerprint() != first


def test_a_warm_run_without_an_earlier_one_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("LING3_SMOKE_CACHE", str(tmp_path))
    with pytest.raises(smoke.Failed, match=r"^--warm: expected an earlier run of fingerprint [0-9a-f]{16}, found none"):
        smoke.main(["--warm"])


def steps() -> list[dict[str, Any]]:
    return list(yaml.safe_load(WORKFLOW.read_text())["jobs"]["smoke"]["steps"])


def test_the_workflow_keeps_the_folder_under_the_fingerprint():
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["jobs"]["smoke"]["env"] == {"LING3_SMOKE_CACHE": "${{ github.workspace }}/.smoke-cache"}
    (cache,) = (step["with"] for step in steps() if step.get("uses", "").startswith("actions/cache@"))
    assert cache["path"] == ".smoke-cache"
    assert cache["key"].endswith("-${{ steps.fingerprint.outputs.key }}")
    assert cache["key"].startswith(cache["restore-keys"].strip())
    assert [step["id"] for step in steps() if "id" in step] == ["fingerprint"]


def test_the_commands_of_the_workflow_exist(tmp_path, monkeypatch):
    commands = [shlex.split(step["run"]) for step in steps() if "run" in step]
    assert [command[:3] for command in commands if command[0] == "make"] == [
        ["make", "setup"],
        ["make", "smoke"],
        ["make", "smoke", "ARGS=--warm"],
    ]
    for command in (command for command in commands if command[0] == "make"):
        done = subprocess.run(["make", "-n", command[1]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (key,) = (command[1] for command in commands if command[0] == "echo")
    found = re.fullmatch(r"key=\$\(\.venv/bin/python -m (\S+) (--key)\)", key)
    assert found is not None
    done = subprocess.run([sys.executable, "-m", found[1], found[2]], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{smoke.fingerprint()}\n"), done.stderr
    (cleanup,) = (command for command in commands if command[0].endswith("ling3export"))
    (tmp_path / cleanup[-1]).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.main, cleanup[1:])
    assert (done.exit_code, done.stderr) == (0, "")
