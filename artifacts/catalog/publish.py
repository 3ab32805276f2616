"""From an artifact's folder to a version in a store."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.artifacts import manifest as manifests
from ling3export.artifacts.catalog import oci
from ling3export.artifacts.catalog.layout import existing
from ling3export.artifacts.catalog.oci import CatalogEntry, ImageManifest, LayerSource
from ling3export.artifacts.catalog.record import (
    SCHEMA,
    CatalogRecord,
    EvalScore,
    File,
    Install,
    Needs,
    check_paths,
    digest_of,
    typed,
)
from ling3export.artifacts.catalog.stores import find
from ling3export.artifacts.files import open_regular
from ling3export.artifacts.records import canonical, to_json
from ling3export.artifacts.schema import Manifest, Target
from ling3export.artifacts.signing import SIGNATURES, read_signatures

if TYPE_CHECKING:
    from ling3export.artifacts.catalog.stores import Store

BLOCK = 1 << 20
WORKERS = 2  # hashing releases the interpreter lock


@dataclass(frozen=True)
class Words:
    """What people are told of an artifact."""

    name: str = ""
    description: str = ""
    author: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Publication:
    """What a publication did.

    Attributes:
        record: The version's.
        moved: Bytes of files that were written; those of other versions are there already.
        new: Whether the version was not there before.
    """

    record: CatalogRecord
    moved: int
    new: bool


def publish(
    artifact: Path, store: "Store", id: str, version: str, words: Words, score: EvalScore | None = None
) -> Publication:
    """Publishes a folder whose bytes were verified.

    Args:
        artifact: The folder.
        store: Where to.
        id: Its name there.
        version: A semantic version that is not there yet, or that has the same content.
        words: What people are told of it.
        score: How it did in an evaluation.

    Raises:
        VersionExists: The version is there with other content.
        Ling3Error: The artifact is damaged, a name is none, or the store cannot be written.
    """
    manifest = manifests.read_manifest(artifact)
    names = [manifests.MANIFEST, *([SIGNATURES] if read_signatures(artifact) else ())]
    names += manifests.recorded_files(manifest)
    check_paths(names, str(artifact))
    with ThreadPoolExecutor(WORKERS) as pool:
        digested = dict(zip(names, pool.map(lambda name: digested_file(artifact, name), names), strict=True))
    files = tuple(file for file, _ in digested.values())
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = described(manifest, id, version, words, files, now, now, score)
    with store.writing(id):
        if (entry := store.entry(id, version)) is not None:
            if (same := _same(store, entry, record)) is None:
                raise existing(id, version, store)
            return Publication(same, 0, False)
        moved = sum(store.add(part) for _, parts in digested.values() for part in parts)
        config = store.add_document(canonical(to_json(record)), oci.RECORD)
        layers = tuple(part.descriptor for _, parts in digested.values() for part in parts)
        image = ImageManifest(
            schemaVersion=2, mediaType=oci.MANIFEST, artifactType=oci.ARTIFACT, config=config, layers=layers
        )
        document = store.add_document(canonical(to_json(image)), oci.MANIFEST, oci.ARTIFACT)
        store.enter(id, version, document)  # which refuses a version that is there by now
    return Publication(record, moved, True)


def _same(store: "Store", entry: CatalogEntry, record: CatalogRecord) -> CatalogRecord | None:
    """The record of a version that is there, if it says the same as a new one, dates apart."""
    old = find(store, entry).record
    dated = sealed(replace(record, created_at=old.created_at, updated_at=old.updated_at))
    return old if dated.digest == old.digest else None


def described(
    manifest: Manifest,
    id: str,
    version: str,
    words: Words,
    files: tuple[File, ...],
    created: str,
    updated: str,
    score: EvalScore | None = None,
) -> CatalogRecord:
    """The record of an artifact.

    Raises:
        CatalogError: A name, version or word that a record does not take.
    """
    targets = manifest.targets.values()
    abis = {target.state_abi for target in targets}
    jaxlibs = {target.requires.jaxlib for target in targets}
    peaks = [cell.memory.peak for target in targets for cell in target.cells.values()]
    needs = Needs(
        token=False,
        targets=tuple(spelled(target) for target in targets),
        depends=(),
        devices=max((target.tp for target in targets), default=0),
        jaxlib=jaxlibs.pop() if len(jaxlibs) == 1 else None,
        state_abi=abis.pop() if len(abis) == 1 else None,
        memory_bytes_per_device=max(peaks, default=None),
    )
    facts = {target.platform for target in targets} | {f"tp{target.tp}" for target in targets} | {manifest.plan.dtype}
    record = CatalogRecord(
        schema=SCHEMA,
        id=id,
        version=version,
        name=words.name or id,
        description=words.description,
        author=words.author,
        kind="artifact" if manifest.has_weights else "programs",
        requirements=needs,
        install=Install(f"ling3-runner serve {id}", {}),
        tags=tuple(sorted({*words.tags, *facts})),
        created_at=created,
        updated_at=updated,
        files=files,
        digest="sha256:" + "0" * 64,
        eval=score,
    )
    return typed(CatalogRecord, to_json(sealed(record)), "what is to be published", "record")


def spelled(target: Target) -> str:
    """``tpu:v6e:4x4``, ``cpu@2``: a target as a build takes it."""
    return target.text if target.topology else f"{target.text}@{target.tp}"


def sealed(record: CatalogRecord) -> CatalogRecord:
    """A record with its digest."""
    return replace(record, digest=digest_of(to_json(record)))


def digested_file(folder: Path, name: str) -> tuple[File, Sequence[LayerSource]]:
    """A file's size and digest, and those of its parts; read once."""
    whole, start = sha256(), 0
    parts: list[LayerSource] = []
    with open_regular(folder, name, f"file `{name}`") as file:
        while True:
            digest, size = sha256(), 0
            while size < oci.PART and (data := file.read(min(BLOCK, oci.PART - size))):
                whole.update(data)
                digest.update(data)
                size += len(data)
            if size or not parts:
                parts.append(LayerSource(folder, name, start, size, f"sha256:{digest.hexdigest()}"))
            start += size
            if size < oci.PART:
                return File(name, start, whole.hexdigest()), parts
