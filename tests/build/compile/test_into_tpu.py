"""A compiled TPU target is added to an artifact for the CPU: one weight store, and both targets in order."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ling3export.artifacts.manifest import read_manifest
from tests.support.builds import environment

pytestmark = pytest.mark.tpu

TARGETS = ["cpu-tp2", "tpu-v6e-2x2-tp4"]


def run(*arguments: object, code: int = 0) -> str:
    """stdout and then stderr of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "ling3export.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment({}),
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file below ``folder``."""
    return {
        str(file.relative_to(folder)): (file.stat().st_ino, file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_a_tpu_target_is_compiled_into_an_artifact_for_the_cpu(artifact, tmp_path):
    whole = Path(shutil.copytree(artifact("micro-tp2"), tmp_path / "x.ling3"))
    before, weights = read_manifest(whole), files(whole / "weights")
    said = run("build", "--into", whole, "--target", "tpu:v6e:2x2")
    assert f"added {TARGETS[1]} to {whole} in " in said
    manifest = read_manifest(whole)
    assert list(manifest.targets) == TARGETS
    assert manifest.weights == before.weights
    assert files(whole / "weights") == weights  # the same files, unchanged
    assert manifest.targets["cpu-tp2"] == before.targets["cpu-tp2"]
    cells = manifest.targets["tpu-v6e-2x2-tp4"].cells
    assert sorted(cells) == ["decode@8", "logits_processor@8", "prefill@128", "sample@8"]
    assert {cell.status for cell in cells.values()} == {"compiled, not executed"}
    assert [note.partition(": ")[0] for note in manifest.notes] == TARGETS
    tensors = {row.tensor for target in manifest.targets.values() for row in target.parameters}
    assert tensors == manifest.weights.index.keys()
    verified = run("verify", whole)
    assert "the worst may be up to 1.0e-05 (float32)" in verified
    assert verified.count(" passed ") == 4
    assert "tpu-v6e-2x2-tp4: not run here: compiled, not executed" in verified
