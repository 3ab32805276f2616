"""Every form of the native kernels that runs here, over random shapes, against plain products in float64."""

import ctypes
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from artifacts_fixture import ROOT
from direct import relative
from kda_oracle import close, delta_rule, random_rows
from ling3export.compile.kernels import compiled
from ling3export.errors import ArtifactError
from ling3export.model.geometry import Geometry
from ling3export.model.kda.recurrence import Inputs
from ling3export.model.native import calls
from ling3export.plan.kernels import LEVELS, compiler, ending
from ling3export.runners.load import kernels
from ling3export.runners.load.environment import cpu_features
from ling3export.runners.load.kernels import register

HERE = [each for each in LEVELS if platform.machine() in each.machines and {*cpu_features()}.issuperset(each.features)]
ERROR = 1e-6  # fp32 sums of at most 300 products of normal numbers; bf16 operands are exact in fp32
HIDDEN = 4e-3  # between the two products of an expert stands a rounding to bf16: half an ulp is 2e-3
WEIGHTS = 4e-3  # weights of the softmax are rounded to bf16: half an ulp is 2e-3
CASES = 4
addresses = set()  # where the libraries of the forms have their code


@pytest.fixture(params=HERE, ids=lambda level: level.name, scope="module")
def geometry(request: pytest.FixtureRequest) -> Geometry:
    """A geometry whose programs call one form of the kernels, which is compiled once and kept between runs."""
    if (command := compiler()) is None:
        pytest.skip("no C++ compiler")
    name = ending(request.param)
    kept = ROOT / ".cache" / "tests" / f"kernels-{name}.so"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(compiled(command, request.param))
    register(kept.read_bytes(), name)
    addresses.add(ctypes.cast(kernels._registered[name].ling3_columns, ctypes.c_void_p).value)
    assert len(addresses) == len(kernels._registered), "each form is a library of its own"
    return Geometry(
        tp=1, dtype="bfloat16", slots=1, pages=1, page_size=16, max_pages=1, latent_row=16, kernels=name
    )  # fmt: skip


def draw(rng: np.random.Generator, *shape: int) -> tuple[Any, np.ndarray]:
    """Random bf16 numbers for jax, and the same in float64."""
    value = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    return value, np.asarray(value.astype(jnp.float32), np.float64)


def padded(rng: np.random.Generator, *shape: int) -> tuple[Any, np.ndarray]:
    """:func:`draw` with rows of padding at the end: zeros, which kernels pass over."""
    value, wide = draw(rng, *shape)
    used = int(rng.integers(1, shape[0], endpoint=True))
    return value.at[used:].set(0), wide[:used]


def check(found: jax.Array, expected: np.ndarray) -> None:
    """All rows of what is expected, and zeros below."""
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
    rows, shards, layers, each, width, out = sizes(rng, 20, 3, 2, 3, 100, 100)
    weight, weight64 = draw(rng, shards, layers, each, width, out)
    for axis, equation, size in ((0, "thx,hxy->thy", width), (1, "thx,hyx->thy", out)):
        x, x64 = padded(rng, rows, shards * each, size)
        found = calls.heads(x, weight, layers - 1, axis, geometry)
        own = weight64[:, layers - 1].reshape(shards * each, width, out)
        check(found, np.einsum(equation, x64, own))


@pytest.mark.parametrize("seed", range(CASES))
def test_experts_of_any_choice(geometry: Geometry, seed: int) -> None:
    """Tokens that choose no expert of this device give zeros; many tokens may choose the same one."""
    rng = np.random.default_rng(seed)
    tokens, shards, layers, each, width, dim, top = sizes(rng, 150, 3, 2, 3, 90, 200, 4)
    x, x64 = draw(rng, tokens, dim)
    up, up64 = draw(rng, shards, layers, each, 2, width, dim)
    down, down64 = draw(rng, shards, layers, each, dim, width)
    chosen = rng.integers(-1, shards * each + 1, (tokens, top)).astype(np.int32)
    share = rng.random((tokens, top)).astype(np.float32)
    found = np.asarray(calls.experts(x, up, down, 0, jnp.asarray(chosen), jnp.asarray(share), geometry))
    expected = np.zeros((tokens, dim))
    for expert in range(shards * each):
        gate_up = up64[:, 0].reshape(-1, 2, width, dim)[expert]
        gate, y = np.einsum("td,gfd->gtf", x64, gate_up)
        out = gate / (1 + np.exp(-gate)) * y @ down64[:, 0].reshape(-1, dim, width)[expert].T
        expected += out * np.where(chosen == expert, share, 0).sum(axis=1, keepdims=True)
    none = ~((chosen >= 0) & (chosen < shards * each)).any(axis=1)
    assert (found[none] == 0).all()
    if expected.any():
        assert relative(found.ravel(), expected.ravel()) < HIDDEN


@pytest.mark.parametrize("seed", range(CASES))
def test_one_token_of_the_recurrence(geometry: Geometry, seed: int) -> None:
    """States that no row has, and those of rows of padding, stay as they are, bit for bit."""
    rng = np.random.default_rng(seed)
    layers, rows, heads, keys, values = sizes(rng, 3, 6, 4, 70, 150)
    used, layer, slots = int(rng.integers(rows + 1)), int(rng.integers(layers)), rows + 2
    pool, slot = rng.normal(size=(layers, slots, heads, keys, values)), rng.permutation(slots)[:rows]
    x = random_rows(rng, "published", (rows, heads), keys, values, False)
    pool32, x32 = jnp.asarray(pool, jnp.float32), jax.tree.map(lambda y: jnp.asarray(y, jnp.float32), x)
    found, o = calls.recurrence(
        pool32, layer, jnp.asarray(slot, jnp.int32), jnp.int32(used), jnp.exp(x32.g), x32.beta[..., None] * x32.k,
        x32.q, x32.k, x32.v, geometry,
    )  # fmt: skip
    expected, wanted = np.array(pool32, np.float64), np.zeros((rows, heads, values))
    for b in range(used):
        row = Inputs(*(y[b : b + 1] for y in x))
        expected[layer, slot[b]], wanted[b : b + 1] = delta_rule(expected[layer, slot[b]], row)
    assert close(found, expected) < ERROR
    assert close(o, wanted) < ERROR if used else not np.asarray(o).any()
    assert not np.asarray(o[used:]).any()
    others = np.ones(pool.shape[:2], bool)
    others[layer, slot[:used]] = False
    np.testing.assert_array_equal(np.asarray(found)[others], np.asarray(pool32)[others])


@pytest.mark.parametrize("seed", range(3 * CASES))
def test_attention_over_pages(geometry: Geometry, seed: int) -> None:
    """Any lengths, of more than one task, too; a NaN behind a length, or in a page that nobody has, does not count."""
    rng = np.random.default_rng(seed)
    layers, rows, heads, rank, rope, page, columns = sizes(rng, 3, 5, 70, 90, 20, 300, 5)
    pages, layer = rows * columns + 1, int(rng.integers(layers))
    table = 1 + rng.permutation(rows * columns).reshape(rows, columns)
    length = rng.integers(0, page * columns, rows, endpoint=True)
    query, query64 = draw(rng, rows, heads, rank + rope)
    query, query64 = query / 4, query64 / 4  # exact; so that weights are neither all alike nor one of them all
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


def test_attention_looks_at_no_page_behind_the_length(geometry: Geometry) -> None:
    query, pool = jnp.ones((1, 2, 8), jnp.bfloat16), jnp.ones((1, 3, 4, 8), jnp.bfloat16)
    found = calls.attention(query, pool, 0, jnp.int32([[2, 99]]), jnp.int32([4]), 8, geometry)
    assert np.asarray(found == 1).all()


def test_a_slot_outside_of_the_pool_is_refused(geometry: Geometry) -> None:
    pool, row = jnp.ones((1, 2, 1, 4, 4)), jnp.ones((1, 1, 4))
    with pytest.raises(jax.errors.JaxRuntimeError, match="slot: expected one of the pool"):
        jax.block_until_ready(calls.recurrence(pool, 0, jnp.int32([2]), jnp.int32(1), *[row] * 5, geometry))


def test_a_layer_outside_of_its_stack_is_refused(geometry: Geometry) -> None:
    x, weight = jnp.ones((1, 8), jnp.bfloat16), jnp.ones((1, 2, 4, 8), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="layer: expected one of the stack"):
        jax.block_until_ready(calls.columns(x, weight, 2, geometry))


def test_a_library_of_an_older_version_has_fewer_kernels(geometry: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    library = (ROOT / ".cache" / "tests" / f"kernels-{geometry.kernels}.so").read_bytes()
    monkeypatch.setattr(kernels, "_registered", {})
    monkeypatch.setattr(kernels, "HANDLERS", (*kernels.HANDLERS, "later"))
    register(library, f"{geometry.kernels}-older")
    monkeypatch.setattr(kernels, "HANDLERS", ("later",))
    with pytest.raises(ArtifactError, match="none of later in it"):
        register(library, f"{geometry.kernels}-none")
