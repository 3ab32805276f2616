"""Where each tensor lies in a weight file: specs, their order, and the safetensors header."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ling3export.artifacts.schema import Slabbed
from ling3export.foundation.dtypes import BY_CODE

ALIGNMENT = 64  # jax on CPU aliases mapped memory from here on, and copies below
HEADER_MULTIPLE = 4096


@dataclass(frozen=True)
class TensorSpec(Slabbed):
    """One tensor of a weight file.

    Args:
        name: Its name, unique in the store.
        shape: Whole shape. With slabs the leading axis is theirs: ``shape[0] == slabs``.
        dtype: ``BF16``, ``F32`` or ``I32``.
        slabs: How many parts it is cut into for tensor parallelism; 0 for a tensor that is never split.

    Raises:
        ValueError: An unknown dtype, an empty axis, or a leading axis that is not the slabs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    slabs: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in BY_CODE:
            raise ValueError(f"tensor `{self.name}`: expected dtype {' or '.join(BY_CODE)}, found {self.dtype}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"tensor `{self.name}`: expected no empty axis, found shape {list(self.shape)}")
        if self.slabs < 0 or (self.slabs and self.shape[:1] != (self.slabs,)):
            raise ValueError(
                f"tensor `{self.name}`: expected a leading axis of {self.slabs} slabs, found shape {list(self.shape)}"
            )

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab; of the whole tensor where it is not split."""
        return self.nbytes // self.parts

    @property
    def aligned(self) -> bool:
        """Whether every slab starts at a multiple of ALIGNMENT if the tensor does."""
        return self.slab_bytes % ALIGNMENT == 0


def arranged(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The order in a file: aligned tensors first, so that each starts at a multiple of 64; the others last.

    safetensors allows no holes between tensors, so order is the only way to align. The others go by falling
    item size, so that each still starts at a multiple of its own. Otherwise the given order holds.
    """
    return sorted(specs, key=lambda spec: 0 if spec.aligned else ALIGNMENT - BY_CODE[spec.dtype].nbytes)


def header(tensors: Mapping[str, Slabbed]) -> bytes:
    """The first bytes of a file that holds ``tensors``, by name, in this order, without holes.

    Eight bytes of little-endian length, then JSON padded with spaces so that the data starts at a multiple of 4096.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "ling3"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_MULTIPLE)
    return len(text).to_bytes(8, "little") + text
