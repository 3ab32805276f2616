"""The record of a published version: its fields, its reader, and which of two versions is the later."""

import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from ling3export.artifacts.files import stays_inside
from ling3export.artifacts.records import Digest, Record, at_most, expect, from_json, one_of, reading
from ling3export.foundation.errors import CatalogError, UnsafePath
from ling3export.foundation.strict_json import parse_json

SCHEMA = "ling3.catalog/1"
LARGEST = 8 << 20  # bytes of a record and of an OCI document
LONGEST_VERSION = 100  # characters: a registry's tag has 128
SEMVER = re.compile(  # semver.org, 2.0.0
    r"(0|[1-9]\d{0,17})\.(0|[1-9]\d{0,17})\.(0|[1-9]\d{0,17})"
    r"(?:-((?:0|[1-9]\d{0,17}|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d{0,17}|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?"
    r"(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?",
    re.ASCII,
)

T = TypeVar("T")


def is_version(text: str) -> bool:
    return len(text) <= LONGEST_VERSION and SEMVER.fullmatch(text) is not None


def order(version: str) -> tuple[object, ...]:
    """A key that sorts versions from the earliest to the latest; build metadata decides last."""
    match = SEMVER.fullmatch(version)
    assert match is not None
    major, minor, patch, pre_release, metadata = match.groups()
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in (pre_release or "").split(".") if part]
    return int(major), int(minor), int(patch), pre_release is None, tuple(parts), metadata or ""


def latest(versions: Iterable[str]) -> str | None:
    """The latest release, the latest pre-release if there is no release, None if there is no version."""
    known = list(versions)
    releases = [version for version in known if "-" not in version.partition("+")[0]]
    return max(releases or known, key=order, default=None)


def _is_date(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


Id = Annotated[
    str, Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,62}[a-z0-9]\Z", description="2 to 64 of a-z, 0-9 and -, no - at an end")
]
BlobDigest = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z", description="sha256: and 64 hex digits")]


class File(Record, frozen=True):
    """A file of the artifact."""

    path: str  # below its folder
    size: int  # bytes
    sha256: Digest


class Requirements(Record, frozen=True):
    """The machine that an artifact needs: one of the targets must fit it."""

    targets: tuple[str, ...]
    devices: int  # of the largest target
    jaxlib: str | None = None  # None if targets differ
    state_abi: Digest | None = None  # None if targets differ
    memory_bytes_per_device: int | None = None  # the largest peak of a cell


class EvalScore(Record, frozen=True):
    """The success rate of an evaluation, and the digest of its file."""

    suite: str
    score: float
    run_digest: BlobDigest


class CatalogRecord(Record, frozen=True, kw_only=True):
    """The description of one version; it never changes."""

    schema: Annotated[str, one_of(SCHEMA)]
    id: Id
    version: str
    name: str
    description: str
    author: str
    kind: Annotated[str, one_of("artifact", "programs")]
    requirements: Requirements
    tags: Annotated[tuple[str, ...], at_most(64)]
    created_at: str
    files: Annotated[tuple[File, ...], at_most(100_000)]
    eval: EvalScore | None = None

    def __post_init__(self) -> None:
        expect(is_version(self.version), "a semantic version", self.version, "version")
        expect(_is_date(self.created_at), "an ISO 8601 date with its zone", self.created_at, "created_at")

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def read_record(data: bytes, where: str) -> CatalogRecord:
    """A record from its JSON text; ``where`` names its place in messages.

    Raises:
        CatalogError: It is no JSON, or a field is missing, unknown or wrong.
        UnsafePath: A path leaves the folder, or two paths meet on some file system.
    """
    record = typed(CatalogRecord, parsed(data, where, "record"), where, "record")
    check_paths([file.path for file in record.files], where)
    return record


def parsed(data: bytes, where: str, what: str) -> dict[str, Any]:
    with reading(what, where, CatalogError):
        raw = parse_json(data, LARGEST)
    if not isinstance(raw, dict):
        raise CatalogError(f"{what}: it must be a JSON object, in {where}")
    return raw


def typed(kind: type[T], raw: object, where: str, what: str) -> T:
    """A record from JSON; a CatalogError if a field is missing, unknown or of another type."""
    with reading(what, where, CatalogError):
        return from_json(kind, raw)


def check_paths(paths: Iterable[str], where: str) -> None:
    """Passes if every path stays in its folder and no two paths meet, on any file system.

    Raises:
        UnsafePath: A path climbs out or is absolute, two differ only in case, or one is a folder of another.
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for path in paths:
        if not stays_inside(path) or "\\" in path:
            raise UnsafePath(f"path {path!r}: it leaves its folder, in {where}")
        key = path.casefold()
        if key in seen:
            raise UnsafePath(f"path {path!r}: it is {seen[key]!r} on some file systems, in {where}")
        seen[key] = path
        for parent in PurePosixPath(path).parents:
            if (known := folders.setdefault(str(parent).casefold(), str(parent))) != str(parent):
                raise UnsafePath(f"path {path!r}: its folder {parent} is {known!r} on some file systems, in {where}")
    if both := sorted(seen.keys() & folders.keys()):
        raise UnsafePath(f"path {seen[both[0]]!r}: it is a file and a folder, in {where}")
