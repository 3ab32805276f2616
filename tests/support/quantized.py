"""An independent reader of quantized checkpoints: numpy in float64, guided only by names and dtypes of tensors."""

from pathlib import Path

import ml_dtypes
import numpy as np

from ling3export.model.config import Config
from tests.support.shards import read_shard

DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "I32": np.uint32,
    "I64": np.int64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": np.uint8,
}


class Plain:
    """A weight source for the conversion, made from numpy arrays."""

    def __init__(self, config: Config, tensors: dict[str, np.ndarray]) -> None:
        self.config = config
        self.tensor = tensors.__getitem__

    def stored(self, name: str) -> None:
        """Returns None: nothing is quantized."""


def dequantized(folder: Path) -> dict[str, np.ndarray]:
    """Every weight of a checkpoint by its published name, with quantized ones dequantized in float64."""
    stored: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        for name, (dtype, shape, data) in read_shard(path).items():
            stored[name] = np.frombuffer(data, DTYPES[dtype]).reshape(shape)
    found: dict[str, np.ndarray] = {}
    for name, values in stored.items():
        if name.endswith("_scale_inv"):
            weight = name.removesuffix("_scale_inv")
            found[weight] = stored[weight].astype(np.float64)
            for row, column in np.ndindex(values.shape):
                block = found[weight][128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
                block *= 2.0 ** (int(values[row, column]) - 127)
        elif name.endswith("_packed"):
            weight = name.removesuffix("_packed")
            q = np.stack([(values >> 4 * place & 15).astype(np.float64) - 8 for place in range(8)], -1)
            groups = q.reshape(len(q), -1, 32) * stored[f"{weight}_scale"].astype(np.float64)[:, :, None]
            found[weight] = groups.reshape(stored[f"{weight}_shape"])
        elif not name.endswith(("_scale", "_shape")):
            found.setdefault(name, values)
    return found
