"""Seeded random weights that expose a wrong model: each tensor's distribution, and a fast generator of it.

Plain small random weights hide mistakes: norms of one, an output norm whose eps never matters, a router that a bias
never moves, conv taps that read the same backwards. The distributions below are chosen so that every such mistake
moves the logits, while activations stay of order one through any number of layers.

A tensor's bytes depend only on its name, its shape and the seed, never on the order of generation.
"""

import functools
import hashlib
import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ling3export.foundation.dtypes import BY_CODE
from ling3export.model.config import Config
from ling3export.model.parameters import TensorInfo, expected_tensors

_LEVELS = 1 << 16  # quantiles; 16 random bits pick one for each value
_BLOCK = 1 << 16  # elements a step: indices and values stay in the processor's cache
_BLOCKS_A_YIELD = 16


class Recipe(NamedTuple):
    """A tensor's distribution: quantiles ("normal": variance 1, "uniform": 0 to 1) times ``scale`` plus ``shift``.

    A ``shift`` of several numbers runs along the last axis.
    """

    quantiles: str
    scale: float
    shift: float | tuple[float, ...] = 0.0


def _linear(fan_in: int, gain: float = 1.0) -> Recipe:
    """A matrix that gives inputs of variance 1 the standard deviation ``gain``."""
    return Recipe("normal", gain / fan_in**0.5)


_NORM = Recipe("uniform", 1.0, 0.5)  # unlike 1
_TINY_V = 0.03  # gain of v_proj in some layers: the mean square before the output norm is of the order of its eps, 1e-6


def recipe(name: str, info: TensorInfo, config: Config) -> Recipe:
    """The distribution of a tensor, by the module it belongs to.

    Gains balance two aims, both measured against the float64 reference: a mistake in any single step must move the
    logits by several percent, yet rounding to bf16 must not (0.02 in 8 layers, 0.1 in 24), although it flips routes.
    """
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if module.endswith("norm"):
        return _NORM
    if ".attention." in name:
        layer = int(name.split(".")[2])
        return _kda_recipe(module, info, config, layer) if layer in config.layers("kda") else _mla_recipe(module, info)
    if module == "down_proj":
        routed, shared, dense = 0.28, 0.4, 0.5
        return _linear(info.shape[-1], routed if ".experts." in name else shared if "shared" in name else dense)
    if module == "expert_bias":
        return Recipe("uniform", 0.7, -0.35)  # of the order of the scores' spread: it changes choices
    if module == "word_embeddings":
        return Recipe("normal", 1.0)
    # Logits that differ by a few; all else keeps a variance of 1.
    return _linear(info.shape[-1], 1.5 if module == "lm_head" else 1.0)


def _kda_recipe(module: str, info: TensorInfo, config: Config, layer: int) -> Recipe:
    if module.endswith("conv1d"):
        return Recipe("normal", 0.25, _taps(info.shape[-1]))
    # Log decays from about -1e-5 a token (remembers all) to -4.9 (forgets at once), spread over and within heads.
    if module == "A_log":
        return Recipe("uniform", 0.2, tuple(np.linspace(-1.0, 1.0, info.shape[0]).tolist()))
    if module == "dt_bias":
        return Recipe("uniform", 6.0, -4.0)
    tiny = config.layers("kda").index(layer) % 2 == 1
    gains = {
        # Past the bend of SiLU keys resemble each other, and what a state holds is read back by later tokens.
        "q_proj": 2.0,
        "k_proj": 2.0,
        "v_proj": _TINY_V if tiny else 1.0,
        "f_proj": 0.5,
        "b_proj": 2.0,
        "g_proj": 1.5,
        "o_proj": 0.7,
    }
    return _linear(info.shape[-1], gains[module])


def _mla_recipe(module: str, info: TensorInfo) -> Recipe:
    # Peaked enough that a wrong rotation picks other tokens and that values are not averaged away.
    gains = {"q_b_proj": 1.5, "q_proj": 1.5, "g_proj": 2.0, "dense": 1.5}
    return _linear(info.shape[-1], gains.get(module, 1.0))


def _taps(count: int) -> tuple[float, ...]:
    """Centres of the conv taps: growing towards the current token, with a sign change, so that no reversal fits."""
    return tuple((-0.5 if age % 2 else 1.0) * 0.6**age for age in reversed(range(count)))


def blocks(
    name: str, info: TensorInfo, config: Config, seed: int, dtype: str, distribution: Recipe | None = None
) -> Iterator[memoryview]:
    """The tensor's bytes in ascending order; a block is valid until the next one is read.

    The default distribution is :func:`recipe`'s.
    """
    distribution = distribution or recipe(name, info, config)
    bits = np.random.SFC64(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16]))
    if isinstance(distribution.shift, tuple):
        table = _table(distribution.quantiles, distribution.scale, 0.0, "F32")
        levels = bits.random_raw(-(-_size(info) // 4)).view(np.uint16)[: _size(info)]
        values = table[levels].reshape(info.shape) + np.array(distribution.shift, np.float32)
        yield memoryview(values.astype(BY_CODE[dtype].numpy).view(np.uint8).reshape(-1))
        return
    table = _table(distribution.quantiles, distribution.scale, distribution.shift, dtype)
    buffer = np.empty(_BLOCKS_A_YIELD * _BLOCK, table.dtype)
    for start in range(0, _size(info), len(buffer)):
        count = min(len(buffer), _size(info) - start)
        for low in range(0, count, _BLOCK):
            out = buffer[low : min(low + _BLOCK, count)]
            levels = bits.random_raw(-(-len(out) // 4)).view(np.uint16)[: len(out)]
            np.take(table, levels, out=out, mode="clip")  # "clip" skips numpy's bounds check and its copy
        yield memoryview(buffer[:count].view(np.uint8))


def whole(
    name: str, info: TensorInfo, config: Config, seed: int, dtype: str, distribution: Recipe | None = None
) -> NDArray[np.generic]:
    """The tensor of :func:`blocks`, in memory."""
    values = np.empty(_size(info), BY_CODE[dtype].numpy)
    data, start = values.view(np.uint8), 0
    for block in blocks(name, info, config, seed, dtype, distribution):
        data[start : start + len(block)] = block
        start += len(block)
    return values.reshape(info.shape)


def _size(info: TensorInfo) -> int:
    return math.prod(info.shape)


@functools.lru_cache(maxsize=64)
def _table(quantiles: str, scale: float, shift: float, dtype: str) -> NDArray[np.generic]:
    """Every level's value in the stored dtype; bf16 as its 16 bits, for which numpy's ``take`` is fast."""
    values = (_quantiles(quantiles) * scale + shift).astype(BY_CODE[dtype].numpy)
    return values.view(np.uint16) if dtype == "BF16" else values


@functools.cache
def _quantiles(kind: str) -> NDArray[np.float64]:
    levels = (np.arange(_LEVELS) + 0.5) / _LEVELS
    return levels if kind == "uniform" else np.array([NormalDist().inv_cdf(level) for level in levels])


class DummyWeights:
    """Random weights without a checkpoint: an element follows from the seed, its tensor's published name and its index.

    So every TP and every dtype of an artifact gets the same values. Norms are 1, the experts' biases 0, A_log lies
    between 0 and log 16, all others are normal with a deviation of 0.02. One tensor is in memory at a time.
    """

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self._seed = seed
        self._tensors = expected_tensors(config)

    def stored(self, name: str) -> None:
        """None: nothing is quantized."""

    def tensor(self, name: str) -> NDArray[np.generic]:
        """A tensor by its published name, in torch's order and shape."""
        info = self._tensors[name]
        return whole(name, info, self.config, self._seed, info.dtypes[0], _dummy_recipe(name))


def _dummy_recipe(name: str) -> Recipe:
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if module.endswith("norm"):
        return Recipe("uniform", 0.0, 1.0)
    if module == "expert_bias":
        return Recipe("uniform", 0.0)
    return Recipe("uniform", math.log(16)) if module == "A_log" else Recipe("normal", 0.02)
