"""Writes weight files: streaming, digested a shard at a time, no larger than a block in anonymous memory."""

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
from msgspec.structs import replace

from ling3export.artifacts.files import create, inside, remove, sync_folder, write_error, writing
from ling3export.artifacts.parameters import ALIGNMENT, Tensor
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import ArtifactError, listed

BLOCK = 1 << 20  # bytes hashed and written at a time: the second reads what the first left in the core's cache
COPIED = 1 << 23  # bytes of a strided piece gathered at a time: smaller blocks read the source's cache lines again
HEADER_MULTIPLE = 4096
COLUMNS = 32  # columns transposed at a time: measured 2 to 3 times as fast as a whole row at once


class _Shard:
    """One stream of bytes: how far it is, and its digest so far."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.position = 0
        self.digest = hashlib.sha256()


class _File:
    """One open weight file: its descriptor and the order of its tensors."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        self.header = header(tensors)
        self.offsets: dict[str, int] = {}  # absolute
        self.size = len(self.header)
        for name, tensor in tensors.items():
            self.offsets[name] = self.size
            self.size += tensor.nbytes
        self.descriptor = create(path)

    def allocate(self) -> None:
        """Reserves the whole size, so that a full disk shows before the first byte and not after the last."""
        try:
            os.posix_fallocate(self.descriptor, 0, self.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            os.ftruncate(self.descriptor, self.size)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        data = memoryview(data)
        try:
            while data:
                done = os.pwrite(self.descriptor, data, offset)
                data, offset = data[done:], offset + done
        except OSError as error:
            raise write_error(error, self.path, self.size) from error

    def complete(self) -> None:
        """Writes the header once the data is safe, so that no header precedes what it describes."""
        with writing(self.path, self.size):
            os.fsync(self.descriptor)
            self.write(self.header, 0)
            os.fsync(self.descriptor)
            sync_folder(self.path.parent)

    def close(self) -> None:
        os.close(self.descriptor)
        self.descriptor = -1


class StoreWriter:
    """Weight files under construction.

    A file is no safetensors file until ``finish``: its header is written last. Leaving a ``with`` block before
    ``finish`` removes the files; threads that write must have ended by then.

    Args:
        files: For each file, as a path below ``folder``, its tensors by name. Their order in the file is that of
            `arranged`.

    Raises:
        ArtifactError: No room on the volume, a file-size limit, a file that exists.
        ValueError: A tensor named twice, or a file without tensors.
    """

    def __init__(self, folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._files: dict[str, _File] = {}
        self._tensors: dict[str, tuple[str, Tensor, list[_Shard]]] = {}
        self._scratch = threading.local()
        self._open = True
        for file, tensors in files.items():
            if not tensors:
                raise ValueError(f"weight file `{file}`: it has no tensors")
            for name, tensor in arranged(tensors).items():
                if name in self._tensors:
                    raise ValueError(f"tensor `{name}`: expected one, found two, in {file}")
                self._tensors[name] = (file, tensor, [_Shard() for _ in range(tensor.parts)])
        try:
            for file, tensors in files.items():
                path = inside(Path(folder), file)
                with writing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    opened = self._files[file] = _File(path, arranged(tensors))
                with writing(path, opened.size):
                    opened.allocate()
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, array: np.ndarray, *, shard: int | None, offset: int = 0) -> None:
        """Appends a piece to one shard. Several threads may write, best each to shards of its own.

        Args:
            array: The piece, of any shape, taken in C order; any view will do. Its dtype is the tensor's, or
                uint16 for bfloat16.
            shard: None for a tensor that is not split.
            offset: Where in the shard the piece starts, in bytes: exactly where the piece before it ended.

        Raises:
            ValueError: An unknown tensor or shard, another dtype, a gap, an overlap, a piece that is too long.
            ArtifactError: The disk is full or the file may not grow.
        """
        if name not in self._tensors:
            raise ValueError(f"tensor `{name}`: expected one of the plan's, found an unknown name")
        file, tensor, shards = self._tensors[name]
        dtype = BY_NAME[tensor.dtype].numpy
        if array.dtype != dtype and not (tensor.dtype == "bfloat16" and array.dtype == np.uint16):
            raise ValueError(f"tensor `{name}`: expected dtype {dtype}, found {array.dtype}, in {file}")
        if (shard is None) != (tensor.shards == 0) or not 0 <= (shard or 0) < tensor.parts:
            wanted = "no shard" if tensor.shards == 0 else f"a shard below {tensor.shards}"
            raise ValueError(f"tensor `{name}`: expected {wanted}, found {shard}, in {file}")
        stream = shards[shard or 0]
        with stream.lock:
            if offset != stream.position or offset + array.nbytes > tensor.shard_bytes:
                raise ValueError(
                    f"tensor `{name}` shard {shard}: expected a piece at byte {stream.position} of "
                    f"{tensor.shard_bytes}, found {array.nbytes} bytes at {offset}, in {file}"
                )
            start = self._files[file].offsets[name] + (shard or 0) * tensor.shard_bytes
            for block in self._blocks(np.asarray(array).view(f"u{dtype.itemsize}")):
                self._files[file].write(block, start + stream.position)
                stream.digest.update(block)
                stream.position += len(block)

    def finish(self) -> dict[str, Tensor]:
        """Completes and closes the files; returns the index that `Store` reads.

        Returns:
            For each tensor, in file order, where it is and its digests.

        Raises:
            ArtifactError: A tensor is not wholly written, or the disk fails. The files are removed.
        """
        try:
            short = [
                name
                for name, (_, tensor, shards) in self._tensors.items()
                if any(shard.position != tensor.shard_bytes for shard in shards)
            ]
            if short:
                raise ArtifactError(f"weights: expected every tensor written, found parts missing of {listed(short)}")
            for opened in self._files.values():
                opened.complete()
        except BaseException:
            self.abort()
            raise
        for opened in self._files.values():
            opened.close()
        self._open = False
        return {
            name: replace(
                tensor,
                file=file,
                offset=self._files[file].offsets[name],
                sha256=tuple(shard.digest.hexdigest() for shard in shards),
            )
            for name, (file, tensor, shards) in self._tensors.items()
        }

    def abort(self) -> None:
        """Closes and removes the files. After `finish` it does nothing."""
        if self._open:
            self._open = False
            for opened in self._files.values():
                opened.close()
                remove(opened.path)

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _blocks(self, array: np.ndarray) -> Iterator[memoryview]:
        """The bytes of ``array`` in C order, in blocks of at most COPIED bytes, each valid until the next."""
        if array.flags.c_contiguous:
            data = memoryview(array.reshape(-1).view(np.uint8))
            for start in range(0, len(data), BLOCK):
                yield data[start : start + BLOCK]
        elif array.nbytes <= COPIED:
            yield self._copied(array)
        else:
            rows = max(1, COPIED * len(array) // array.nbytes)
            for first in range(0, len(array), rows):
                block = array[first : first + rows]
                yield from self._blocks(block if rows > 1 else block[0])

    def _copied(self, array: np.ndarray) -> memoryview:
        """``array`` in C order, in this thread's scratch memory."""
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = np.empty(COPIED, np.uint8)
        data = self._scratch.memory[: array.nbytes]
        block = data.view(array.dtype).reshape(array.shape)
        if array.strides[-1] == array.itemsize:
            block[...] = array
        else:
            for column in range(0, array.shape[-1], COLUMNS):
                block[..., column : column + COLUMNS] = array[..., column : column + COLUMNS]
        return memoryview(data)


def arranged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The order in a file: aligned tensors first, so that each starts at a multiple of 64; the others last.

    safetensors allows no holes between tensors, so order is the only way to align. The others go by falling
    item size, so that each still starts at a multiple of its own. Otherwise the given order holds.
    """

    def place(item: tuple[str, Tensor]) -> int:
        return 0 if item[1].aligned else ALIGNMENT - BY_NAME[item[1].dtype].nbytes

    return dict(sorted(tensors.items(), key=place))


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """The first bytes of a file that holds ``tensors``, by name, in this order, without holes.

    Eight bytes of little-endian length, then JSON padded with spaces so that the data starts at a multiple of 4096.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "ling3"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        code = BY_NAME[tensor.dtype].code
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_MULTIPLE)
    return len(text).to_bytes(8, "little") + text
