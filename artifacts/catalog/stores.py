"""References to versions, and what every store can do."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling3export.artifacts.catalog import oci
from ling3export.artifacts.catalog.layout import OciLayout
from ling3export.artifacts.catalog.oci import CatalogEntry, Descriptor
from ling3export.artifacts.catalog.record import CatalogRecord, read_record
from ling3export.artifacts.catalog.versions import is_version, latest, order
from ling3export.foundation.errors import CatalogError, listed
from ling3export.foundation.extras import require

if TYPE_CHECKING:
    from ling3export.artifacts.catalog.registry import Registry

    Store = OciLayout | Registry

HOST = re.compile(r"(localhost|[\w-]+(\.[\w-]+)+|[\w-]+(?=:))(:\d{1,5})?(/[a-z0-9._/-]+)?", re.ASCII)


@dataclass(frozen=True)
class ResolvedVersion:
    """A version in a store, the layers of each of its files, and its record."""

    entry: CatalogEntry
    layers: dict[str, list[Descriptor]]
    record: CatalogRecord


@dataclass(frozen=True)
class CatalogReference:
    """``STORE/ID[@VERSION]``, for a registry ``HOST/NAME[:VERSION]``."""

    store: str
    id: str
    version: str | None = None


def parse_reference(text: str) -> CatalogReference:
    """Reads a reference.

    Raises:
        CatalogError: It is none.
    """
    match = re.fullmatch(r"(.+)/([a-z0-9-]+)(?:[@:]([^@:/]+))?", text)
    if match is None or (match[3] is not None and not is_version(match[3]) and match[3] != "latest"):
        raise CatalogError(
            f"reference `{text}`: expected STORE/ID or STORE/ID@VERSION, found another form",
            "for example oci:FOLDER/ling3-tiny@1.0.0, or HOST/ling3-tiny:1.0.0 of a registry",
        )
    return CatalogReference(match[1], match[2], None if match[3] == "latest" else match[3])


def open_store(text: str) -> "Store":
    """The store that a text names.

    Raises:
        CatalogError: It is none of those that are known.
    """
    kind, _, place = text.partition(":")
    if kind == "oci" and place:
        return OciLayout(Path(place))
    if "://" in text:
        require("store", "remote", "fsspec", kind=CatalogError)
        from ling3export.artifacts.catalog.remote import RemoteLayout

        return RemoteLayout(text)
    if HOST.fullmatch(text):
        require("store", "oci", "requests", kind=CatalogError)
        from ling3export.artifacts.catalog.registry import Registry

        return Registry(text)
    raise CatalogError(
        f"store `{text}`: expected oci:FOLDER, HOST or a URL, found another form",
        "a registry's name has a dot or a port, or is localhost",
    )


def open_layout(text: str) -> OciLayout:
    """A store whose blobs can be removed.

    Raises:
        CatalogError: It is a registry or at a URL, where nobody knows who else is publishing.
    """
    store = open_store(text)
    if type(store) is not OciLayout:
        raise CatalogError(f"store `{text}`: expected oci:FOLDER, found another", "use the store's own tools")
    return store


def choose(store: "Store", id: str, version: str | None) -> CatalogEntry:
    """A version, or the latest one.

    Raises:
        CatalogError: There is none.
    """
    there = [] if version else store.versions(id)
    wanted = version or latest(there)
    entry = None if wanted is None else store.entry(id, wanted)
    if entry is None:
        there = store.versions(id) if version else there  # once: somebody may publish meanwhile
        found = f"version {listed([*reversed(there)])}" if there else "none"
        raise CatalogError(f"version `{id}@{version or 'latest'}`: expected it in the store, found {found}, in {store}")
    return entry


def resolve(
    store: "Store",
    id: str,
    version: str | None = None,
    *,
    strict: bool = False,
    warn: Callable[[str], object] = lambda text: None,
) -> ResolvedVersion:
    """A version, or the latest one, as its documents say it.

    Raises:
        CatalogError: There is none, or a document is damaged, or is of another version.
        UnsafePath: A path that leaves its folder.
    """
    return find(store, choose(store, id, version), strict=strict, warn=warn)


def located(
    reference: str, *, strict: bool = False, warn: Callable[[str], object] = lambda text: None
) -> tuple["Store", ResolvedVersion]:
    """The store that a reference names, and the version: see :func:`resolve`."""
    wanted = parse_reference(reference)
    store = open_store(wanted.store)
    return store, resolve(store, wanted.id, wanted.version, strict=strict, warn=warn)


def find(
    store: "Store", entry: CatalogEntry, *, strict: bool = False, warn: Callable[[str], object] = lambda text: None
) -> ResolvedVersion:
    """A version, as its documents say it.

    Raises:
        CatalogError: A document is damaged, or is of another version.
        UnsafePath: A path that leaves its folder.
    """
    where = f"{entry} of {store}"
    image = oci.image_of(store.read(entry.descriptor), where)
    record = read_record(store.read(image.config), where, strict=strict, warn=warn)
    if (record.id, record.version) != (entry.id, entry.version):
        raise CatalogError(f"record: expected that of {entry}, found {record.id}@{record.version}, in {store}")
    if others := record.requirements.depends:  # which earlier versions pulled with it
        warn(f"{entry}: to be pulled, too: {listed([f'{each.id}@{each.version}' for each in others])}")
    return ResolvedVersion(entry, oci.layers_of(image, record, where), record)


def search(
    store: "Store",
    words: str,
    *,
    tag: str | None = None,
    kind: str | None = None,
    target: str | None = None,
    tp: int | None = None,
) -> list[CatalogRecord]:
    """Records that hold every word, in id, name, description, author or a tag, whatever its case.

    Args:
        store: Where to look.
        words: Divided by spaces; parts of words do, so that Chinese is found.
        tag: Only with this tag.
        kind: Only of this kind.
        target: Only for this target, with or without its ``@TP``.
        tp: Only for so many devices.

    Returns:
        First that whose id it is, then ids that begin so, then names that hold it, then others; of each the latest
        version first.
    """
    said = words.casefold()
    found = []
    for record in (find(store, entry).record for entry in store.entries()):
        text = "\n".join((record.id, record.name, record.description, record.author, *record.tags)).casefold()
        targets = {*record.requirements.targets, *(each.partition("@")[0] for each in record.requirements.targets)}
        if (
            all(word in text for word in said.split())
            and (tag is None or tag in record.tags)
            and kind in (None, record.kind)
            and (target is None or target in targets)
            and (tp is None or f"tp{tp}" in record.tags)
        ):
            found.append(record)

    def rank(record: CatalogRecord) -> int:
        matches = (record.id == said, record.id.startswith(said), said in record.name.casefold(), True)
        return matches.index(True)

    found.sort(key=lambda record: order(record.version), reverse=True)
    return sorted(found, key=lambda record: (rank(record), record.id))


def summary(record: CatalogRecord) -> dict[str, Any]:
    """What a line of a list says of a version."""
    return {
        "id": record.id,
        "version": record.version,
        "kind": record.kind,
        "targets": list(record.requirements.targets),
        "bytes": record.size,
        "name": record.name,
    }
