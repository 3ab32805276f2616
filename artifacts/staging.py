"""Folders that appear whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import DISK_FULL, partial_name, partial_path, sync_folder, sync_tree, write_error
from ling3export.artifacts.lock import folder_lock
from ling3export.artifacts.manifest import MANIFEST, read_manifest
from ling3export.errors import ArtifactError


@contextmanager
def staged(destination: Path, *, force: bool = False, mark: str = MANIFEST) -> Iterator[Path]:
    """A temporary folder beside ``destination`` that takes its name when the block ends well.

    Holds ``destination``'s lock, so whatever else is named ``.NAME.partial-…`` belongs to a dead build and is removed.
    When the block raises, the temporary folder is removed and ``destination`` is as before. A kill leaves at most
    the temporary folder; one between the two renames of a replacement leaves the old folder under such a name too.

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
        raise ArtifactError(f"output `{destination.name}`: expected an existing parent folder, found none, at {parent}")
    with folder_lock(destination):
        _refuse(destination, force, mark)
        with _partial(destination) as partial:
            yield partial
            sync_tree(partial)
            _rename(partial, destination)
            sync_folder(parent)


@contextmanager
def adding(artifact: Path) -> Iterator[Path]:
    """A temporary folder beside an artifact, for files that are to be moved into it; it holds the artifact's lock.

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
    """A temporary folder beside ``destination``, whose lock is held; whatever is left of it and of dead builds goes."""
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
        found: Any = json.loads(mark.read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(found, dict):
        return False
    metadata = found.get("metadata")
    producers = [found.get("producer"), metadata.get("producer") if isinstance(metadata, dict) else None]
    return any(isinstance(producer, dict) and "ling3export" in producer for producer in producers)


def _rename(partial: Path, destination: Path) -> None:
    """Gives ``partial`` its name; an old folder of that name becomes a leftover."""
    if not destination.exists():
        partial.rename(destination)
        return
    old = partial_path(destination)
    destination.rename(old)
    try:
        partial.rename(destination)
    except BaseException:
        old.rename(destination)
        raise


def _remove_leftovers(destination: Path) -> None:
    leftover = partial_name(destination.name)
    for path in destination.parent.iterdir():
        if leftover.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
