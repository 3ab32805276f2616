"""What the cache holds, and whether an artifact's cells are among it."""

from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import MANIFEST, read_manifest
from ling3export.cache.cleanup import blob_sizes, found_entries
from ling3export.cache.store import DIGEST, Cache, entries
from ling3export.errors import ArtifactError
from ling3export.plan.targets import Target


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
        name = target_name(entry.fields)
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


def target_name(fields: dict[str, Any]) -> str:
    """The name of the target in an entry's fields."""
    known = Target.__dataclass_fields__
    return Target(**{name: value for name, value in fields["target"].items() if name in known}).name


def lookup(folder: Path, what: str) -> list[dict[str, Any]]:
    """Whether cells are in the cache, whole.

    Args:
        folder: The cache's.
        what: An artifact's folder, or a key or its begin, at least 8 digits long.

    Returns:
        By cell ``target``, ``cell``, ``key``, ``found``, and ``program`` (key, ``program_found``), which a change of
        the model's sources alone does not change. For a key, every entry of it; one that is not found if there is none.

    Raises:
        ArtifactError: It is neither, or an artifact that names no keys.
    """
    reader = Cache(folder, lambda text: None, writes=False)
    if (Path(what) / MANIFEST).exists():
        return [_row(reader, *cell) for cell in _keys_of(Path(what))]
    if not DIGEST.fullmatch(what.ljust(64, "0")) or len(what) < 8:
        raise ArtifactError(
            f"cache lookup `{what}`: expected an artifact or a key, found neither",
            "a key is 64 hexadecimal digits, of which the first 8 will do",
        )
    rows = []
    for entry in (entry for entry in entries(folder, "cells") if entry.key.startswith(what)):
        cell = entry.fields["cell"]
        name = f"{cell['phase']}@{cell['padding']}"
        rows.append(_row(reader, target_name(entry.fields), name, entry.key, entry.record["origin"]["program"]))
    for entry in (entry for entry in entries(folder, "programs") if entry.key.startswith(what)):
        rows.append(_row(reader, target_name(entry.fields), None, None, entry.key))
    return rows or [_row(reader, None, None, what, None)]


def _keys_of(artifact: Path) -> list[tuple[str, str, str, str]]:
    keys = []
    for name, target in read_manifest(artifact)["targets"].items():
        for cell, record in target["cells"].items():
            if "origin" not in record:
                raise ArtifactError(
                    f"artifact `{artifact.name}`: expected each cell's cache key, found none for {cell} of {name}",
                    "it was built by a version without a cache: build it again",
                )
            keys.append((name, cell, record["origin"]["key"], record["origin"]["program"]))
    return keys


def _row(reader: Cache, target: str | None, cell: str | None, key: str | None, program: str | None) -> dict[str, Any]:
    return {
        "target": target,
        "cell": cell,
        "key": key,
        "found": key is not None and len(key) == 64 and reader.read("cells", key) is not None,
        "program": program,
        "program_found": program is not None and reader.read("programs", program) is not None,
    }
