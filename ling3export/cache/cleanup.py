"""The size of the cache, and making room in it. A running build has copied what it took."""

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ling3export.artifacts.files import PARTIAL, RECOMPILED, remove, writing
from ling3export.cache.store import KINDS

PLACES = (*KINDS, RECOMPILED)
NAME = re.compile(r"[0-9a-f]{64}|.+\.json")  # of an entry, and of a runner's program
LEFT = re.compile(rf"\.(.+\.)?{PARTIAL}")  # files of writers
WRITING = 3600  # seconds after which nobody still writes one file


@dataclass(frozen=True)
class StoredEntry:
    """An entry of a build, or a program that a runner compiled: its file, seconds since 1970 of its last use, bytes."""

    path: Path
    used: float
    bytes: int


def stored_entries(folder: Path) -> list[StoredEntry]:
    """Every entry, and every program of a runner, the least recently used first."""
    entries = []
    for path in (path for place in PLACES for path in (folder / place).glob("*") if NAME.fullmatch(path.name)):
        with contextlib.suppress(FileNotFoundError):
            sizes = [file.lstat().st_size for file in _files(path)]
            entries.append(StoredEntry(path, path.lstat().st_mtime, sum(sizes)))
    return sorted(entries, key=lambda entry: (entry.used, entry.path.name))


def _files(path: Path) -> list[Path]:
    """The files of an entry: one, or of a runner's program its JSON and its executable."""
    return [path, path.with_suffix(".exec")] if path.parent.name == RECOMPILED else [path]


@dataclass(frozen=True)
class CacheStatus:
    """The contents of the cache: entries by kind, programs that runners compiled, and the bytes of all."""

    folder: str
    cells: int
    programs: int
    recompiled: int
    bytes: int


def status(folder: Path) -> CacheStatus:
    """The contents of the cache in ``folder``."""
    entries = stored_entries(folder)
    cells, programs, recompiled = map([entry.path.parent.name for entry in entries].count, PLACES)
    return CacheStatus(str(folder), cells, programs, recompiled, sum(entry.bytes for entry in entries))


@dataclass(frozen=True)
class Cleaned:
    """The result of a clean-up: entries that were removed and kept, bytes that were freed and are left."""

    removed: int = 0
    kept: int = 0
    freed: int = 0
    bytes: int = 0


def clean_up(folder: Path, max_bytes: int | None = None) -> Cleaned:
    """Removes the least recently used entries until the rest takes no more than ``max_bytes``; by default all.

    Files of writers that were killed go too.
    """
    entries = stored_entries(folder)
    whole = left = sum(entry.bytes for entry in entries)
    removed = 0
    while removed < len(entries) and (max_bytes is None or left > max_bytes):
        left -= entries[removed].bytes
        removed += 1
    with writing(folder):
        for path in (path for entry in entries[:removed] for path in _files(entry.path)):
            remove(path)
        for path in (path for place in (".", *PLACES) for path in (folder / place).glob(".*partial-*")):
            with contextlib.suppress(FileNotFoundError):
                if LEFT.fullmatch(path.name) and path.lstat().st_mtime < time.time() - WRITING:
                    remove(path)
    return Cleaned(removed, len(entries) - removed, whole - left, left)
