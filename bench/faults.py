"""Faults that benchmarks and tests put into what they run."""

from pathlib import Path

import numpy as np

from ling3export.artifacts.manifest import read_manifest
from ling3export.foundation.dtypes import BY_CODE


def put_nan(artifact: Path, tensor: str, *place: int) -> None:
    """Sets an element of a weight, or a range of it, to NaN; ``--check programs`` does not see it."""
    stored = read_manifest(artifact).weights.index[tensor]
    kind = BY_CODE[stored.dtype].numpy
    weights = np.memmap(artifact / stored.file, kind, "r+", stored.offset, stored.shape)
    weights[place] = np.nan
    weights.flush()
