"""Whether cells are in the cache, and why one is not: the fields in which it differs from the nearest entry."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import MANIFEST, read_manifest
from ling3export.cache.store import DIGEST, KINDS, Cache, Entry, entries
from ling3export.cache.use import CacheUse
from ling3export.foundation.errors import ArtifactError, listed
from ling3export.plan.plan import Cell

PLAIN = ("toolchain", "flags", "options")  # groups of fields whose name goes without saying
GROUPS = {
    "model": "sources of model/",
    "lowering": "sources of the lowering",
    "accelerators": "sources of what is made for accelerators",
}
SHOWN = 60  # characters of a value


def explain(fields: dict[str, Any], known: list[Entry]) -> str:
    """One line that says in which fields a cell differs from the nearest entry.

    An entry of the same cell for the same platform is nearest, then the one with the fewest differences.

    Args:
        fields: What decides the cell.
        known: The entries to compare with.
    """
    if not known:
        return "the cache holds no cells"
    found = differences(min(known, key=lambda entry: _distance(fields, entry.fields)).fields, fields)
    return "; ".join(found) if found else "its entry was lost or broken"


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """``plan.pages: 512 → 256`` for every field that differs; one text for the files of a group of sources."""
    old, new = dict(_flat(before)), dict(_flat(now))
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    texts = []
    for group, words in GROUPS.items():
        prefix = f"sources.{group}."
        if files := [name.removeprefix(prefix) for name in changed if name.startswith(prefix)]:
            texts.append(f"{words}: {listed([file.removeprefix('model/') for file in files])}")
    for name in changed:
        group, _, rest = name.partition(".")
        if group != "sources":
            values = old.get(name), new.get(name)
            texts.append(f"{rest if group in PLAIN else name}: {_shown(*values)} → {_shown(*reversed(values))}")
    return texts


def _distance(fields: dict[str, Any], other: dict[str, Any]) -> tuple[bool, bool, int]:
    return (
        other.get("cell") != fields["cell"],
        dict(_flat(other)).get("target.platform") != fields["target"]["platform"],
        len(differences(other, fields)),
    )


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def _shown(value: Any, other: Any) -> str:
    """A value as text; of a list only the items that the ``other`` list lacks."""
    if isinstance(value, list) and isinstance(other, list):
        return f"[{listed([str(item) for item in value if item not in other])}]"
    text = "none" if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


@dataclass(frozen=True)
class Looked:
    """Whether one cell, and the program that it was compiled to, are in the cache.

    Attributes:
        target: The target's name; None for a key that is not there.
        cell: The cell's name; None for a key that is not a cell's.
        key: The cell's key.
        found: Whether the cell is there, whole.
        program: The program's key. A change of the model's sources that lowers to the same does not change it.
        program_found: Whether the program is there, whole.
    """

    target: str | None
    cell: str | None
    key: str | None
    found: bool
    program: str | None
    program_found: bool

    @property
    def there(self) -> bool:
        """Whether what was asked for is there: a cell, or a program by its own key."""
        return self.found or (self.key is None and self.program_found)


def lookup(folder: Path, what: str) -> list[Looked]:
    """Whether cells are in the cache, whole.

    Args:
        folder: The cache's folder.
        what: An artifact's folder, or a key or its begin, at least 8 digits long.

    Returns:
        A line for each cell of the artifact, or for each entry of the key; one that is not found if there is none.

    Raises:
        ArtifactError: ``what`` is neither, or an artifact that names no keys.
    """
    reader = Cache(CacheUse("readonly", folder), lambda text: None)

    def looked(target: str | None, cell: str | None, key: str | None, program: str | None) -> Looked:
        found = key is not None and len(key) == 64 and reader.read("cells", key) is not None
        return Looked(target, cell, key, found, program, bool(program and reader.read("programs", program)))

    if (Path(what) / MANIFEST).exists():
        return [looked(*cell) for cell in _keys_of(Path(what))]
    if not DIGEST.fullmatch(what.ljust(64, "0")) or len(what) < 8:
        raise ArtifactError(
            f"cache lookup `{what}`: expected an artifact or a key, found neither",
            "a key is 64 hexadecimal digits, of which the first 8 will do",
        )
    found = []
    for entry in (entry for kind in KINDS for entry in entries(folder, kind) if entry.key.startswith(what)):
        if entry.kind == "cells":
            try:
                name, program = Cell(**entry.fields["cell"]).name, str(entry.record["program"]["origin"]["program"])
            except (KeyError, TypeError):  # none that a build wrote
                name, program = None, ""
            found.append(looked(entry.target, name, entry.key, program if DIGEST.fullmatch(program) else None))
        else:
            found.append(looked(entry.target, None, None, entry.key))
    return found or [looked(None, None, what, None)]


def _keys_of(artifact: Path) -> list[tuple[str, str, str, str]]:
    """Target, cell, key and the program's key of every cell of an artifact."""
    keys = []
    for name, target in read_manifest(artifact).targets.items():
        for cell, record in target.cells.items():
            if record.origin is None or record.origin.key is None:
                raise ArtifactError(
                    f"artifact `{artifact.name}`: expected each cell's cache key, found none for {cell} of {name}",
                    "it was built by a version without a cache: build it again",
                )
            keys.append((name, cell, record.origin.key, record.origin.program))
    return keys
