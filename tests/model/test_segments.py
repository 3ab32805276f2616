"""A prefill call cut at its groups of layers gives what one program gives, in the form for cpu, which alone has it."""

from typing import Any

import jax
import numpy as np
import pytest

from ling3export.model.geometry import CHUNK
from ling3export.model.program import build_step
from ling3export.runners.engine.inputs import Span, prefill_fields
from tests.support.direct import Direct, pack, relative
from tests.support.numerics import Case, Quick
from tests.support.tolerances import FLOAT32, SAME

pytestmark = pytest.mark.jit

PADDING = 32


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A whole group, whose first layer is dense, and one of two layers, which are MLA."""
    return Case(tmp_path_factory.mktemp("case") / "checkpoint", (20, 25), num_hidden_layers=5).expect()


def run(direct: Direct, phase: str, batch: dict[str, Any], **fields: Any) -> dict[str, Any]:
    step, call = direct.step(phase, PADDING)
    params = {stack: {name: direct.params[stack][name] for name in rows} for stack, rows in step.specs[0].items()}
    state, out = call(params, direct.state if step.specs[1] else {}, batch | {"packed": pack(step.fields, **fields)})
    direct.state = state or direct.state
    return out


def test_groups_in_order_equal_one_program(case: Case):
    """In two calls of each prompt, so that the second goes on from state; logits and state agree."""
    found = {}
    for way in ("whole", "segments"):
        direct = Quick(case.config, case.read, tp=2)
        direct.reset()
        for slot, ids in enumerate(case.prompts, 1):
            for start in (0, CHUNK):
                spans = [Span(slot, start, ids[start:] if start else ids[:CHUNK])]
                if way == "whole":
                    out = direct.call("prefill", PADDING, spans)
                else:
                    fields = prefill_fields(PADDING, spans, CHUNK, direct.tables)
                    out = run(direct, "embed", {}, **fields)
                    for group in range(2):
                        out = run(direct, "group", {"hidden": out["hidden"]}, **fields, group=group)
                    out = run(direct, "unembed", {"hidden": out["hidden"]}, **fields)
            found[way, slot] = np.asarray(out["logits"])[0]
            assert relative(found[way, slot], case.expected[slot - 1][len(ids) - 1]) < FLOAT32
        found[way, "state"] = jax.tree.map(np.asarray, direct.state)
    assert max(relative(found["segments", slot], found["whole", slot]) for slot in (1, 2)) < SAME
    states = (found[way, "state"] for way in ("whole", "segments"))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one[:, 1:], other[:, 1:], rtol=1e-4, atol=1e-5),
        *({name: state[name] for name in state if name != "last_token"} for state in states),
    )


def test_a_slice_has_the_layers_of_its_group(case: Case):
    """An incomplete last group has no KDA layers and two of MLA, which stand at the end of what is given."""
    direct = Quick(case.config, case.read)
    rng = np.random.default_rng(0)
    direct.state = {
        name: jax.numpy.asarray(rng.standard_normal(each.shape), each.dtype) for name, each in direct.state.items()
    }
    state = {name: np.asarray(each) for name, each in direct.state.items() if name != "last_token"}
    step = build_step(case.config, direct.geometry, "offload_group", 2, direct.mesh)
    for group, layers in enumerate((slice(0, 2), slice(1, 3))):  # of three layers of MLA: a group has up to two
        packed = pack(step.fields, slot=2, page=[3, 0], group=group)
        _, out = step.call({}, {name: direct.state[name] for name in state}, {"packed": packed})
        latent, width = np.asarray(out["mla_latent"]), case.config.latent_dim
        assert np.array_equal(latent[:, 0], state["mla_latent"][layers, 3, :, :width]) and not latent[:, 1].any()
        for name in ("kda_conv", "kda_recurrent"):
            assert np.array_equal(np.asarray(out[name]), state[name][:, 2])
