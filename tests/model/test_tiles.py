"""KDA's prefill in the forms for machines with matrix units, against loops over tokens in float64."""

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ling3export.model.geometry import CHUNK
from ling3export.model.kda import tiled as tiles
from ling3export.model.kda.conv import convolve_tiles, picks_of
from ling3export.model.kda.recurrence import Inputs, recurrent_step
from ling3export.model.layers import l2_norm, rms_norm, rope
from ling3export.verify import formulas
from tests.support.kda_oracle import BOUNDED, close, delta_rule, random_rows
from tests.support.tolerances import KERNEL, TILES

pytestmark = pytest.mark.jit

CHUNKS, HEADS, KEY, VALUE = 16, 2, 24, 20
# First chunks of runs: one run over both tiles; several in each, one across the border; one run for each chunk.
RUNS = {"one": [0], "some": [0, 3, 5, 6, 11, 15], "each": list(range(CHUNKS))}
THREE_PASSES = 1e-4  # a chain of some twenty products, each right to 2^-16; the error of bf16's inputs is 4e-3


Scan = Callable[[tiles.Rows, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def scan_at(exact: lax.Precision) -> Scan:
    """Compiles :func:`tiles.tile_scan`.

    It returns states at the ends of runs and tiles, zeros after other chunks, and o.
    """

    def scan(rows: tiles.Rows, pool: jax.Array, first: jax.Array, held: jax.Array) -> tuple[jax.Array, jax.Array]:
        end = ends_of(first).reshape(-1, tiles.TILE)
        one = np.eye(tiles.TILE, dtype=bool)
        ended, out = tiles.tile_scan(lambda: pool, held, tiles.runs_of(first, end & one[-1], CHUNK), rows, exact)
        start = jnp.where(held, pool, 0.0)
        states = [ended.states(end & one[a], start[:, :, a]) for a in range(tiles.TILE - 1)]
        states.append(ended.last_states(end & one[-1], start[:, :, -1]))
        return jnp.where(end[:, None, :, None, None], jnp.stack(states, axis=2), 0.0), out

    return jax.jit(scan)


def ends_of(first: Any) -> Any:
    """Whether each chunk is the last of its run or of its tile."""
    return jnp.roll(first, -1) | (np.arange(CHUNKS) % tiles.TILE == tiles.TILE - 1)


exact_scan = scan_at(lax.Precision.HIGHEST)


class Case:
    """Random rows of 16 chunks, and the results of a loop over tokens."""

    def __init__(self, gate: str, starts: list[int], repeated: bool, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.rows = random_rows(rng, gate, (CHUNKS, CHUNK, HEADS), KEY, VALUE, repeated)
        self.first = np.isin(np.arange(CHUNKS), starts)
        head = np.maximum.accumulate(np.where(self.first, np.arange(CHUNKS), 0))
        self.pool = rng.normal(size=(CHUNKS, HEADS, KEY, VALUE))[head]  # the run's state, at each of its chunks

    def expected(self, held: bool) -> tuple[np.ndarray, np.ndarray]:
        state, after, out = self.pool[0], [], []
        for n in range(CHUNKS):
            if self.first[n]:
                state = self.pool[n] if held else np.zeros_like(state)
            state, o = delta_rule(state, Inputs(*(y[n] for y in self.rows)))
            after.append(state)
            out.append(o)
        return np.stack(after), np.stack(out)

    def found(self, held: bool, scan: Scan) -> tuple[np.ndarray, np.ndarray]:
        def tiled(y: np.ndarray, heads: int = 3) -> jax.Array:
            y = y.reshape(-1, tiles.TILE, *y.shape[1:])
            return jnp.asarray(np.moveaxis(y, heads, 1), jnp.float32)

        rows = tiles.Rows(*(tiled(y) for y in self.rows[:4]), tiled(self.rows[4][..., None]))
        after, out = scan(rows, tiled(self.pool, 2), jnp.asarray(self.first), jnp.asarray(held))
        after, out = np.moveaxis(after, 1, 2), np.moveaxis(out, 1, 3)
        return after.reshape(self.pool.shape), out.reshape(CHUNKS, CHUNK, HEADS, VALUE)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("starts", RUNS)
@pytest.mark.parametrize(("gate", "repeated"), [*((gate, False) for gate in BOUNDED), ("none", True), ("-2.6", True)])
def test_tiles_equal_a_loop(gate: str, starts: str, repeated: bool, held: bool):
    case = Case(gate, RUNS[starts], repeated)
    after, out = case.expected(held)
    found_after, found_out = case.found(held, exact_scan)
    assert close(found_out, out) < TILES
    ends = np.asarray(ends_of(case.first))
    assert np.max(np.abs(found_after[ends] - after[ends])) < TILES * np.max(np.abs(case.pool))


@pytest.mark.parametrize("size", [4, 16, 32, 48, 64, 80, 96, 112, 128])
def test_a_triangular_solve_by_blocks_takes_the_rows_of_any_padding(size: int):
    """Regression: prefill@48 and the other paddings whose tile is no power of two could not be built."""
    rng = np.random.default_rng(size)
    strict, y = rng.normal(size=(2, size, size)) / 4, rng.normal(size=(2, size, 5))
    found = jax.jit(tiles.unit_lower_solve_blocks)(jnp.asarray(strict, jnp.float32), jnp.asarray(y, jnp.float32))
    assert close(found, np.linalg.solve(np.eye(size) + np.tril(strict, -1), y)) < TILES


class ThreePasses:
    """``jax.numpy`` with products at precision HIGH computed as by a matrix unit: three products of bf16 halves."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def einsum(equation: str, *operands: Any, precision: lax.Precision) -> jax.Array:
        product = functools.partial(jnp.einsum, equation, precision=lax.Precision.HIGHEST)
        return ThreePasses.three_products(product, *operands) if precision == lax.Precision.HIGH else product(*operands)

    @staticmethod
    def matmul(*operands: Any, precision: lax.Precision) -> jax.Array:
        product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
        return ThreePasses.three_products(product, *operands) if precision == lax.Precision.HIGH else product(*operands)

    @staticmethod
    def three_products(product: Any, a: jax.Array, b: jax.Array) -> jax.Array:
        (high_a, low_a), (high_b, low_b) = (ThreePasses.halves(y) for y in (a, b))
        return product(high_a, high_b) + product(high_a, low_b) + product(low_a, high_b)

    @staticmethod
    def halves(y: jax.Array) -> tuple[jax.Array, jax.Array]:
        high = lax.reduce_precision(y, 8, 7)
        return high, lax.reduce_precision(y - high, 8, 7)


@pytest.mark.parametrize(("gate", "repeated"), [("published", False), ("saturated", False), ("none", True)])
def test_three_passes_are_enough_for_inputs_of_bf16(gate: str, repeated: bool, monkeypatch: pytest.MonkeyPatch):
    """bf16 models use this precision on TPU. CPU ignores the precision, so the test emulates it."""
    case = Case(gate, RUNS["some"], repeated)
    _, out = case.expected(True)
    monkeypatch.setattr(tiles, "jnp", ThreePasses())
    error = close(case.found(True, scan_at(tiles.island_precision(jnp.dtype("bfloat16"))))[1], out)
    assert TILES < error < THREE_PASSES  # the product was not exact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_with_zeros_and_ones_is_a_convolution(dtype: str):
    """Runs of any length, from a pool or from nothing, with a short last chunk, against a convolution of each run."""
    rng = np.random.default_rng(1)
    width, size, features = 3, tiles.TILE, 6
    lengths = [1, 2, 3, 16, 17, 18, 35, 60]  # chunks: 1 1 1 1 2 2 3 4, and an empty run
    first, fresh, length, pool, raw, expected, kept = [], [], [], [], [], [], []
    taps = rng.normal(size=(features, width + 1)).astype(np.float32)
    for number, tokens in enumerate([*lengths, 0]):
        old = np.zeros((width, features)) if number % 2 else rng.normal(size=(width, features)).astype(dtype)
        new = rng.normal(size=(tokens, features)).astype(dtype)
        both = np.concatenate([old, new]).astype(np.float64)
        out = formulas.silu(formulas.causal_conv(both, taps.astype(np.float64)))[width:]
        for at in range(0, max(tokens, 1), CHUNK):
            count = min(CHUNK, tokens - at)
            first.append(at == 0)
            fresh.append(at == 0 and number % 2 == 1)
            length.append(count)
            pool.append(old if not number % 2 else np.full((width, features), 7.0))
            raw.append(np.concatenate([new[at : at + count], np.full((CHUNK - count, features), 9.0, new.dtype)]))
            expected.append(out[at : at + count])
            kept.append(both[at + count : at + count + width])
    assert len(first) == CHUNKS
    picks = picks_of(*(jnp.asarray(y) for y in (first, fresh, length)), size, CHUNK, width)
    assert np.max(np.sum(np.asarray(picks, np.float32), axis=-1)) == 1
    found, found_kept = jax.jit(convolve_tiles)(
        jnp.asarray(np.stack(raw), dtype).reshape(-1, size * CHUNK, 1, features),
        jnp.asarray(np.stack(pool), dtype).reshape(-1, size, 1, width * features),
        jnp.asarray(taps.T)[:, None],
        picks,
    )
    found = np.asarray(found).reshape(CHUNKS, CHUNK, features)
    for n in range(CHUNKS):
        np.testing.assert_allclose(found[n, : length[n]], expected[n], rtol=2e-5, atol=2e-6)
    found_kept = np.asarray(found_kept, np.float64).reshape(CHUNKS, width, features)
    np.testing.assert_array_equal(found_kept, np.stack(kept).astype(dtype).astype(np.float64))


@pytest.mark.parametrize("gate", BOUNDED)
def test_a_step_by_sums_agrees_with_the_recurrence(gate: str):
    rng = np.random.default_rng(0)
    rows = random_rows(rng, gate, (5, HEADS), KEY, VALUE, False)
    states = rng.normal(size=(5, HEADS, KEY, VALUE))
    expected, read = zip(
        *(delta_rule(state, Inputs(*(y[n : n + 1] for y in rows))) for n, state in enumerate(states)), strict=True
    )
    inputs = Inputs(*(jnp.asarray(y, jnp.float32) for y in rows))
    found, out = jax.jit(lambda s, x: recurrent_step(s, x, by_sums=True))(jnp.asarray(states, jnp.float32), inputs)
    assert close(found, np.stack(expected)) < KERNEL and close(out, np.concatenate(read)) < KERNEL


@pytest.mark.parametrize("width", [64, 1536])
def test_small_things_by_products_are_the_same(width: int):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 3, width)), jnp.float32)
    weight, position = jnp.asarray(rng.normal(size=width), jnp.float32), jnp.asarray([0, 1, 8191, 131071], jnp.int32)
    turns = (6e6 ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])).astype(np.float32)
    np.testing.assert_array_equal(rope(x, position, turns, sum_by_matmul=True), rope(x, position, turns))
    assert close(l2_norm(x, "highest"), np.asarray(l2_norm(x))) < KERNEL
    assert close(rms_norm(x, weight, 1e-6, "highest"), np.asarray(rms_norm(x, weight, 1e-6))) < KERNEL


FOR_CUDA = """
import dataclasses, jax
from jax import export
from ling3export.model.kda.tiled import runs_of
first = jax.ShapeDtypeStruct((8,), bool)
program = export.export(jax.jit(lambda first: runs_of(first, first.reshape(-1, 8), 16)), platforms=("cuda",))(first)
jax.jit(dataclasses.replace(program, platforms=("cpu",)).call).lower(first).compile()
print("compiled")
"""


def test_the_runs_of_tiles_lowered_for_cuda_compile_on_the_processor():
    """Regression: `build --target cuda:h100` ended with SIGABRT when it ran its portable programs on the processor."""
    done = subprocess.run([sys.executable, "-c", FOR_CUDA], capture_output=True, text=True)
    assert done.stdout == "compiled\n", done.stderr[-2000:]
