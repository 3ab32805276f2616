"""How much the cache holds, and making room in it: by age, by size, or all; never what a running build has used."""

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import writing
from ling3export.cache.store import DIGEST, KINDS, entries, read_entry
from ling3export.cache.use import EXCLUSIVE, LOCK, locked, oldest_build


@dataclass(frozen=True)
class Found:
    """An entry's file, as a clean-up sees it.

    Attributes:
        path: Of its JSON.
        used: Time of its last use; for a whole group of entries that share an executable, of any of them.
        bytes: Of the JSON alone.
        blobs: Digests of its bytes; none if it is broken.
    """

    path: Path
    used: float
    bytes: int
    blobs: tuple[str, ...]


def found_entries(folder: Path) -> list[Found]:
    """Every entry, the least recently used first; entries of one executable count as used together."""
    rows = []
    for path in (path for kind in KINDS for path in (folder / kind).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            try:
                blobs = {name: blob["sha256"] for name, blob in read_entry(path).blobs.items()}
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
    """Bytes of every blob, by digest."""
    sizes = {}
    for path in (folder / "blobs").glob("*"):
        if DIGEST.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):
                sizes[path.name] = path.stat().st_size
    return sizes


def total_bytes(found: Iterable[Found], sizes: dict[str, int]) -> int:
    """Of entries, and of the blobs that they name, each once."""
    found = list(found)
    return sum(entry.bytes for entry in found) + sum(sizes.get(b, 0) for b in {b for e in found for b in e.blobs})


def status(folder: Path) -> dict[str, Any]:
    """Entries and bytes, in all and by target.

    Returns:
        ``folder``, ``cells``, ``programs`` (entries), ``bytes`` (of everything), ``broken`` (entries that will be made
        again), and ``targets``: by name ``cells`` and ``bytes`` (of their files; cells may share some).
    """
    sizes, found = blob_sizes(folder), found_entries(folder)
    cells, programs = list(entries(folder, "cells")), list(entries(folder, "programs"))
    targets: dict[str, dict[str, Any]] = {}
    blobs: dict[str, set[str]] = {}
    for entry in cells:
        name = entry.target
        row = targets.setdefault(name, {"cells": 0, "bytes": 0})
        row["cells"] += 1
        blobs.setdefault(name, set()).update(blob["sha256"] for blob in entry.blobs.values())
    for name, row in targets.items():
        row["bytes"] = sum(sizes.get(blob, 0) for blob in blobs[name])
    return {
        "folder": str(folder),
        "cells": len(cells),
        "programs": len(programs),
        "bytes": sum(entry.bytes for entry in found) + sum(sizes.values()),
        "broken": len(found) - len(cells) - len(programs),
        "targets": dict(sorted(targets.items())),
    }


def clean_up(
    folder: Path, *, older_than: float | None = None, max_bytes: int | None = None, everything: bool = False
) -> dict[str, int]:
    """Removes entries, the blobs that nothing names any more, and what killed processes left.

    Args:
        folder: The cache's.
        older_than: Seconds since the last use: older entries go.
        max_bytes: Entries go, the least recently used first, until the rest takes no more than this.
        everything: All entries go.

    Returns:
        ``removed`` and ``kept`` (entries), ``in_use`` (entries that were to go, but a running build has used them),
        ``freed`` and ``bytes`` (freed, and left).

    Raises:
        ArtifactError: The folder cannot be written.
    """
    if not (folder / LOCK).is_file():  # no build has used it
        return {"removed": 0, "kept": 0, "in_use": 0, "freed": 0, "bytes": 0}
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
    return {
        "removed": len(going),
        "kept": len(left),
        "in_use": wanted - len(going),
        "freed": before - after,
        "bytes": after,
    }


def _chosen(
    found: list[Found], free: list[Found], sizes: dict[str, int], older_than: float | None, max_bytes: int | None,
    everything: bool,
) -> list[Found]:  # fmt: skip
    """Which of ``free`` go."""
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
