"""References to versions in a catalogue: what they look like, and the folder that one is pulled into.

Nothing heavy is imported before something is pulled.
"""

import os
import re
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.artifacts.files import locked, remove_tree, writing
from ling3export.foundation.errors import CatalogError, listed, printable

if TYPE_CHECKING:
    from ling3export.artifacts.catalog.stores import ResolvedVersion

STORE = "LING3_STORE"
# What no folder is called: a store's kind in front, or a host and a version.
REFERENCE = re.compile(r"oci:.|[a-z0-9]+://|[\w-]+(\.[\w-]+)*(:\d+)?/[a-z0-9._/-]+[:@]\w")


def is_reference(text: str) -> bool:
    """Whether a text names a version in a catalogue, and nothing that is there."""
    return REFERENCE.match(text) is not None and not os.path.lexists(text)


def folder_of(
    artifact: str | Path, target: str | None = None, *, host: int | None = None, elsewhere: bool = False
) -> Path:
    """The folder that a text names; of a reference the one in LING3_STORE that it is pulled into, unless it is there.

    Args:
        artifact: A folder, or a reference.
        target: Leave out the programs of all other targets.
        host: Leave out the weights that this host of the target does not hold.
        elsewhere: Pull what this machine cannot run, too.

    Raises:
        CatalogError: There is no LING3_STORE, no such version, or it cannot be pulled.
    """
    if not is_reference(text := str(artifact)):
        return Path(artifact)
    if not (kept := os.environ.get(STORE)):
        raise CatalogError(f"artifact `{text}`: expected a folder in {STORE} to pull it into, found none")
    return pulled(text, None, kept, target, host=host, elsewhere=elsewhere)


def pulled(
    reference: str,
    to: Path | None,
    kept: str | None,
    target: str | None,
    *,
    host: int | None = None,
    force: bool = False,
    elsewhere: bool = False,
    strict: bool = False,
) -> Path:
    """Pulls a version, unless it is there; returns its folder."""
    from ling3export.artifacts.catalog.pull import check_room
    from ling3export.artifacts.catalog.pull import pull as one
    from ling3export.artifacts.catalog.stores import located

    store, found = located(reference, strict=strict, warn=_say)
    place = to or _place(found, kept, target, host)
    _check_machine(found, target, elsewhere)
    blobs = _blobs(place, kept)
    if target is None and (to is not None or not place.is_dir()):  # of a part behind the manifest
        check_room(found, blobs, place.parent, {file.sha256: file.size for file in found.record.files})
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
    # One process at a time pulls into a folder of the store: several servers may start with one reference.
    with nullcontext() if to is not None else locked(place.with_name(f".{place.name}.pulling")):
        if to is None and place.is_dir():
            _say(f"{found.entry}: there already, at {place}")
            return place
        moved = one(store, found, place, blobs, target=target, host=host, force=force, report=_say)
    if not kept:
        remove_tree(blobs)
    _say(f"{found.entry}: {moved.pulled:,} bytes pulled, {moved.here:,} were here")
    return place


def pulled_manifest(reference: str, folder: Path) -> Path:
    """Pulls the manifest of a version, without its files; returns the folder that it lies in, in ``folder``."""
    from ling3export.artifacts.catalog.pull import Moved, pull_manifest
    from ling3export.artifacts.catalog.stores import located

    store, found = located(reference, warn=_say)
    place = folder / f"{found.entry}.ling3"
    place.mkdir()
    pull_manifest(store, found, place, folder, Moved(), _say)
    return place


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _place(found: "ResolvedVersion", kept: str | None, target: str | None, host: int | None) -> Path:
    """The folder of a version in the store."""
    parts = [str(found.entry), found.record.digest[7:19], *(str(part) for part in (target, host) if part is not None)]
    return Path(kept or "") / "artifacts" / f"{'-'.join(parts)}.ling3"


def _blobs(place: Path, kept: str | None) -> Path:
    """Where a pull keeps files by digest: in the store, or until it ends."""
    return Path(kept) / "blobs" if kept else place.parent / f".{place.name}.pull"


def _check_machine(found: "ResolvedVersion", target: str | None, elsewhere: bool) -> None:
    """Says what this machine lacks before anything is pulled.

    Raises:
        CatalogError: It has not the devices.
    """
    from ling3export.machine.targets import platforms_here

    needs, here = found.record.requirements, platforms_here()
    wanted = target and re.split("[-:@]", target)[0]
    targets = [each for each in needs.targets if wanted in (None, re.split("[:@]", each)[0])]
    if targets and not elsewhere and not any(re.split("[:@]", each)[0] in here for each in targets):
        devices = f"{needs.devices} device{'s' * (needs.devices > 1)}"
        raise CatalogError(
            f"machine: expected {devices} of {listed(targets)} for {found.entry}, found {listed(here)}",
            "pull it for another machine with --elsewhere",
        )
    if needs.jaxlib not in (None, version("jaxlib")):
        _say(f"{found.entry}: compiled for jaxlib {needs.jaxlib}, here is {version('jaxlib')}")
