"""From an artifact's folder to a version in a store."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from ling3export.artifacts import manifest as manifests
from ling3export.artifacts.catalog import oci
from ling3export.artifacts.catalog.layout import existing
from ling3export.artifacts.catalog.oci import Descriptor, Entry, ImageManifest, Part
from ling3export.artifacts.catalog.record import (
    SCHEMA,
    Dependency,
    File,
    Install,
    Needs,
    Record,
    Score,
    check_paths,
    digest_of,
    typed,
)
from ling3export.artifacts.catalog.stores import Store, choose, find
from ling3export.artifacts.files import open_regular
from ling3export.artifacts.records import canonical, to_json
from ling3export.artifacts.schema import Manifest, Target
from ling3export.artifacts.signing import SIGNATURES, read_signatures

BLOCK = 1 << 20
WORKERS = 2  # hashing releases the interpreter lock


class Writable(Store, Protocol):
    """A store that takes versions."""

    def writing(self, id: str) -> Any:
        """A context in which parts may be added."""
        ...

    def add(self, part: Part) -> int:
        """Writes a part of a file unless it is there; returns the bytes that were written."""
        ...

    def add_document(self, data: bytes, media: str, artifact: str | None = None) -> Descriptor:
        """Writes a record or a manifest."""
        ...

    def enter(self, id: str, version: str, manifest: Descriptor) -> None:
        """Makes the version, and moves ``latest``."""
        ...

    def refer(self, id: str, manifest: Descriptor, image: ImageManifest) -> bool:
        """Adds what is said of a version, which ``image`` names as its subject; False if it was there."""
        ...


@dataclass(frozen=True)
class Words:
    """What people are told of an artifact."""

    name: str = ""
    description: str = ""
    author: str = ""
    tags: tuple[str, ...] = ()
    depends: tuple[Dependency, ...] = ()


@dataclass(frozen=True)
class Published:
    """What a publication did.

    Attributes:
        record: The version's.
        moved: Bytes of files that were written; those of other versions are there already.
        new: Whether the version was not there before.
    """

    record: Record
    moved: int
    new: bool


def publish(
    artifact: Path, store: Writable, id: str, version: str, words: Words, score: Score | None = None
) -> Published:
    """Publishes a folder whose bytes were verified.

    Args:
        artifact: The folder.
        store: Where to.
        id: Its name there.
        version: A semantic version that is not there yet, or that has the same content.
        words: What people are told of it.
        score: How it did in an evaluation; a version that is there keeps the score that it was published with.

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
        for entry in store.entries(id):
            if entry.version == version:
                if (same := _same(store, entry, record)) is None:
                    raise existing(id, version, store)
                return Published(same, 0, False)
        moved = sum(store.add(part) for _, parts in digested.values() for part in parts)
        config = store.add_document(canonical(to_json(record)), oci.RECORD)
        layers = tuple(part.descriptor for _, parts in digested.values() for part in parts)
        image = ImageManifest(
            schemaVersion=2, mediaType=oci.MANIFEST, artifactType=oci.ARTIFACT, config=config, layers=layers
        )
        document = store.add_document(canonical(to_json(image)), oci.MANIFEST, oci.ARTIFACT)
        store.enter(id, version, document)  # which refuses a version that is there by now
    return Published(record, moved, True)


def _same(store: Store, entry: Entry, record: Record) -> Record | None:
    """The record of a version that is there, if it says the same as a new one, dates and score apart."""
    _, old = find(store, entry)
    dated = sealed(replace(record, created_at=old.created_at, updated_at=old.updated_at, eval=old.eval))
    return old if dated.digest == old.digest else None


def attach(store: Writable, id: str, version: str, score: Score, folder: Path, names: Sequence[str]) -> bool:
    """Adds the results of an evaluation to a version, as a manifest of their own whose subject is the version's.

    Args:
        store: Where the version is.
        id: Its id.
        version: The version.
        score: What came out.
        folder: Where the results are.
        names: Their files.

    Returns:
        Whether they were not there before.
    """
    with store.writing(id):
        subject = replace(choose(store, id, version).descriptor, annotations=None, artifactType=None)
        parts = [part for name in names for part in digested_file(folder, name)[1]]
        for part in parts:
            store.add(part)
        image = ImageManifest(
            schemaVersion=2,
            mediaType=oci.MANIFEST,
            artifactType=oci.EVAL,
            subject=subject,
            config=store.add_document(b"{}", oci.EMPTY),
            layers=tuple(part.descriptor for part in parts),
            annotations={oci.SUITE: score.suite, oci.SCORE: repr(score.score), oci.RUN: score.run_digest},
        )
        return store.refer(id, store.add_document(canonical(to_json(image)), oci.MANIFEST, oci.EVAL), image)


def attached(store: Store, entry: Entry) -> list[Score]:
    """The results of evaluations that were added to a version.

    Raises:
        CatalogError: One of them says something else than that.
    """
    found = []
    for _, image in store.referrers(entry.descriptor):
        said = image.annotations or {}
        try:
            number = float(said.get(oci.SCORE, ""))
        except ValueError:
            number = math.nan
        raw = {"suite": said.get(oci.SUITE), "score": number, "run_digest": said.get(oci.RUN)}
        found.append(typed(Score, raw, f"{entry} of {store}", "evaluation"))
    return found


def described(
    manifest: Manifest,
    id: str,
    version: str,
    words: Words,
    files: tuple[File, ...],
    created: str,
    updated: str,
    score: Score | None = None,
) -> Record:
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
        depends=words.depends,
        devices=max((target.tp for target in targets), default=0),
        jaxlib=jaxlibs.pop() if len(jaxlibs) == 1 else None,
        state_abi=abis.pop() if len(abis) == 1 else None,
        memory_bytes_per_device=max(peaks, default=None),
    )
    facts = {target.platform for target in targets} | {f"tp{target.tp}" for target in targets} | {manifest.plan.dtype}
    record = Record(
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
    return typed(Record, to_json(sealed(record)), "what is to be published", "record")


def spelled(target: Target) -> str:
    """``tpu:v6e:4x4``, ``cpu@2``: a target as a build takes it."""
    return target.text if target.topology else f"{target.text}@{target.tp}"


def sealed(record: Record) -> Record:
    """A record with its digest."""
    return replace(record, digest=digest_of(to_json(record)))


def digested_file(folder: Path, name: str) -> tuple[File, Sequence[Part]]:
    """A file's size and digest, and those of its parts; read once."""
    whole, start = sha256(), 0
    parts: list[Part] = []
    with open_regular(folder, name, f"file `{name}`") as file:
        while True:
            digest, size = sha256(), 0
            while size < oci.PART and (data := file.read(min(BLOCK, oci.PART - size))):
                whole.update(data)
                digest.update(data)
                size += len(data)
            if size or not parts:
                parts.append(Part(folder, name, start, size, f"sha256:{digest.hexdigest()}"))
            start += size
            if size < oci.PART:
                return File(name, start, whole.hexdigest()), parts
