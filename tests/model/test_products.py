"""Products with one layer of a stack, by TP shards, heads and pieces, against one plain product."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ling3export.model import products
from ling3export.model.geometry import Geometry
from tests.support.direct import relative

LAYER, DIM, ROWS = 1, 24, (1, 2, 5)
GEOMETRY = Geometry(tp=1, dtype="float32", slots=1, pages=1, page_size=16, max_pages=1, latent_row=16)
# fp32 products of random normal numbers; bf16 operands are exact in fp32, so the same holds of them.
ERROR = 1e-6


@pytest.fixture(params=["one by one", "merged on CPU", "merged"], autouse=True)
def geometry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Geometry:
    """The form of the products: by the size of a layer, and by the loop over layers."""
    monkeypatch.setattr(products, "CACHED", 0 if request.param == "one by one" else 2**30)
    monkeypatch.setattr(products, "PIECE", 7)
    return replace(GEOMETRY, form="tiles") if request.param == "merged" else GEOMETRY


def draw(*shape: int, seed: int, dtype: str) -> tuple[Any, np.ndarray]:
    """Random numbers for jax, and the same in float64."""
    value = jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)
    return value, np.asarray(value.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS)
def test_outputs_split(rows: int, dtype: str, geometry: Geometry) -> None:
    x, x64 = draw(rows, DIM, seed=0, dtype=dtype)
    weight, weight64 = draw(4, 3, 2, 5, DIM, seed=1, dtype=dtype)
    found = products.column_parallel(x, nnx.Param(weight), LAYER, geometry)
    assert found.shape == (rows, 4, 2, 5) and found.dtype == jnp.float32
    assert relative(np.ravel(found), np.einsum("td,shkd->tshk", x64, weight64[:, LAYER]).ravel()) < ERROR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS)
def test_inputs_split(rows: int, dtype: str, geometry: Geometry) -> None:
    x, x64 = draw(rows, 4 * 6, seed=0, dtype=dtype)
    weight, weight64 = draw(4, 3, 6, DIM, seed=1, dtype=dtype)
    found = products.row_parallel(x, nnx.Param(weight), LAYER, geometry)
    assert found.dtype == jnp.float32
    assert relative(found, x64 @ weight64[:, LAYER].reshape(-1, DIM)) < ERROR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", ROWS)
def test_each_heads_own_matrix(rows: int, axis: int, dtype: str, geometry: Geometry) -> None:
    x, x64 = draw(rows, 8, (6, 10)[axis], seed=0, dtype=dtype)
    weight, weight64 = draw(4, 3, 2, 6, 10, seed=1, dtype=dtype)
    found = products.per_head(x, nnx.Param(weight), LAYER, axis, geometry)
    assert found.shape == (rows, 8, (10, 6)[axis]) and found.dtype == jnp.float32
    expected = np.einsum(("thn,hnr->thr", "thr,hnr->thn")[axis], x64, weight64[:, LAYER].reshape(8, 6, 10))
    assert relative(np.ravel(found), expected.ravel()) < ERROR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS)
def test_a_table(rows: int, dtype: str, geometry: Geometry) -> None:
    x, x64 = draw(rows, DIM, seed=0, dtype=dtype)
    table, table64 = draw(4, 15, DIM, seed=1, dtype=dtype)
    found = products.vocab_parallel(x, nnx.Param(table), geometry)
    assert found.shape == (rows, 60) and found.dtype == jnp.float32
    assert relative(found, x64 @ table64.reshape(-1, DIM).T) < ERROR
