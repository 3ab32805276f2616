"""A checkpoint as the plain model reads it where weights are quantized: the values that they stand for."""

import re
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ling3export.artifacts.parameters import PLAIN
from ling3export.checkpoint.convert import WeightSource, pair_of
from ling3export.checkpoint.forms import EMBEDDINGS, HEAD
from ling3export.checkpoint.quantize import dequantized, quantize
from ling3export.model.parameters import EXPERT, Weight, weight_table

_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


class Dequantized:
    """A checkpoint that reads quantized tensors as ``q * scale``, in fp32.

    They are quantized as a whole, in torch's order, not as the store's pieces are: what this gives does not depend on
    how the store is laid out.

    Args:
        weights: In which forms, a key of ``artifacts/parameters.py``'s WEIGHTS.
    """

    def __init__(self, source: WeightSource, weights: str) -> None:
        self.config = source.config
        self._source = source
        self._rows = {
            ("" if layer is None else f"model.layers.{layer}.") + name: row
            for row in weight_table(source.config, weights)
            for layer in (row.layers or (None,))
            for name in row.source.names
            if row.form != PLAIN
        }

    def tensor(self, name: str) -> Any:
        """A tensor by its published name, or an object that can be indexed by rows like an array."""
        row = self._rows.get(_EXPERT.sub(f".experts.{EXPERT}.", name))
        if row is None:
            return self._source.tensor(name)
        if name in (EMBEDDINGS, HEAD):
            return _Rows(self._source.tensor(name), row)
        return dequantized(pair_of(row, name, self._source.tensor, self._source.stored))


class _Rows:
    """A matrix of the vocabulary, which is large: only requested rows are dequantized."""

    def __init__(self, value: np.ndarray, row: Weight) -> None:
        self._value, self._row = value, row

    def __len__(self) -> int:
        return len(self._value)

    def __getitem__(self, index: Any) -> np.ndarray:
        return dequantized(quantize(self._value[index], self._row.form, self._row.group))

    def astype(self, dtype: DTypeLike) -> np.ndarray:
        """All rows."""
        return self[:].astype(dtype)


def exact_type(dtype: str, weights: str) -> type[np.floating[Any]]:
    """The reference's precision: float64 for fp32 programs and for dequantized weights, else float32, which is faster.

    Args:
        weights: The forms of its weights, a key of ``artifacts/parameters.py``'s WEIGHTS.
    """
    return np.float64 if dtype == "float32" or weights != PLAIN else np.float32
