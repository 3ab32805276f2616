"""The oracle for all forms of KDA: the delta rule as a loop over tokens in float64, and inputs with various gates."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ling3export.model.kda import recurrence as delta

Gate = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
# Log decays of a token; the first four respect the bound of -5.
GATES: dict[str, Gate] = {
    "published": lambda rng, shape: -5 / (1 + np.exp(-rng.normal(-1, 2, shape))),
    "saturated": lambda rng, shape: np.full(shape, -5.0),
    "-2.6": lambda rng, shape: np.full(shape, -2.6),
    "all or nothing": lambda rng, shape: np.where(rng.random(shape) < 0.5, -5.0, -1e-5),
    "none": lambda rng, shape: np.zeros(shape),
    "unbounded": lambda rng, shape: -rng.exponential(20, shape),
    "all at once": lambda rng, shape: np.where(rng.random(shape) < 0.2, -90.0, -1e-3),
}
BOUNDED = ("published", "saturated", "-2.6", "all or nothing", "none")


def close(found: Any, expected: np.ndarray) -> float:
    """Largest error, relative to the largest element."""
    return float(np.max(np.abs(np.asarray(found, np.float64) - expected)) / np.max(np.abs(expected)))


def random_rows(
    rng: np.random.Generator, gate: str, shape: tuple[int, ...], key: int, value: int, repeated: bool
) -> delta.Inputs:
    """Inputs in float64 of ``shape [..., H]``. If ``repeated``, all tokens have one key, written at full strength."""
    q, k = rng.normal(size=(2, *shape, key))
    if repeated:
        k[:] = k.reshape(-1, *k.shape[-2:])[0]
    q, k = (y / np.linalg.norm(y, axis=-1, keepdims=True) for y in (q, k))
    beta = np.ones(shape) if repeated else rng.random(shape)
    rows: list[Any] = [q, k, rng.normal(size=(*shape, value)), GATES[gate](rng, (*shape, key)), beta]
    return delta.Inputs(*rows)


def delta_rule(state: np.ndarray, x: delta.Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence in recurrence.py's docstring, token by token, from a state [H, K, V]: (state, o [T, H, V])."""
    out = []
    for q, k, v, g, beta in zip(*x, strict=True):
        state = np.exp(g)[:, :, None] * state
        rest = v - np.einsum("hk,hkv->hv", k, state)
        state = state + beta[:, None, None] * k[:, :, None] * rest[:, None, :]
        out.append(np.einsum("hk,hkv->hv", q, state))
    return state, np.array(out)
