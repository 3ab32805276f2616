"""One safetensors file: checked by the library, its tensors mapped without a copy."""

import hashlib
import math
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ling3export.foundation.dtypes import BY_CODE
from ling3export.foundation.errors import CheckpointError
from ling3export.foundation.reading import opened

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
PREFIX = "Error while deserializing header: "  # of the library's messages
# The numpy dtype of a view on a tensor; FP8 as its codes.
READABLE = {code: dtype.numpy for code, dtype in BY_CODE.items()} | {
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}


class TensorEntry(NamedTuple):
    """The place of a tensor: ``start`` and ``stop`` are bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A safetensors file. The library compares its header with the file: sizes, dtypes, no holes, no overlaps.

    Attributes:
        entries: Every tensor, by name.
        header_sha256: Digest of the length and header bytes.

    Raises:
        CheckpointError: the file is absent, truncated, or its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with opened(path.parent, path.name, links=True) as file:
                # By its descriptor: the name may lead to another file now.
                with safe_open(f"/proc/self/fd/{file.fileno()}", "numpy") as checked:
                    slices = [(name, checked.get_slice(name)) for name in checked.offset_keys()]
                    tensors = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, SafetensorError) as error:
            raise self._broken(getattr(error, "strerror", None) or str(error).removeprefix(PREFIX)) from None
        self.nbytes = len(self._map)
        end = 8 + int.from_bytes(self._map[:8], "little")
        self.header_sha256 = hashlib.sha256(self._map[:end]).hexdigest()
        self.entries: dict[str, TensorEntry] = {}
        for name, dtype, shape in tensors:
            if dtype not in ITEM_BYTES:
                raise self._broken(f"`{name}` in {dtype}")
            start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
            self.entries[name] = TensorEntry(dtype, shape, start, end)

    def tensor(self, name: str) -> NDArray[Any]:
        """A read-only view of a mapped tensor of a ``READABLE`` dtype; its pages are read when touched."""
        entry = self.entries[name]
        count = math.prod(entry.shape)
        return np.frombuffer(self._map, READABLE[entry.dtype], count, entry.start).reshape(entry.shape)

    def scattered(self, name: str) -> NDArray[Any]:
        """A copy of a small tensor among large ones: only its own pages are read."""
        self._map.madvise(mmap.MADV_RANDOM)
        try:
            return self.tensor(name).copy()
        finally:
            self._map.madvise(mmap.MADV_NORMAL)

    def _broken(self, actual: str) -> CheckpointError:
        return CheckpointError(
            f"shard `{self.path.name}`: expected a readable safetensors file, found {actual}, in {self.path.parent}",
            "download or copy this file again",
        )
