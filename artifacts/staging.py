"""Folders that appear whole or not at all, and the right to write one: a build at a time."""

import ctypes
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ling3export.artifacts.files import (
    DISK_FULL,
    leftovers,
    open_lock,
    partial_path,
    remove,
    remove_tree,
    rename,
    sync_folder,
    sync_tree,
    write_error,
    writing,
)
from ling3export.artifacts.manifest import MANIFEST, read_manifest
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.strict_json import read_json


@contextmanager
def staged(destination: Path, *, force: bool = False, mark: str = MANIFEST) -> Iterator[Path]:
    """A temporary folder next to ``destination`` that takes its name when the block ends well.

    Holds ``destination``'s lock, so whatever else is named ``.NAME.partial-…`` belongs to a dead build and is removed.
    When the block raises, the temporary folder is removed and ``destination`` is as before. A kill leaves at most
    the temporary folder, and a whole folder under the name: a replacement swaps the two names. On a file system that
    cannot, it takes two renames, and a kill between them leaves both folders under temporary names.

    Args:
        destination: The folder to make. Its parent must exist.
        force: Replace an existing folder that was written here, as its ``mark`` says.
        mark: A JSON file that names ling3export as the ``producer``, itself or in its ``metadata``.

    Raises:
        ArtifactError: The destination exists, is no such folder, is being written, or the disk is full.
    """
    destination = Path(destination).resolve()
    parent = destination.parent
    if not parent.is_dir():
        raise ArtifactError(f"output `{destination.name}`: its parent folder does not exist: {parent}")
    with folder_lock(destination):
        _refuse(destination, force, mark)
        with _partial(destination) as partial:
            yield partial
            sync_tree(partial)
            _rename(partial, destination)
            sync_folder(parent)


@contextmanager
def adding(artifact: Path) -> Iterator[Path]:
    """A temporary folder next to an artifact, for files that are to be moved into it; it holds the artifact's lock.

    Raises:
        ArtifactError: There is no artifact, it is being written, or the disk is full.
    """
    artifact = Path(artifact).resolve()
    with folder_lock(artifact):
        read_manifest(artifact)
        with _partial(artifact) as partial:
            yield partial


@contextmanager
def _partial(destination: Path) -> Iterator[Path]:
    """A temporary folder next to ``destination``, with its lock held; leftovers of it and of dead builds are
    removed."""
    _remove_leftovers(destination)
    partial = partial_path(destination)
    try:
        partial.mkdir()
        yield partial
    except OSError as error:
        if error.errno in DISK_FULL:
            raise write_error(error, Path(error.filename or destination)) from error
        raise
    finally:
        _remove_leftovers(destination)


def _refuse(destination: Path, force: bool, mark: str) -> None:
    """Raises unless ``destination`` is free or may be replaced."""
    if not os.path.lexists(destination):
        return
    if not force:
        raise ArtifactError(
            f"output `{destination.name}`: expected a free name, found one that exists, in {destination.parent}",
            "choose another name, or replace it with --force",
        )
    if not _made_here(destination / mark):
        raise ArtifactError(
            f"output `{destination.name}`: expected a folder whose {mark} ling3export wrote, found something else, "
            f"in {destination.parent}",
            "--force replaces only what an earlier run wrote: remove it yourself, or choose another name",
        )


def _made_here(mark: Path) -> bool:
    """Whether a file says that ling3export wrote it: a name alone is no ground to remove a folder."""
    try:
        record = read_json(mark)
        producers = [record.get("producer"), record.get("metadata", {}).get("producer")]
    except (OSError, ValueError, AttributeError):
        return False
    return any(isinstance(producer, dict) and "ling3export" in producer for producer in producers)


def _rename(partial: Path, destination: Path) -> None:
    """Gives ``partial`` its name; an old folder of that name becomes a leftover."""
    if not destination.exists():
        rename(partial, destination)
        return
    if swap_names(partial, destination):
        return
    old = partial_path(destination)
    rename(destination, old)
    try:
        rename(partial, destination)
    except BaseException:
        rename(old, destination)
        raise


def swap_names(one: Path, other: Path) -> bool:
    """Exchanges two names at once; False where this system cannot, and nothing has changed."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    at_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return (
        renameat2 is not None and renameat2(at_folder, os.fsencode(one), at_folder, os.fsencode(other), exchange) == 0
    )


def _remove_leftovers(destination: Path) -> None:
    for path in leftovers(destination):
        remove_tree(path)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds the right to write ``folder``, which need not exist, until the block ends or the process does.

    The lock is a file next to the folder, ``.NAME.lock``; the system drops it with the process, so what a killed
    build leaves of it stops nobody.

    Raises:
        ArtifactError: Another build holds it (a second one in this process too), or the parent cannot be written.
    """
    folder = Path(folder).resolve()
    path = folder.parent / f".{folder.name}.lock"
    descriptor = _acquired(path, folder)
    try:
        yield
    finally:
        remove(path, held=descriptor)  # while it is held: whoever waits at the old file sees that it is gone
        os.close(descriptor)


def _acquired(path: Path, folder: Path) -> int:
    """A descriptor that holds the lock on the file now named ``path``."""
    while True:
        descriptor = open_lock(path, os.O_RDWR | os.O_CREAT)
        try:
            with writing(path):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
                    raise ArtifactError(
                        f"artifact `{folder.name}`: expected no other build, found process {holder} writing it, "
                        f"in {folder.parent}",
                        "wait until it ends, or choose another folder",
                    ) from error
                if _names(path, descriptor):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the holder before us removed it between our open and our lock


def _names(path: Path, descriptor: int) -> bool:
    """Whether ``path`` still is the file of ``descriptor``."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
