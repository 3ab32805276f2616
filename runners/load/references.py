"""References to versions in a store, in the place of an artifact's folder."""

import os
import sys
from pathlib import Path

from ling3export.artifacts.files import locked, writing
from ling3export.foundation.errors import CatalogError, printable

STORE = "LING3_STORE"  # names the folder that references are pulled into


def is_reference(text: str) -> bool:
    """Whether a text names a version in a store, and no existing path."""
    return text.startswith("oci:") and not os.path.lexists(text)


def folder_of(artifact: str | Path) -> Path:
    """The folder that a text names; for a reference the folder in LING3_STORE that it is pulled into.

    Raises:
        CatalogError: LING3_STORE is not set, the store has no such version, or it is damaged.
    """
    if not is_reference(text := str(artifact)):
        return Path(artifact)
    if not os.environ.get(STORE):
        raise CatalogError(
            f"artifact `{text}`: {STORE} names no folder to pull it into",
            f"set {STORE}, or pull it yourself: ling3-runner pull REFERENCE --to FOLDER",
        )
    return pulled(text)


def pulled(reference: str, to: Path | None = None, *, force: bool = False) -> Path:
    """Pulls a version into ``to``, by default into a folder in LING3_STORE unless it is there; returns the folder."""
    from ling3export.artifacts.catalog.layout import parse_reference  # a start from a folder needs none of this
    from ling3export.artifacts.catalog.pull import pull

    store, id, number = parse_reference(reference)
    version = store.find(id, number)
    if to is not None:
        pull(store, version, to, force=force, report=_report)
        return to
    folder = Path(os.environ[STORE], f"{version}-{version.image.digest[7:19]}.ling3")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.pulling")):  # several servers may start with one reference
        if folder.is_dir():
            _report(f"{version}: there already, at {folder}")
        else:
            pull(store, version, folder, report=_report)
    return folder


def _report(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
