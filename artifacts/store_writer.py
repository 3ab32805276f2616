"""Writes weight files: streaming, digested a slab at a time, no larger than a block in anonymous memory."""

import errno
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from ling3export.artifacts.files import create, inside, remove, sync_folder, write_error, writing
from ling3export.artifacts.schema import StoredTensor
from ling3export.artifacts.store_layout import TensorSpec, arranged, header
from ling3export.foundation.dtypes import BY_CODE
from ling3export.foundation.errors import ArtifactError, listed

BLOCK = 1 << 20  # bytes hashed and written at a time: the second reads what the first left in the core's cache
COPIED = 1 << 23  # bytes of a strided piece gathered at a time: smaller blocks read the source's cache lines again
COLUMNS = 32  # columns transposed at a time: measured 2 to 3 times as fast as a whole row at once


class _Slab:
    """One stream of bytes: how far it is, and its digest so far."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.position = 0
        self.digest = hashlib.sha256()


class _File:
    """One open weight file: its descriptor and the order of its tensors."""

    def __init__(self, path: Path, specs: list[TensorSpec]) -> None:
        self.path = path
        self.specs = specs
        self.header = header({spec.name: spec for spec in specs})
        self.size = len(self.header) + sum(spec.nbytes for spec in specs)
        self.offsets: dict[str, int] = {}  # absolute
        offset = len(self.header)
        for spec in specs:
            self.offsets[spec.name] = offset
            offset += spec.nbytes
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
        folder: The artifact's folder.
        files: For each file, as a path below ``folder``, its tensors. Their order in the file is `layout.arranged`.

    Raises:
        ArtifactError: No room on the volume, a file-size limit, a file that exists.
        ValueError: A tensor named twice, or a file without tensors.
    """

    def __init__(self, folder: Path, files: Mapping[str, Sequence[TensorSpec]]) -> None:
        self._files: dict[str, _File] = {}
        self._tensors: dict[str, tuple[str, TensorSpec, list[_Slab]]] = {}
        self._scratch = threading.local()
        self._open = True
        for file, specs in files.items():
            if not specs:
                raise ValueError(f"weight file `{file}`: expected tensors, found none")
            for spec in specs:
                if spec.name in self._tensors:
                    raise ValueError(f"tensor `{spec.name}`: expected one, found two, in {file}")
                self._tensors[spec.name] = (file, spec, [_Slab() for _ in range(spec.parts)])
        try:
            for file, specs in files.items():
                path = inside(Path(folder), file)
                with writing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    opened = self._files[file] = _File(path, arranged(specs))
                with writing(path, opened.size):
                    opened.allocate()
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, array: np.ndarray, *, slab: int | None, offset: int = 0) -> None:
        """Appends a piece to one slab. Safe from several threads, best each on slabs of its own.

        Args:
            name: The tensor.
            array: The piece, of any shape, taken in C order; any view will do. Its dtype is the tensor's, or
                uint16 for BF16.
            slab: Which slab; None for a tensor that is not split.
            offset: Where in the slab the piece starts, in bytes: exactly where the piece before it ended.

        Raises:
            ValueError: An unknown tensor or slab, another dtype, a gap, an overlap, a piece that is too long.
            ArtifactError: The disk is full or the file may not grow.
        """
        if name not in self._tensors:
            raise ValueError(f"tensor `{name}`: expected one of the plan's, found an unknown name")
        file, spec, slabs = self._tensors[name]
        dtype = BY_CODE[spec.dtype].numpy
        if array.dtype != dtype and not (spec.dtype == "BF16" and array.dtype == np.uint16):
            raise ValueError(f"tensor `{name}`: expected dtype {dtype}, found {array.dtype}, in {file}")
        if (slab is None) != (spec.slabs == 0) or not 0 <= (slab or 0) < spec.parts:
            wanted = "no slab" if spec.slabs == 0 else f"a slab below {spec.slabs}"
            raise ValueError(f"tensor `{name}`: expected {wanted}, found {slab}, in {file}")
        stream = slabs[slab or 0]
        with stream.lock:
            if offset != stream.position or offset + array.nbytes > spec.slab_bytes:
                raise ValueError(
                    f"tensor `{name}` slab {slab}: expected a piece at byte {stream.position} of "
                    f"{spec.slab_bytes}, found {array.nbytes} bytes at {offset}, in {file}"
                )
            start = self._files[file].offsets[name] + (slab or 0) * spec.slab_bytes
            for block in self._blocks(np.asarray(array).view(f"u{dtype.itemsize}")):
                self._files[file].write(block, start + stream.position)
                stream.digest.update(block)
                stream.position += len(block)

    def finish(self) -> dict[str, StoredTensor]:
        """Completes and closes the files; returns the index that `Store` reads.

        Returns:
            For each tensor, in file order, where it is and its digests.

        Raises:
            ArtifactError: A tensor is not wholly written, or the disk fails. The files are removed.
        """
        try:
            short = [
                name
                for name, (_, spec, slabs) in self._tensors.items()
                if any(slab.position != spec.slab_bytes for slab in slabs)
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
            spec.name: StoredTensor(
                file,
                spec.dtype,
                spec.shape,
                spec.slabs,
                opened.offsets[spec.name],
                spec.slab_bytes,
                tuple(slab.digest.hexdigest() for slab in self._tensors[spec.name][2]),
            )
            for file, opened in self._files.items()
            for spec in opened.specs
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
