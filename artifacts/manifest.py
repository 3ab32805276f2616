"""The manifest: canonical JSON, its digest, and the records of digested files."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ling3export.artifacts.agreement import check_agreement
from ling3export.artifacts.files import inside, partial_name, replace_file, writing
from ling3export.artifacts.format_1 import upgraded
from ling3export.artifacts.records import (
    CANONICAL,
    WrongRecordError,
    canonical,
    from_json,
    laid_out,
    parse_json,
    sha256_of,
)
from ling3export.artifacts.schema import Manifest
from ling3export.errors import ArtifactError, listed

__all__ = ["canonical", "sha256_of"]

# Version history (artifacts/FORMAT.md tells what a reader must do):
# 1 (November 2026): the first.
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
FIELDS = ("producer", "source", "config", "plan", "targets", "weights", "vectors", "tokenizer", "notes")
WEIGHTS = "weights"  # the field, and the folder that its paths start from
FOREIGN = ("source", "notes")  # fields whose paths are not of this artifact
REBUILD = "copy the artifact again, or build it again"


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Makes ``folder`` an artifact, or replaces its manifest, in one step: written beside, then renamed.

    One writer at a time: whoever replaces a manifest holds the folder's lock.

    Args:
        folder: The artifact's folder, every other file already in place.
        manifest: The fields of FIELDS, all of them. ``format`` and ``sha256`` are set here, whatever they were.

    Returns:
        The manifest as written.

    Raises:
        ArtifactError: A field is missing or unknown, a path leaves the folder, or the disk is full.
    """
    body = {key: value for key, value in manifest.items() if key not in ("format", "sha256")}
    if unknown := sorted(set(body) - set(FIELDS)):
        raise ArtifactError(f"manifest: expected the fields of format {FORMAT_VERSION}, found {listed(unknown)}")
    whole = {"format": FORMAT_VERSION, **body}
    whole["sha256"] = sha256_of(whole)
    whole = json.loads(json.dumps(whole))  # tuples become lists, as they will be read
    _check_fields(whole, folder)
    with writing(folder / MANIFEST):
        for left in folder.iterdir():  # by a writer that was killed; the first version had one name for all
            if left.name == f".{MANIFEST}.partial" or partial_name(MANIFEST).fullmatch(left.name):
                left.unlink()
    replace_file(folder / MANIFEST, _file_bytes(whole))
    return whole


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an artifact, its own digest checked. Other files are not opened.

    Raises:
        ArtifactError: No folder, no manifest, another format, a byte that was changed, a missing field, or a path
            that leaves the folder.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise ArtifactError(
            f"artifact `{folder.name}`: expected a folder, found {found}, at {folder}",
            "make one with: ling3export build CHECKPOINT ARTIFACT",
        )
    if not path.exists():
        raise ArtifactError(
            f"artifact `{folder.name}`: expected {MANIFEST}, found none, in {folder}",
            "this is no artifact, or its build was interrupted: build it again",
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{MANIFEST}: expected a readable file, found {error.strerror}, in {folder}") from error
    try:
        manifest = parse_json(data)
    except ValueError as error:
        raise ArtifactError(f"{MANIFEST}: expected JSON, found {error}, in {folder}", REBUILD) from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is not int or version < 1:
        raise ArtifactError(f"{MANIFEST}: expected a format version, found {version!r}, in {folder}", REBUILD)
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{MANIFEST}: expected format {FORMAT_VERSION}, found format {version}, in {folder}",
            "install a newer ling3export, or build the artifact again with this one",
        )
    if not _is_exact(manifest, data):
        raise ArtifactError(
            f"{MANIFEST}: expected the spacing and spelling of a build, found another, in {folder}", REBUILD
        )
    claimed = manifest.pop("sha256", None)
    digest = hashlib.sha256(CANONICAL.encode(manifest).encode()).hexdigest()  # parsed JSON has only string keys
    if claimed != digest:
        raise ArtifactError(f"{MANIFEST}: expected sha256 {claimed}, found {digest}, in {folder}", REBUILD)
    manifest["sha256"] = digest
    _check_fields(manifest, folder)
    return manifest


def open_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact as records, every value checked. Other files are not opened.

    Raises:
        ArtifactError: As `read_manifest`, or a field of another type, out of bounds, or in contradiction to others.
    """
    return typed(read_manifest(folder), Path(folder))


def typed(raw: dict[str, Any], folder: Path) -> Manifest:
    """The records of a manifest of format 1.

    Raises:
        ArtifactError: It is not what a build wrote.
    """
    try:
        manifest = from_json(Manifest, upgraded(raw))
        check_agreement(manifest)
    except WrongRecordError as error:
        raise ArtifactError(
            f"{MANIFEST} `{error.where}`: expected {error.expected}, found {error.found}, in {folder}", REBUILD
        ) from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ArtifactError(
            f"{MANIFEST}: expected the fields of format 1, found others ({type(error).__name__}: {error}), in {folder}",
            REBUILD,
        ) from error
    return manifest


def file_record(folder: Path, relative: str) -> dict[str, Any]:
    """``{"path", "bytes", "sha256"}`` of a file below ``folder``.

    Raises:
        ArtifactError: The path leaves the folder, or the file cannot be read.
    """
    path = inside(folder, relative, "a file record")
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"path": relative, "bytes": file.tell(), "sha256": digest}
    except OSError as error:
        raise _unreadable(relative, folder, error) from error


def read_checked(folder: Path, record: dict[str, Any]) -> bytes:
    """The bytes of a recorded file: those that were digested, so nothing can change them in between.

    Raises:
        ArtifactError: The record is none, the path leaves the folder, the file is missing, or its size or digest
            is another.
    """
    if not isinstance(record, dict) or not {"path", "bytes", "sha256"} <= set(record):
        raise ArtifactError(f"file record: expected path, bytes and sha256, found {record!r}, in {MANIFEST}")
    relative = record["path"]
    path = inside(folder, relative, MANIFEST)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read() if size == record["bytes"] else b""
    except OSError as error:
        raise _unreadable(relative, folder, error) from error
    if size != record["bytes"]:
        raise ArtifactError(
            f"file `{relative}`: expected {record['bytes']:,} bytes, found {size:,}, in {folder}", REBUILD
        )
    digest = hashlib.sha256(data).hexdigest()
    if digest != record["sha256"]:
        raise ArtifactError(
            f"file `{relative}`: expected sha256 {record['sha256']}, found {digest}, in {folder}", REBUILD
        )
    return data


def _unreadable(relative: str, folder: Path, error: OSError) -> ArtifactError:
    return ArtifactError(f"file `{relative}`: expected a readable file, found {error.strerror}, in {folder}", REBUILD)


def _file_bytes(manifest: dict[str, Any]) -> bytes:
    return (laid_out(manifest) + "\n").encode()


def _is_exact(manifest: dict[str, Any], data: bytes) -> bool:
    """Whether ``data`` is what `write_manifest` writes for ``manifest``: the digest alone lets spacing change."""
    try:
        return _file_bytes(manifest) == data
    except (ValueError, RecursionError):
        return False


def _check_fields(manifest: dict[str, Any], folder: Path) -> None:
    if missing := [field for field in FIELDS if field not in manifest]:
        raise ArtifactError(f"{MANIFEST}: expected the field {listed(missing)}, found none, in {folder}", REBUILD)
    for field in FIELDS:
        if field not in FOREIGN:
            for path in _paths(manifest[field]):
                inside(folder, path, MANIFEST)


def recorded_files(manifest: dict[str, Any]) -> list[str]:
    """Every file that a manifest names, as a path below the artifact's folder."""
    fields = [field for field in FIELDS if field not in FOREIGN]
    found = [
        f"{WEIGHTS}/{path}" if field == WEIGHTS else str(path) for field in fields for path in _paths(manifest[field])
    ]
    return list(dict.fromkeys(found))


def _paths(value: object) -> Iterator[object]:
    """Every value under a key ``path`` or ``file`` that is no object or list itself."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (dict, list)):
                yield from _paths(item)
            elif key in ("path", "file"):
                yield item
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, (dict, list)):
                yield from _paths(item)
