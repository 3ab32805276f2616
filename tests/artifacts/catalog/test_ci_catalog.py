"""The workflow of deploy/ci-catalog.yml, every line of it, on this machine with a real registry."""

import os
import shlex
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.share import check_share
from ling3export.artifacts.store import Store
from ling3export.cli import main as cli
from ling3export.compile import pool
from ling3export.runners.cli import main as runner_cli
from tests.support.artifacts_fixture import RECIPES
from tests.support.registries import docker_registry

WORKFLOW = Path(__file__).parents[3] / "deploy/ci-catalog.yml"
COMMANDS = {"ling3export": cli.main, "ling3-runner": runner_cli.main}
TARGET = "cpu-2x1-tp2"


def steps(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def ran(line: str) -> str:
    """What a line prints on stderr, its variables put in."""
    command, *words = shlex.split(os.path.expandvars(line))
    done = CliRunner().invoke(COMMANDS[command], words)
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.stderr


@pytest.mark.hosts
@pytest.mark.usefixtures("unoptimized")
def test_programs_weights_and_four_hosts_come_from_jobs_of_their_own(artifact, tmp_path, monkeypatch):
    """The programs are those of a kept artifact, so the build takes them from the cache."""
    workflow = yaml.safe_load(WORKFLOW.read_text())
    jobs = workflow["jobs"]
    assert [job.get("needs") for job in jobs.values()] == [None, "programs", "weights"]
    artifact("micro-2x1")
    words, recipe = workflow["env"]["PLAN"].split(), RECIPES["micro-2x1"].options()
    assert sorted(zip(words[::2], words[1::2], strict=True)) == sorted(zip(recipe[::2], recipe[1::2], strict=True))
    for name in jobs:
        (tmp_path / name).mkdir()
    shutil.copy(artifact.checkpoint("micro-2x1") / "config.json", tmp_path / "programs")
    (tmp_path / "weights/checkpoint").symlink_to(artifact.checkpoint("micro-2x1"))
    with docker_registry(tmp_path) as host:
        for name, value in (workflow["env"] | jobs["weights"]["env"]).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("LING3_CATALOG_TOKEN")
        monkeypatch.setenv("STORE", f"{host}/team")
        monkeypatch.setenv("VERSION", "1.0.0")
        monkeypatch.chdir(tmp_path / "programs")
        for line in steps(jobs["programs"]):
            ran(line)
        monkeypatch.chdir(tmp_path / "weights")
        with monkeypatch.context() as patch:
            patch.setattr(pool.Compilers, "__init__", lambda *given, **options: pytest.fail("a compiler was started"))
            for line in steps(jobs["weights"]):
                ran(line)
        manifest = read_manifest(tmp_path / "weights/model.ling3")
        target, matrix, shares = manifest.targets[TARGET], jobs["hosts"]["strategy"]["matrix"], 0
        assert manifest.vectors.receipts[TARGET].passed
        rest = sum(file.bytes for file in (*target.files, *manifest.tokenizer)) + manifest.vectors.expected.bytes
        rest += (tmp_path / "weights/model.ling3/manifest.json").stat().st_size
        monkeypatch.delenv("LING3_STORE")
        (pull,) = steps(jobs["hosts"])
        for name, number in product(matrix["slice"], matrix["host"]):
            (here := tmp_path / f"hosts/{name}-{number}").mkdir()
            monkeypatch.chdir(here)
            monkeypatch.setenv("HOST", str(number))
            said = ran(pull)
            check_share(here / "model.ling3", TARGET, number)
            store, slabs = Store(here / "model.ling3", manifest.weights.index), target.slabs(number)
            store.check_many(slabs)
            shares += store.nbytes(slabs)
            assert f": {store.nbytes(slabs) + rest:,} bytes pulled, 0 were here" in said
        assert manifest.weights.nbytes < shares / 2 < 2 * manifest.weights.nbytes
