"""Builds with a cache, as processes: nothing is compiled twice, keys do not depend on the folder, kills, damage,
policies.

Two copies of the source tree in different folders build as different users. These builds run once, in parallel.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import Manifest
from ling3export.cache.cells import counts
from ling3export.graph.hlo import unpacked
from tests.support.builds import SMALLEST, UNOPTIMIZED, ended
from tests.support.tiny import tiny_fields, tiny_weights, write_tiny
from tests.support.waiting import until

pytestmark = pytest.mark.build

ROOT = Path(__file__).parents[3]
TARGET = "cpu-tp1"
CELLS = ["decode@1", "logits_processor@1", "prefill@16", "sample@1"]


CACHED = SMALLEST[2:]  # without `--cache off`


class Tree:
    """A copy of the source tree, and a user who builds with it.

    Args:
        folder: Folder of the copy.
        user: The user's name; the user has a home folder.
    """

    def __init__(self, folder: Path, user: str) -> None:
        self.folder, self.home = folder, folder.parent / f"home-{user}"
        self.home.mkdir(parents=True)
        for part in ("ling3export", "foundation", "machine", "model", "artifacts", "runners"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=ignore)
        self.variables = {name: value for name, value in os.environ.items() if name != "LING3_CACHE"}
        self.variables |= {"HOME": str(self.home), "USER": user, "LOGNAME": user, "PYTHONPATH": str(folder)}
        self.variables |= UNOPTIMIZED

    @contextmanager
    def building(self, checkpoint: Path, artifact: Path, *options: object) -> Iterator[subprocess.Popen[str]]:
        words = ("build", checkpoint, artifact, *SMALLEST[2:], *options)
        command = [sys.executable, "-P", "-m", "ling3export.cli", *words]
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=self.home,
            env=self.variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def build(self, checkpoint: Path, artifact: Path, *options: object) -> tuple[Manifest, str]:
        """Runs a build; returns the manifest and stderr."""
        with self.building(checkpoint, artifact, *options) as process:
            return finished(process, artifact)


def finished(process: subprocess.Popen[str], artifact: Path) -> tuple[Manifest, str]:
    code, err = ended(process)
    assert code == 0, err
    return read_manifest(artifact), err


def origins(manifest: Manifest) -> dict[str, str]:
    return {name: cell.origin.source for name, cell in manifest.targets[TARGET].cells.items()}


def keys(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """Keys of each cell and its program, by cell."""
    cells = manifest.targets[TARGET].cells
    return {name: (cell.origin.key, cell.origin.program) for name, cell in cells.items()}


def files(artifact: Path, suffix: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (artifact / "programs" / TARGET).glob(f"*.{suffix}")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    fields = tiny_fields(num_hidden_layers=3)
    return write_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny", fields, tiny_weights(fields))


class Built:
    """Builds of two users from two trees, each with a cache of its own. bob first builds from config.json only."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.one, self.two = Tree(folder / "first" / "tree", "ann"), Tree(folder / "b", "bob")
        self.artifacts = [tree.home / "a.ling3" for tree in (self.one, self.two)]
        config = folder / "config.json"
        config.write_bytes((checkpoint / "config.json").read_bytes())
        with (
            self.one.building(checkpoint, self.artifacts[0]) as first,
            self.two.building(config, self.two.home / "programs.ling3", "--no-weights") as programs,
        ):
            self.first, self.said = finished(first, self.artifacts[0])
            self.programs = ended(programs)[1]
        self.cache, self.other_cache = (tree.home / ".cache" / "ling3export" for tree in (self.one, self.two))
        before = files_below(self.other_cache)
        self.second, self.collected = self.two.build(checkpoint, self.artifacts[1])
        assert files_below(self.other_cache) == before


@pytest.fixture(scope="module")
def built(tmp_path_factory, checkpoint) -> Built:
    return Built(tmp_path_factory.mktemp("trees"), checkpoint)


@pytest.mark.extras
def test_two_trees_and_users_get_the_same_programs_and_keys(built):
    assert origins(built.first) == dict.fromkeys(CELLS, "compiler")
    assert origins(built.second) == dict.fromkeys(CELLS, "cache")  # the origins of the programs
    assert keys(built.first) == keys(built.second)
    assert built.first.targets[TARGET].fingerprint == built.second.targets[TARGET].fingerprint
    programs = [files(artifact, "stablehlo") for artifact in built.artifacts]
    assert sorted(programs[0]) == sorted(f"{name}.stablehlo" for name in CELLS)
    assert programs[0] == programs[1]


def test_no_path_or_user_is_in_what_is_kept(built):
    for tree, other in ((built.one, built.two), (built.two, built.one)):
        kept = files_below(tree.home / ".cache" / "ling3export")
        assert len(kept) >= 2 * 4
        for path in [*kept, *(tree.home / "a.ling3" / "programs").rglob("*.*")]:
            data = path.read_bytes()
            if path.suffix == ".xz":
                data = unpacked(data).encode()
            for trace in (tree.folder, tree.home, other.folder, ROOT):
                assert str(trace).encode() not in data, f"{trace} in {path}"


def test_the_summary_counts_what_was_compiled(built):
    found = counts(built.first.targets[TARGET].cells.values())
    assert found == {**found, "cells": 4, "compiled": 4, "from_program_cache": 0, "from_cache": 0, "compiles": 4}
    assert found["traces"] > 0
    line = f"cells: 4 compiled, 0 from the cache (on, {built.cache}); jax traced {found['traces']} functions and "
    assert f"\n{line}compiled 4 programs\n" in built.said


def test_a_build_takes_the_programs_that_were_built_without_weights(built):
    """The second build traced and compiled nothing."""
    assert re.findall(r"cells: .*, 0 from the cache", built.programs) == ["cells: 4 compiled, 0 from the cache"]
    none = {"compiled": 0, "from_program_cache": 0, "traces": 0, "compiles": 0}
    assert counts(built.second.targets[TARGET].cells.values()) == {"cells": 4, "from_cache": 4, **none}
    said = built.collected
    assert "jax traced 0 functions and compiled 0 programs\n" in said
    table = [line.split()[:3] for line in said[said.index(f"{TARGET}:\n") :].splitlines()[2 : 2 + len(CELLS)]]
    assert sorted(table) == sorted([cell, "cached", "-"] for cell in CELLS)


def test_sources_that_lower_to_the_same_program_compile_nothing_and_readonly_changes_nothing(
    built, checkpoint, tmp_path
):
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_below(built.cache)}
    tree = Tree(tmp_path / "tree", "eve")
    with open(tree.folder / "model" / "kda" / "layer.py", "a") as file:
        file.write("\n# A comment.\n")
    artifact = tmp_path / "x.ling3"
    manifest, said = tree.build(checkpoint, artifact, "--cache-dir", built.cache, "--cache", "readonly")
    assert origins(manifest) == dict.fromkeys(CELLS, "program cache")
    found = counts(manifest.targets[TARGET].cells.values())
    assert (found["from_program_cache"], found["compiles"]) == (4, 0)
    assert found["traces"] > 0
    assert "cells: 0 compiled, 4 traced again to a program from the cache, 0 from the cache" in said
    assert files(artifact, "exec") == files(built.artifacts[0], "exec")
    mine, old = keys(manifest), keys(built.first)
    assert all(mine[cell][1] == old[cell][1] and mine[cell][0] != old[cell][0] for cell in CELLS)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_below(built.cache)} == before


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_broken_executable_is_named_and_made_again(built, checkpoint, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(built.cache, cache)
    key = keys(built.first)["sample@1"][1]
    path = cache / "programs" / key
    raw = bytearray(path.read_bytes())
    raw[-len(raw) // 4] ^= 1
    path.write_bytes(raw)
    manifest, said = built.one.build(checkpoint, tmp_path / "x.ling3", "--cache-dir", cache)
    assert origins(manifest) == dict.fromkeys(CELLS, "cache") | {"sample@1": "compiler"}
    assert counts(manifest.targets[TARGET].cells.values())["compiles"] == 1
    broken = f"cache entry programs/{key[:12]}: expected a whole one, found another digest, in {cache}"
    assert said.count(f"{broken}; discarded, it is made again\n") == 1


def test_finished_cells_of_a_killed_build_serve_concurrent_and_later_builds(built, checkpoint, tmp_path):
    """Two builds compile the same cell with one cache. One is killed meanwhile, the other finishes."""
    cache = tmp_path / "cache"
    shutil.copytree(built.cache, cache)
    for kind, key in zip(("cells", "programs"), keys(built.first)["sample@1"], strict=True):
        (cache / kind / key).unlink()
    written = cache / "programs" / keys(built.first)["sample@1"][1]
    options = ("--cache-dir", cache)
    with (
        built.one.building(checkpoint, tmp_path / "killed.ling3", *options) as killed,
        built.two.building(checkpoint, tmp_path / "other.ling3", *options) as other,
    ):
        until(written.exists, seconds=200, pause=0.001)
        killed.send_signal(signal.SIGKILL)
        manifest, said = finished(other, tmp_path / "other.ling3")
    assert "expected a whole one" not in said
    assert origins(manifest)["prefill@16"] == "cache"
    assert origins(manifest)["sample@1"] in ("compiler", "program cache", "cache")
