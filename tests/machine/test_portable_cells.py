"""Every kind of cell for every platform contains only StableHLO, so that the date in its target is a promise."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from ling3export.artifacts.program_records import Leaf
from ling3export.checkpoint.synth import config_fields
from ling3export.compile.lower import lower_cell, mesh_of
from ling3export.compile.target_record import stablehlo_version
from ling3export.machine.portable import CUSTOM_CALL, compile_portable, packed, text
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

SMALL = {"num_hidden_layers": 2, "layer_group_size": 2, "num_nextn_predict_layers": 0}
SIZES = {"paddings": (16,), "decode_paddings": (2,), "max_running": 4, "context": 256, "page_size": 16, "pages": 28}
WHOLE = {"prefill", "score", "decode", "sample", "logits_processor", "copy", "offload", "onload"}
SPLIT = {"attend", "dispatch", "experts", "combine", "head"}


@pytest.mark.parametrize("target", ["cpu@2", "tpu:v6e:2x2", "cuda:h100"])
def test_every_kind_of_cell_is_stablehlo_without_a_custom_call(target: str):
    """Regression: for a card, jax's cumulative sums have no portable form, so no prefill could be written."""
    config = Config.from_dict(config_fields("micro", SMALL))
    plan = make_plan(config, Options(**SIZES, afd=True, snapshots=6, score_paddings=(16,)), target)
    assert {cell.phase for cell in plan.cells} == WHOLE | SPLIT
    for cell in {cell.phase: cell for cell in plan.cells}.values():
        blob = lower_cell(config, plan.geometry, cell.phase, cell.padding, plan.target.platform).blob
        assert stablehlo_version(blob) is not None, cell
        assert CUSTOM_CALL.findall(text(blob)) == [], cell


def test_a_cumulative_sum_for_a_card_is_a_loop_in_portable_form_and_computes_the_same():
    def call(params, state, batch):
        return state, {"y": jnp.cumsum(batch["x"])}

    shape = jax.ShapeDtypeStruct((9,), jnp.int32)
    exported = export.export(jax.jit(call), platforms=("cuda",))({}, {}, {"x": shape})
    assert 'stablehlo.composite "chlo.scan"' in exported.mlir_module()
    leaves = {name: (Leaf(name, (9,), "int32", (), group),) for name, group in (("x", "batch"), ("y", "out"))}
    program = SimpleNamespace(inputs=leaves["x"], outputs=leaves["y"])
    compiled = compile_portable(packed(exported), program, mesh_of(jax.devices()[:1]))
    _, out = compiled({}, {}, {"x": jnp.arange(9, dtype=jnp.int32)})
    assert np.array_equal(out["y"], np.cumsum(np.arange(9)))
