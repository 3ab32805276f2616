"""Both sides of whether a snapshot is kept: measured, estimated, or bytes."""

from dataclasses import replace

import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.runners.engine.engine import Engine
from ling3export.runners.state.prefix_cache import SnapshotCost, snapshot_cost


@pytest.fixture
def target(artifact):
    (found,) = read_manifest(artifact("micro-tp1-snapshots")).targets.values()
    return found


def test_measured_seconds_come_first(target):
    prefill = target.paddings("prefill")[-1]
    measured = {"copy@8": 3e-3, f"prefill@{prefill}": 1e-3 * prefill}
    assert snapshot_cost(target, measured) == SnapshotCost(3e-3, pytest.approx(1e-3), "s")
    assert snapshot_cost(target, measured).least == 4, "three tokens cost as much as the copy"
    assert snapshot_cost(target, {"copy@8": 3e-3}).unit == "bytes", "one side alone says nothing"


def test_bytes_where_nobody_knows_the_device(target):
    """A state is read and written once; prefill moves what the compiler counts."""
    (fetch,) = (cell for cell in target.cells.values() if cell.phase == "offload")
    own = [leaf for leaf in fetch.outputs if leaf.group == "out" and leaf.name in ("kda_recurrent", "kda_conv")]
    state = sum(leaf.nbytes for leaf in own)
    prefill = target.cells[f"prefill@{target.paddings('prefill')[-1]}"]
    worth = snapshot_cost(target, {})
    assert worth == SnapshotCost(2 * state, prefill.bytes_accessed / prefill.padding, "bytes")
    assert (worth.least - 1) * worth.token <= worth.keep < worth.least * worth.token
    silent = {name: replace(cell, bytes_accessed=None) for name, cell in target.cells.items()}
    assert snapshot_cost(replace(target, cells=silent), {}) is None


def test_stats_print_both_sides(artifact, target):
    with Engine(artifact("micro-tp1-snapshots"), report=lambda text: None) as engine:
        assert engine.stats()["prefix_cache"]["worth"] == snapshot_cost(target, {}).record()
