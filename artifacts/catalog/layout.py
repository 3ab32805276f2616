"""A store in a folder: an OCI image layout, which other tools read and copy (``oci:FOLDER``).

Blobs come first, each whole under its digest by a rename; then one rename of ``index.json`` makes a version and moves
``latest``. So a kill at any moment leaves the versions that were there, and blobs that ``gc`` removes.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from ling3export.artifacts.catalog import oci
from ling3export.artifacts.catalog.oci import Block, CatalogEntry, Descriptor, Index, LayerSource
from ling3export.artifacts.catalog.record import LARGEST, parsed
from ling3export.artifacts.catalog.versions import is_version, latest, order
from ling3export.artifacts.files import PARTIAL, inside, leftovers, locked, refuse_links, remove, replacing, writing
from ling3export.artifacts.records import canonical, to_json
from ling3export.foundation.errors import CatalogError, VersionExists
from ling3export.foundation.reading import opened, read_bytes

LAYOUT, INDEX = "oci-layout", "index.json"
LAYOUT_DATA = canonical({"imageLayoutVersion": "1.0.0"})
BLOCK = 1 << 20
BLOBS = "blobs/sha256"
OURS = re.compile(rf"[0-9a-f]{{64}}|\.[0-9a-f]{{64}}\.{PARTIAL}")  # what a publication makes in BLOBS
PUBLISHERS_LOCK, INDEX_LOCK = ".writers.lock", ".index.lock"


def named(digest: str) -> str:
    """The path of a blob below the layout."""
    return digest.replace(":", "/", 1).join(("blobs/", ""))


def blocks(file: Any, count: int) -> Iterator[Block]:
    """The next ``count`` bytes of a file, as far as there are some; a block is there until the next is asked for."""
    buffer = memoryview(bytearray(min(BLOCK, max(count, 0))))
    while count > 0 and (size := file.readinto(buffer[:count])):
        yield buffer[:size]
        count -= size


def existing(id: str, version: str, store: object) -> VersionExists:
    """What is said of a version that was to be new."""
    return VersionExists(
        f"version `{id}@{version}`: expected a new one, found one with other content, in {store}",
        "what was published never changes: publish under the next version",
    )


class OciLayout:
    """An OCI image layout.

    Args:
        folder: Where it is; a first publication makes it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return f"oci:{self.folder}"

    # --- reading -----------------------------------------------------------------------------------------------------

    def entries(self, id: str | None = None) -> list[CatalogEntry]:
        """Every version, or those of one id, in order; the tag ``latest`` is none."""
        return _entries(self._index(), id)

    def versions(self, id: str) -> list[str]:
        """The versions of an id, in order."""
        return [entry.version for entry in self.entries(id)]

    def entry(self, id: str, version: str) -> CatalogEntry | None:
        """A version, if it is there."""
        return next((entry for entry in self.entries(id) if entry.version == version), None)

    def read(self, blob: Descriptor) -> bytes:
        """A small blob: a manifest or a record.

        Raises:
            CatalogError: It is missing, damaged, or larger than any such document.
        """
        what = f"blob `{blob.digest}`"
        try:
            data = self._bytes(named(blob.digest), LARGEST)
        except OSError as error:
            raise CatalogError(f"{what}: expected a readable file, found {error.strerror}, in {self}") from error
        if f"sha256:{sha256(data).hexdigest()}" != blob.digest:
            raise CatalogError(f"{what}: expected bytes of this digest, found others, in {self}")
        return data

    def stream(self, blob: Descriptor, start: int = 0, stop: int | None = None) -> Iterator[Block]:
        """The bytes of a blob from ``start`` to ``stop``, not checked."""
        try:
            yield from self._blocks(named(blob.digest), start, blob.size + 1 if stop is None else stop)
        except OSError as error:
            what = f"blob `{blob.digest}`"
            raise CatalogError(f"{what}: expected a readable file, found {error.strerror}, in {self}") from error

    def _index(self) -> Index:
        try:
            layout = parsed(self._bytes(LAYOUT, LARGEST), str(self), LAYOUT)
            data = self._bytes(INDEX, LARGEST)
        except OSError as error:
            raise CatalogError(
                f"store `{self}`: expected an OCI image layout, found {error.strerror}, at {error.filename}",
                "the first publication makes one: ling3export catalog publish ARTIFACT oci:FOLDER --id ID --version V",
            ) from error
        if layout.get("imageLayoutVersion") != "1.0.0":
            raise CatalogError(f"{LAYOUT}: expected imageLayoutVersion 1.0.0, found another, in {self}")
        index: Index = oci.foreign(Index, parsed(data, str(self), INDEX), str(self), INDEX)
        return index

    def _bytes(self, path: str, largest: int) -> bytes:
        """All bytes of a small file."""
        return read_bytes(self.folder, path, largest)

    def _blocks(self, path: str, start: int, stop: int) -> Iterator[Block]:
        """The bytes of a file from ``start`` to ``stop``."""
        with opened(self.folder, path) as file:
            file.seek(start)
            yield from blocks(file, stop - start)

    # --- writing -----------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, id: str) -> Iterator[None]:
        """Blobs that are written in the block are not removed by ``gc`` before it ends; makes the layout."""
        with writing(self.folder / LAYOUT):
            refuse_links(self.folder, (BLOBS,))
            (self.folder / BLOBS).mkdir(parents=True, exist_ok=True)
        with locked(self.folder / PUBLISHERS_LOCK, fcntl.LOCK_SH):
            with locked(self.folder / INDEX_LOCK):
                for left in leftovers(self.folder / INDEX):  # by a writer that was killed
                    remove(left)
                if not self._there(LAYOUT):
                    self._put(LAYOUT, LAYOUT_DATA)
                if not self._there(INDEX):  # last: where it is, there is a whole layout
                    self._put_index(())
            yield

    def add(self, part: LayerSource) -> int:
        """Writes a part of a file; returns how many bytes had to be written.

        Raises:
            CatalogError: The file has changed since its digest was taken.
        """
        blob = named(part.digest)
        if self._there(blob):
            return 0
        with opened(part.path, part.title) as file, self._written(blob, part.size) as out:
            file.seek(part.start)
            digest = sha256()
            for data in blocks(file, part.size):
                digest.update(data)
                out.write(data)
            if f"sha256:{digest.hexdigest()}" != part.digest:
                raise CatalogError(f"file `{part.title}`: expected no change meanwhile, found one, in {part.path}")
        return part.size

    def add_document(self, data: bytes, media: str, artifact: str | None = None) -> Descriptor:
        """Writes a record or a manifest."""
        digest = f"sha256:{sha256(data).hexdigest()}"
        if not self._there(named(digest)):
            self._put(named(digest), data)
        return Descriptor(mediaType=media, digest=digest, size=len(data), artifactType=artifact)

    def enter(self, id: str, version: str, manifest: Descriptor) -> None:
        """Makes a version and moves ``latest``.

        Raises:
            VersionExists: It is there.
        """
        with locked(self.folder / INDEX_LOCK):
            index = self._index()
            entries = _entries(index)
            if any((each.id, each.version) == (id, version) for each in entries):
                raise existing(id, version, self)
            entries.append(CatalogEntry(id, version, replace(manifest, annotations={oci.NAME: f"{id}:{version}"})))
            tags = []
            for each in sorted({entry.id for entry in entries}):
                known = {entry.version: entry.descriptor for entry in entries if entry.id == each}
                newest = latest(known)
                assert newest is not None
                tags.append(replace(known[newest], annotations={oci.NAME: f"{each}:latest"}))
            others = [each for each in index.manifests if not _is_ours(each)]
            self._put_index((*others, *(entry.descriptor for entry in entries), *tags))

    def gc(self) -> tuple[int, int]:
        """Removes blobs that no version names; returns how many, and their bytes.

        Waits until nobody publishes. Files with other names than blobs have are left alone.

        Raises:
            ArtifactError: A link leads out of the layout, to where files could be somebody else's.
        """
        with locked(self.folder / PUBLISHERS_LOCK), locked(self.folder / INDEX_LOCK):
            refuse_links(self.folder, (BLOBS,))
            kept: set[str] = set()
            for each in self._index().manifests:
                kept.add(each.digest)
                manifest = oci.image_of(self.read(each), str(self))
                kept |= {manifest.config.digest, *(layer.digest for layer in manifest.layers)}
            removed = freed = 0
            for path in (self.folder / BLOBS).iterdir():
                if OURS.fullmatch(path.name) and f"sha256:{path.name}" not in kept:
                    size = path.lstat().st_size
                    with suppress(IsADirectoryError):
                        if remove(path, self.folder):
                            removed, freed = removed + 1, freed + size
            return removed, freed

    def _there(self, path: str) -> bool:
        return os.path.lexists(inside(self.folder, path))

    def _written(self, path: str, size: int) -> AbstractContextManager[BinaryIO]:
        """A file to write, which is there whole once the block ends well."""
        refuse_links(self.folder, (path,))
        return replacing(inside(self.folder, path), size)

    def _put(self, path: str, data: bytes) -> None:
        with self._written(path, len(data)) as file:
            file.write(data)

    def _put_index(self, manifests: tuple[Descriptor, ...]) -> None:
        self._put(INDEX, canonical(to_json(Index(schemaVersion=2, mediaType=oci.INDEX, manifests=manifests))))


def _entries(index: Index, id: str | None = None) -> list[CatalogEntry]:
    found = []
    for each in index.manifests:
        name, _, version = each.annotation(oci.NAME).partition(":")
        if is_version(version) and id in (None, name):
            found.append(CatalogEntry(name, version, each))
    return sorted(found, key=lambda entry: (entry.id, order(entry.version)))


def _is_ours(descriptor: Descriptor) -> bool:
    version = descriptor.annotation(oci.NAME).partition(":")[2]
    return is_version(version) or version == "latest"
