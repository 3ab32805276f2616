"""A host's share of a weight file: the slabs that its devices hold, each checked by its own digest in the manifest.

They come by ranges into a file of the full size, with holes where the slabs of other hosts are.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.artifacts.catalog.oci import Block, Descriptor
from ling3export.artifacts.catalog.record import File
from ling3export.artifacts.files import writing
from ling3export.artifacts.schema import Manifest, StoredTensor
from ling3export.artifacts.store_layout import header
from ling3export.foundation.errors import CatalogError

if TYPE_CHECKING:
    from ling3export.artifacts.catalog.stores import Store


@dataclass(frozen=True)
class Slab:
    """Bytes of a weight file."""

    name: str
    start: int
    stop: int
    sha256: str


def slabs_of(manifest: Manifest, target: str, host: int) -> dict[str, list[Slab]]:
    """What a host of a target needs of each weight file, in the file's order."""
    found: dict[str, list[Slab]] = {}
    for name, first, behind in manifest.targets[target].slabs(host):
        stored = manifest.weights.index[name]
        for number in range(first, stored.parts if behind is None else behind):
            start = stored.offset + number * stored.slab_bytes
            slab = Slab(f"tensor `{name}` slab {number}", start, start + stored.slab_bytes, stored.sha256[number])
            found.setdefault(stored.file, []).append(slab)
    return {file: sorted(slabs, key=lambda slab: slab.start) for file, slabs in found.items()}


def tensors_of(manifest: Manifest, file: str) -> dict[str, StoredTensor]:
    """The tensors of a weight file, in its order."""
    inside = [(name, stored) for name, stored in manifest.weights.index.items() if stored.file == file]
    return dict(sorted(inside, key=lambda item: item[1].offset))


def begin(descriptor: int, size: int, tensors: dict[str, StoredTensor], slabs: list[Slab]) -> list[Slab]:
    """Gives a file its size and its header; returns the slabs that it does not hold yet."""
    was = os.fstat(descriptor).st_size
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, header(tensors), 0)
    return [slab for slab in slabs if not was or not holds(descriptor, slab)]


def holds(descriptor: int, slab: Slab) -> bool:
    """Whether a file has the bytes of a slab."""
    digest, at = sha256(), slab.start
    while at < slab.stop and (data := os.pread(descriptor, min(1 << 20, slab.stop - at), at)):
        digest.update(data)
        at += len(data)
    return at == slab.stop and digest.hexdigest() == slab.sha256


def runs(slabs: Iterable[Slab]) -> list[list[Slab]]:
    """Slabs that follow one another without a gap, as one list: one request brings them."""
    found: list[list[Slab]] = []
    for slab in slabs:
        if found and found[-1][-1].stop == slab.start:
            found[-1].append(slab)
        else:
            found.append([slab])
    return found


def ranged(store: "Store", file: File, layers: list[Descriptor], start: int, stop: int) -> Iterator[Block]:
    """The bytes of a file from ``start`` to ``stop``, out of its layers, which may be several.

    Raises:
        CatalogError: More bytes came than were asked for.
        ConnectionError: Fewer came.
    """
    at = 0
    for layer in layers:
        end = at + layer.size
        if start < end and at < stop:
            left = min(stop, end) - max(start, at)
            for data in store.stream(layer, max(start - at, 0), min(stop - at, layer.size)):
                left -= len(data)
                if left < 0:
                    raise CatalogError(f"file `{file.path}`: expected {file.size:,} bytes, found more, in {store}")
                yield data
            if left:
                raise ConnectionError(f"{left:,} bytes of {file.path} are missing")
        at = end


def write_at(descriptor: int, data: Block, at: int, file: File) -> None:
    """Writes all of ``data``.

    Raises:
        ArtifactError: The disk is full.
    """
    left = memoryview(data)
    with writing(Path(file.path), file.size):
        while left:
            count = os.pwrite(descriptor, left, at)
            left, at = left[count:], at + count


def copied(data: Iterator[Block], descriptor: int, run: list[Slab], file: File, store: "Store") -> Iterator[int]:
    """Writes the bytes of a run where they belong.

    Yields:
        Bytes that came; all slabs before them were checked.

    Raises:
        CatalogError: A slab's bytes are not those that the manifest names.
    """
    slabs, digest, at = iter(run), sha256(), run[0].start
    slab = next(slabs)
    for block in data:
        left = memoryview(block)
        while left:
            part = left[: slab.stop - at]
            digest.update(part)
            write_at(descriptor, part, at, file)
            at, left = at + len(part), left[len(part) :]
            if at == slab.stop:
                if digest.hexdigest() != slab.sha256:
                    raise CatalogError(
                        f"{slab.name}: expected sha256 {slab.sha256}, found {digest.hexdigest()}, in {store}",
                        "the store is damaged: have it published again",
                    )
                slab, digest = next(slabs, slab), sha256()
        yield len(block)
