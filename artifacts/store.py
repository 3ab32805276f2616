"""Reads weight files: mapped, never copied; every byte covered by a digest or by the manifest.

`TensorSpec` and `StoreWriter` are the other half: how the files are laid out, and how they are written.
"""

import hashlib
import mmap
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ling3export.artifacts.files import inside, open_regular
from ling3export.artifacts.schema import StoredTensor
from ling3export.artifacts.store_layout import TensorSpec, header
from ling3export.artifacts.store_writer import StoreWriter
from ling3export.dtypes import BY_CODE
from ling3export.errors import ArtifactError

__all__ = ["Store", "StoreWriter", "TensorSpec"]

REBUILD = "copy the artifact again, or build it again"


class Store:
    """The weights of an artifact, mapped read-only.

    A file is mapped on first use, after its size and header are compared with the index. Mapping reads nothing:
    a process pays for the slabs that it touches.

    Args:
        folder: What the index's paths are relative to: the artifact.
        index: What `StoreWriter.finish` returned.

    Raises:
        ArtifactError: An index entry that no writer makes.
    """

    def __init__(self, folder: Path, index: Mapping[str, StoredTensor]) -> None:
        self.folder = Path(folder)
        self.index = index
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()
        self._specs = {name: _spec(name, entry) for name, entry in index.items()}
        self._paths = {
            file: inside(self.folder, file, "the weight index")
            for file in dict.fromkeys(tensor.file for tensor in index.values())
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self._specs.values())

    def view(self, name: str) -> np.ndarray:
        """The whole tensor, as a read-only view on the mapped file; 64-byte aligned if its slabs' size allows."""
        spec, stored = self._spec(name), self.index[name]
        data = np.frombuffer(self._map(stored.file), np.uint8, spec.nbytes, stored.offset)
        return data.view(BY_CODE[spec.dtype].numpy).reshape(spec.shape)

    def slabs(self, name: str, start: int, stop: int) -> np.ndarray:
        """Slabs ``start`` to ``stop`` of a split tensor: a read-only view, ``[stop - start, ...]``."""
        self._range(name, start, stop)
        if not self._spec(name).slabs:
            raise ValueError(f"tensor `{name}`: expected a split tensor, found a whole one")
        return self.view(name)[start:stop]

    def check(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Compares the digests of slabs ``start`` to ``stop`` (all by default) with the index.

        Raises:
            ArtifactError: Bytes differ: names the tensor, the slab and the file.
        """
        self.check_many([(name, start, stop)], threads=1)

    def check_many(self, ranges: Iterable[tuple[str, int, int | None]], threads: int | None = None) -> None:
        """`check` for several ranges, in threads (as many as cores by default).

        Raises:
            ArtifactError: As `check`; where several slabs differ, the largest of them is named.
        """
        slabs = [(name, slab) for name, start, stop in ranges for slab in self._range(name, start, stop)]
        slabs.sort(key=lambda item: -self._specs[item[0]].slab_bytes)  # the long ones first: threads end together
        for file in dict.fromkeys(self.index[name].file for name, _ in slabs):
            self._map(file)
        with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
            checks = [pool.submit(self._check_slab, name, slab) for name, slab in slabs]
            try:
                for check in checks:
                    check.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def check_layout(self) -> None:
        """Compares every file's size and header with the index, without mapping or reading the tensors.

        Raises:
            ArtifactError: A file is missing, is shorter or longer, or its header is another.
        """
        for file in self._paths:
            os.close(self._opened(file)[0])

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._specs:
            raise ArtifactError(f"tensor `{name}`: expected it in the artifact, found no such weight, in {self.folder}")
        return self._specs[name]

    def _range(self, name: str, start: int, stop: int | None) -> range:
        parts = self._spec(name).parts
        stop = parts if stop is None else stop
        if not 0 <= start < stop <= parts:
            raise ValueError(f"tensor `{name}`: expected slabs within 0:{parts}, found {start}:{stop}")
        return range(start, stop)

    def _check_slab(self, name: str, slab: int) -> None:
        stored, size = self.index[name], self._specs[name].slab_bytes
        start = stored.offset + slab * size
        with memoryview(self._map(stored.file)) as data:
            found = hashlib.sha256(data[start : start + size]).hexdigest()
        if found != stored.sha256[slab]:
            raise ArtifactError(
                f"tensor `{name}` slab {slab}: expected sha256 {stored.sha256[slab]}, "
                f"found {found}, in {self._paths[stored.file]}",
                REBUILD,
            )

    def _map(self, file: str) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                descriptor, size = self._opened(file)
                try:
                    self._maps[file] = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
                finally:
                    os.close(descriptor)
            return self._maps[file]

    def _opened(self, file: str) -> tuple[int, int]:
        """A descriptor of ``file`` and its size, once its size and header agree with the index."""
        names = sorted(
            (n for n, stored in self.index.items() if stored.file == file), key=lambda n: self.index[n].offset
        )
        expected = header([self._specs[name] for name in names])
        end = len(expected)
        for name in names:
            if self.index[name].offset != end:
                raise ArtifactError(
                    f"tensor `{name}`: expected byte offset {end}, found {self.index[name].offset}, "
                    f"in the index of {file}",
                    REBUILD,
                )
            end += self._specs[name].nbytes
        try:
            with open_regular(self.folder, file) as opened:
                descriptor = os.dup(opened.fileno())
        except OSError as error:
            raise ArtifactError(
                f"weight file `{file}`: expected a readable file, found {error.strerror}, in {self.folder}", REBUILD
            ) from error
        try:
            size = os.fstat(descriptor).st_size
            if size != end:
                raise ArtifactError(
                    f"weight file `{file}`: expected {end:,} bytes, found {size:,}, in {self.folder}", REBUILD
                )
            if os.pread(descriptor, len(expected), 0) != expected:
                raise ArtifactError(
                    f"weight file `{file}`: expected the header that the manifest describes, "
                    f"found another, in {self.folder}",
                    REBUILD,
                )
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, size


def _spec(name: str, stored: StoredTensor) -> TensorSpec:
    """The TensorSpec of an index entry, once the entry is one that a writer makes."""
    try:
        spec = TensorSpec(name, stored.shape, stored.dtype, stored.slabs)
        if stored.slab_bytes != spec.slab_bytes or len(stored.sha256) != spec.parts:
            raise ValueError(
                f"tensor `{name}`: expected {spec.parts} digests of {spec.slab_bytes} bytes each, "
                f"found {len(stored.sha256)} of {stored.slab_bytes}"
            )
    except ValueError as error:
        raise ArtifactError(f"{error}, in the weight index", REBUILD) from error
    return spec
