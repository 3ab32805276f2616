"""The OCI documents that a version consists of: a manifest names the record (its config) and one layer for each file.

A file of more than PART bytes is several layers of the same title, in order.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ling3export.artifacts.catalog.record import CatalogRecord, File, Named, parsed, typed, without_unknown
from ling3export.artifacts.records import at_most
from ling3export.foundation.errors import CatalogError

ARTIFACT = "application/vnd.ling3.artifact.v1"
RECORD = "application/vnd.ling3.record.v1+json"
LAYER = "application/vnd.ling3.file.v1"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
TITLE = "org.opencontainers.image.title"
NAME = "org.opencontainers.image.ref.name"
Block = bytes | memoryview  # of a file as it comes; a memoryview holds it until the next one is asked for
PART = 2_000_000_000  # bytes of a layer: registries and proxies refuse much larger ones


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """Names a blob by its digest."""

    mediaType: str
    digest: Named
    size: int
    artifactType: str | None = None
    annotations: dict[str, str] | None = None

    def annotation(self, name: str) -> str:
        """An annotation; empty where there is none."""
        return (self.annotations or {}).get(name, "")


@dataclass(frozen=True, kw_only=True)
class ImageManifest:
    """A version: its record and its files."""

    schemaVersion: int
    mediaType: str
    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], at_most(200_000)]
    artifactType: str | None = None
    annotations: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Index:
    """``index.json`` of a layout: its versions, under their names."""

    schemaVersion: int
    manifests: Annotated[tuple[Descriptor, ...], at_most(100_000)]
    mediaType: str | None = None


@dataclass(frozen=True)
class CatalogEntry:
    """A version in a store, by the descriptor of its manifest."""

    id: str
    version: str
    descriptor: Descriptor

    def __str__(self) -> str:
        return f"{self.id}@{self.version}"


@dataclass(frozen=True)
class LayerSource:
    """A range of a file of a folder, with the digest of its bytes."""

    path: Path
    title: str
    start: int
    size: int
    digest: str

    @property
    def descriptor(self) -> Descriptor:
        """Its layer."""
        return Descriptor(mediaType=LAYER, digest=self.digest, size=self.size, annotations={TITLE: self.title})


def foreign(kind: Any, raw: object, where: str, what: str) -> Any:
    """A document of ``kind``, without the fields that other tools may add."""
    return typed(kind, without_unknown(kind, raw)[0], where, what)


def image_of(data: bytes, where: str) -> ImageManifest:
    """A version's manifest from its bytes."""
    image: ImageManifest = foreign(ImageManifest, parsed(data, where, "manifest"), where, "manifest")
    return image


def layers_of(manifest: ImageManifest, record: CatalogRecord, where: str) -> dict[str, list[Descriptor]]:
    """The layers of each file, by its path.

    Raises:
        CatalogError: The manifest has other files than the record, or of other sizes or digests.
    """
    found: dict[str, list[Descriptor]] = {}
    for layer in manifest.layers:
        found.setdefault(layer.annotation(TITLE), []).append(layer)
    files = {file.path: file for file in record.files}
    if files.keys() != found.keys():
        other = sorted(files.keys() ^ found.keys())
        raise CatalogError(f"file {other[0]!r}: expected it in record and layers, found it in one alone, in {where}")
    for path, layers in found.items():
        if sum(layer.size for layer in layers) != files[path].size or not _named(layers, files[path]):
            raise CatalogError(f"file {path!r}: expected layers of its size and digest, found others, in {where}")
    return found


def _named(layers: list[Descriptor], file: File) -> bool:
    return len(layers) > 1 or layers[0].digest == f"sha256:{file.sha256}"
