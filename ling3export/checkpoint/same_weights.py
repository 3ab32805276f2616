"""Whether a checkpoint holds the weights of an artifact: each slab's digest, computed as the store would write it.

The recorded source has the digests of the shards' headers alone, and those of two fine-tunings are the same.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ling3export.checkpoint.convert import Source, convert_parameter
from ling3export.model.parameters import parameters


class _Digests:
    """In place of a store's writer: digests of slabs, nothing written."""

    def __init__(self) -> None:
        self.slabs: dict[int, Any] = defaultdict(hashlib.sha256)

    def write(self, name: str, array: np.ndarray, *, slab: int | None, offset: int = 0) -> None:
        """Appends a piece to a slab."""
        self.slabs[slab or 0].update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


def differing_tensors(
    source: Source, index: Mapping[str, Any], dtype: str, progress: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Names of the store's tensors that ``source`` has other values for.

    Args:
        source: An opened checkpoint with the artifact's configuration.
        index: The manifest's weight index.
        dtype: The artifact's.
        progress: Called with the bytes of each piece that was read.
    """
    found = []
    for row in parameters(source.config):
        digests = _Digests()
        convert_parameter(row, source, digests, dtype, progress)
        if [digests.slabs[slab].hexdigest() for slab in sorted(digests.slabs)] != index[row.name]["sha256"]:
            found.append(row.name)
    return found
