"""Why a cell is not in the cache: the fields in which it differs from the nearest entry."""

from collections.abc import Iterator
from typing import Any

from ling3export.cache.store import CacheEntry
from ling3export.foundation.errors import listed

PLAIN = ("toolchain", "flags", "options")  # groups of fields whose name goes without saying
GROUPS = {
    "model": "sources of model/",
    "lowering": "sources of the lowering",
    "accelerators": "sources of what is made for accelerators",
}
SHOWN = 60  # characters of a value


def explain(fields: dict[str, Any], known: list[CacheEntry]) -> str:
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
