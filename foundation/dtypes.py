"""The dtypes of weights, state and calls, in one table: numpy's name, safetensors' code, the dtype itself."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Dtype:
    """A dtype: its name in numpy, jax and a manifest, its code in safetensors, and numpy's, little-endian."""

    name: str
    code: str
    numpy: np.dtype

    @property
    def nbytes(self) -> int:
        return self.numpy.itemsize


TABLE = (
    Dtype("bfloat16", "BF16", np.dtype(ml_dtypes.bfloat16)),
    Dtype("float32", "F32", np.dtype("<f4")),
    Dtype("int32", "I32", np.dtype("<i4")),
    Dtype("int8", "I8", np.dtype("i1")),
    Dtype("uint8", "U8", np.dtype("u1")),
    Dtype("uint16", "U16", np.dtype("<u2")),
)
BY_NAME = {dtype.name: dtype for dtype in TABLE}
BY_CODE = {dtype.code: dtype for dtype in TABLE}
# In the int32 expert ids of a call this value, and every larger one, means "no expert".
MASK = 1_000_000
