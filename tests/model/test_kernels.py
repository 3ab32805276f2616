"""Single parts of the model against loops in float64, on inputs that are rare in a whole model."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3export.checkpoint.synth import config_fields
from ling3export.model import moe
from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK
from ling3export.model.inputs import batch_fields, chunks_of, packed_size, unpack
from ling3export.model.kda import layer as kda
from ling3export.model.kda import recurrence as delta
from ling3export.model.layers import rope
from ling3export.verify import formulas
from tests.support.direct import pack
from tests.support.kda_oracle import BOUNDED, GATES, close, delta_rule, random_rows
from tests.support.tolerances import KERNEL

HEADS, KEY, VALUE, TOKENS = 2, 24, 20, 5 * CHUNK


def random_inputs(gate: str, *, repeated_keys: bool = False, seed: int = 0) -> tuple[np.ndarray, delta.Inputs]:
    """(state, inputs) in float64; with ``repeated_keys``, all tokens have one key, written at full strength."""
    rng = np.random.default_rng(seed)
    x = random_rows(rng, gate, (TOKENS, HEADS), KEY, VALUE, repeated_keys)
    return rng.normal(size=(HEADS, KEY, VALUE)), x


def as_float32(tree: Any) -> Any:
    return jax.tree.map(lambda y: jnp.asarray(y, jnp.float32), tree)


@jax.jit
def recurrent(state: jax.Array, x: delta.Inputs) -> tuple[jax.Array, jax.Array]:
    def step(state: jax.Array, x: delta.Inputs) -> tuple[jax.Array, jax.Array]:
        state, o = delta.recurrent_step(state[None], jax.tree.map(lambda y: y[None], x))
        return state[0], o[0]

    return jax.lax.scan(step, state, x)


@jax.jit(static_argnums=2)
def chunked(state: jax.Array, x: delta.Inputs, factored: bool) -> tuple[jax.Array, jax.Array]:
    terms = delta.chunk_terms(jax.tree.map(lambda y: y.reshape(-1, CHUNK, *y.shape[1:]), x), factored)
    state, o = jax.lax.scan(delta.chunk_step, state, terms)
    return state, jnp.swapaxes(o, 1, 2).reshape(-1, HEADS, VALUE)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("repeated_keys", [False, True])
def test_kda_forms_equal_a_loop(gate: str, repeated_keys: bool):
    start, x = random_inputs(gate, repeated_keys=repeated_keys)
    state, o = delta_rule(start, x)
    inputs = as_float32((start, x))
    forms = [recurrent(*inputs), chunked(*inputs, False)] + [chunked(*inputs, True)] * (gate in BOUNDED)
    for found_state, found_o in forms:
        assert close(found_o, o) < KERNEL
        assert np.max(np.abs(found_state - state)) < KERNEL * np.max(np.abs(start))


@pytest.mark.parametrize("length", [0, 1, 7, 15])
def test_unused_slots_of_a_chunk_leave_the_state(length: int):
    """Unused slots have no decay and no strength: the state is that of a loop over the tokens only."""
    start, x = random_inputs("published")
    x = delta.Inputs(*(y[:CHUNK].copy() for y in x))
    x.g[length:], x.beta[length:] = 0, 0
    state, _ = delta_rule(start, delta.Inputs(*(y[:length] for y in x)))
    assert close(chunked(*as_float32((start, x)), True)[0], state) < KERNEL


def test_factored_scores_stay_finite_at_the_bound():
    """Also above the diagonal, where factors of the last tokens are multiplied: e^75 is near the end of fp32."""
    _, x = random_inputs("saturated")
    k, g = np.swapaxes(x.k[:CHUNK], 0, 1), np.swapaxes(x.g[:CHUNK], 0, 1)
    assert np.all(np.isfinite(delta.scores_factored(*as_float32((k, k, g)))))


@pytest.mark.parametrize("value", [1.0, -1.0, 2.0])
def test_unit_lower_inverse_of_equal_entries_is_exact(value: float):
    """1: only -1 under the diagonal. -1: powers of two up to 16384. 2: ±2, from sums up to 3^14 that cancel."""
    lower = np.tril(np.full((2, 3, CHUNK, CHUNK), value), -1)
    expected = np.linalg.inv(np.eye(CHUNK) + lower)
    found = jax.jit(delta.unit_lower_inverse)(jnp.asarray(lower, jnp.float32))
    np.testing.assert_array_equal(found, np.round(expected))


def test_unit_lower_inverse_of_random_entries():
    lower = np.tril(np.random.default_rng(0).uniform(-1, 1, (50, CHUNK, CHUNK)), -1).astype(np.float32)
    found = np.asarray(jax.jit(delta.unit_lower_inverse)(lower), np.float64)
    residual = found @ (np.eye(CHUNK) + lower) - np.eye(CHUNK)
    assert np.max(np.abs(residual) / np.max(np.abs(found), axis=(1, 2), keepdims=True)) < KERNEL


@pytest.mark.parametrize("safe", [True, False])
def test_log_decay(safe: bool):
    config = Config.from_dict(config_fields("micro", {"kda_safe_gate": safe}))
    rng = np.random.default_rng(0)
    f, a_log, bias = rng.normal(0, 8, (40, 4, 16)), rng.uniform(-2, 3, 4), rng.normal(0, 8, (4, 16))
    expected = formulas.kda_log_decay(f, a_log, bias, -5.0 if safe else None)
    found = kda.log_decay(as_float32(f), as_float32(a_log), as_float32(bias), config)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-30)  # e^-100 of an argument rounded at 1e-5


def test_causal_conv_from_a_history():
    rng = np.random.default_rng(0)
    raw, taps = rng.normal(size=(20, 6)), rng.normal(size=(6, 4))
    expected = formulas.silu(formulas.causal_conv(raw, taps))[4:]
    found = kda.causal_conv(*as_float32((raw[None, 1:4], raw[None, 4:], taps.T)))
    assert close(found[0], expected) < KERNEL


def test_rope_at_far_positions():
    x = np.random.default_rng(0).normal(size=(4, 3, 64))
    position = np.array([0, 1, 8191, 131071])
    angles = formulas.rope_angles(131072, 64, 6e6, None)[position]
    config = Config.from_dict(config_fields("full", {"rope_theta": 6e6}))
    found = rope(jnp.asarray(x, jnp.float32), jnp.asarray(position, jnp.int32), config.rope_frequencies)
    assert close(found, formulas.rope(x, angles)) < KERNEL


def layouts(rng: np.random.Generator, count: int, experts: int) -> list[np.ndarray]:
    """Random and extreme choices of experts; the number ``experts`` marks a row of another device."""
    some = [rng.integers(0, experts + 1, count) for _ in range(20)]
    skewed = [np.minimum(rng.geometric(0.5, count) - 1, experts) for _ in range(5)]
    return [
        *some,
        *skewed,
        *(np.full(count, expert) for expert in (0, experts - 1, experts)),
        np.arange(count) % experts,
    ]


@pytest.mark.parametrize(("count", "experts", "rows"), [(1, 4, 1), (8, 3, 1), (40, 16, 2), (24, 4, 8), (96, 3, 16)])
def test_tile_layout(count: int, experts: int, rows: int):
    layout = jax.jit(moe.tile_layout, static_argnums=(1, 2))
    for expert in layouts(np.random.default_rng(count), count, experts):
        place, tile_expert, used, tiles = map(np.asarray, layout(jnp.asarray(expert, jnp.int32), experts, rows))
        ours = expert < experts
        counts = np.bincount(expert[ours], minlength=experts)
        assert tiles == np.sum(-(-counts // rows)) <= len(tile_expert)
        assert np.all(place[~ours] == len(tile_expert) * rows)
        assert np.all(place[ours] < tiles * rows)
        assert len(set(place[ours])) == np.sum(ours)
        np.testing.assert_array_equal(tile_expert[place[ours] // rows], expert[ours])
        np.testing.assert_array_equal(used, np.bincount(place[ours] // rows, minlength=len(tile_expert)))
        assert np.all(place[ours] % rows < used[place[ours] // rows])  # used rows come first in a tile
        assert all(np.all(np.diff(place[expert == e]) > 0) for e in range(experts))


def test_tile_rows_grow_with_the_rows_an_expert():
    sizes = [moe.tile_rows(rows, 128) for rows in (1, 8, 64, 128, 512, 4096, 1 << 20)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1
    assert sizes[-1] == moe.LARGEST_TILE
    assert all(size & (size - 1) == 0 for size in sizes)


def test_route_equals_the_reference_with_ties():
    """Scores of few values, exact in fp32: ties between experts and between groups go to the lowest index."""
    config = Config.from_dict(config_fields("small", {}))
    rng = np.random.default_rng(0)
    scores, bias = rng.integers(1, 8, (400, 32)) / 8, rng.integers(-2, 3, 32) / 8
    expected = formulas.route(scores, bias, config.n_group, config.topk_group, config.num_experts_per_tok, 2.5)
    assert min(expected.margins) == 0
    chosen, weights = jax.jit(lambda s, b: moe.route(s, b, config))(*as_float32((scores, bias)))
    np.testing.assert_array_equal(chosen, expected.experts)
    assert close(weights, expected.weights) < KERNEL


@pytest.mark.parametrize(("phase", "padding"), [("prefill", 48), ("decode", 5), ("sample", 3)])
def test_batch_comes_out_as_it_was_packed(phase: str, padding: int):
    """Floats bit for bit, including negative zero, a denormal and infinity.

    Fields fill the vector without gap or overlap.
    """
    fields = batch_fields(phase, padding, 7)
    rng = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {}
    for field in fields:
        value = rng.integers(-(2**31), 2**31, field.shape).astype(np.int32)
        special = np.resize(np.array([-0.0, 1e-40, np.inf], np.float32), field.shape)
        values[field.name] = special if field.dtype == "float32" else value
    spans = sorted((field.offset, field.offset + field.size) for field in fields)
    assert [end for _, end in [(0, 0), *spans]] == [start for start, _ in [*spans, (packed_size(fields), 0)]]
    out = jax.jit(lambda packed: unpack(packed, fields))(pack(fields, **values))
    for field, (name, value) in itertools.product(fields, values.items()):
        if field.name == name:
            assert out[name].dtype == field.dtype
            np.testing.assert_array_equal(np.asarray(out[name]).view(np.int32), value.view(np.int32))


def test_chunks_of_a_call():
    """Slot 2 from its start, two chunks; slot 1 at position 40, chunks of 16 and 3; padding between and after."""
    fields = {
        "chunk_slot": [2, 2, 0, 1, 1, 0],
        "chunk_start": [0, 16, 0, 40, 56, 0],
        "chunk_len": [16, 5, 0, 16, 3, 0],
        "fresh": [1, 0, 1, 0, 0, 0],
        "page_table": np.zeros((6, 1)),
    }
    chunks = jax.jit(chunks_of)({name: jnp.asarray(value, jnp.int32) for name, value in fields.items()})
    assert chunks.used == 5
    assert chunks.fresh.tolist() == [True, False, False, False, False, False]
    assert chunks.first.tolist()[:2] + chunks.first.tolist()[3:5] == [True, False, True, False]
    assert chunks.last.tolist() == [False, True, False, False, True, False]
    assert chunks.run_start.tolist()[:2] + chunks.run_start.tolist()[3:5] == [0, 0, 40, 40]
    assert chunks.valid.reshape(6, CHUNK).sum(axis=1).tolist() == [16, 5, 0, 16, 3, 0]
    assert chunks.position.reshape(6, CHUNK)[[1, 4], 2].tolist() == [18, 58]
