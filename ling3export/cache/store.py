"""The cache's files. Each entry is one file, which appears whole by a rename. Knows no jax.

    cells/KEY      a cell: its manifest record and its portable program
    programs/KEY   a compiled program: its record and the executable

KEY is the sha256 of the fields that decide the entry. A file is the sha256 of the rest of it, a line of JSON (version,
fields, record), and the bytes. So a kill leaves no half of an entry, two builds that write the same entry both write a
whole one, and an entry that a clean-up removes is read to its end.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import RECOMPILED, refuse_links, remove, replace_file, user_cache, writing
from ling3export.artifacts.records import CANONICAL, WrongRecordError, sha256_of
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.reading import read_bytes
from ling3export.foundation.strict_json import parse_json

VERSION = 3  # the form of entries; those of another version are not read
KINDS = ("cells", "programs")
POLICIES = ("on", "off", "redo", "readonly")
LARGEST_ENTRY = 2 << 30  # bytes
Report = Callable[[str], None]


@dataclass(frozen=True)
class CacheUse:
    """How a build uses the cache; the one place of these defaults.

    Attributes:
        policy: ``on``: read and write. ``off``: neither. ``redo``: make everything again and replace what is there.
            ``readonly``: read, and change nothing in the folder.
        folder: None is ``user_cache()``.
    """

    policy: str = "on"
    folder: Path | None = None

    @property
    def reads(self) -> bool:
        return self.policy in ("on", "readonly")

    @property
    def writes(self) -> bool:
        return self.policy in ("on", "redo")

    @property
    def where(self) -> Path:
        return (user_cache() if self.folder is None else self.folder).absolute()


DEFAULT_USE = CacheUse()


@dataclass(frozen=True)
class CacheEntry:
    """The record of a cell or of a compiled program, and its bytes."""

    record: dict[str, Any]
    data: bytes


class Cache:
    """A folder of entries, which several processes may use at once; the first write makes it.

    ``report`` is called with a line for each broken entry and each failed write.
    """

    def __init__(self, use: CacheUse, report: Report) -> None:
        self.folder, self._report, self._reads, self._writes = use.where, report, use.reads, use.writes

    def path(self, kind: str, key: str) -> Path:
        return self.folder / kind / key

    def read(
        self, kind: str, key: str, check: Callable[[CacheEntry], object] = lambda entry: None
    ) -> CacheEntry | None:
        """An entry; None if there is none. A broken one is reported and removed, to be made again.

        ``check`` raises a ValueError for a whole entry that cannot be used: it is broken, too.
        """
        path = self.path(kind, key)
        if not self._reads or not os.path.lexists(path):
            return None
        try:
            entry = self._entry(kind, key)
            check(entry)
        except (OSError, ValueError) as error:
            if os.path.lexists(path):  # else a clean-up was faster
                self._discard(path, error)
            return None
        if self._writes:
            with contextlib.suppress(OSError):  # another user's file keeps its time, and is used anyway
                os.utime(path)  # the time of use, by which clean-ups choose
        return entry

    def write(self, kind: str, fields: dict[str, Any], record: dict[str, Any], data: bytes) -> None:
        """Adds or replaces an entry. A write that fails is reported, and the build goes on without it."""
        if not self._writes:
            return
        header = CANONICAL.encode({"version": VERSION, "fields": fields, "record": record}).encode()
        body = header + b"\n" + data
        path = self.path(kind, sha256_of(fields))
        try:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        except ArtifactError as error:
            self._report(f"not cached: {error.message}")

    def _entry(self, kind: str, key: str) -> CacheEntry:
        """An entry whose digest and key are right; a ValueError, whose text follows "found", if it is none."""
        digest, _, body = read_bytes(self.folder, f"{kind}/{key}", LARGEST_ENTRY).partition(b"\n")
        if digest != hashlib.sha256(body).hexdigest().encode():
            raise ValueError("another digest")
        header, _, data = body.partition(b"\n")
        try:
            raw = parse_json(header)
            if raw["version"] != VERSION:
                raise ValueError(f"version {raw['version']} instead of {VERSION}")
            if sha256_of(raw["fields"]) != key:
                raise ValueError("the fields of another key")
            return CacheEntry(raw["record"], data)
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"no entry ({type(error).__name__}: {error})") from error

    def _discard(self, path: Path, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, WrongRecordError):
            reason = f"another record ({error})"
        name = f"{path.parent.name}/{path.name[:12]}"
        outcome = "discarded, it is made again" if self._writes else "not used"
        self._report(f"cache entry {name}: expected a whole one, found {reason}, in {self.folder}; {outcome}")
        if self._writes:
            with contextlib.suppress(OSError):  # it is replaced, or reported again
                remove(path)


def cache_folder(use: CacheUse) -> Path:
    """The folder of a cache to read or clean up. The default folder may be absent: nothing was built yet.

    Raises:
        ArtifactError: The folder is no cache, so nothing in it may be removed.
    """
    folder = use.where
    try:
        names = os.listdir(folder)
        refuse_links(folder, names)
        if {*names} <= {*KINDS, RECOMPILED}:
            return folder
        reason = "other files"
    except OSError as error:
        if isinstance(error, FileNotFoundError) and use.folder is None:
            return folder
        reason = str(error.strerror)
    raise ArtifactError(
        f"cache `{folder.name}`: expected a folder that builds have written to, found {reason}, in {folder.parent}",
        "name another with --cache-dir, or with LING3_CACHE",
    )
