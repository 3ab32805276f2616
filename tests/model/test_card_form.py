"""The form of the steps for one card, on CPU: only chosen experts are multiplied, and whole page tables are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3export.model import card, moe
from ling3export.model.geometry import AXIS
from ling3export.model.mla.paged import attend_tables
from ling3export.model.program import bind
from tests.support.direct import relative
from tests.support.numerics import Case, Quick
from tests.support.tolerances import FLOAT32

pytestmark = pytest.mark.jit


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("card") / "micro", (30, 21), num_hidden_layers=4).expect()


@pytest.fixture(scope="module")
def direct(case: Case) -> Quick:
    return Quick(case.config, case.read, form="card", page_size=16, max_pages=8)


def multiplied(direct: Quick, x: np.ndarray, layer: int, valid: np.ndarray) -> np.ndarray:
    """Output of a layer's experts for ``x``."""

    def body(params, x, valid):
        return bind(direct.config, direct.geometry)(params).moe(x, layer, valid)

    alone = jax.vmap(body, in_axes=None, axis_name=AXIS, axis_size=1)
    return np.asarray(jax.jit(alone)(direct.params, x, valid)[0])


def by_hand(direct: Quick, x: np.ndarray, layer: int, valid: np.ndarray) -> np.ndarray:
    """The same in float64, expert by expert."""
    config, params = direct.config, direct.params["moe"]
    gate = np.asarray(params["gate"][f"{layer:03}"], np.float64)
    bias = np.asarray(params["expert_bias"][layer], np.float64)
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ gate.T)))
    chosen, weights = moe.route(jnp.asarray(scores, jnp.float32), jnp.asarray(bias, jnp.float32), config)
    up, down = (np.asarray(params[f"experts_{name}_proj"][f"{layer:03}"], np.float64) for name in ("gate_up", "down"))
    up, down = (each.reshape(config.num_experts, *each.shape[2:]) for each in (up, down))
    shared_up, shared_down = (
        np.asarray(params[f"shared_{name}_proj"][f"{layer:03}"], np.float64) for name in ("gate_up", "down")
    )
    parts = [*zip(shared_up, shared_down, strict=True)]
    out = np.zeros_like(x, np.float64)
    for row, own in enumerate(x.astype(np.float64)):
        for gate_up, back in parts:
            gated, straight = gate_up @ own
            out[row] += (gated / (1 + np.exp(-gated)) * straight) @ back
        for expert, weight in zip(np.asarray(chosen[row]), np.asarray(weights[row]), strict=True):
            gated, straight = up[expert] @ own
            out[row] += valid[row] * weight * (down[expert] @ (gated / (1 + np.exp(-gated)) * straight))
    return out


@pytest.mark.parametrize("rows", [1, 3, "most"])
@pytest.mark.parametrize("layer", [0, 2])
def test_chosen_experts_make_what_a_loop_over_them_makes(direct: Quick, rows: int | str, layer: int):
    """The second and the last row are padding: their output is that of the shared expert only."""
    config = direct.config
    count = config.num_experts // config.num_experts_per_tok if isinstance(rows, str) else rows
    assert moe.form_of(count, config, direct.geometry) == "chosen"
    assert moe.form_of(config.num_experts // config.num_experts_per_tok + 1, config, direct.geometry) == "grouped"
    x = np.random.default_rng(count).normal(size=(count, config.hidden_size)).astype(np.float32)
    valid = np.ones(count, bool)
    if count > 1:
        valid[[1, -1]] = False
    assert relative(multiplied(direct, x, layer, valid), by_hand(direct, x, layer, valid)) <= FLOAT32


@pytest.mark.parametrize(("count", "alike"), [(40, 0), (300, 0), (300, 200)])
def test_batches_of_every_expert_make_what_a_loop_over_them_makes(direct: Quick, count: int, alike: int):
    """A quarter of the rows is padding. With rows ``alike``, some experts get more rows than a batch holds."""
    config = direct.config
    size = card.batch_rows(count, config.num_experts_per_tok, config.num_experts)
    assert moe.form_of(count, config, direct.geometry) == "grouped"
    assert 3 * alike // 4 > size if alike else size <= count
    x = np.random.default_rng(count).normal(size=(count, config.hidden_size)).astype(np.float32)
    x[count - alike :] = x[0]
    valid = np.arange(count) % 4 != 1
    assert relative(multiplied(direct, x, 2, valid), by_hand(direct, x, 2, valid)) <= FLOAT32
    x[3] = np.nan
    spoiled = multiplied(direct, x, 2, valid)
    assert np.isnan(spoiled[3]).all() and np.isfinite(np.delete(spoiled, 3, axis=0)).all()


@pytest.mark.parametrize("experts", [16, 128, 512])
def test_any_router_has_tiles_enough(experts: int):
    """Regression: one tile too few for rows such as 257, and 4096 with 512 experts; its last row was lost."""
    choices = 8
    for rows in (17, 129, 200, 257, 512, 1000, 2048, 2080, 4096):
        size = card.batch_rows(rows, choices, experts)
        most = -(-rows // size) - 1
        # So many experts that just fill each number of tiles, and the tiles of one more with the rows that are left.
        routers = [0]
        for tiles in range(1, most + 1):
            full = min(experts, rows * choices // (tiles * size + 1))
            left = rows * choices - full * (tiles * size + 1)
            routers.append(full * tiles + (max(left - 1, 0) // size if full < experts else 0))
        assert card.tile_count(rows, choices, experts) == max(routers)


@pytest.mark.parametrize("rows", [33, 34, 40, 64])
def test_rows_that_all_choose_the_same_experts_are_added_once(rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(card, "ROOM", 4)
    experts, rng = 64, np.random.default_rng(rows)
    shapes = (rows, 3), (rows, 4), (experts, 3, 3)
    x, share, matrices = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    def multiply(y, own):
        return jnp.einsum("ncd,nde->nce", y, own(matrices))

    for chosen in (np.arange(4), np.arange(experts - 4, experts)):
        found = card.weighted_sum(x, jnp.tile(jnp.asarray(chosen, jnp.int32), (rows, 1)), share, experts, multiply)
        expected = np.einsum("td,ade,ta->te", x, matrices[chosen], share)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_row_that_is_not_finite_leaves_the_other_rows_as_they_are(direct: Quick):
    """NaN in a padding row, and in a sequence's row.

    The router may order NaN anyhow, but no other number may change.
    """
    x = np.random.default_rng(0).normal(size=(3, direct.config.hidden_size)).astype(np.float32)
    valid = np.array([True, True, False])
    right = multiplied(direct, x, 0, valid)
    for row in (1, 2):
        spoiled = x.copy()
        spoiled[row] = np.nan
        found = multiplied(direct, spoiled, 0, valid)
        assert np.isnan(found[row]).all()
        others = [other for other in range(3) if other != row]
        np.testing.assert_array_equal(found[others], right[others])


def test_a_decode_step_reads_nothing_after_its_sequences(case: Case, direct: Quick):
    """Neither a page of NaN after a sequence's last one in its table, nor rows after its end in the last page."""
    direct.reset()
    for slot, (prompt, _) in enumerate(zip(case.prompts, case.expected, strict=True), 1):
        direct.sequence(32, prompt[:-1], slot=slot)
    pool = np.asarray(direct.state["mla_latent"]).copy()
    seen = np.zeros(pool.shape[1:3], bool)
    for slot, prompt in enumerate(case.prompts, 1):
        for at in range(len(prompt) - 1):
            seen[direct.tables[slot][at // 16], at % 16] = True
    pool[:, ~seen] = np.nan
    direct.state = direct.state | {"mla_latent": jnp.asarray(pool)}
    rows = [(slot, len(prompt) - 1, prompt[-1]) for slot, prompt in enumerate(case.prompts, 1)]
    found = direct.decode(3, [rows[1], rows[0]])
    errors = [relative(found[row], case.expected[slot - 1][-1]) for row, slot in ((0, 2), (1, 1))]
    assert max(errors) <= FLOAT32


def test_attending_whole_tables_agrees_with_a_plain_softmax():
    """Random lengths, including 0, and tables with pages in any order."""
    rng = np.random.default_rng(0)
    rows, heads, page, rank, width = 5, 3, 4, 8, 11
    pool = rng.normal(size=(2, 21, page, width)).astype(np.float32)
    table = rng.permutation(np.arange(1, 21)).reshape(rows, 4).astype(np.int32)
    length, query = np.array([16, 1, 0, 7, 12], np.int32), rng.normal(size=(rows, heads, width)).astype(np.float32)
    found = jax.jit(lambda q, p, t, n: attend_tables(q, p, 1, t, n, rank))(query, pool, table, length)
    for row in range(rows):
        cached = pool[1, table[row]].reshape(-1, width)[: length[row]].astype(np.float64)
        scores = query[row] @ cached.T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf, where=np.isfinite(scores)))
        expected = (
            (weights / weights.sum(axis=1, keepdims=True)) @ cached[:, :rank] if length[row] else np.zeros((3, 8))
        )
        np.testing.assert_allclose(found[row], expected, atol=2e-6)
