"""Every form of the native kernels that runs on this machine, with random shapes, against float64 products."""

import ctypes
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ling3export.foundation.errors import ArtifactError
from ling3export.machine import kernels
from ling3export.machine.environment import cpu_features
from ling3export.machine.kernels import register
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.kda.recurrence import Inputs
from ling3export.model.native import calls
from ling3export.model.program import bind
from ling3export.plan.kernels import LEVELS, compiler, ending
from ling3export.verify import formulas
from tests.support import emulated
from tests.support.artifacts_fixture import kept_kernels
from tests.support.direct import Direct, relative
from tests.support.kda_oracle import close, delta_rule
from tests.support.numerics import Case
from tests.support.tiny import tiny_fields

pytestmark = pytest.mark.jit

HERE = [each for each in LEVELS if platform.machine() in each.machines and {*cpu_features()}.issuperset(each.features)]
# The best form of this machine and the plain one; forms between them share the source.
FORMS = [
    pytest.param(level, id=level.name, marks=[pytest.mark.extras] * (level not in (HERE[0], HERE[-1])))
    for level in HERE
]
EMULATED = [
    pytest.param(level, id=f"{level.name} emulated", marks=pytest.mark.extras)
    for level in emulated.LEVELS
    if level not in HERE
]
OF_XLA = pytest.mark.parametrize("geometry", FORMS, indirect=True, scope="module")  # in programs, or by its loader
ERROR = 1e-6  # fp32 sums of at most 300 products of normal numbers; bf16 operands are exact in fp32
HIDDEN = 4e-3  # an expert rounds to bf16 between its two products: half an ulp is 2e-3
WEIGHTS = 4e-3  # weights of the softmax are rounded to bf16: half an ulp is 2e-3
CURVES = 3e-6  # exponentials are right to 3e-7, and a decay's exponent is up to 5 times that
CASES = 4
addresses = set()  # code addresses of the forms' libraries


@pytest.fixture(params=[*FORMS, *EMULATED], scope="module")
def geometry(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Geometry]:
    """A geometry whose programs call one form of the kernels, which is compiled once and kept between runs."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    name = ending(request.param)
    own = Geometry(tp=1, dtype="bfloat16", slots=1, pages=1, page_size=16, max_pages=1, latent_row=16, kernels=name)
    if request.param not in HERE:
        with emulated.calling(request.param, name, tmp_path_factory.mktemp("emulated")):
            yield own
        return
    register(kept_kernels(name), name)
    addresses.add(ctypes.cast(kernels.LIBRARIES[name].ling3_columns, ctypes.c_void_p).value)
    assert len(addresses) == len(kernels.LIBRARIES), "each form is a library of its own"
    yield own


def draw(rng: np.random.Generator, *shape: int) -> tuple[Any, np.ndarray]:
    """Random bf16 numbers for jax, and the same in float64."""
    value = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    return value, np.asarray(value.astype(jnp.float32), np.float64)


def padded(rng: np.random.Generator, *shape: int) -> tuple[Any, np.ndarray]:
    """:func:`draw` with rows of padding at the end: zeros, which kernels skip."""
    value, wide = draw(rng, *shape)
    used = int(rng.integers(1, shape[0], endpoint=True))
    return value.at[used:].set(0), wide[:used]


def check(found: jax.Array, expected: np.ndarray) -> None:
    """The first rows are as expected, and the rows after them are zeros."""
    used = len(expected)
    assert relative(found[:used], expected) < ERROR
    assert not np.asarray(found[used:]).any()


def sizes(rng: np.random.Generator, *most: int) -> list[int]:
    return [int(rng.integers(1, each, endpoint=True)) for each in most]


@pytest.mark.parametrize("unit", [1, 32], ids=["any", "of whole tiles"])
@pytest.mark.parametrize("seed", range(CASES))
def test_products_of_any_shape(geometry: Geometry, seed: int, unit: int) -> None:
    rng = np.random.default_rng(seed)
    rows, shards, layers, out, depth = sizes(rng, 70 if unit == 1 else 16, 3, 3, 150 // unit, 300 // unit)
    out, depth, layer = out * unit, depth * unit, int(rng.integers(layers))
    weight, weight64 = draw(rng, shards, layers, out, depth)
    x, x64 = padded(rng, rows, depth)
    check(calls.columns(x, weight, layer, geometry), np.einsum("td,sod->tso", x64, weight64[:, layer]))
    x, x64 = padded(rng, rows, shards * out)
    check(calls.rows(x, weight, layer, geometry), x64 @ weight64[:, layer].reshape(-1, depth))


@pytest.mark.parametrize("seed", range(CASES))
def test_each_heads_own_matrix(geometry: Geometry, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, shards, layers, each, width, out = sizes(rng, 70, 3, 2, 3, 100, 100)
    weight, weight64 = draw(rng, shards, layers, each, width, out)
    for axis, equation, size in ((0, "thx,hxy->thy", width), (1, "thx,hyx->thy", out)):
        x, x64 = padded(rng, rows, shards * each, size)
        found = calls.heads(x, weight, layers - 1, axis, geometry)
        own = weight64[:, layers - 1].reshape(shards * each, width, out)
        check(found, np.einsum(equation, x64, own))


@pytest.mark.parametrize("limit", [None, 0.5], ids=["no limit", "a limit"])
@pytest.mark.parametrize("seed", range(CASES))
def test_experts_of_any_choice(geometry: Geometry, seed: int, limit: float | None) -> None:
    """Tokens that choose no expert of this device give zeros; many tokens may choose the same one."""
    rng = np.random.default_rng(seed)
    tokens, shards, layers, each, width, dim, top = sizes(rng, 150, 3, 2, 3, 90, 200, 4)
    x, x64 = draw(rng, tokens, dim)
    up, up64 = draw(rng, shards, layers, each, 2, width, dim)
    down, down64 = draw(rng, shards, layers, each, dim, width)
    chosen = rng.integers(-1, shards * each + 1, (tokens, top)).astype(np.int32)
    share = rng.random((tokens, top)).astype(np.float32)
    of_layer = None if limit is None else jnp.float32(limit)
    found = np.asarray(calls.experts(x, up, down, 0, jnp.asarray(chosen), jnp.asarray(share), of_layer, geometry))
    check_experts(found, x64, up64, down64, chosen, share, limit)


def check_experts(
    found: np.ndarray,
    x64: np.ndarray,
    up64: np.ndarray,
    down64: np.ndarray,
    chosen: np.ndarray,
    share: np.ndarray,
    limit: float | None,
    hidden_as: Callable[[np.ndarray], np.ndarray] = lambda hidden: hidden,
) -> None:
    """Checks ``found``, the output of layer 0's experts; ``hidden_as`` rounds the values between their products."""
    (tokens, dim), width = x64.shape, up64.shape[-2]
    stacks = zip(up64[:, 0].reshape(-1, 2, width, dim), down64[:, 0].reshape(-1, dim, width), strict=True)
    expected = np.zeros((tokens, dim))
    for expert, (gate_up, down) in enumerate(stacks):
        gate, up = np.einsum("td,gfd->gtf", x64, gate_up)
        gated = formulas.silu(gate)
        if limit is not None:
            gated, up = np.minimum(gated, limit), np.clip(up, -limit, limit)
        expected += hidden_as(gated * up) @ down.T * np.where(chosen == expert, share, 0).sum(axis=1, keepdims=True)
    none = ~((chosen >= 0) & (chosen <= expert)).any(axis=1)
    assert (found[none] == 0).all()
    if expected.any():
        assert relative(found.ravel(), expected.ravel()) < HIDDEN


@OF_XLA
def test_the_limits_of_a_models_layers_reach_the_kernel(geometry: Geometry, tmp_path: Path) -> None:
    """Regression: programs of models with limits called no kernel. The last layer has no limit."""
    limits = {"expert_swiglu_limit_list": [0, 0.02]}
    case = Case(tmp_path / "checkpoint", (1,), num_hidden_layers=3, **limits)
    direct = Direct(case.config, case.read, dtype="bfloat16")
    x = np.random.default_rng(0).normal(size=(3, case.config.hidden_size)).astype(np.float32)
    ways = [
        (case.config, direct.geometry),
        (case.config, replace(direct.geometry, kernels=geometry.kernels)),
        (replace(case.config, expert_swiglu_limit_list=None), direct.geometry),
    ]

    def body(params: Any, x: jax.Array) -> list[jax.Array]:
        both = [bind(*way)(params).moe for way in ways]
        return [jnp.stack([moe(x, layer, jnp.ones(3, bool)) for layer in (0, 1)]) for moe in both]

    mapped = jax.shard_map(body, mesh=direct.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    program = jax.jit(mapped).lower(direct.params, x)
    assert f"ling3_experts.{geometry.kernels}" in program.as_text()
    plain, native, without = (np.asarray(each).reshape(2, -1) for each in program.compile()(direct.params, x))
    assert relative(native, plain) < HIDDEN
    assert relative(without[0], plain[0]) > 0.1
    np.testing.assert_array_equal(without[1], plain[1])


@pytest.mark.parametrize("seed", range(CASES))
def test_the_best_of_many_logits(geometry: Geometry, seed: int) -> None:
    """The results are XLA's for rows of any width, several largest values, and logits that are not finite."""
    rng = np.random.default_rng(seed)
    rows, offset = int(rng.integers(8, 20)), int(rng.integers(1000))
    width = int(rng.integers(1, (40, 600, 20_000, 70_000)[seed]))
    logits = rng.normal(scale=10, size=(rows, width)).astype(np.float32)
    logits[0] = logits[0, 0]  # all equal
    logits[1, rng.integers(width, size=3)] = logits[1].max() + 1
    logits[2, 1:] = -np.inf
    logits[3], logits[4, rng.integers(width)], logits[5, rng.integers(width)] = -np.inf, np.inf, np.nan
    logits[6], logits[7, : width // 2] = 0, 0  # rows of padding are zeros, which are skipped
    most, total, token = np.asarray(calls.best(jnp.asarray(logits), jnp.int32(offset), geometry))
    usable = np.array([0, 1, 2, *range(6, rows)])
    wide = logits[usable].astype(np.float64)
    np.testing.assert_array_equal(most[usable], wide.max(axis=1))
    np.testing.assert_array_equal(token[usable], offset + wide.argmax(axis=1))
    assert relative(total[usable], np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1)) < CURVES
    assert total[3] == 0 and most[3] == -np.inf
    assert np.isnan(total[4]) and np.isnan(total[5])


def config(**changes: Any) -> Config:
    return replace(Config.from_dict(tiny_fields()), **changes)


@pytest.mark.parametrize("seed", range(CASES))
def test_the_router_chooses_as_the_reference_does(geometry: Geometry, seed: int) -> None:
    """Includes equal scores: an expert that repeats another one never comes first."""
    rng = np.random.default_rng(seed)
    tokens, layers, groups, each, dim = sizes(rng, 70, 3, 5, 9, 300)
    open_groups = int(rng.integers(1, groups, endpoint=True))
    top = int(rng.integers(1, open_groups * each, endpoint=True))
    x, gate = (rng.normal(size=shape).astype(np.float32) for shape in ((tokens, dim), (layers, groups * each, dim)))
    used = int(rng.integers(1, tokens, endpoint=True))
    x[used:] = 0
    bias = rng.normal(size=(layers, groups * each)).astype(np.float32)
    gate[:, -1], bias[:, -1] = gate[:, 0], bias[:, 0]
    own = config(n_group=groups, topk_group=open_groups, num_experts_per_tok=top, num_experts=groups * each)
    chosen, share = calls.route(jnp.asarray(x), jnp.asarray(gate), jnp.asarray(bias), layers - 1, own, geometry)
    scores = formulas.sigmoid(x[:used].astype(np.float64) @ gate[-1].T.astype(np.float64))
    scores[:, -1] = scores[:, 0]
    wanted = formulas.route(scores, bias[-1], groups, open_groups, top, own.routed_scaling_factor)
    np.testing.assert_array_equal(chosen[:used], wanted.experts)
    assert relative(np.asarray(share[:used]), wanted.weights) < CURVES
    assert (np.asarray(chosen[used:]) == -1).all()
    assert not np.asarray(share[used:]).any()


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded gate", "unbounded gate"])
@pytest.mark.parametrize("seed", range(CASES))
def test_one_token_of_kda(geometry: Geometry, seed: int, bound: float | None) -> None:
    """States and windows that no row uses, and those of padding rows, stay unchanged bit for bit."""
    rng = np.random.default_rng(seed)
    layers, rows, shards, each, key, dim, taps = sizes(rng, 3, 6, 2, 3, 70, 200, 5)
    heads, used, layer, slots = shards * each, int(rng.integers(rows + 1)), int(rng.integers(layers)), rows + 2
    own = config(head_dim=key, num_attention_heads=heads, kda_safe_gate=bound is not None)
    pool = rng.normal(size=(layers, slots, heads, key, key)).astype(np.float32)
    windows, windows64 = draw(rng, layers, slots, heads, (taps - 1) * 3 * key)
    x, x64 = draw(rng, rows, dim)
    y, slot = rng.normal(size=(rows, heads, 5 * key)).astype(np.float32), rng.permutation(slots)[:rows]
    b_proj, b_proj64 = draw(rng, shards, layers, each, dim)
    conv1d, conv1d64 = draw(rng, shards, layers, each, 3, key, taps)
    o_norm, o_norm64 = draw(rng, layers, key)
    a_log, dt_bias = (rng.normal(size=(shards, layers, each, *more)).astype(np.float32) for more in ((), (key,)))
    weights = calls.KdaWeights(b_proj, conv1d, jnp.asarray(a_log), jnp.asarray(dt_bias), o_norm)
    found, kept, out = calls.token(
        jnp.asarray(pool),
        windows,
        jnp.asarray(y),
        x,
        weights,
        layer,
        jnp.asarray(slot, jnp.int32),
        jnp.int32(used),
        own,
        geometry,
    )
    expected, wanted = pool.astype(np.float64), np.zeros((rows, heads, key))
    raw = np.asarray(jnp.asarray(y[..., : 3 * key], jnp.bfloat16), np.float64)
    new, f, gate = np.array(windows64), y[..., 3 * key : 4 * key], y[..., 4 * key :]
    filters = conv1d64[:, layer].reshape(heads, 3 * key, taps)
    for b in range(used):
        inputs = np.concatenate([windows64[layer, slot[b]].reshape(heads, taps - 1, 3 * key), raw[b][:, None]], axis=1)
        q, k, v = np.split(formulas.silu(np.einsum("hwc,hcw->hc", inputs, filters)), 3, axis=-1)
        new[layer, slot[b]] = inputs[:, 1:].reshape(heads, -1)
        g = formulas.kda_log_decay(
            f[b : b + 1].astype(np.float64),
            a_log[:, layer].reshape(heads),
            dt_bias[:, layer].reshape(heads, key),
            bound,
        )
        beta = formulas.sigmoid(b_proj64[:, layer].reshape(heads, dim) @ x64[b])
        row = Inputs(formulas.l2_norm(q)[None] * key**-0.5, formulas.l2_norm(k)[None], v[None], g, beta[None])
        expected[layer, slot[b]], o = delta_rule(expected[layer, slot[b]], row)
        wanted[b] = formulas.rms_norm(o[0], o_norm64[layer], own.rms_norm_eps) * formulas.sigmoid(gate[b])
    assert close(found, expected) < CURVES
    if used:
        assert relative(np.asarray(out[:used], np.float64).reshape(used, -1), wanted[:used].reshape(used, -1)) < HIDDEN
    assert not np.asarray(out[used:]).any()
    np.testing.assert_array_equal(np.asarray(kept, np.float64), new)
    others = np.ones(pool.shape[:2], bool)
    others[layer, slot[:used]] = False
    np.testing.assert_array_equal(np.asarray(found)[others], pool[others])


@pytest.mark.parametrize("seed", range(3 * CASES))
def test_attention_over_pages(geometry: Geometry, seed: int) -> None:
    """Any lengths, also with several tasks; NaN after a length, or in a free page, does not matter."""
    rng = np.random.default_rng(seed)
    layers, rows, heads, rank, rope, page, columns = sizes(rng, 3, 5, 70, 90, 20, 300, 5)
    pages, layer = rows * columns + 1, int(rng.integers(layers))
    table = 1 + rng.permutation(rows * columns).reshape(rows, columns)
    length = rng.integers(0, page * columns, rows, endpoint=True)
    query, query64 = draw(rng, rows, heads, rank + rope)
    # exact; so that the weights are neither all equal nor concentrated on one position
    query, query64 = query / 4, query64 / 4
    pool, pool64 = draw(rng, layers, pages, page, rank + rope)
    expected, behind = np.zeros((rows, heads, rank)), np.ones((pages, page), bool)
    for b in range(rows):
        for j, number in enumerate(table[b]):
            behind[number, : max(0, length[b] - j * page)] = False
        if length[b]:
            cached = pool64[layer, table[b]].reshape(-1, rank + rope)[: length[b]]
            scores = query64[b] @ cached.T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            expected[b] = weights @ cached[:, :rank] / weights.sum(axis=1, keepdims=True)
    pool = jnp.where(jnp.asarray(behind)[None, :, :, None], jnp.nan, pool).astype(jnp.bfloat16)
    batch = (jnp.asarray(each, jnp.int32) for each in (table, length))
    found = np.asarray(calls.attention(query, pool, layer, *batch, rank, geometry))
    assert not found[length == 0].any()
    if length.any():
        assert relative(found[length > 0], expected[length > 0]) < WEIGHTS


@pytest.mark.parametrize(
    ("table", "length", "why"),
    [
        ([0, 3], 5, "table: expected pages"),
        ([0, -1], 8, "table: expected pages"),
        ([0, 1], 9, "length: expected no more"),
    ],
)
def test_attention_refuses_what_lies_outside(geometry: Geometry, table: list[int], length: int, why: str) -> None:
    query, pool = jnp.ones((1, 2, 8), jnp.bfloat16), jnp.ones((1, 3, 4, 8), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match=why):
        jax.block_until_ready(calls.attention(query, pool, 0, jnp.int32([table]), jnp.int32([length]), 8, geometry))


def test_attention_reads_no_page_after_the_length(geometry: Geometry) -> None:
    query, pool = jnp.ones((1, 2, 8), jnp.bfloat16), jnp.ones((1, 3, 4, 8), jnp.bfloat16)
    found = calls.attention(query, pool, 0, jnp.int32([[2, 99]]), jnp.int32([4]), 8, geometry)
    assert np.asarray(found == 1).all()


def test_a_slot_outside_of_the_pool_is_refused(geometry: Geometry) -> None:
    pool, windows = jnp.ones((1, 2, 1, 4, 4)), jnp.ones((1, 2, 1, 36), jnp.bfloat16)
    wide = {"b_proj": (1, 1, 1, 8), "conv1d": (1, 1, 1, 3, 4, 4), "o_norm": (1, 4)}
    weights = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in wide.items()}
    found = calls.KdaWeights(**weights, a_log=jnp.ones((1, 1, 1)), dt_bias=jnp.ones((1, 1, 1, 4)))
    y, x, own = jnp.ones((1, 1, 20)), jnp.ones((1, 8), jnp.bfloat16), config(head_dim=4, num_attention_heads=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="slot: expected one of the pool"):
        jax.block_until_ready(calls.token(pool, windows, y, x, found, 0, jnp.int32([2]), jnp.int32(1), own, geometry))


def test_a_layer_outside_of_its_stack_is_refused(geometry: Geometry) -> None:
    x, weight = jnp.ones((1, 8), jnp.bfloat16), jnp.ones((1, 2, 4, 8), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="layer: expected one of the stack"):
        jax.block_until_ready(calls.columns(x, weight, 2, geometry))


@OF_XLA
def test_a_library_without_a_kernel_is_refused(geometry: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LIBRARIES", {})
    monkeypatch.setattr(kernels, "HANDLERS", (*kernels.HANDLERS, "later"))
    with pytest.raises(ArtifactError, match="undefined symbol: ling3_later"):
        register(kept_kernels(geometry.kernels), f"{geometry.kernels}-none")
