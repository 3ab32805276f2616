"""Artifacts and probes that test files share. The command line builds each once; they are kept between runs.

They are kept in ``.cache/tests``, or in LING3_TEST_CACHE, under a digest of the recipe, of the sources that building
imports, of the toolchain's versions and of this machine's processor. A lock serves parallel runs. Each kept folder has
a file with the digest of its content: a folder that a killed run left or a test changed is built again. ``cache`` is
the build cache of all tests that do not set one, and runners keep their compiled programs in it: a second run compiles
nothing that the first compiled. Entries that no run has used for 14 days are removed.
"""

import ast
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ling3export.artifacts.files import RECOMPILED
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import KERNELS, Manifest
from ling3export.cache.cleanup import clean_up
from ling3export.checkpoint.synth import synthesize
from ling3export.machine import environment
from tests.support.builds import UNOPTIMIZED
from tests.support.probe import ROOT, Probe

DEMO = ROOT / "ling3export" / "demo"
# Modules from which imports are followed: those that build an artifact, write a checkpoint, and compile in a runner.
BUILDING, MAKING = "ling3export.compile.build", "ling3export.checkpoint.synth"
RECOMPILING = "ling3export.runners.load.recompile"
TOOLCHAIN = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "libtpu", "orbax_export", "tensorflow_cpu")
KEPT_DAYS = 14
KEPT_BYTES = 4_000_000_000  # of programs: a run of all tests makes a tenth of it


@dataclass(frozen=True)
class Recipe:
    """Options of an artifact's build. It has few cells, since compiling them takes most of the time.

    Pages are small, so that sequences have many of them. Prefill and decode have the same number of logits rows, so
    that one ``sample`` program serves both.
    """

    tp: int
    preset: str = "small"
    seed: int = 1
    overrides: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    context: int = 1024
    paddings: tuple[int, ...] = (128,)
    decode: int = 8
    score: tuple[int, ...] = ()
    afd: bool = False
    afd_dtype: str = "model"
    target: str = "cpu"
    snapshots: int = 0
    kernels: str = "off"
    weights: str = "bf16"
    optimized: bool = False  # by LLVM: for artifacts whose numbers are compared, or that compute many tokens

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint; artifacts that differ only in build options share it."""
        changes = "".join(f"-{name}-{value}" for name, value in sorted(self.overrides.items()))
        return f"{self.preset}-{self.seed}{changes}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the build."""
        return {} if self.optimized or self.kernels == "on" or not self.target.startswith("cpu") else UNOPTIMIZED

    def options(self) -> list[str]:
        numbers = {
            "--tp": self.tp,
            "--decode-paddings": self.decode,
            "--max-running": 8,
            "--context": self.context,
            "--page-size": 64,
            "--paddings": ",".join(map(str, self.paddings)),
            "--dtype": self.dtype,
            "--target": self.target,
        }
        if self.kernels != "off":
            numbers["--kernels"] = self.kernels
        if self.weights != "bf16":
            numbers["--weights"] = self.weights
        if self.score:
            numbers["--score-paddings"] = ",".join(map(str, self.score))
        if self.afd:
            numbers["--afd-dtype"] = self.afd_dtype
        if self.snapshots:  # blocks of 16 tokens; the pool is too small for the blocks of all sequences that may run
            numbers |= {"--max-running": 4, "--context": 256, "--page-size": 16, "--pages": 28}
            numbers["--snapshots"] = self.snapshots
        if self.target.startswith("tpu"):
            numbers |= {"--max-running": 4, "--context": 512, "--page-size": 256}
            del numbers["--tp"]
        return [str(part) for pair in numbers.items() for part in pair] + ["--afd"] * self.afd


RECIPES = {
    "small-tp16": Recipe(16, paddings=(16, 128), optimized=True),
    "micro-4x1": Recipe(4, "micro", target="cpu:4x1"),
    # Two hosts of one device each: the cheapest artifact for several hosts.
    "micro-2x1-snapshots": Recipe(2, "micro", paddings=(16,), decode=2, target="cpu:2x1", snapshots=2),
    "micro-tp4": Recipe(4, "micro"),
    "micro-tp2": Recipe(2, "micro"),
    "micro-tp1": Recipe(1, "micro", optimized=True),
    # Quantized weights with every other option that they can be combined with.
    "micro-tp2-int4": Recipe(2, "micro", paddings=(16,), decode=2, weights="int4", afd=True, snapshots=2),
    "micro-tp2-int4-small": Recipe(2, "micro", paddings=(16,), decode=2, weights="int4-small", afd=True, snapshots=2),
    "micro-tp1-kernels": Recipe(1, "micro", dtype="bfloat16", paddings=(16,), decode=1, kernels="on"),
    "micro-tp1-kernels-int4": Recipe(
        1, "micro", dtype="bfloat16", paddings=(16,), decode=1, kernels="on", weights="int4"
    ),
    "micro-tp1-kernels-int4-small": Recipe(
        1, "micro", dtype="bfloat16", paddings=(16,), decode=1, kernels="on", weights="int4-small"
    ),
    "micro-tp4-flat": Recipe(4, "micro", overrides={"q_lora_rank": None}),
    # Decode is split before the experts, with micro batches of two tokens.
    "micro-tp1-afd": Recipe(1, "micro", paddings=(16,), decode=2, afd=True),
    "micro-tp1-afd-int8": Recipe(1, "micro", dtype="bfloat16", paddings=(16,), decode=2, afd=True, afd_dtype="int8"),
    "micro-tp1-snapshots": Recipe(1, "micro", paddings=(64,), decode=4, snapshots=6),
    "micro-tp2-snapshots": Recipe(2, "micro", paddings=(64,), decode=4, snapshots=2),
    "micro-tp1-seed2": Recipe(1, "micro", seed=2),
    "demo-tp1": Recipe(1, "demo", dtype="bfloat16", score=(128,), context=4096, optimized=True),
    # Compiled for four chips that this machine does not have (20 s).
    "micro-v6e": Recipe(4, "micro", dtype="bfloat16", paddings=(16,), decode=16, score=(16,), target="tpu:v6e:2x2"),
}


def run(
    *command: object, code: int = 0, folder: Path = ROOT, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command, by default in the checkout's root, and checks that its exit code is ``code``."""
    parts = [str(part) for part in command]
    done = subprocess.run(parts, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, f"{command}: ended with {done.returncode}, not {code}\n{done.stdout}{done.stderr}"
    return done


def digest_of(files: dict[str, Path]) -> str:
    """sha256 over names and contents."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def files_below(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


@functools.cache
def sources_of(module: str) -> str:
    """Digest of one of our modules and of all our modules that it imports, directly or not, at the top or in functions.

    Imports of a command line module are not followed: such modules only pass options on.
    """
    package, found, left = ROOT / "ling3export", dict[str, Path](), [module]
    while left:
        name = left.pop()
        path = package.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name.split(".")[0] != "ling3export" or name in found or not path.is_file():
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                left += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                left += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    assert module in found, f"{module}: expected a module, found none: name another in {__file__}"
    found |= {f"ling3export.cli {path.name}": path for path in package.glob("cli/*.py")}
    found |= {
        path.name: path for pattern in ("model/native/*.cc", "checkpoint/*.jinja") for path in package.glob(pattern)
    }
    return digest_of(found)


@functools.cache
def versions() -> dict[str, str | None]:
    """Versions that decide the compiled programs, next to the sources."""
    installed = {each.name.lower().replace("-", "_"): each.version for each in metadata.distributions()}
    return {
        "python": sys.version,
        "machine": platform.machine(),
        "cpu": str(environment.cpu_features()),
        **{name: installed.get(name) for name in TOOLCHAIN},
    }


def remove_old(folder: Path) -> None:
    """Removes entries that no run has used for KEPT_DAYS, and the least recently used programs if all are too large.

    Entries that a run in another process is using are young, and stay. Runners keep compiled programs under keys that
    do not depend on our sources, so that a change of the sources removes these programs.
    """
    seconds, programs = KEPT_DAYS * 24 * 3600, kept_programs(folder)
    for each in [*folder.glob("*-*"), *folder.glob("jit/*"), *programs.glob("*/*")]:
        with contextlib.suppress(FileNotFoundError):  # another run removed it
            if time.time() - each.stat().st_mtime > seconds:
                shutil.rmtree(each, ignore_errors=True) if each.is_dir() else each.unlink()
    clean_up(programs, max_bytes=KEPT_BYTES)
    stamp, sources = folder / "recompiling", sources_of(RECOMPILING)
    if not stamp.exists() or stamp.read_text() != sources:
        shutil.rmtree(programs / RECOMPILED, ignore_errors=True)
        programs.mkdir(parents=True, exist_ok=True)
        stamp.write_text(sources)


class Artifacts:
    """Gives built artifacts. Called with a name of RECIPES, it returns the artifact's folder and builds it at most
    once.

    Args:
        folder: The folder in which everything is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = kept_programs(folder)
        self._ready: dict[str, Path] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def kept(self, name: str, made_of: object, build: Callable[[Path], object]) -> Path:
        """The folder ``name``: an earlier run's if that had the same ``made_of`` (JSON), else ``build`` makes it."""
        key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
        home = self.folder / f"{name}-{key}"
        if str(home) not in self._ready:
            home.mkdir(exist_ok=True)
            with locked(home):
                os.utime(home)
                path, stamp = home / name, home / "digest"
                if not stamp.exists() or stamp.read_text() != digest_of(files_below(path)):
                    stamp.unlink(missing_ok=True)
                    shutil.rmtree(path, ignore_errors=True)
                    build(path)
                    stamp.write_text(digest_of(files_below(path)))
            self._ready[str(home)] = path
        return self._ready[str(home)]

    def checkpoint(self, name: str) -> Path:
        """The checkpoint from which the artifact is built."""
        recipe = RECIPES[name]
        if recipe.preset == "demo":
            return DEMO
        made_of = [sources_of(MAKING), recipe.preset, recipe.seed, recipe.overrides, metadata.version("numpy")]
        return self.kept(
            recipe.checkpoint,
            made_of,
            lambda path: synthesize(path, recipe.preset, recipe.seed, overrides=recipe.overrides),
        )

    def __call__(self, name: str) -> Path:
        recipe = RECIPES[name]
        return self.built(f"{name}.ling3", self.checkpoint(name), *recipe.options(), variables=recipe.variables)

    def built(
        self, name: str, checkpoint: Path, *options: str, variables: Mapping[str, str] = MappingProxyType({})
    ) -> Path:
        """Runs ``ling3export build CHECKPOINT NAME OPTIONS`` with ``variables`` in its environment."""

        def build(path: Path) -> None:
            if "--kernels" in options:
                kept_kernels()
            words = ("build", checkpoint, path, *options, "--cache-dir", self.programs)
            # several tests may run at once, and another process costs more than it saves on small programs
            one = ("--jobs", 1)
            run(sys.executable, "-m", "ling3export.cli", *words, *one, environment=os.environ | variables)

        source = digest_of(files_below(checkpoint) or {checkpoint.name: checkpoint})  # a config.json without weights
        return self.kept(name, [sources_of(BUILDING), source, options, dict(variables), versions()], build)

    def manifest(self, name: str) -> Manifest:
        return read_manifest(self(name))

    def probe(self, name: str) -> Probe:
        """A process that has loaded the artifact; use it in a ``with`` statement."""
        return Probe(self(name), self.manifest(name))


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    """Holds a file lock; the kernel releases the lock of a killed process."""
    with open(home / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kept_folder() -> Path:
    """The folder in which tests keep what they build."""
    return Path(os.environ.get("LING3_TEST_CACHE") or ROOT / ".cache" / "tests").resolve()


def kept_programs(folder: Path) -> Path:
    """The build cache in that folder."""
    return folder / "cache"


def kept_kernels(kernels: str | None = None) -> bytes:
    """The library of native kernels from the cache that builds use, by default for this processor's best level.

    Processes that need it at the same time wait for one of them to compile it.
    """
    from ling3export.cache.cells import Cells
    from ling3export.cache.store import CacheUse
    from ling3export.compile.kernels import library_of, put_library
    from ling3export.plan.kernels import best_level, ending

    name = kernels or ending(best_level())
    home = kept_folder() / f"kernels-{name}"
    home.mkdir(parents=True, exist_ok=True)
    cells = Cells(CacheUse(folder=kept_programs(kept_folder())), print)
    with locked(home), tempfile.TemporaryDirectory() as folder:
        put_library(Path(folder), name, cells, lambda: library_of(name))
        return Path(folder, KERNELS).read_bytes()


@pytest.fixture(scope="session")
def artifact() -> Artifacts:
    """``artifact("small-tp16")`` returns a folder; ``.checkpoint``, ``.manifest`` and ``.probe`` take a name, too."""
    return Artifacts(kept_folder())


@pytest.fixture(scope="session")
def tpu_artifact(artifact: Artifacts) -> Path:
    """The micro model compiled for four TPU chips."""
    return artifact("micro-v6e")
