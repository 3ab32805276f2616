"""Artifacts and probes that test files share: each is built once a session, through the command line.

With LING3_TEST_CACHE set to a folder they are kept there, under a digest of the product's sources and jax's version.
"""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.checkpoint.synth import synthesize
from probe import ROOT, Probe

DEMO = ROOT / "ling3export" / "demo"
SOURCES = ("ling3export", "model", "artifacts", "runners")


@dataclass(frozen=True)
class Recipe:
    """How an artifact is built: few cells, since compiling them is what takes the time.

    Pages are small, so that sequences hold many; rows of prefill and decode are as many, so that one ``sample`` serves
    both.
    """

    tp: int
    preset: str = "small"
    seed: int = 1
    overrides: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    paddings: tuple[int, ...] = (128,)
    decode: int = 8
    score: tuple[int, ...] = ()
    target: str = "cpu"

    @property
    def checkpoint(self) -> str:
        """The name of its checkpoint; artifacts that differ in the build alone share one."""
        changes = "".join(f"-{name}-{value}" for name, value in sorted(self.overrides.items()))
        return f"{self.preset}-{self.seed}{changes}"

    def options(self) -> list[str]:
        numbers = {
            "--tp": self.tp, "--decode-paddings": self.decode, "--max-running": 8, "--context": 1024, "--page-size": 64,
            "--paddings": ",".join(map(str, self.paddings)), "--dtype": self.dtype, "--target": self.target,
        }  # fmt: skip
        if self.score:
            numbers["--score-paddings"] = ",".join(map(str, self.score))
        return [str(part) for pair in numbers.items() for part in pair]


RECIPES = {
    "small-tp16": Recipe(16, paddings=(16, 128, 512)),
    "small-4x4": Recipe(16, target="cpu:4x4"),
    "small-tp8": Recipe(8),
    "small-tp4": Recipe(4),
    "small-tp2": Recipe(2),
    "small-tp1": Recipe(1),
    "small-tp16-bf16": Recipe(16, dtype="bfloat16"),
    "micro-tp4": Recipe(4, "micro"),
    "micro-tp2": Recipe(2, "micro"),
    "micro-tp1": Recipe(1, "micro"),
    "micro-tp4-flat": Recipe(4, "micro", overrides={"q_lora_rank": None}),
    "micro-tp1-seed2": Recipe(1, "micro", seed=2),
    "micro-tp1-experts": Recipe(1, "micro", overrides={"num_experts": 32}),
    "demo-tp16": Recipe(16, "demo", dtype="bfloat16", score=(128,)),
}


def run(
    *command: object, code: int = 0, folder: Path = ROOT, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command, by default in the checkout's root; it has to end with ``code``."""
    parts = [str(part) for part in command]
    done = subprocess.run(parts, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, f"{command}: ended with {done.returncode}, not {code}\n{done.stdout}{done.stderr}"
    return done


def sources_digest() -> str:
    digest = hashlib.sha256(f"{sys.version} {version('jax')} {version('jaxlib')}".encode())
    sources = [path for part in SOURCES for path in (ROOT / part).glob("*.py")]
    for path in sorted([*sources, *DEMO.iterdir()]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Artifacts:
    """Builds what is asked for, once. Called with a name of RECIPES it gives the artifact's folder.

    Args:
        folder: Where checkpoints and artifacts are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def checkpoint(self, name: str) -> Path:
        """The checkpoint that an artifact is built from."""
        recipe = RECIPES[name]
        if recipe.preset == "demo":
            return DEMO
        path = self.folder / recipe.checkpoint
        if not path.exists():
            synthesize(path, recipe.preset, recipe.seed, overrides=recipe.overrides)
        return path

    def __call__(self, name: str) -> Path:
        path = self.folder / f"{name}.ling3"
        if not path.exists():
            run(sys.executable, "-m", "ling3export.cli", "build", self.checkpoint(name), path, *RECIPES[name].options())
        return path

    def manifest(self, name: str) -> dict[str, Any]:
        return read_manifest(self(name))

    def probe(self, name: str) -> Probe:
        """A process that has the artifact loaded, for a ``with``."""
        return Probe(self(name), self.manifest(name))


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """``artifact("small-tp16")`` is a folder; ``.checkpoint``, ``.manifest`` and ``.probe`` take a name as well."""
    kept = os.environ.get("LING3_TEST_CACHE")
    folder = Path(kept).resolve() / sources_digest() if kept else tmp_path_factory.mktemp("artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return Artifacts(folder)


@pytest.fixture(scope="session")
def tpu_artifact(artifact: Artifacts) -> Path:
    """The micro model compiled for four TPU chips that are not here (20 s)."""
    path = artifact.folder / "tpu.ling3"
    if not path.exists():
        options = ["--target", "tpu:v6e:2x2", "--paddings", "16", "--max-running", "4", "--context", "512",
                   "--score-paddings", "16"]  # fmt: skip
        checkpoint = artifact.checkpoint("micro-tp1")
        run(sys.executable, "-m", "ling3export.cli", "build", checkpoint, path, *options)
    return path
