"""The workflow of docs/ci.md: its commands run on the micro model, with a stub of GitHub's command."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support.artifacts_fixture import ROOT

PAGE = ROOT / "docs/ci.md"
# A build for the processor takes seconds. The environment is installed already.
SWAPS = {"--target tpu:v6e:4x4": "--paddings 16 --decode-paddings 1 --tp 1 --max-running 2 --context 512"}
INSTALLED = "pip install"
STUB = '#!/bin/sh\ntest "$1 $2 $3" = "pr comment 7" && cat comment.md > commented.md\n'


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_workflow_of_the_page_builds_audits_and_comments(artifact, tmp_path: Path):
    (workflow,), (budgets,) = map(yaml.safe_load, blocks("yaml")), blocks("toml")
    commands = [step["run"] for step in workflow["jobs"]["programs"]["steps"] if "run" in step]
    assert {match[1] for match in map(re.compile(r"ling3export (?:graph )?(\w+)").match, commands) if match} == {
        "build", "audit", "summary", "diff",
    }  # fmt: skip
    (tmp_path / "config.json").write_bytes((artifact.checkpoint("micro-tp2") / "config.json").read_bytes())
    (tmp_path / "budgets.toml").write_text(budgets)
    (tmp_path / "gh").write_text(STUB)
    (tmp_path / "gh").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "NUMBER": "7", "LING3_CACHE": str(artifact.programs)}
    for turn, left_out in (("push", "gh pr comment"), ("pull_request", "mv ")):
        for command in commands:
            if INSTALLED in command or left_out in command:
                continue
            for old, new in SWAPS.items():
                command = command.replace(old, new)
            subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=environment, check=True)
        if turn == "push":
            shutil.rmtree(tmp_path / "new.ling3")
    comment = (tmp_path / "commented.md").read_text()
    assert "decode@1 → " in comment and comment.count("equal") >= 3
    assert len(PAGE.read_text().split()) <= 500
