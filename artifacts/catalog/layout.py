"""A store: an OCI image layout in a folder, which skopeo and oras copy to registries and back.

A version is an image manifest. Its config is the record; each layer is a file of the artifact. Blobs come first, each
whole under its digest by a rename; one rename of ``index.json`` then adds a version and moves ``latest``. So a kill at
any moment leaves the versions that were there, and blobs that ``gc`` removes.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ling3export.artifacts.catalog.record import (
    LARGEST,
    BlobDigest,
    CatalogRecord,
    File,
    is_version,
    latest,
    order,
    parsed,
    read_record,
    typed,
)
from ling3export.artifacts.files import PARTIAL, leftovers, locked, refuse_links, remove, replacing, writing
from ling3export.artifacts.records import Record, canonical, to_json
from ling3export.foundation.errors import CatalogError, listed
from ling3export.foundation.reading import opened, read_bytes

ARTIFACT = "application/vnd.ling3.artifact.v1"
RECORD = "application/vnd.ling3.record.v1+json"
LAYER = "application/vnd.ling3.file.v1"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
TITLE, NAME = "org.opencontainers.image.title", "org.opencontainers.image.ref.name"
LAYOUT, INDEX, LOCK, BLOBS = "oci-layout", "index.json", ".lock", "blobs/sha256"
EMPTY = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}
OURS = re.compile(rf"[0-9a-f]{{64}}|\.[0-9a-f]{{64}}\.{PARTIAL}")  # names that a publication makes in BLOBS
BLOCK = 1 << 20


class Descriptor(Record, frozen=True):
    """The fields of an OCI descriptor that we read."""

    mediaType: str
    digest: BlobDigest
    size: int


@dataclass(frozen=True)
class Published:
    """A version in a store: its image manifest, which names every byte by digest, and its record."""

    image: Descriptor
    record: CatalogRecord

    def __str__(self) -> str:
        return f"{self.record.id}@{self.record.version}"

    def tagged(self, tag: str) -> dict[str, Any]:
        """A descriptor for ``index.json``."""
        return to_json(self.image) | {"artifactType": ARTIFACT, "annotations": {NAME: f"{self.record.id}:{tag}"}}


class OciLayout:
    """An OCI image layout; the first publication makes its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return f"oci:{self.folder}"

    def versions(self, id: str | None = None) -> list[Published]:
        """All versions, or all of one id, in order. Images of other kinds are passed over.

        Raises:
            CatalogError: The folder is no layout, or a document is missing or damaged.
            UnsafePath: A file's path leaves its folder.
        """
        published: dict[str, Published] = {}  # by digest: `latest` names a version again
        for image in self._images():
            if image.digest not in published and image.mediaType == MANIFEST:
                config = self._descriptor(self._manifest(image).get("config"))
                if config.mediaType == RECORD:
                    record = read_record(self._document(config), f"{config.digest} of {self}")
                    published[image.digest] = Published(image, record)
        chosen = [version for version in published.values() if id in (None, version.record.id)]
        return sorted(chosen, key=lambda version: (version.record.id, order(version.record.version)))

    def find(self, id: str, version: str | None = None) -> Published:
        """One version, by default the latest; a CatalogError if the store has no such version."""
        known = {published.record.version: published for published in self.versions(id)}
        wanted = version or latest(known)
        if wanted not in known:
            versions, name = f"version {listed([*reversed(known)])}" if known else "none", f"{id}@{version or 'latest'}"
            raise CatalogError(f"version `{name}`: expected it in the store, found {versions}, in {self}")
        return known[wanted]

    def blob(self, sha: str) -> str:
        """The path of a blob below the folder. Refuses a missing one, and a symbolic link on the way to it."""
        path = f"{BLOBS}/{sha}"
        refuse_links(self.folder, (path,))
        if not (self.folder / path).exists():
            hint = "copy or publish the version again"
            raise CatalogError(f"blob `sha256:{sha}`: the file is missing in {self}", hint)
        return path

    def _images(self) -> list[Descriptor]:
        return [self._descriptor(raw) for raw in self._index()["manifests"]]

    def _index(self) -> dict[str, Any]:
        try:
            layout = parsed(read_bytes(self.folder, LAYOUT, LARGEST), str(self), LAYOUT)
            index = parsed(read_bytes(self.folder, INDEX, LARGEST), str(self), INDEX)
        except OSError as error:
            raise CatalogError(
                f"store `{self}`: expected an OCI image layout, found {error.strerror}, at {error.filename}",
                "the first publication makes one: ling3export catalog publish ARTIFACT oci:FOLDER --id ID --version V",
            ) from error
        if (version := layout.get("imageLayoutVersion")) != "1.0.0":
            raise CatalogError(f"{LAYOUT}: expected imageLayoutVersion 1.0.0, found {str(version)[:40]}, in {self}")
        if not isinstance(index.get("manifests"), list):
            raise CatalogError(f"{INDEX}: `manifests` must be a list, in {self}")
        return index

    def _manifest(self, image: Descriptor) -> dict[str, Any]:
        return parsed(self._document(image), str(self), f"manifest {image.digest}")

    def _descriptor(self, raw: object) -> Descriptor:
        """A descriptor without the fields that other tools add."""
        if isinstance(raw, dict):
            raw = {name: raw[name] for name in Descriptor.__struct_fields__ if name in raw}
        return typed(Descriptor, raw, str(self), "descriptor")

    def _document(self, blob: Descriptor) -> bytes:
        """The bytes of a manifest or a record, compared with their digest."""
        what = f"blob `{blob.digest}`"
        try:
            data = read_bytes(self.folder, f"{BLOBS}/{blob.digest.removeprefix('sha256:')}", LARGEST)
        except OSError as error:
            raise CatalogError(f"{what}: expected a readable file, found {error.strerror}, in {self}") from error
        if f"sha256:{sha256(data).hexdigest()}" != blob.digest:
            raise CatalogError(f"{what}: expected bytes of this digest, found others, in {self}")
        return data

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Makes the layout, and holds its lock in the block: ``gc`` and other publishers wait."""
        with writing(self.folder / LAYOUT):
            refuse_links(self.folder, (BLOBS,))
            (self.folder / BLOBS).mkdir(parents=True, exist_ok=True)
        with locked(self.folder / LOCK):
            for path in leftovers(self.folder / INDEX):  # of a writer that was killed
                remove(path)
            if not os.path.lexists(self.folder / LAYOUT):
                self._put(LAYOUT, canonical({"imageLayoutVersion": "1.0.0"}))
            if not os.path.lexists(self.folder / INDEX):  # last: a folder with an index is a whole layout
                self._put(INDEX, canonical(EMPTY))
            yield

    def add_file(self, folder: Path, file: File) -> int:
        """Copies a file of ``folder`` into the store unless it is there; returns the bytes that were written."""
        path = f"{BLOBS}/{file.sha256}"
        if os.path.lexists(self.folder / path):
            return 0
        refuse_links(self.folder, (path,))
        with opened(folder, file.path) as source, replacing(self.folder / path, file.size) as blob:
            digest = sha256()
            while data := source.read(BLOCK):
                digest.update(data)
                blob.write(data)
            if digest.hexdigest() != file.sha256:
                raise CatalogError(f"file `{file.path}`: expected no change meanwhile, found one, in {folder}")
            os.fchmod(blob.fileno(), 0o444)  # pulled folders may hold it as a second name
        return file.size

    def enter(self, record: CatalogRecord) -> Published:
        """Adds a new version whose files are in the store, and moves ``latest``; the caller holds the lock."""
        layers = [
            to_json(Descriptor(LAYER, f"sha256:{file.sha256}", file.size)) | {"annotations": {TITLE: file.path}}
            for file in record.files
        ]
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": ARTIFACT, "layers": layers}
        config = self._put_document(RECORD, canonical(to_json(record)))
        image = self._put_document(MANIFEST, canonical(manifest | {"config": to_json(config)}))
        index, versions = self._index(), [*self.versions(record.id), Published(image, record)]
        digests = {version.image.digest for version in versions}
        newest = latest(version.record.version for version in versions)
        tags = [version.tagged(version.record.version) for version in versions]
        tags += [version.tagged("latest") for version in versions if version.record.version == newest]
        others = [raw for raw in index["manifests"] if raw["digest"] not in digests]
        self._put(INDEX, canonical(index | {"manifests": [*others, *tags]}))
        return versions[-1]

    def gc(self) -> tuple[int, int]:
        """Removes blobs that no version names; returns their number and their bytes. Waits until nobody publishes."""
        with locked(self.folder / LOCK):
            refuse_links(self.folder, (BLOBS,))
            kept: set[str] = set()
            for image in self._images():
                manifest = self._manifest(image)
                layers = manifest.get("layers")
                if not isinstance(layers, list):
                    raise CatalogError(f"manifest {image.digest}: `layers` must be a list, in {self}")
                kept |= {image.digest, *(self._descriptor(raw).digest for raw in (manifest.get("config"), *layers))}
            removed = freed = 0
            for path in (self.folder / BLOBS).iterdir():
                if OURS.fullmatch(path.name) and f"sha256:{path.name}" not in kept:
                    size = path.lstat().st_size
                    with suppress(IsADirectoryError):
                        if remove(path, self.folder):
                            removed, freed = removed + 1, freed + size
            return removed, freed

    def _put_document(self, media: str, data: bytes) -> Descriptor:
        digest = sha256(data).hexdigest()
        if not os.path.lexists(self.folder / BLOBS / digest):
            self._put(f"{BLOBS}/{digest}", data)
        return Descriptor(media, f"sha256:{digest}", len(data))

    def _put(self, path: str, data: bytes) -> None:
        refuse_links(self.folder, (path,))
        with replacing(self.folder / path, len(data)) as file:
            file.write(data)


def parse_reference(text: str) -> tuple[OciLayout, str, str | None]:
    """The store, the id and the version of ``oci:FOLDER/ID[@VERSION]``; no version means the latest."""
    match = re.fullmatch(r"oci:(.+)/([a-z0-9-]+)(?:@([^@/]+))?", text)
    if match is None or (match[3] is not None and not is_version(match[3]) and match[3] != "latest"):
        raise CatalogError(
            f"reference `{text}`: it must be oci:FOLDER/ID or oci:FOLDER/ID@VERSION",
            "for example oci:store/ling3-tiny@1.0.0; skopeo copy brings versions of a registry into a folder",
        )
    return OciLayout(Path(match[1])), match[2], None if match[3] == "latest" else match[3]


def parse_store(text: str) -> OciLayout:
    if not text.startswith("oci:") or text == "oci:":
        hint = "skopeo copy moves versions between a folder and a registry"
        raise CatalogError(f"store `{text}`: it must be oci:FOLDER", hint)
    return OciLayout(Path(text.removeprefix("oci:")))
