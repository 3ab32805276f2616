"""One safetensors file: its header checked against the file, its tensors mapped without a copy.

Layout: 8 bytes of little-endian header length, a JSON object of ``name: {dtype, shape, data_offsets}``, then the data,
which the offsets (counted from its start) must cover exactly once.
"""

import hashlib
import json
import math
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ling3export.foundation.dtypes import BY_CODE
from ling3export.foundation.errors import CheckpointError
from ling3export.foundation.reading import opened
from ling3export.foundation.strict_json import DoubledKeyError, parse_json

LARGEST_HEADER = 32 << 20  # bytes, at about 140 a tensor
MOST_AXES = 8

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
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
    """A safetensors file whose header was read and compared with the file.

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
                self.nbytes = os.fstat(file.fileno()).st_size
                raw = self._header(file.read(8), file)
                self._map = mmap.mmap(file.fileno(), self.nbytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file became shorter meanwhile
            raise self._broken("a readable file", getattr(error, "strerror", None) or str(error)) from None
        self.data_start = 8 + len(raw)
        self.header_sha256 = hashlib.sha256(len(raw).to_bytes(8, "little") + raw).hexdigest()
        self.entries = self._entries(raw)

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

    def _broken(self, expected: str, actual: str) -> CheckpointError:
        message = f"shard `{self.path.name}`: expected {expected}, found {actual}, in {self.path.parent}"
        return CheckpointError(message, "download or copy this file again")

    def _header(self, prefix: bytes, file: Any) -> bytes:
        if len(prefix) < 8:
            raise self._broken("a safetensors header", f"{len(prefix)} bytes")
        length = int.from_bytes(prefix, "little")
        if length > LARGEST_HEADER:
            raise self._broken(f"a header of at most {LARGEST_HEADER} bytes", str(length))
        if 8 + length > self.nbytes:
            raise self._broken(f"a header of {length} bytes", f"a file of {self.nbytes}")
        raw = file.read(length)
        assert isinstance(raw, bytes)
        return raw

    def _entries(self, raw: bytes) -> dict[str, TensorEntry]:
        try:
            header = parse_json(raw, LARGEST_HEADER)
        except DoubledKeyError as error:
            twice = f"tensor `{error.key}`: expected once, found twice, in the header of {self.path.name}"
            raise CheckpointError(twice) from None
        except ValueError as error:
            raise self._broken("a header in JSON", str(error)) from None
        if not isinstance(header, dict):
            raise self._broken("a header that is a JSON object", type(header).__name__)
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, value) for name, value in header.items()}
        self._check_cover(entries)
        return entries

    def _entry(self, name: str, value: Any) -> TensorEntry:
        def is_size(item: Any) -> bool:
            return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62

        def sizes(field: str) -> list[int] | None:
            numbers = value.get(field) if isinstance(value, dict) else None
            return numbers if isinstance(numbers, list) and all(is_size(item) for item in numbers) else None

        shape, offsets = sizes("shape"), sizes("data_offsets")
        dtype = value.get("dtype") if isinstance(value, dict) else None
        if shape is None or offsets is None or len(offsets) != 2 or not isinstance(dtype, str):
            raise self._broken(f"dtype, shape and data_offsets of `{name}`", json.dumps(value)[:80])
        if len(shape) > MOST_AXES:
            raise self._broken(f"at most {MOST_AXES} axes of `{name}`", str(len(shape)))
        if dtype not in ITEM_BYTES:
            raise self._broken(f"a known dtype of `{name}`", dtype[:80])
        entry = TensorEntry(dtype, tuple(shape), *(self.data_start + offset for offset in offsets))
        wanted = math.prod(shape) * ITEM_BYTES[entry.dtype]
        if entry.stop - entry.start != wanted:
            raise self._broken(f"{wanted} bytes of `{name}`", f"offsets that span {entry.stop - entry.start}")
        return entry

    def _check_cover(self, entries: dict[str, TensorEntry]) -> None:
        """The tensors must lie end to end from the header to the end of the file."""
        end = self.data_start
        for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
            if entry.start != end:
                raise self._broken(f"`{name}` at byte {end}", f"it at byte {entry.start}")
            end = entry.stop
        if end != self.nbytes:
            what = "it truncated at" if self.nbytes < end else "it going on to"
            raise self._broken(f"a file of {end} bytes", f"{what} {self.nbytes}")
