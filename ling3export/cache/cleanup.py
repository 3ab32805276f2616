"""How much the cache holds, and making room in it: by age, by size, or all.

A running build loses nothing: it has copied what it took, and what it writes it writes while it holds the lock.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ling3export.artifacts.files import PARTIAL, RECOMPILED, remove, writing
from ling3export.cache.store import DIGEST, KINDS, CacheEntry, read_entry
from ling3export.cache.use import EXCLUSIVE, LOCK, locked

LEFT = re.compile(rf"\.(.+\.)?{PARTIAL}")  # what was being written
WRITING = 3600  # seconds after which no runner still writes one file


@dataclass(frozen=True)
class Found:
    """An entry's file, as a clean-up sees it.

    Attributes:
        path: The entry's JSON file.
        used: When the entry was last used, in seconds since 1970; entries that share an executable count as used when
            any of them was.
        bytes: The size of the JSON file alone.
        entry: What the file says; None if it is broken.
    """

    path: Path
    used: float
    bytes: int
    entry: CacheEntry | None

    @property
    def blobs(self) -> dict[str, str]:
        """The digests of the entry's blobs by name; none if it is broken."""
        return {} if self.entry is None else self.entry.blobs


def found_entries(folder: Path) -> list[Found]:
    """Every entry, whole or broken, the least recently used first."""
    found: dict[str, list[Found]] = {}  # by the executable, which several entries may name
    for path in (path for kind in KINDS for path in (folder / kind).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            stat, entry = path.lstat(), None
            with contextlib.suppress(OSError, ValueError):
                entry = read_entry(folder, path.parent.name, path.stem)
            each = Found(path, stat.st_mtime, stat.st_size, entry)
            found.setdefault(each.blobs.get("exec", path.name), []).append(each)
    used = [replace(each, used=max(other.used for other in group)) for group in found.values() for each in group]
    return sorted(used, key=lambda each: (each.used, each.path.name))


def recompiled_programs(folder: Path) -> list[Found]:
    """What runners compiled here: of each program one file that says what it is, and the executable beside it."""
    found = []
    for path in (folder / RECOMPILED).glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            said, executable = path.lstat(), path.with_suffix(".exec").lstat()
            found.append(Found(path, said.st_mtime, said.st_size + executable.st_size, None))
    return found


def blob_sizes(folder: Path) -> dict[str, int]:
    """The size of every blob in bytes, by digest."""
    sizes = {}
    for path in (folder / "blobs").glob("*"):
        if DIGEST.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):
                sizes[path.name] = path.stat().st_size
    return sizes


def total_bytes(found: Iterable[Found], sizes: dict[str, int]) -> int:
    """Bytes of entries and of the blobs that they name; a blob that several name counts once."""
    found = list(found)
    blobs = {digest for each in found for digest in each.blobs.values()}
    return sum(each.bytes for each in found) + sum(sizes.get(digest, 0) for digest in blobs)


@dataclass(frozen=True)
class TargetShare:
    """What the cache holds for one target.

    Attributes:
        cells: How many.
        bytes: The size of their blobs; targets may share some.
    """

    cells: int
    bytes: int


@dataclass(frozen=True)
class CacheStatus:
    """What the cache holds.

    Attributes:
        folder: The cache's folder.
        cells: How many whole entries of cells there are.
        programs: How many whole entries of programs there are.
        recompiled: How many programs runners compiled here.
        bytes: The size of everything.
        broken: Entries that cannot be used and will be made again.
        targets: The share of each target, by name.
    """

    folder: str
    cells: int
    programs: int
    recompiled: int
    bytes: int
    broken: int
    targets: dict[str, TargetShare]


def status(folder: Path) -> CacheStatus:
    """What the cache in ``folder`` holds."""
    sizes, found = blob_sizes(folder), found_entries(folder)
    whole = [each.entry for each in found if each.entry is not None]
    cells = [entry for entry in whole if entry.kind == "cells"]
    targets: dict[str, TargetShare] = {}
    for name in sorted({entry.target for entry in cells}):
        own = [entry for entry in cells if entry.target == name]
        blobs = {digest for entry in own for digest in entry.blobs.values()}
        targets[name] = TargetShare(len(own), sum(sizes.get(digest, 0) for digest in blobs))
    runners = recompiled_programs(folder)
    size = sum(each.bytes for each in found + runners) + sum(sizes.values())
    programs, broken = len(whole) - len(cells), len(found) - len(whole)
    return CacheStatus(str(folder), len(cells), programs, len(runners), size, broken, targets)


@dataclass(frozen=True)
class Cleaned:
    """What a clean-up did.

    Attributes:
        removed: Entries that were removed.
        kept: Entries that are left.
        freed: Bytes that were removed.
        bytes: Bytes that are left.
    """

    removed: int = 0
    kept: int = 0
    freed: int = 0
    bytes: int = 0


def clean_up(
    folder: Path, *, older_than: float | None = None, max_bytes: int | None = None, everything: bool = False
) -> Cleaned:
    """Removes entries, the blobs that nothing names any more, and what killed processes left.

    Args:
        folder: The cache's folder.
        older_than: Entries that were not used for more seconds than this are removed.
        max_bytes: Entries are removed, the least recently used first, until the rest takes no more than this.
        everything: All entries are removed.

    Raises:
        ArtifactError: The folder cannot be written.
    """
    if not any(os.path.lexists(folder / name) for name in (LOCK, RECOMPILED)):  # nobody has used it
        return Cleaned()
    with writing(folder / LOCK), locked(folder, EXCLUSIVE):
        found, sizes = found_entries(folder) + recompiled_programs(folder), blob_sizes(folder)
        found.sort(key=lambda each: (each.used, each.path.name))
        before = sum(entry.bytes for entry in found) + sum(sizes.values())
        going = found if everything else _chosen(found, sizes, older_than, max_bytes)
        for entry in going:
            remove(entry.path)
            if entry.path.parent.name == RECOMPILED:
                remove(entry.path.with_suffix(".exec"))
        left = [entry for entry in found if entry not in going]
        gone = _drop_unnamed(folder, {digest for entry in left for digest in entry.blobs.values()})
        after = sum(entry.bytes for entry in left) + sum(size for name, size in sizes.items() if name not in gone)
    return Cleaned(len(going), len(left), before - after, after)


def _chosen(found: list[Found], sizes: dict[str, int], older_than: float | None, max_bytes: int | None) -> list[Found]:
    """The entries that are to be removed."""
    going = [] if older_than is None else [entry for entry in found if time.time() - entry.used > older_than]
    if max_bytes is not None:
        left = [entry for entry in found if entry not in going]
        while left and total_bytes(left, sizes) > max_bytes:
            going.append(left.pop(0))
    return going


def _drop_unnamed(folder: Path, named: set[str]) -> set[str]:
    """Removes blobs that no entry names, and what was being written when its process was killed.

    Builds write while they hold the folder's lock, so what they left is of dead ones; runners do not take it.

    Args:
        folder: The cache's folder, whose lock is held.
        named: The digests of the blobs that stay.

    Returns:
        The names of the files that were removed.
    """
    blobs = [path for path in (folder / "blobs").glob("*") if DIGEST.fullmatch(path.name) and path.name not in named]
    places = [folder / place for place in (".", *KINDS, "blobs", RECOMPILED)]
    partial = [path for place in places for path in place.glob(".*partial-*") if LEFT.fullmatch(path.name)]
    gone = set()
    for path in blobs + partial:
        with contextlib.suppress(FileNotFoundError):
            old = path.parent.name != RECOMPILED or path.lstat().st_mtime < time.time() - WRITING
            if old and remove(path):
                gone.add(path.name)
    return gone
