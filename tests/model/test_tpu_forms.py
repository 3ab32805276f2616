"""The steps in the forms for accelerators, on CPU in fp32: unrolled layers, tiles, striped pages; one card."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ling3export.model import card, moe
from ling3export.model.geometry import AXIS
from ling3export.model.mla.paged import TILE, tile_pages
from ling3export.model.program import bind
from tests.support.direct import relative
from tests.support.numerics import Case, Quick
from tests.support.tolerances import FLOAT32

pytestmark = pytest.mark.jit

ROWS = 6
SHORT = {"num_hidden_layers": 4}  # one or two layers of each kind: these forms are unrolled and take long to compile


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("forms") / "micro", (70, 37, 21), **SHORT).expect()


@pytest.mark.parametrize(("tp", "form"), [(4, "tiles"), (1, "card")])
def test_the_form_agrees_with_the_reference(case: Case, tp: int, form: str):
    """Three sequences of several pages, cut prefills, then decode of all with padding rows between them."""
    direct = Quick(case.config, case.read, tp=tp, form=form, page_size=16, max_pages=8)
    assert direct.geometry.placement == ("striped" if tp > 1 else "replicated")
    errors = []
    starts = [len(prompt) - 6 for prompt in case.prompts]
    for slot, (prompt, expected, start) in enumerate(zip(case.prompts, case.expected, starts, strict=True), 1):
        errors.append(relative(direct.sequence(32, prompt[:start], slot=slot), expected[start - 1]))
    for step in range(6):
        rows = [(slot, start + step, case.prompts[slot - 1][start + step]) for slot, start in enumerate(starts, 1)]
        found = direct.decode(ROWS, [rows[1], (0, 0, 0), rows[2], rows[0]])
        for row, slot in ((0, 2), (2, 3), (3, 1)):
            errors.append(relative(found[row], case.expected[slot - 1][starts[slot - 1] + step]))
    assert max(errors) <= FLOAT32


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("long") / "micro", (330, 190), **SHORT).expect()


@pytest.mark.parametrize(("tp", "form"), [(2, "tiles"), (1, "card")])
def test_steps_of_several_tiles_agree_with_the_reference(long: Case, tp: int, form: str):
    """Calls of 17 chunks, which are three tiles; runs cross tiles and continue from the call before.

    Decode reads more pages than a tile has, on every device.
    """
    direct = Quick(long.config, long.read, tp=tp, form=form, page_size=8, max_pages=48)
    (one, two), (first, second) = long.prompts, long.expected
    found = direct.prefill(272, [(1, 0, one[:144]), (2, 0, two[:120])])
    errors = [relative(found[1], first[143]), relative(found[2], second[119])]
    found = direct.prefill(272, [(2, 120, two[120:188]), (1, 144, one[144:328])])
    errors += [relative(found[1], first[327]), relative(found[2], second[187])]
    assert (328 // 8 + 188 // 8) // tp > TILE and 328 // 8 // tp > tile_pages(1)
    logits = direct.decode(ROWS, [(2, 188, two[188]), (1, 328, one[328])])
    errors += [relative(logits[0], second[188]), relative(logits[1], first[328])]
    # one sequence, in tiles of fewer pages
    for slot, at, prompt, expected in ((2, 189, two, second), (1, 329, one, first)):
        errors.append(relative(direct.decode(1, [(slot, at, prompt[at])])[0], expected[at]))
    assert max(errors) <= FLOAT32


@pytest.mark.parametrize(
    ("layer", "tp", "experts", "weights"), [(0, 4, 128, "bf16"), (2, 2, 128, "bf16"), (1, 2, 128, "int8-channel")]
)
def test_reading_some_experts_gives_what_reading_all_gives(tmp_path, layer: int, tp: int, experts: int, weights: str):
    """With limits that change values, on a device without any chosen expert, and next to NaN in padding rows."""
    limits = {"expert_swiglu_limit_list": [0, 0, 0, 0.01], "share_expert_swiglu_limit_list": [0.01] * 4}
    short = Case(tmp_path / "micro", (1,), num_experts=experts, **SHORT | limits)
    direct = Quick(short.config, short.read, tp=tp, form="tiles", weights=weights)
    x = np.random.default_rng(layer).normal(size=(4, short.config.hidden_size)).astype(np.float32)
    x[3] = np.nan
    valid = np.array([True, True, True, False])

    def body(params, x, valid):
        own = bind(short.config, direct.geometry)(params).moe
        share = own.local_weights(x, layer)
        everything = own.all_local(x, layer, share) + own.shared(x, layer)
        found, alone = own(x, layer, valid), own.some_local(x, layer, jnp.zeros_like(share))
        return found, everything, alone, jnp.any(share[:, :3] != 0, axis=1)

    assert moe.form_of(4, short.config, direct.geometry) == "some"
    assert moe.form_of(32, short.config, direct.geometry) == "all"
    specs = direct.step("decode", 1)[0].specs[0]
    on_devices = jax.shard_map(body, mesh=direct.mesh, in_specs=(specs, P(), P()), out_specs=P(AXIS), check_vma=False)
    found, everything, alone, chosen = (np.asarray(each) for each in jax.jit(on_devices)(direct.params, x, valid))
    found, everything = (each.reshape(tp, 4, -1)[:, :3].reshape(3 * tp, -1) for each in (found, everything))
    assert relative(found, everything) <= FLOAT32
    assert not np.asarray(alone).any()
    assert 0 < np.count_nonzero(chosen) < chosen.size


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("experts", [16, 256])
def test_reducing_chooses_what_sorting_chooses(case: Case, experts: int, ties: bool):
    """With more than ``ONE_REDUCTION`` experts, ``route_weights`` sorts, too."""
    config = replace(case.config, num_experts=experts)
    rng = np.random.default_rng(0)
    scores = rng.uniform(size=(64, config.num_experts)).astype(np.float32)
    bias = rng.normal(size=config.num_experts).astype(np.float32)
    if ties:
        scores, bias = np.round(scores * 4) / 4, np.zeros_like(bias)
    chosen, weights = moe.route(jnp.asarray(scores), jnp.asarray(bias), config)
    expected = jnp.zeros(scores.shape).at[jnp.arange(64)[:, None], chosen].set(weights)
    ranked, shares = jax.jit(lambda s, b: card.route_by_rank(s, b, config))(scores, bias)
    np.testing.assert_array_equal(ranked, chosen)
    np.testing.assert_allclose(shares, weights, rtol=1e-6)
    for wanted in (np.arange(config.num_experts), np.arange(3, config.num_experts, 2)):
        for rows, by_products in ((64, False), (64, True), (16, True)):
            route = jax.jit(lambda s, b, w, by=by_products: moe.route_weights(s, b, config, w, by))
            found, right = route(scores[:rows].T, bias, wanted).T, expected[:rows, wanted]
            np.testing.assert_allclose(found, right, rtol=1e-6)
            assert np.array_equal(np.count_nonzero(found, axis=1), np.count_nonzero(right, axis=1))


@pytest.mark.parametrize(("count", "axis"), [(1, 0), (2, 1), (3, 0), (8, 1)])
def test_largest_are_those_of_a_sort(count: int, axis: int):
    """Values repeat often; each repetition counts."""
    values = np.random.default_rng(count).integers(0, 9, (16, 24, 5)).astype(np.float32)
    found = jax.jit(lambda v: moe.largest((v,), count, (axis,)))(values)
    expected = -np.sort(-values, axis=axis).take(range(count), axis=axis)
    np.testing.assert_array_equal(np.stack([value for (value,) in found], axis=axis), expected)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_among_equal_values_the_first_are_selected(count: int):
    """Over two axes, with payload values."""
    values = np.random.default_rng(count).integers(0, 4, (6, 8, 5)).astype(np.float32)
    index, along = np.arange(48, dtype=np.int32).reshape(6, 8, 1) + np.zeros((1, 1, 5), np.int32), -7 * values
    found = jax.jit(lambda *rows: moe.largest(rows, count, (0, 1)))(values, index, along)
    order = np.argsort(-values.reshape(48, 5), axis=0, kind="stable")[:count]
    np.testing.assert_array_equal([number for _, number, _ in found], order)
    for place in (0, 2):
        expected = np.take_along_axis((values, index, along)[place].reshape(48, 5), order, axis=0)
        np.testing.assert_array_equal([row[place] for row in found], expected)
