"""Adds a phase by its record, its function and its receipt, as CONTRIBUTING.md says, in a copy of the sources."""

import os
from pathlib import Path

import numpy as np
import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.checkpoint.synth import synthesize
from tests.support.builds import SMALLEST, UNOPTIMIZED, environment, python
from tests.support.package_copy import copied

pytestmark = pytest.mark.extras  # it compiles an artifact: half a minute

RECORD = """    PhaseSpec(
        name="entropy", family="on logits", sizes="rows",
        batch=_arrays(logits=_ROW_LOGITS),
        out=_arrays(entropy="float32 padding"),
    ),
    PhaseSpec(
        name="copy","""
FUNCTION = '''def entropy(model: Unfilled, state: Tree, fields: Fields, batch: Tree) -> tuple[Tree, Tree]:
    """``entropy [R]`` of each row of ``logits [R, V/TP]``, in nats."""
    logits = jax.lax.all_gather(batch["logits"], AXIS, axis=1, tiled=True)
    return state, {"entropy": -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=1)}


# By phase: '''
RECEIPT = """        if cell.phase == "entropy":
            receipts[cell.name] = exact_receipt(*through.entropy(cell.padding))
        elif cell.phase == "sample":"""
METHOD = '''    def entropy(self, rows: int) -> tuple[int, int]:
        """One call of ``entropy`` against numpy: (how many rows were compared, how many were wrong)."""
        handle = self._logits(rows)
        found = self._runner.read(self._runner.call(f"entropy@{rows}", {}, {"logits": handle})["entropy"])
        shifted = np.stack([log_softmax(row) for row in self._runner.read(handle)])
        return rows, int(np.sum(~np.isclose(found, -np.sum(np.exp(shifted) * shifted, axis=1), rtol=1e-4)))

    def _logits('''
# Replacements by file: all that the phase needs, including receipts.
CHANGES = {
    "foundation/phases.py": {'    PhaseSpec(\n        name="copy",': RECORD},
    "model/program.py": {
        "# By phase: ": FUNCTION,
        '    "copy": copy,\n': '    "copy": copy,\n    "entropy": entropy,\n',
    },
    "runners/calibrate/vectors.py": {'        if cell.phase == "sample":': RECEIPT, "    def _logits(": METHOD},
}
RUN = """
import sys
import numpy as np
from ling3export.runners.load.loader import load

logits = np.zeros((1, 320), np.float32)
logits[0, :4] = 100
runner = load(sys.argv[1]).runner
print(runner.read(runner.call("entropy@1", {}, {"logits": runner.logits(logits)})["entropy"])[0])
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with one more phase."""
    folder = copied(tmp_path_factory.mktemp("phase") / "tree")
    for file, changes in CHANGES.items():
        text = (folder / file).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, (file, old)
            text = text.replace(old, new)
        (folder / file).write_text(text)
    return folder


def test_a_phase_needs_four_files_at_most_and_is_built_checked_and_run(tree: Path, tmp_path: Path) -> None:
    assert len(CHANGES) <= 4
    checkpoint, built = tmp_path / "checkpoint", tmp_path / "micro.ling3"
    synthesize(checkpoint, "micro", 1)
    variables = {**UNOPTIMIZED, "PYTHONPATH": os.pathsep.join([str(tree), environment({})["PYTHONPATH"]])}
    done = python("-P", "-m", "ling3export.cli", "build", checkpoint, built, *SMALLEST, **variables)
    assert done.returncode == 0, done.stderr
    done = python("-P", "-c", RUN, built, **variables)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(np.log(4), rel=1e-5)
    done = python("-P", "-m", "ling3export.cli", "inspect", built, **variables)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["entropy@1"]]
    assert "exact" in row
    with pytest.raises(Exception, match=r'expected ".*", found "entropy"'):
        read_manifest(built)  # this checkout does not know the phase
