"""--snapshots: the memory of slots and programs for moving states, and the digest that tells compatible states."""

from dataclasses import replace

import pytest

from ling3export.checkpoint.synth import config_fields
from ling3export.compile.target_record import state_abi
from ling3export.foundation.errors import PlanError
from ling3export.model.config import Config
from ling3export.model.state import snapshot_bytes, state_bytes
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

FULL = Config.from_dict(config_fields("full", {}))


@pytest.mark.parametrize("target", ["cpu@1", "cpu@16", "tpu:v6e:4x4"])
def test_a_snapshot_of_the_true_model_takes_19_537_920_bytes_over_all_devices(target):
    plain = make_plan(FULL, Options(state_memory=1 << 40), target)
    more = make_plan(FULL, Options(state_memory=1 << 40, snapshots=8), target)
    assert snapshot_bytes(FULL, more.geometry) == 19_537_920
    grown = state_bytes(FULL, more.geometry) - state_bytes(FULL, replace(more.geometry, snapshots=0))
    assert grown == 8 * (19_537_920 + 4 * plain.target.tp), "and a last token, on every device"
    assert "of it 8 snapshots of 18.63 MiB over all devices" in more.notes[-1]
    assert "snapshots" not in plain.notes[-1]


def test_without_snapshots_a_plan_has_the_cells_and_pools_that_it_always_had():
    plan = make_plan(FULL, Options(), "tpu:v6e:4x4")
    assert {cell.phase for cell in plan.cells} == {"prefill", "decode", "sample", "logits_processor"}
    assert plan.geometry.snapshots == 0


@pytest.mark.parametrize(
    ("target", "cells"),
    [("cpu@1", ["copy@8", "offload@8", "onload@8"]), ("tpu:v6e:4x4", ["copy@8", "offload@16", "onload@16"])],
)
def test_pages_that_move_in_a_call_are_as_many_on_each_device(target, cells):
    plan = make_plan(FULL, Options(snapshots=1, state_memory=1 << 40), target)
    assert [cell.name for cell in plan.cells][-3:] == cells


def test_snapshots_that_do_not_fit_are_refused_with_the_sum():
    with pytest.raises(PlanError) as raised:
        make_plan(FULL, Options(snapshots=500), "cpu@1")
    assert "500 snapshots (9.10 GiB)" in raised.value.message
    assert raised.value.hint == "lower --max-running, --snapshots, --context or --pages, or raise --state-memory"
    with pytest.raises(PlanError, match="--snapshots: expected 0 to 65536, found -1"):
        make_plan(FULL, Options(snapshots=-1), "cpu@1")


def test_states_of_one_model_and_dtype_have_one_form():
    """The form does not depend on the weights; `Manifest.state_of` adds these."""
    same = state_abi(FULL, "bfloat16")
    assert same == state_abi(FULL, "bfloat16")
    others = {state_abi(FULL, "float32"), state_abi(replace(FULL, rope_theta=FULL.rope_theta + 1), "bfloat16")}
    assert len(others) == 2 and same not in others
