"""What a catalogue says of an artifact: the record, its digest, and the strict reader of what somebody else wrote."""

import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar

from ling3export.artifacts.catalog.versions import is_version
from ling3export.artifacts.files import stays_inside
from ling3export.artifacts.records import Digest, Rule, WrongRecordError, at_most, from_json, one_of, sha256_of
from ling3export.foundation.errors import CatalogError, UnsafePath, listed
from ling3export.foundation.strict_json import parse_json

SCHEMA = "ling3.catalog/1"
KINDS = ("artifact", "programs", "weights", "checkpoint", "dataset", "task-suite")
LARGEST = 8 << 20  # bytes of a record, and of the documents around it

T = TypeVar("T")


def _is_date(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


Id = Annotated[
    str, Rule("2 to 64 of a-z, 0-9 and -, no - at an end", re.compile(r"[a-z0-9][a-z0-9-]{0,62}[a-z0-9]").fullmatch)
]
Version = Annotated[str, Rule("a semantic version", is_version)]
Date = Annotated[str, Rule("an ISO 8601 date with its zone", _is_date)]
Named = Annotated[str, Rule("sha256: and 64 hex digits", re.compile(r"sha256:[0-9a-f]{64}").fullmatch)]


@dataclass(frozen=True)
class File:
    """A file of what is published, by its path below the folder."""

    path: str
    size: int
    sha256: Digest


@dataclass(frozen=True)
class Dependency:
    """What has to be pulled, too: named by records of earlier versions alone."""

    id: Id
    version: Version


@dataclass(frozen=True)
class Needs:
    """What a machine must have: one of the targets, and of it so many devices."""

    token: bool
    targets: tuple[str, ...]
    devices: int
    depends: tuple[Dependency, ...]
    jaxlib: str | None = None
    state_abi: Digest | None = None
    memory_bytes_per_device: int | None = None


@dataclass(frozen=True)
class Install:
    """How it is run once it is here."""

    command: str
    config: dict[str, str]


@dataclass(frozen=True)
class EvalScore:
    """How it did in an evaluation."""

    suite: str
    score: float
    run_digest: Named


@dataclass(frozen=True, kw_only=True)
class CatalogRecord:
    """What a catalogue says of one version; it never changes."""

    schema: Annotated[str, one_of(SCHEMA)]
    id: Id
    version: Version
    name: str
    description: str
    author: str
    kind: Annotated[str, one_of(*KINDS)]
    requirements: Needs
    install: Install
    tags: Annotated[tuple[str, ...], at_most(64)]
    created_at: Date
    updated_at: Date
    files: Annotated[tuple[File, ...], at_most(100_000)]
    digest: Named
    eval: EvalScore | None = None
    signature: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def digest_of(raw: dict[str, Any]) -> str:
    """The digest of a record's JSON: of all but ``digest`` and ``signature``."""
    return "sha256:" + sha256_of({name: value for name, value in raw.items() if name not in ("digest", "signature")})


def read_record(
    data: bytes, where: str, *, strict: bool = False, warn: Callable[[str], object] = lambda text: None
) -> CatalogRecord:
    """A record from its bytes.

    Args:
        data: JSON.
        where: Where it comes from, for messages.
        strict: Whether a field that this version does not know is refused; else it is only warned of.
        warn: Told of such fields.

    Raises:
        CatalogError: No JSON, a field that is missing or wrong, or another digest than its own.
        UnsafePath: A path that leaves the folder, or two that some file system takes for one.
    """
    raw = parsed(data, where, "record")
    known, unknown = without_unknown(CatalogRecord, raw)
    if unknown:
        if strict:
            raise CatalogError(f"record: expected no other fields, found {listed(unknown)}, in {where}")
        warn(f"record: fields that this version does not know: {listed(unknown)}, in {where}")
    record = typed(CatalogRecord, known, where, "record")
    if record.digest != (found := digest_of(raw)):
        raise CatalogError(f"record: expected digest {record.digest}, found {found}, in {where}")
    if datetime.fromisoformat(record.updated_at) < datetime.fromisoformat(record.created_at):
        raise CatalogError(f"record `updated_at`: expected no earlier than created_at, found earlier, in {where}")
    check_paths([file.path for file in record.files], where)
    return record


def parsed(data: bytes, where: str, what: str) -> dict[str, Any]:
    """A JSON object that somebody else wrote.

    Raises:
        CatalogError: It is none.
    """
    try:
        raw = parse_json(data, LARGEST)
    except ValueError as error:
        raise CatalogError(f"{what}: expected JSON, found {error}, in {where}") from error
    if not isinstance(raw, dict):
        raise CatalogError(f"{what}: expected an object, found another value, in {where}")
    return raw


def typed(kind: type[T], raw: object, where: str, what: str) -> T:
    """A record of ``kind`` from JSON.

    Raises:
        CatalogError: A field is missing, unknown, or of another type.
    """
    try:
        return from_json(kind, raw)
    except WrongRecordError as error:
        at = f" `{error.where}`" if error.path else ""
        raise CatalogError(f"{what}{at}: expected {error.expected}, found {error.found}, in {where}") from error


def without_unknown(kind: Any, value: Any, at: str = "") -> tuple[Any, list[str]]:
    """A JSON value without the fields that ``kind`` does not have, at any depth, and the names of these."""
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Annotated, typing.Union, types.UnionType):
        return without_unknown(parameters[0], value, at)
    if origin is tuple and isinstance(value, list):
        pairs = [without_unknown(parameters[0], each, at) for each in value]
        return [each for each, _ in pairs], list(dict.fromkeys(name for _, names in pairs for name in names))
    if not (is_dataclass(kind) and isinstance(value, dict)):
        return value, []
    hints = typing.get_type_hints(kind, include_extras=True)
    known, unknown = {}, [f"{at}{name}" for name in value if name not in hints]
    for each in fields(kind):
        if each.name in value:
            known[each.name], inner = without_unknown(hints[each.name], value[each.name], f"{at}{each.name}.")
            unknown += inner
    return known, unknown


def check_paths(paths: Iterable[str], where: str) -> None:
    """Passes where every path stays in its folder and no two can meet, wherever they are written.

    Raises:
        UnsafePath: One climbs out or is absolute, two differ in case alone, or one is a folder of another.
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for path in paths:
        if not stays_inside(path) or "\\" in path:
            raise UnsafePath(f"path {path!r}: expected one that stays in its folder, found another, in {where}")
        key = path.casefold()
        if key in seen:
            raise UnsafePath(f"path {path!r}: expected it once, found {seen[key]!r} besides, in {where}")
        seen[key] = path
        for parent in PurePosixPath(path).parents:
            if (known := folders.setdefault(str(parent).casefold(), str(parent))) != str(parent):
                raise UnsafePath(f"path {path!r}: expected folders once, found {known!r} besides, in {where}")
    if both := sorted(seen.keys() & folders.keys()):
        raise UnsafePath(f"path {seen[both[0]]!r}: expected a file, found a folder of that name, in {where}")
