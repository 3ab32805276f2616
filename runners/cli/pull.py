"""``ling3-runner pull``: an artifact from a catalogue, checked and whole, or nothing."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ling3export.artifacts.files import open_lock, writing
from ling3export.errors import CatalogError, listed
from ling3export.runners.cli.options import FOLDER, Command, trust_option

if TYPE_CHECKING:
    from ling3export.artifacts.catalog.pull import Found

STORE = "LING3_STORE"


@click.command(cls=Command)
@click.argument("reference")
@click.option("--to", type=FOLDER, metavar="FOLDER", help=f"Where to.  [default: a folder in ${STORE}]")
@click.option("--target", help="Leave out the programs of all other targets.")
@click.option("--host-id", type=click.IntRange(0), metavar="N", help="Of the weights only what host N of it holds.")
@click.option("--force", is_flag=True, help="Replace FOLDER if it is there.")
@click.option("--elsewhere", is_flag=True, help="Pull also what this machine cannot run.")
@click.option("--strict", is_flag=True, help="Refuse a record with fields that this version does not know.")
@trust_option
def pull(
    reference: str, to: Path | None, target: str | None, host_id: int | None, force: bool, elsewhere: bool,
    strict: bool,
) -> None:  # fmt: skip
    """Pull STORE/ID or STORE/ID@VERSION, and what it depends on.

    Every byte is checked; a pull that broke off is gone on with. With LING3_STORE set, files that an earlier pull has
    brought are not pulled again. Prints the folder.
    """
    kept = os.environ.get(STORE)
    if to is None and not kept:
        raise click.UsageError(f"expected --to FOLDER, or a folder in {STORE}.")
    if host_id is not None and target is None:
        raise click.UsageError("expected --target NAME with --host-id.")
    click.echo(pulled(reference, to, kept, target, host=host_id, force=force, elsewhere=elsewhere, strict=strict))


def pulled(
    reference: str, to: Path | None, kept: str | None, target: str | None, *, host: int | None = None,
    force: bool = False, elsewhere: bool = False, strict: bool = False,
) -> Path:  # fmt: skip
    """Pulls a version and what it depends on, unless it is there; returns its folder."""
    from ling3export.artifacts.catalog.pull import check_room, resolve
    from ling3export.artifacts.catalog.pull import pull as one
    from ling3export.artifacts.catalog.stores import open_store, parse_reference

    wanted = parse_reference(reference)
    store = open_store(wanted.store)
    found = resolve(store, wanted.id, wanted.version, strict=strict, warn=_say)
    last = found[-1]
    places = [_place(each, to, kept, each is last, target, host) for each in found]
    for each, place in zip(found, places, strict=True):
        _check_machine(each, target if each is last else None, elsewhere)
        if (target is None or each is not last) and (to is not None or not place.is_dir()):  # parts: after the manifest
            check_room(each, _blobs(place, kept), place.parent, {file.sha256: file.size for file in each.record.files})
    for each, place in zip(found, places, strict=True):
        blobs = _blobs(place, kept)
        with writing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(place, to):
            if to is None and place.is_dir():
                _say(f"{each.entry}: there already, at {place}")
                continue
            moved = one(
                store, each, place, blobs, target=target if each is last else None, host=host if each is last else None,
                force=force, report=_say,
            )  # fmt: skip
        if not kept:
            shutil.rmtree(blobs)
        _say(f"{each.entry}: {moved.pulled:,} bytes pulled, {moved.here:,} were here")
    return places[-1]


def pulled_manifest(reference: str, folder: Path) -> Path:
    """Pulls the manifest of a version, without its files; returns the folder that it lies in, in ``folder``."""
    from ling3export.artifacts.catalog.pull import Found, Moved, pull_manifest
    from ling3export.artifacts.catalog.stores import choose, find, open_store, parse_reference

    wanted = parse_reference(reference)
    store = open_store(wanted.store)
    entry = choose(store, wanted.id, wanted.version)
    found, place = Found(entry, *find(store, entry, warn=_say)), folder / f"{entry}.ling3"
    place.mkdir()
    pull_manifest(store, found, place, folder, Moved(), _say)
    return place


@contextmanager
def _one_at_a_time(place: Path, to: Path | None) -> Iterator[None]:
    """Waits until no other process pulls into a folder of the store: several servers may start with one reference."""
    if to is not None:
        yield
        return
    descriptor = open_lock(place.with_name(f".{place.name}.pulling"), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _place(found: "Found", to: Path | None, kept: str | None, last: bool, target: str | None, host: int | None) -> Path:
    """The folder of a version: ``to``, or beside it for what it depends on, or in the store."""
    if to is not None:
        return to if last else to.with_name(f"{found.entry}.ling3")
    parts = [str(found.entry), found.record.digest[7:19]]
    parts += [str(part) for part in (target, host) if last and part is not None]
    return Path(kept or "") / "artifacts" / f"{'-'.join(parts)}.ling3"


def _blobs(place: Path, kept: str | None) -> Path:
    """Where a pull keeps files by digest: in the store, or until it ends."""
    return Path(kept) / "blobs" if kept else place.parent / f".{place.name}.pull"


def _check_machine(found: "Found", target: str | None, elsewhere: bool) -> None:
    """Says what this machine lacks before anything is pulled.

    Raises:
        CatalogError: It has not the devices.
    """
    from ling3export.runners.load.targets import platforms_here

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
