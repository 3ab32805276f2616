"""From an artifact's folder to a version in a store, and the search for versions."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from msgspec import structs

from ling3export.artifacts.catalog.layout import OciLayout, Published
from ling3export.artifacts.catalog.record import (
    SCHEMA,
    CatalogRecord,
    EvalScore,
    File,
    Requirements,
    check_paths,
    order,
    typed,
)
from ling3export.artifacts.manifest import MANIFEST, file_record, read_manifest, recorded_files
from ling3export.artifacts.records import to_json
from ling3export.artifacts.schema import Manifest
from ling3export.artifacts.signing import SIGNATURES, read_signatures
from ling3export.foundation.errors import VersionExists

WORKERS = 2  # hashing releases the interpreter lock


@dataclass(frozen=True)
class Words:
    """The description of an artifact for people, and tags to find it by."""

    name: str = ""
    description: str = ""
    author: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Publication:
    """The result of a publication.

    Attributes:
        moved: Bytes of files that were written; files of other versions are in the store already.
        new: Whether the version was not in the store before.
    """

    version: Published
    moved: int
    new: bool


def publish(
    artifact: Path, store: OciLayout, id: str, version: str, words: Words, score: EvalScore | None = None
) -> Publication:
    """Publishes a folder whose bytes were verified. The same content under the same version changes nothing.

    Raises:
        VersionExists: The version exists with other content.
        Ling3Error: The artifact is damaged, a name is invalid, or the store cannot be written.
    """
    manifest = read_manifest(artifact)
    names = [MANIFEST, *([SIGNATURES] if read_signatures(artifact) else ()), *recorded_files(manifest)]
    check_paths(names, str(artifact))
    with ThreadPoolExecutor(WORKERS) as pool:
        digested = pool.map(lambda name: file_record(artifact, name), names)
        files = tuple(File(file.path, file.bytes, file.sha256) for file in digested)
    record = _described(manifest, id, version, words, files, score)
    with store.publishing():
        for old in store.versions(id):
            if old.record.version == version:
                if old.record == structs.replace(record, created_at=old.record.created_at):
                    return Publication(old, 0, False)
                raise VersionExists(
                    f"version `{old}`: it exists with other content, in {store}",
                    "what was published never changes: publish under the next version",
                )
        moved = sum(store.add_file(artifact, file) for file in files)
        return Publication(store.enter(record), moved, True)


def _described(
    manifest: Manifest, id: str, version: str, words: Words, files: tuple[File, ...], score: EvalScore | None
) -> CatalogRecord:
    targets = manifest.targets.values()
    abis = {target.state_abi for target in targets}
    jaxlibs = {target.requires.jaxlib for target in targets}
    peaks = [cell.memory.peak for target in targets for cell in target.cells.values()]
    facts = {target.platform for target in targets} | {f"tp{target.tp}" for target in targets} | {manifest.plan.dtype}
    record = CatalogRecord(
        schema=SCHEMA,
        id=id,
        version=version,
        name=words.name or id,
        description=words.description,
        author=words.author,
        kind="artifact" if manifest.has_weights else "programs",
        requirements=Requirements(
            targets=tuple(target.text if target.topology else f"{target.text}@{target.tp}" for target in targets),
            devices=max((target.tp for target in targets), default=0),
            jaxlib=jaxlibs.pop() if len(jaxlibs) == 1 else None,
            state_abi=abis.pop() if len(abis) == 1 else None,
            memory_bytes_per_device=max(peaks, default=None),
        ),
        tags=tuple(sorted({*words.tags, *facts})),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        files=files,
        eval=score,
    )
    return typed(CatalogRecord, to_json(record), "the version to publish", "record")


def search(store: OciLayout, words: str) -> list[CatalogRecord]:
    """Records that hold every word in id, name, description, author, kind, a tag or a target, in any case.

    Words are divided by spaces; each may be a part of a word, so that Chinese is found. First comes the record whose id
    is ``words``, then ids that begin so, then names that hold it, then others; of each id the latest version first.
    """
    wanted = words.casefold()
    matching = []
    for record in (version.record for version in store.versions()):
        texts = (record.id, record.name, record.description, record.author, record.kind)
        text = "\n".join((*texts, *record.tags, *record.requirements.targets)).casefold()
        if all(word in text for word in wanted.split()):
            matching.append(record)

    def rank(record: CatalogRecord) -> int:
        return (record.id == wanted, record.id.startswith(wanted), wanted in record.name.casefold(), True).index(True)

    matching.sort(key=lambda record: order(record.version), reverse=True)
    return sorted(matching, key=lambda record: (rank(record), record.id))
