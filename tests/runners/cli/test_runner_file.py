"""The runner as one file: packed once, then run next to a moved artifact with Python but without the package."""

import json
import os
import shutil
import sys
from pathlib import Path

import httpx2
import pytest

from tests.support.artifacts_fixture import ROOT, Artifacts, digest_of, files_below, run, versions
from tests.support.serving import RUNNER, Server

pytestmark = pytest.mark.extras

PROMPT = ["--prompt", "the number of", "--max-tokens", 12, "--json"]


@pytest.fixture(scope="module")
def packed(artifact: Artifacts) -> Path:
    """The packed runner; packed again if a source or an installed package has changed."""
    names = "pyproject.toml constraints.txt .ci/runner ling3export artifacts foundation machine model runners".split()
    below = {f"{name}/{file}": path for name in names for file, path in files_below(ROOT / name).items()}
    files = {name: path for name, path in below.items() if path.suffix != ".pyc"}
    files |= {name: ROOT / name for name in names if (ROOT / name).is_file()}
    folder = artifact.kept(
        "packed", [digest_of(files), versions()], lambda path: run(ROOT / ".ci/runner", path / "ling3-runner")
    )
    return folder / "ling3-runner"


def test_the_file_needs_only_python(packed: Path, artifact: Artifacts, tmp_path: Path):
    """It generates the tokens of this environment, and serves."""
    bare = {"PATH": f"{Path(sys.base_prefix, 'bin')}:{os.defpath}", "HOME": str(tmp_path)}
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    names = "jax numpy click starlette ling3export"
    code = f"import importlib.util as i; print(*(n for n in {names.split()} if i.find_spec(n)))"
    found = run("/usr/bin/env", version, "-c", code, folder=tmp_path, environment=bare)
    assert found.stdout == "\n", "packages of this Python would hide what the file lacks"

    moved = shutil.copytree(artifact("micro-tp1"), tmp_path / "moved.ling3")
    here = run(*RUNNER, "generate", artifact("micro-tp1"), *PROMPT)
    there = run(packed, "generate", moved, *PROMPT, folder=tmp_path, environment=bare)
    keys = ("prompt_ids", "token_ids", "text", "stop_reason")
    told, expected = ({key: json.loads(done.stdout)[key] for key in keys} for done in (there, here))
    assert told == expected

    with Server(moved, runner=[packed], environment=bare) as server:
        ask = {"model": "moved", "prompt": "the number of", "max_tokens": 12, "temperature": 0}
        answer = httpx2.post(f"{server.url}/v1/completions", json=ask, timeout=60)
        assert answer.json()["choices"][0]["text"] == expected["text"]
        assert server.stop() == 0
