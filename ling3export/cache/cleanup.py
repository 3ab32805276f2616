"""The size of the cache, and making room in it: by age, by size, or all. A running build has copied what it took."""

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ling3export.artifacts.files import PARTIAL, RECOMPILED, remove, writing
from ling3export.cache.store import KINDS, read_entry

KEY = re.compile(r"[0-9a-f]{64}")
LEFT = re.compile(rf"\.(.+\.)?{PARTIAL}")  # files of writers
WRITING = 3600  # seconds after which nobody still writes one file


@dataclass(frozen=True)
class StoredEntry:
    """An entry of a build, or a program that a runner compiled: its file, seconds since 1970 of its last use, bytes."""

    path: Path
    used: float
    bytes: int


def stored_entries(folder: Path) -> list[StoredEntry]:
    """Every entry, whole or broken, and those of runners, the least recently used first."""
    entries = []
    for path in (path for kind in KINDS for path in (folder / kind).glob("*") if KEY.fullmatch(path.name)):
        with contextlib.suppress(FileNotFoundError):
            stat = path.lstat()
            entries.append(StoredEntry(path, stat.st_mtime, stat.st_size))
    for path in (folder / RECOMPILED).glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            stat, executable = path.lstat(), path.with_suffix(".exec").lstat()
            entries.append(StoredEntry(path, stat.st_mtime, stat.st_size + executable.st_size))
    return sorted(entries, key=lambda entry: (entry.used, entry.path.name))


@dataclass(frozen=True)
class CacheStatus:
    """The contents of the cache: whole entries by kind, programs that runners compiled, entries to be made again."""

    folder: str
    cells: int
    programs: int
    recompiled: int
    bytes: int
    broken: int


def status(folder: Path) -> CacheStatus:
    """The contents of the cache in ``folder``."""
    entries = stored_entries(folder)
    whole = []
    for path in (entry.path for entry in entries):
        with contextlib.suppress(OSError, ValueError):
            if path.parent.name != RECOMPILED:
                read_entry(folder, path.parent.name, path.name)
            whole.append(path.parent.name)
    cells, programs, recompiled = (whole.count(kind) for kind in (*KINDS, RECOMPILED))
    size, broken = sum(entry.bytes for entry in entries), len(entries) - len(whole)
    return CacheStatus(str(folder), cells, programs, recompiled, size, broken)


@dataclass(frozen=True)
class Cleaned:
    """The result of a clean-up: entries that were removed and kept, bytes that were freed and are left."""

    removed: int = 0
    kept: int = 0
    freed: int = 0
    bytes: int = 0


def clean_up(
    folder: Path, *, older_than: float | None = None, max_bytes: int | None = None, everything: bool = False
) -> Cleaned:
    """Removes entries, and files of writers that were killed.

    Args:
        folder: The cache's folder.
        older_than: Seconds; entries that were not used for longer are removed.
        max_bytes: Entries are removed, the least recently used first, until the rest takes no more.
        everything: All entries are removed.

    Raises:
        ArtifactError: The folder cannot be written.
    """
    entries = kept = stored_entries(folder)
    if everything:
        kept = []
    elif older_than is not None:
        kept = [entry for entry in entries if entry.used >= time.time() - older_than]
    size = sum(entry.bytes for entry in kept)
    while max_bytes is not None and size > max_bytes:
        size, kept = size - kept[0].bytes, kept[1:]
    with writing(folder):
        for entry in entries:
            if entry not in kept:
                remove(entry.path)
                if entry.path.parent.name == RECOMPILED:
                    remove(entry.path.with_suffix(".exec"))
        for path in (path for place in (".", *KINDS, RECOMPILED) for path in (folder / place).glob(".*partial-*")):
            with contextlib.suppress(FileNotFoundError):
                if LEFT.fullmatch(path.name) and path.lstat().st_mtime < time.time() - WRITING:
                    remove(path)
    return Cleaned(len(entries) - len(kept), len(kept), sum(entry.bytes for entry in entries) - size, size)
