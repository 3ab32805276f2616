"""Weights of no meaning, for programs to be run before there is a checkpoint."""

import math

import numpy as np
from numpy.typing import NDArray

from ling3export.checkpoint.synth_weights import Recipe, blocks
from ling3export.foundation.dtypes import BY_CODE
from ling3export.model.config import Config
from ling3export.model.parameters import expected_tensors


class DummyWeights:
    """A checkpoint that is nowhere: an element follows from the seed, its tensor's published name and its index.

    So every TP and every dtype of an artifact gets the same values. Norms are 1, the experts' biases 0, A_log lies
    between 0 and log 16, all else is normal with a deviation of 0.02. One tensor is in memory at a time.
    """

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self._seed = seed
        self._tensors = expected_tensors(config)

    def tensor(self, name: str) -> NDArray[np.generic]:
        """A tensor by its published name, in torch's order and shape."""
        info = self._tensors[name]
        dtype = info.dtypes[0]
        values = np.empty(math.prod(info.shape), BY_CODE[dtype].numpy)
        data, start = values.view(np.uint8), 0
        for block in blocks(name, info, self.config, self._seed, dtype, _recipe(name)):
            data[start : start + len(block)] = block
            start += len(block)
        return values.reshape(info.shape)


def _recipe(name: str) -> Recipe:
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if module.endswith("norm"):
        return Recipe("uniform", 0.0, 1.0)
    if module == "expert_bias":
        return Recipe("uniform", 0.0)
    return Recipe("uniform", math.log(16)) if module == "A_log" else Recipe("normal", 0.02)
