"""Reads weight files: mapped, never copied; every byte covered by a digest or by the manifest.

`StoreWriter` writes them and says how they are laid out.
"""

import hashlib
import mmap
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ling3export.artifacts.files import REBUILD, open_regular
from ling3export.artifacts.parameters import Tensor
from ling3export.artifacts.store_writer import StoreWriter, header
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import ArtifactError

__all__ = ["Store", "StoreWriter"]

ShardRange = tuple[str, int, int | None]  # a tensor, its first shard, and the shard after the last (None: all)


class Store:
    """The weights of an artifact, mapped read-only.

    A file is mapped on first use, after its size and header are compared with the index. Mapping reads nothing:
    a process pays for the shards that it touches.

    Args:
        folder: The artifact: the index's paths are relative to it.
        index: What `StoreWriter.finish` returned, or a manifest that was read: its numbers agree with each other.
        copied: Whether a file is read into memory of this process instead, which nobody else can write.
    """

    def __init__(self, folder: Path, index: Mapping[str, Tensor], *, copied: bool = False) -> None:
        self._copied = copied
        self.folder = Path(folder)
        self.index = index
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()

    def view(self, name: str) -> np.ndarray:
        """The whole tensor, as a read-only view on the mapped file; 64-byte aligned if its shards' size allows.

        Raises:
            ArtifactError: There is no such tensor, or its file is not as the index says.
        """
        stored = self._stored(name)
        data = np.frombuffer(self._map(stored.file), np.uint8, stored.nbytes, stored.offset)
        data.flags.writeable = False
        return data.view(BY_NAME[stored.dtype].numpy).reshape(stored.shape)

    def check_many(self, ranges: Iterable[ShardRange], threads: int | None = None) -> None:
        """Compares the digests of shards with the index, in threads (as many as cores by default).

        Raises:
            ArtifactError: Bytes differ: names the tensor, the shard and the file; where several shards differ, the
                largest of them. Or a file is missing, of another size, or has another header.
        """
        shards = [(name, shard) for part in ranges for name, shard in self._shards(*part)]
        shards.sort(key=lambda item: -self.index[item[0]].shard_bytes)  # the long ones first: threads end together
        for file in dict.fromkeys(self.index[name].file for name, _ in shards):
            self._map(file)
        with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
            list(pool.map(lambda part: self._check_shard(*part), shards))  # the first error cancels what has not begun

    def nbytes(self, ranges: Iterable[ShardRange]) -> int:
        return sum(self.index[name].shard_bytes for part in ranges for name, _ in self._shards(*part))

    def _stored(self, name: str) -> Tensor:
        if name not in self.index:
            raise ArtifactError(f"tensor `{name}`: expected it in the artifact, found no such weight, in {self.folder}")
        return self.index[name]

    def _shards(self, name: str, start: int, stop: int | None) -> list[tuple[str, int]]:
        parts = self._stored(name).parts
        stop = parts if stop is None else stop
        if not 0 <= start < stop <= parts:
            raise ValueError(f"tensor `{name}`: expected shards within 0:{parts}, found {start}:{stop}")
        return [(name, shard) for shard in range(start, stop)]

    def _check_shard(self, name: str, shard: int) -> None:
        stored = self.index[name]
        start = stored.offset + shard * stored.shard_bytes
        with memoryview(self._map(stored.file)) as data:
            actual = hashlib.sha256(data[start : start + stored.shard_bytes]).hexdigest()
        if actual != stored.sha256[shard]:
            raise ArtifactError(
                f"tensor `{name}` shard {shard}: expected sha256 {stored.sha256[shard]}, "
                f"found {actual}, in {self.folder / stored.file}",
                REBUILD,
            )

    def _map(self, file: str) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                self._maps[file] = self._mapped(file)
            return self._maps[file]

    def _mapped(self, file: str) -> mmap.mmap:
        """``file``, once its size and header agree with the index."""
        inside = [(name, stored) for name, stored in self.index.items() if stored.file == file]
        tensors = dict(sorted(inside, key=lambda item: item[1].offset))
        expected = header(tensors)
        end = len(expected)
        for name, stored in tensors.items():
            if stored.offset != end:
                problem = f"expected byte offset {end}, found {stored.offset}"
                raise ArtifactError(f"tensor `{name}`: {problem}, in the index of {file}", REBUILD)
            end += stored.nbytes
        what = f"weight file `{file}`"
        with open_regular(self.folder, file, what) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != end:
                raise ArtifactError(f"{what}: expected {end:,} bytes, found {size:,}, in {self.folder}", REBUILD)
            if opened.read(len(expected)) != expected:
                wanted = "its header is not what the manifest describes"
                raise ArtifactError(f"{what}: {wanted}, in {self.folder}", REBUILD)
            if not self._copied:
                return mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ)
            copy = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            opened.seek(0)
            opened.readinto(copy)  # what is missing, if the file became shorter meanwhile, no digest lets pass
            return copy
