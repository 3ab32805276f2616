"""How much the cache holds, and making room in it: by age, by size, or all; never what a running build has used."""

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ling3export.artifacts.files import writing
from ling3export.cache.store import DIGEST, KINDS, entries, read_entry
from ling3export.cache.use import EXCLUSIVE, LOCK, locked, oldest_build


@dataclass(frozen=True)
class Found:
    """An entry's file, as a clean-up sees it.

    Attributes:
        path: The entry's JSON file.
        used: When the entry was last used, in seconds since 1970; entries that share an executable count as used when
            any of them was.
        bytes: The size of the JSON file alone.
        blobs: The digests of the entry's blobs; none if it is broken.
    """

    path: Path
    used: float
    bytes: int
    blobs: tuple[str, ...]


def found_entries(folder: Path) -> list[Found]:
    """Every entry, whole or broken, the least recently used first."""
    rows = []
    for path in (path for kind in KINDS for path in (folder / kind).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            try:
                blobs = read_entry(path).blobs
            except (OSError, ValueError):
                blobs = {}
            rows.append((path, stat, blobs))
    last: dict[str, float] = {}
    for path, stat, blobs in rows:
        group = blobs.get("exec", path.name)
        last[group] = max(last.get(group, 0), stat.st_mtime)
    found = [
        Found(path, last[blobs.get("exec", path.name)], stat.st_size, tuple(blobs.values()))
        for path, stat, blobs in rows
    ]
    return sorted(found, key=lambda entry: (entry.used, entry.path.name))


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
    return sum(entry.bytes for entry in found) + sum(sizes.get(b, 0) for b in {b for e in found for b in e.blobs})


@dataclass(frozen=True)
class Share:
    """What the cache holds for one target.

    Attributes:
        cells: How many.
        bytes: The size of their blobs; targets may share some.
    """

    cells: int
    bytes: int


@dataclass(frozen=True)
class Status:
    """What the cache holds.

    Attributes:
        folder: The cache's folder.
        cells: How many whole entries of cells there are.
        programs: How many whole entries of programs there are.
        bytes: The size of everything.
        broken: Entries that cannot be used and will be made again.
        targets: The share of each target, by name.
    """

    folder: str
    cells: int
    programs: int
    bytes: int
    broken: int
    targets: dict[str, Share]


def status(folder: Path) -> Status:
    """What the cache in ``folder`` holds."""
    sizes, found = blob_sizes(folder), found_entries(folder)
    cells, programs = list(entries(folder, "cells")), list(entries(folder, "programs"))
    targets: dict[str, Share] = {}
    for name in sorted({entry.target for entry in cells}):
        own = [entry for entry in cells if entry.target == name]
        blobs = {digest for entry in own for digest in entry.blobs.values()}
        targets[name] = Share(len(own), sum(sizes.get(digest, 0) for digest in blobs))
    whole = sum(entry.bytes for entry in found) + sum(sizes.values())
    broken = len(found) - len(cells) - len(programs)
    return Status(str(folder), len(cells), len(programs), whole, broken, targets)


@dataclass(frozen=True)
class Cleaned:
    """What a clean-up did.

    Attributes:
        removed: Entries that were removed.
        kept: Entries that are left.
        in_use: Entries that were to be removed, but a running build has used them.
        freed: Bytes that were removed.
        bytes: Bytes that are left.
    """

    removed: int = 0
    kept: int = 0
    in_use: int = 0
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
    if not (folder / LOCK).is_file():  # no build has used it
        return Cleaned()
    with writing(folder / LOCK), locked(folder, EXCLUSIVE):
        protected = oldest_build(folder)
        found, sizes = found_entries(folder), blob_sizes(folder)
        before = sum(entry.bytes for entry in found) + sum(sizes.values())
        free = [entry for entry in found if protected is None or entry.used < protected]
        going = _chosen(found, free, sizes, older_than, max_bytes, everything)
        wanted = len(_chosen(found, found, sizes, older_than, max_bytes, everything))
        for entry in going:
            entry.path.unlink(missing_ok=True)
        left = [entry for entry in found if entry not in going]
        freed_blobs = _drop_blobs(folder, {blob for entry in left for blob in entry.blobs}, protected)
        _drop_partial(folder, protected)
        after = sum(entry.bytes for entry in left) + sum(s for name, s in sizes.items() if name not in freed_blobs)
    return Cleaned(len(going), len(left), wanted - len(going), before - after, after)


def _chosen(
    found: list[Found], free: list[Found], sizes: dict[str, int], older_than: float | None, max_bytes: int | None,
    everything: bool,
) -> list[Found]:  # fmt: skip
    """The entries that are to be removed among ``free``, which no running build has used."""
    if everything:
        return free
    going = [] if older_than is None else [entry for entry in free if time.time() - entry.used > older_than]
    if max_bytes is not None:
        left = [entry for entry in found if entry not in going]
        for entry in (entry for entry in free if entry not in going):
            if total_bytes(left, sizes) <= max_bytes:
                break
            left.remove(entry)
            going.append(entry)
    return going


def _drop_blobs(folder: Path, named: set[str], protected: float | None) -> set[str]:
    """Removes blobs that no entry names; a running build may be about to name one that it wrote."""
    gone = set()
    for path in (folder / "blobs").glob("*"):
        if DIGEST.fullmatch(path.name) and path.name not in named and _unused(path, protected):
            path.unlink(missing_ok=True)
            gone.add(path.name)
    return gone


def _drop_partial(folder: Path, protected: float | None) -> None:
    """Removes what was being written when its process was killed."""
    for place in (*KINDS, "blobs"):
        for path in (folder / place).glob(".*.partial-*"):
            if _unused(path, protected):
                path.unlink(missing_ok=True)


def _unused(path: Path, protected: float | None) -> bool:
    try:
        return protected is None or os.stat(path).st_mtime < protected
    except FileNotFoundError:
        return False
