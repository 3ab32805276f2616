"""The cache's files: entries that name their fields, and the bytes that they point at. Knows no jax.

    cells/KEY.json      one cell: what it was lowered and compiled from, and its manifest record
    programs/KEY.json   one compiled program: what the compiler was given, and the record of what it made
    blobs/SHA256        the bytes of both: portable programs and executables

KEY is the sha256 of the entry's own ``fields``, a blob is named by the sha256 of its content, and an entry carries a
digest of itself. Blobs are written before the entry that names them, each to a temporary sibling, made durable and
renamed. So a kill leaves no entry that lacks something, and two builds that write the same entry both write a whole
one: executables are not reproducible on CPU, and a blob named by its key could belong to the other build's entry.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ling3export.artifacts.files import RECOMPILED, refuse_links, remove, replace_file, writing
from ling3export.artifacts.records import WrongRecordError, from_json, sha256_of
from ling3export.cache.use import LOCK, SHARED, CacheUse, locked
from ling3export.foundation.errors import ArtifactError, listed
from ling3export.foundation.reading import read_bytes
from ling3export.foundation.strict_json import LARGEST, parse_json
from ling3export.plan.targets import TargetSpec

VERSION = 2  # the form of entries; those of another version are not read
KINDS = ("cells", "programs")
LARGEST_BLOB = 2 << 30  # bytes
DIGEST = re.compile(r"[0-9a-f]{64}")
Say = Callable[[str], None]
Record = TypeVar("Record")


@dataclass(frozen=True)
class CacheEntry:
    """One cell or one compiled program.

    Attributes:
        kind: ``cells`` or ``programs``.
        key: The sha256 of the fields.
        fields: Everything that decided what was compiled.
        record: What a manifest says of it.
        blobs: The sha256 of each blob, by name: ``exec``, and ``stablehlo`` for a cell.
        data: The blobs' bytes, once they were read and found right.
    """

    kind: str
    key: str
    fields: dict[str, Any]
    record: dict[str, Any]
    blobs: dict[str, str]
    data: dict[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def target(self) -> str:
        """The name of the target that the entry is for; ``unknown`` if no build wrote its fields."""
        try:
            said = self.fields["target"]
            return from_json(TargetSpec, {name: said.get(name) for name in TargetSpec.__dataclass_fields__}).name
        except (KeyError, AttributeError, WrongRecordError):
            return "unknown"


class Cache:
    """A folder of entries, which several processes may use at once.

    Args:
        use: Says the folder, which the first write makes, and whether entries are looked up and written.
        say: Told of entries that are broken, and of writes that failed.
    """

    def __init__(self, use: CacheUse, say: Say) -> None:
        self.folder, self._say, self._reads, self._writes = use.where, say, use.reads, use.writes

    def path(self, kind: str, key: str) -> Path:
        """Where an entry is, or would be."""
        return self.folder / kind / f"{key}.json"

    def read(
        self, kind: str, key: str, check: Callable[[CacheEntry], object] = lambda entry: None
    ) -> CacheEntry | None:
        """An entry with its bytes; None if there is none. A broken one is named and removed, to be made again.

        Args:
            kind: ``cells`` or ``programs``.
            key: The sha256 of the entry's fields.
            check: Raises ValueError for a whole entry that cannot be used: it is broken, too.
        """
        path = self.path(kind, key)
        if not self._reads or not os.path.lexists(path):
            return None
        try:
            with locked(self.folder, SHARED, create=False):
                self._touch(path)
                entry = read_entry(self.folder, kind, key)
                for name, digest in entry.blobs.items():
                    self._touch(self._blob(digest))
                    entry.data[name] = self._checked(digest)
            check(entry)
        except ArtifactError as error:
            self._say(f"cache not used: {error.message}")
            return None
        except (OSError, ValueError) as error:
            if os.path.lexists(path):  # else a clean-up was faster
                self._discard(path, error)
            return None
        return entry

    def write(self, kind: str, fields: dict[str, Any], record: dict[str, Any], data: dict[str, bytes]) -> None:
        """Adds or replaces an entry; a disk that does not take it is named, and the build goes on without."""
        if not self._writes:
            return
        blobs = {name: hashlib.sha256(raw).hexdigest() for name, raw in data.items()}
        entry = {"version": VERSION, "fields": fields, "blobs": blobs, "record": record}
        text = json.dumps(entry | {"sha256": sha256_of(entry)}, indent=1, ensure_ascii=False)
        path = self.path(kind, sha256_of(fields))
        try:
            with writing(path), locked(self.folder, SHARED):
                for name, raw in data.items():
                    self._write_blob(blobs[name], raw)
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, text.encode())
        except ArtifactError as error:
            self._say(f"not cached: {error.message}")

    def _blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest

    def _checked(self, digest: str) -> bytes:
        path, data = self._blob(digest), read_bytes(self.folder, f"blobs/{digest}", LARGEST_BLOB)
        if hashlib.sha256(data).hexdigest() != digest:
            if self._writes:
                remove(path)
            raise ValueError(f"{len(data):,} bytes of another digest")
        return data

    def _write_blob(self, digest: str, raw: bytes) -> None:
        """Writes a blob that is not there: comparing one that is there is faster than making it durable again."""
        path = self._blob(digest)
        try:
            if read_bytes(self.folder, f"blobs/{digest}", len(raw)) == raw:
                self._touch(path)
                return
        except OSError:
            pass  # there is none, or something else, which the next lines replace
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, raw)

    def _touch(self, path: Path) -> None:
        """Notes the time of use, by which clean-ups choose. Another user's file keeps its time, and is used anyway."""
        if self._writes:
            with contextlib.suppress(OSError):
                os.utime(path)

    def _discard(self, path: Path, error: Exception) -> None:
        found = error.strerror if isinstance(error, OSError) else error
        what = f"cache entry {path.parent.name}/{path.stem[:12]}: expected a whole one, found {found}, in {self.folder}"
        if not self._writes:
            self._say(f"{what}; not used")
            return
        self._say(f"{what}; discarded, it is made again")
        try:
            remove(path)
        except OSError as refused:
            self._say(f"cache entry {path.stem[:12]}: could not be removed: {refused.strerror}")


def read_entry(folder: Path, kind: str, key: str) -> CacheEntry:
    """Reads an entry of the cache in ``folder`` without its bytes, and checks its own digest and its key.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no whole entry of this version; says so in words that follow "found".
    """
    try:
        raw = parse_json(read_bytes(folder, f"{kind}/{key}.json", LARGEST))
        claimed = raw.pop("sha256")
        if raw["version"] != VERSION:
            raise ValueError(f"version {raw['version']} instead of {VERSION}")
        if claimed != sha256_of(raw):
            raise ValueError("another digest")
        if sha256_of(raw["fields"]) != key:
            raise ValueError("the fields of another key")
        if not all(DIGEST.fullmatch(digest) for digest in raw["blobs"].values()):
            raise ValueError("bytes that no digest names")
        if not isinstance(raw["fields"], dict):
            raise ValueError("no fields")
        return CacheEntry(kind, key, raw["fields"], raw["record"], raw["blobs"])
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no entry ({type(error).__name__}: {error})") from error


def record_of(entry: CacheEntry, form: type[Record], names: Collection[str]) -> Record:
    """The record of an entry, which must have the bytes of ``names`` and no others.

    Raises:
        ValueError: No build wrote this entry, though its digests are right; the text follows "found".
    """
    if entry.blobs.keys() != set(names):
        raise ValueError(f"the bytes of {listed(sorted(entry.blobs))} instead of {listed(sorted(names))}")
    try:
        return from_json(form, entry.record)
    except WrongRecordError as error:
        raise ValueError(f"another record ({error})") from error


def known_folder(use: CacheUse) -> Path:
    """The folder of a cache that is to be read or cleaned up: builds wrote to it, or it is empty.

    The default folder may be absent: nothing was built yet.

    Raises:
        ArtifactError: The folder is something else, such as a checkpoint, in which nothing may be removed.
    """
    folder = use.where
    try:
        names = set(os.listdir(folder))
        refuse_links(folder, names)
        if names <= {LOCK, RECOMPILED} or (
            LOCK in names and names & {*KINDS, "builds"}
        ):  # earlier versions made the last
            return folder
        found = "other files"
    except FileNotFoundError:
        if use.folder is None:
            return folder
        found = "none"
    except NotADirectoryError:
        found = "a file"
    except OSError as error:
        found = str(error.strerror)
    raise ArtifactError(
        f"cache `{folder.name}`: expected a folder that builds have written to, found {found}, in {folder.parent}",
        "name another with --cache-dir, or with LING3_CACHE",
    )


def entries(folder: Path, kind: str) -> Iterator[CacheEntry]:
    """Every whole entry of a kind, without bytes, in the order of their keys; broken ones are passed over."""
    for path in sorted((folder / kind).glob("*.json")):
        try:
            yield read_entry(folder, kind, path.stem)
        except (OSError, ValueError):
            continue  # found, named and discarded where it is used
