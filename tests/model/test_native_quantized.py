"""The kernels for quantized weights, at every level that runs on this machine, against the same sums in float64."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ling3export.artifacts.parameters import FORMS
from ling3export.checkpoint.quantize import packed
from ling3export.model.geometry import Geometry
from ling3export.model.native import calls
from ling3export.model.quantized import Quantized
from tests.model.test_native import HERE, check_experts, geometry, sizes  # noqa: F401 (a fixture)

pytestmark = pytest.mark.jit

ERROR = 1e-6  # sums of groups are fp32
CASES = 4
ROW_FORMS = ("int8", "int4", "code4")  # forms of weights that kernels sum over TP shards, and of experts
EVERY_FORM = pytest.mark.parametrize("form", [*ROW_FORMS, "code6"])
ROWS_FORM = pytest.mark.parametrize("form", ROW_FORMS)


def weights(rng: np.random.Generator, form: str, *shape: int) -> tuple[Quantized, np.ndarray]:
    """Quantized weights with random values, often extremes, and scales; and the same weights in float64."""
    values = np.array(FORMS[form].values or range(-(1 << FORMS[form].bits - 1), 1 << FORMS[form].bits - 1))
    q = rng.choice(values, shape)
    q = np.where(rng.random(shape) < 0.1, rng.choice(values[[0, -1]], shape), q)
    stored = packed(q.astype(np.int8).reshape(-1, shape[-1]), form, 32).reshape(*shape[:-1], -1)
    groups = (*shape[:-1], shape[-1] // 32)
    if FORMS[form].scale == "bfloat16":
        scale = jnp.asarray(rng.normal(size=groups), jnp.bfloat16)
        factors = np.asarray(scale.astype(jnp.float32), np.float64).repeat(32, axis=-1)
        return Quantized(jnp.asarray(stored), scale), q * factors
    exponent, both = rng.integers(35, 55, groups), rng.integers(-16, 16, (*groups, 2))
    words = (exponent << 10 | (both[..., 0] & 31) << 5 | both[..., 1] & 31).astype(np.uint16)
    factors = (both * 2.0 ** (exponent - 48)[..., None]).reshape(*shape[:-1], -1).repeat(16, axis=-1)
    return Quantized(jnp.asarray(stored), jnp.asarray(words)), q * factors


def rounded(x: np.ndarray) -> np.ndarray:
    """Rounds rows to 8 bits: each group of 32 becomes multiples of 1/127 of its largest magnitude; returns float64."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    q = np.rint(np.divide(groups, scale, out=np.zeros_like(groups), where=scale > 0))
    return (q.astype(np.float64) * scale).reshape(x.shape)


def rows_of(rng: np.random.Generator, count: int, width: int) -> tuple[Any, np.ndarray]:
    """bf16 rows of very different magnitudes, then padding rows; and the former rounded to 8 bits."""
    used = int(rng.integers(1, count, endpoint=True))
    x = jnp.asarray(rng.normal(size=(count, width)) * 10.0 ** rng.integers(-6, 6, (count, width // 32)).repeat(32, 1))
    x = x.astype(jnp.bfloat16).at[used:].set(0)
    return x, rounded(np.asarray(x[:used].astype(jnp.float32)))


def check(found: jax.Array, expected: np.ndarray, terms: np.ndarray) -> None:
    """Errors are small relative to the sum of the terms' magnitudes, and the rows after ``expected`` are zeros."""
    used = len(expected)
    error = np.abs(np.asarray(found[:used], np.float64) - expected)
    assert (error <= ERROR * terms).all(), (error / terms).max()
    assert not np.asarray(found[used:]).any()


@EVERY_FORM
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 70])
def test_products_of_any_shape(geometry: Geometry, form: str, rows: int) -> None:  # noqa: F811
    rng = np.random.default_rng(rows)
    for unit in (1, 16):
        shards, layers, out, groups = sizes(rng, 3, 3, 150 // unit, 40 // unit)
        out, groups, layer = out * unit, groups * unit, int(rng.integers(layers))
        stored, weights64 = weights(rng, form, shards, layers, out, groups * 32)
        x, x64 = rows_of(rng, rows, groups * 32)
        own = weights64[:, layer]
        terms = np.einsum("td,sod->tso", np.abs(x64), np.abs(own))
        check(calls.columns(x, stored, layer, geometry), np.einsum("td,sod->tso", x64, own), terms)
        if form not in ROW_FORMS:
            continue
        x, x64 = rows_of(rng, rows, shards * groups * 32)
        wide = np.concatenate(own, axis=1)
        check(calls.rows(x, stored, layer, geometry), x64 @ wide.T, np.abs(x64) @ np.abs(wide).T)


@ROWS_FORM
@pytest.mark.parametrize("groups", [1, 2, 4, 8, 9, 17])
def test_sums_over_shards_of_few_groups(geometry: Geometry, form: str, groups: int) -> None:  # noqa: F811
    """Weights with rows so short that several fit into a vector, and a value that is not finite in one of them."""
    rng = np.random.default_rng(groups)
    for out, rows in ((16, 1), (48, 5), (64, 2), (100, 3), (144, 4), (1600, 1)):
        stored, weights64 = weights(rng, form, 3, 2, out, groups * 32)
        wide = np.concatenate(weights64[:, 1], axis=1)
        x, x64 = rows_of(rng, rows, 3 * groups * 32)
        found = calls.rows(x, stored, 1, geometry)
        check(found, x64 @ wide.T, np.abs(x64) @ np.abs(wide).T)
        if stored.scale.dtype == jnp.bfloat16:
            damaged = Quantized(stored.q, stored.scale.at[2, 1, 7, 0].set(np.nan))
            bad = np.asarray(calls.rows(x, damaged, 1, geometry))[: len(x64)]
            assert np.isnan(bad[:, 7]).all()
            good = np.asarray(found)[: len(x64)]
            np.testing.assert_array_equal(np.delete(bad, 7, axis=1), np.delete(good, 7, axis=1))
        bad = np.asarray(calls.rows(x.at[0, -1].set(np.inf), stored, 1, geometry))
        assert np.isnan(bad[0]).all()
        np.testing.assert_array_equal(bad[1:], np.asarray(found)[1:])


@EVERY_FORM
@pytest.mark.parametrize("out", [15, 16, 17, 33, 65])
def test_products_at_the_edges_of_tiles(geometry: Geometry, form: str, out: int) -> None:  # noqa: F811
    rng = np.random.default_rng(out)
    for groups in (1, 7, 8, 9, 15, 16, 17):
        stored, weights64 = weights(rng, form, 1, 1, out, groups * 32)
        for rows in (1, 4, 11):
            x, x64 = rows_of(rng, rows, groups * 32)
            found = calls.columns(x, stored, 0, geometry)[:, 0]
            check(found, x64 @ weights64[0, 0].T, np.abs(x64) @ np.abs(weights64[0, 0]).T)


@ROWS_FORM
@pytest.mark.parametrize(("tokens", "limit"), [(1, None), (3, 0.5), (20, None), (150, 0.5)])
def test_experts_of_any_choice(geometry: Geometry, form: str, tokens: int, limit: float | None) -> None:  # noqa: F811
    """Tokens that choose no expert of this device give zeros; many tokens may choose the same one."""
    rng = np.random.default_rng(tokens)
    shards, layers, each, width, dim, top = sizes(rng, 3, 2, 3, 4, 7, 4)
    width, dim = width * 32, dim * 32
    x = jnp.asarray(rng.normal(size=(tokens, dim)), jnp.bfloat16)
    x64 = rounded(np.asarray(x.astype(jnp.float32)))
    up, up64 = weights(rng, form, shards, layers, each, 2, width, dim)
    down, down64 = weights(rng, form, shards, layers, each, dim, width)
    smaller = up.scale - (4 << 10) if up.scale.dtype == jnp.uint16 else up.scale / 16
    up, up64 = Quantized(up.q, smaller), up64 / 16
    chosen = rng.integers(-1, shards * each + 1, (tokens, top)).astype(np.int32)
    share = rng.random((tokens, top)).astype(np.float32)
    of_layer = None if limit is None else jnp.float32(limit)
    found = np.asarray(calls.experts(x, up, down, 0, jnp.asarray(chosen), jnp.asarray(share), of_layer, geometry))

    def hidden_as(hidden: np.ndarray) -> np.ndarray:
        return rounded(np.asarray(jnp.asarray(hidden).astype(jnp.bfloat16).astype(jnp.float32)))

    check_experts(found, x64, up64, down64, chosen, share, limit, hidden_as)


@EVERY_FORM
@pytest.mark.parametrize("rows", [1, 5])
def test_values_that_are_not_finite_change_only_their_own_sums(geometry: Geometry, form: str, rows: int) -> None:  # noqa: F811
    rng = np.random.default_rng(rows)
    stored, _ = weights(rng, form, 1, 1, 40, 288)
    for bad in (np.nan, np.inf, -np.inf):
        x = jnp.asarray(rng.normal(size=(rows, 288)), jnp.bfloat16)
        damaged = x.at[0, 100].set(bad)
        good = np.asarray(calls.columns(x, stored, 0, geometry))
        found = np.asarray(calls.columns(damaged, stored, 0, geometry))
        assert np.isnan(found[0]).all()
        np.testing.assert_array_equal(found[1:], good[1:])
        if stored.scale.dtype != jnp.bfloat16:
            continue
        damaged = Quantized(stored.q, stored.scale.at[0, 0, 7, 3].set(bad))
        found = np.asarray(calls.columns(x, damaged, 0, geometry))[:, 0]
        assert not np.isfinite(found[:, 7]).any()
        np.testing.assert_array_equal(np.delete(found, 7, axis=1), np.delete(good[:, 0], 7, axis=1))


@EVERY_FORM
def test_a_group_of_zeros_and_the_smallest_numbers(geometry: Geometry, form: str) -> None:  # noqa: F811
    rng = np.random.default_rng(0)
    stored, weights64 = weights(rng, form, 1, 1, 20, 96)
    for rows in (1, 4):
        x = jnp.ones((rows, 96), jnp.bfloat16).at[:, :32].set(0).at[:, 32:64].set(1e-40)
        found = calls.columns(x, stored, 0, geometry)[:, 0]
        expected = np.broadcast_to(weights64[0, 0, :, 64:].sum(axis=1), (rows, 20))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused(geometry: Geometry) -> None:  # noqa: F811
    rng = np.random.default_rng(0)
    (q, scale), _ = weights(rng, "int8", 1, 2, 4, 64)
    x = jnp.ones((1, 64), jnp.bfloat16)
    for each, own, layer, why in (
        (x, scale, 2, "layer: expected one of the stack"),
        (x, scale[..., :1], 1, "q, scale: expected a scale for 32 numbers of x"),
        (x[:, :32], scale, 1, "q, scale: expected a scale for 32 numbers of x"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=why):
            jax.block_until_ready(calls.columns(each, Quantized(q, own), layer, geometry))


def test_kernels_are_called_for_groups_of_32_and_activations_of_8_bits() -> None:
    own = Geometry(1, "bfloat16", 1, 1, 16, 1, 16, kernels="avx2-0", weights="int8", activations="int8")

    def parameter(groups: int, dtype: Any = jnp.bfloat16) -> nnx.Dict:
        q, scale = jnp.zeros((1, 1, 8, 64), jnp.int8), jnp.zeros((1, 1, 8, groups), dtype)
        return nnx.Dict(q=nnx.Param(q), scale=nnx.Param(scale))

    assert calls.do_columns(parameter(2), 1000, own)
    assert calls.do_experts([parameter(2)] * 2, 100_000, 1, own)
    assert not calls.do_experts([parameter(2), parameter(4)], 1, 1, own)
    assert not calls.do_columns(parameter(2, jnp.float32), 1, own)
    assert not calls.do_columns(parameter(2), 1, replace(own, activations="bf16"))
    assert not calls.do_columns(parameter(2), 1, replace(own, kernels=""))
