"""Built artifacts in other places: moved, in an environment with only the runner installed, and with another jax."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ling3export.checkpoint.reader import Checkpoint
from tests.support.artifacts_fixture import Artifacts, run
from tests.support.direct import agreed, relative
from tests.support.kept_reference import KeptReference
from tests.support.package_copy import copied
from tests.support.tolerances import FLOAT32, MARGIN, SAME
from tests.support.transformers_peer import parity_python

pytestmark = pytest.mark.build

BUILD_SIDE = ("flax", "orbax", "tensorflow", "transformers", "torch")
STEPS = 33
LENGTHS = (1, 17, 40, 130, 300)  # the last prompt is prefilled in several calls, in turns with decoding
# Seeds for which the reference's routing margins stay above MARGIN over the whole answers; a check is below.
NAME, SEEDS = "micro-tp2", (10, 11, 12, 13, 14)
# jax's own events, not counted by our code.
EVENTS = """
import json, sys, jax
from jax import monitoring
seen = []
monitoring.register_event_listener(lambda event, **_: seen.append(event))
monitoring.register_event_duration_secs_listener(lambda event, seconds, **_: seen.append(event))
from ling3export.runners.engine.engine import Engine
with Engine(sys.argv[1]) as engine:
    (completion,) = engine.generate([[1, 2, 3]], max_tokens=5, ignore_eos=True)
prebuilt = list(seen)
jax.jit(lambda x: x + 1)(3)
print(json.dumps([len(completion.token_ids), len(jax.devices()), prebuilt, seen]))
"""


class Answers:
    """The output and the files of a runner's command."""

    def __init__(self, done: subprocess.CompletedProcess[str], logits: Path) -> None:
        self.tokens = [json.loads(line)["token_ids"] for line in done.stdout.splitlines()]
        self.stats = json.loads(done.stderr.rpartition("stats: ")[2])
        self.said = done.stderr
        with np.load(logits) as arrays:
            self.logits = [arrays[f"logits.{n}"] for n in range(len(self.tokens))]
            assert [arrays[f"tokens.{n}"].tolist() for n in range(len(self.tokens))] == self.tokens


def prompts_of(vocabulary: int) -> list[list[int]]:
    return [
        np.random.default_rng(seed).integers(0, vocabulary, length).tolist()
        for seed, length in zip(SEEDS, LENGTHS, strict=True)
    ]


def stranger() -> dict[str, str]:
    """This environment's variables without those of the tests."""
    ours = ("JAX", "XLA", "PYTHON", "NPROC", "OPENBLAS", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def generate(
    command: Sequence[object], artifact: Path, prompts: list[list[int]], scratch: Path, *options: str, **how: Any
) -> Answers:
    """Runs all prompts as one batch."""
    scratch.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt_ids": prompt}) + "\n" for prompt in prompts]
    (scratch / "prompts.jsonl").write_text("".join(lines))
    words = [artifact, "--prompt-file", scratch / "prompts.jsonl", "--max-tokens", STEPS, "--ignore-eos", "--json"]
    words += ["--stats", "--logits", scratch / "logits.npz", "--force", *options]
    return Answers(run(*command, "generate", *words, **how), scratch / "logits.npz")


HERE = [sys.executable, "-m", "ling3export.runners.cli"]


@pytest.fixture(scope="module")
def runner_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a fresh environment after `pip install .`, with the versions of this environment."""
    folder = tmp_path_factory.mktemp("runner")
    pins = [f"{each.name}=={each.version}\n" for each in distributions() if each.name.lower() != "ling3export"]
    (folder / "constraints.txt").write_text("".join(pins))
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    commands = folder / "venv" / "bin"
    # Few of the installed modules are imported, so only these are compiled to bytecode.
    quiet = "install -q --no-input --no-compile --disable-pip-version-check".split()
    words = ["--python", commands / "python", *quiet, "-c", folder / "constraints.txt", copied(folder / "source")]
    run(sys.executable, "-m", "pip", *words, folder=folder, environment=stranger())
    shutil.rmtree(folder / "source")
    return commands


@pytest.fixture(scope="module")
def moved(artifact: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(artifact(NAME), tmp_path_factory.mktemp("elsewhere") / "renamed.ling3")


@pytest.mark.extras
def test_the_runner_needs_nothing_of_the_build_side(runner_only: Path, tmp_path: Path):
    code = "from importlib.metadata import distributions as d; print(*sorted(x.name.lower() for x in d()))"
    names = run(runner_only / "python", "-c", code, folder=tmp_path, environment=stranger()).stdout.split()
    assert "ling3export" in names and "jax" in names
    assert [name for name in names if name.startswith(BUILD_SIDE)] == []


@pytest.fixture(params=["here", pytest.param("in an environment of its own", marks=pytest.mark.extras)])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[object], dict[str, Any]]:
    """The command of a runner and where it runs: this environment, or one with only the runner's packages."""
    if request.param == "here":
        return HERE, {}
    commands = request.getfixturevalue("runner_only")
    return [commands / "ling3-runner"], {"folder": tmp_path, "environment": stranger()}


def test_a_moved_artifact_gives_the_same_tokens(elsewhere, moved: Path, artifact: Artifacts, tmp_path: Path):
    """The logits are equal to the bit. Tokens and logits are the reference's, over all 33 greedy tokens of a prompt."""
    command, how = elsewhere
    prompts = prompts_of(Checkpoint.open(artifact.checkpoint(NAME)).config.vocab_size)
    here = generate(HERE, artifact(NAME), prompts, tmp_path / "here")
    there = generate(command, moved, prompts, tmp_path / "there", **how)
    assert there.tokens == here.tokens
    assert all(map(np.array_equal, there.logits, here.logits))
    assert here.stats["compile_events"] == there.stats["compile_events"] == 0

    reference = KeptReference(artifact.checkpoint(NAME))
    expected = reference.logits_many([prompt + ids[:-1] for prompt, ids in zip(prompts, there.tokens, strict=True)])
    assert min(reference.margins) >= MARGIN
    for ids, found, rows in zip(there.tokens, there.logits, expected, strict=True):
        assert len(ids) == STEPS
        assert relative(found, rows[-STEPS:]) <= FLOAT32
        assert agreed(ids, rows[-STEPS:], FLOAT32) >= STEPS - 1


def test_jax_itself_sees_no_compiling(moved: Path, tmp_path: Path):
    """Nor tracing. The script makes jax compile at its end, to show that the listeners work."""
    done = run(sys.executable, "-c", EVENTS, moved)
    tokens, devices, prebuilt, seen = json.loads(done.stdout)
    assert (tokens, devices) == (5, 2)
    assert prebuilt == []
    assert "/jax/core/compile/backend_compile_duration" in seen


def test_an_artifact_names_no_folder_of_its_build(artifact: Artifacts):
    folder = artifact(NAME)
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".safetensors"]
    words = [str(artifact.folder).encode(), str(Path(__file__).parents[2]).encode()]
    assert len(files) > 10
    assert [file.name for file in files for word in words if word in file.read_bytes()] == []


# Prints each module of the package, and the module that its import lacks.
IMPORTING = """
import importlib, pkgutil
import ling3export
for module in pkgutil.walk_packages(ling3export.__path__, "ling3export."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
            print(module.name, "nothing")
        except ModuleNotFoundError as error:
            print(module.name, error.name)
"""
# Packages of extras that the parity environment does not have.
LACKING = {"inspect_ai", "lm_eval", "ray"}


@pytest.mark.extras
def test_every_module_imports_in_the_oldest_python():
    """Regression: in 3.11 and 3.12, which hash the parts of a type, `serve` and `batch` ended in a TypeError."""
    python = parity_python()
    found = run(python, "-c", "import sys; print(*sys.version_info[:2], sep='.')").stdout.strip()
    if found != "3.11":
        pytest.skip(f"the parity environment has Python {found}, not 3.11")
    lines = [line.split() for line in run(python, "-c", IMPORTING).stdout.splitlines()]
    lacking = {name: what for name, what in lines if what != "nothing"}
    assert set(lacking.values()) <= LACKING, lacking
    whole = {name for name, what in lines if what == "nothing"}
    assert {"ling3export.runners.serve.app", "ling3export.runners.batch.run", "ling3export.cli.main"} <= whole
    assert len(whole) > 200


@pytest.fixture(scope="module")
def other_python() -> Path:
    """The parity environment's interpreter, which has an older jax."""
    python = parity_python()
    theirs = run(python, "-c", "import jaxlib; print(jaxlib.__version__)").stdout.strip()
    if theirs == version("jaxlib"):
        pytest.skip(f"both environments have jaxlib {theirs}")
    return python


@pytest.mark.extras
def test_another_jax(other_python: Path, artifact: Artifacts, tmp_path: Path):
    """The artifact is refused without compiling, and compiled once where that is allowed; the tokens stay the same."""
    prompts = prompts_of(artifact.manifest(NAME).vocab_size)
    here = generate(HERE, artifact(NAME), prompts, tmp_path / "here")
    moved = shutil.copytree(artifact(NAME), tmp_path / "moved.ling3")
    other = [other_python, "-m", "ling3export.runners.cli"]

    refused = run(*other, "generate", moved, "--prompt-ids", "1,2", "--max-tokens", 1, code=1)
    assert refused.stdout == ""
    assert "Traceback" not in refused.stderr
    assert re.match(
        r"error: target `cpu-tp2`: expected compiled programs that fit, found RECOMPILE .*jaxlib.*"
        rf"{version('jaxlib')}.*\nhint: .*--programs allow-compile",
        refused.stderr,
    ), refused.stderr

    empty = os.environ | {"LING3_CACHE": str(tmp_path / "cache")}
    for compiled in (4, 0):
        there = generate(other, moved, prompts, tmp_path / "there", "--programs", "allow-compile", environment=empty)
        assert there.stats["compile_events"] == compiled
        assert there.said.count("RECOMPILE") == 4
        assert there.tokens == here.tokens
        assert max(map(relative, there.logits, here.logits)) <= SAME
