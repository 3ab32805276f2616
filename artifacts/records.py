"""Records as JSON: what a text may hold, one canonical spelling, and frozen structs whose fields msgspec checks.

A record's fields are ``str``, ``int``, ``float``, ``bool``, ``tuple[X, ...]``, ``dict[str, X]``, other records, and
unions of these; ``Annotated[X, Meta(...)]`` bounds one. Whole numbers lie in 0 … 2**53, floats are finite. Texts are
printable (so that no terminal escape passes) and have at most 10,000 characters. A field that has its default value is
left out of the JSON.
"""

import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ling3export.foundation.errors import Ling3Error, listed, shown

CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
SPACED = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
LINE = 100  # characters: a value that fits stands on one line
LARGEST_TEXT = 10_000  # characters of one string
LARGEST_WHOLE = 2**53  # what every JSON library reads exactly
TEXT = f"a printable text of at most {LARGEST_TEXT:,} characters"
WORDS = {
    **{"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"},
    **{"array": "a list", "object": "an object"},
}
UNIONS = (typing.Union, types.UnionType)

T = TypeVar("T")
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z", description="a sha256 in hex")]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A JSON object with these fields and no others."""


def within(low: float, high: float) -> Meta:
    """Numbers from ``low`` to ``high``."""
    return Meta(ge=low, le=high, description=f"a number from {low:,} to {high:,}")


def at_most(count: int) -> Meta:
    """No more than ``count`` entries."""
    return Meta(max_length=count, description=f"at most {count:,} entries")


def one_of(*words: str) -> Meta:
    """One of a few texts."""
    pattern = "|".join(map(re.escape, words))
    return Meta(pattern=rf"\A(?:{pattern})\Z", description=" or ".join(map(shown, words)))


class WrongRecordError(ValueError):
    """A value that its type does not allow.

    Attributes:
        expected: In words.
        actual: The value, shortened, control characters escaped.
        path: Keys and indices that lead to the value, the innermost first.
    """

    def __init__(self, expected: str, actual: str, path: tuple[object, ...] = ()) -> None:
        super().__init__(expected, actual)
        self.expected, self.actual, self.path = expected, actual, list(path)[::-1]

    @property
    def where(self) -> str:
        """``targets.cpu-tp2.cells.decode@2.fields[3]``."""
        parts = [f"[{part}]" if isinstance(part, int) else f".{shown(part)[1:-1]}" for part in reversed(self.path)]
        return "".join(parts).lstrip(".")

    def __str__(self) -> str:
        place = f", at {self.where}" if self.path else ""
        return f"expected {self.expected}, found {self.actual}{place}"


@contextmanager
def reading(what: str, where: object, kind: type[Ling3Error], hint: str | None = None) -> Iterator[None]:
    """Words what is wrong with a file of records as an error of ``kind``: the file, its JSON, or a field."""
    try:
        yield
    except WrongRecordError as error:
        field = f" `{error.where}`" if error.path else ""
        raise kind(f"{what}{field}: expected {error.expected}, found {error.actual}, in {where}", hint) from error
    except OSError as error:
        raise kind(f"{what}: expected a file, found {error.strerror}, in {where}", hint) from error
    except ValueError as error:
        raise kind(f"{what}: expected JSON, found {error}, in {where}", hint) from error


# --- JSON text -------------------------------------------------------------------------------------------------------


def canonical(value: object) -> bytes:
    """The one spelling of a JSON value: UTF-8, keys sorted by code point, no spaces, no NaN or infinity.

    Raises:
        TypeError: A key that is not a string, or a value that JSON does not have.
        ValueError: NaN, an infinity, or a lone surrogate.
    """
    _check_keys(value)
    return CANONICAL.encode(value).encode()


def sha256_of(value: object) -> str:
    """The hex sha256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()


def _check_keys(value: object) -> None:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"JSON key {key!r}: expected a string, found {type(key).__name__}")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        _check_keys(item)


def laid_out(value: object, newline: str = "\n") -> str:
    """JSON for people: in the given key order, on one line where it fits in LINE characters, else a member a line."""
    if not isinstance(value, (dict, list, tuple)) or not value:
        return SPACED.encode(value)
    deeper = newline + "  "
    if isinstance(value, dict):
        ends, parts = "{}", [f"{SPACED.encode(key)}: {laid_out(item, deeper)}" for key, item in value.items()]
    else:
        ends, parts = "[]", [laid_out(item, deeper) for item in value]
    line = ", ".join(parts)
    if len(line) + 2 <= LINE and "\n" not in line:
        return f"{ends[0]}{line}{ends[1]}"
    return ends[0] + deeper + ("," + deeper).join(parts) + newline + ends[1]


# --- records ---------------------------------------------------------------------------------------------------------


def expect(holds: object, expected: str, actual: object, *path: object) -> None:
    """Raises WrongRecordError unless ``holds``; for what a record's types cannot say."""
    if not holds:
        raise WrongRecordError(expected, shown(actual), path)


def to_json(value: object) -> Any:
    """A record, or a tuple or dict of records, as plain JSON values, in the order of the fields."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=_path_as_text))  # tuples become lists


def _path_as_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"record: expected a value that JSON has, found {type(value).__name__}")


def from_json(kind: type[T], value: object, *, free: bool = False) -> T:
    """A record of ``kind`` from plain JSON values, every one of them checked.

    Args:
        free: Texts may have any length and characters, and numbers may be infinite: for messages between this project's
            processes, and for files that hold what a model wrote.

    Raises:
        WrongRecordError: A field is missing, unknown, of another type, or out of bounds.
    """
    _check_values(value, free)
    try:
        return msgspec.convert(value, kind, dec_hook=lambda inner, item: inner(item))
    except msgspec.ValidationError as error:
        raise _located(kind, value) from error


def _check_values(value: object, free: bool, *path: object) -> None:
    """Bounds single values, whatever their field."""
    kind = type(value)
    if kind is str:
        expect(free or (len(value) <= LARGEST_TEXT and value.isprintable()), TEXT, value, *path)  # type: ignore[arg-type,attr-defined]
    elif kind is int:
        expect(0 <= value <= LARGEST_WHOLE, f"a number from 0 to {LARGEST_WHOLE:,}", value, *path)  # type: ignore[operator]
    elif kind is float:
        expect(free or math.isfinite(value), "a finite number", value, *path)  # type: ignore[arg-type]
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_values(key, free, *path, key)
            _check_values(item, free, *path, key)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _check_values(item, free, *path, number)


def _located(kind: Any, value: object, *path: object) -> WrongRecordError:
    """The error of the innermost value that is not of its type: msgspec names no keys of a mapping."""
    if wrong := _wrong_fields(_plain(kind), value, path):
        return wrong
    for key, inner, item in _members(_plain(kind), value):
        try:
            msgspec.convert(item, inner, dec_hook=lambda inner, item: inner(item))
        except msgspec.ValidationError:
            return _located(inner, item, *path, key)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if isinstance(cause := error.__cause__, WrongRecordError):
            return WrongRecordError(cause.expected, cause.actual, (*path, *reversed(cause.path)))
        return _worded(kind, value, str(error), path)
    raise AssertionError(f"{kind}: no member refuses the value")


def _plain(kind: Any) -> Any:
    """A type without its bounds, and without null as the one alternative."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is Annotated or (typing.get_origin(kind) in UNIONS and len(parts) == 1):
        return _plain(parts[0])
    return kind


def _wrong_fields(kind: Any, value: object, path: tuple[object, ...]) -> WrongRecordError | None:
    """The error of an object that has another field than its record, or lacks one."""
    if not (isinstance(kind, type) and issubclass(kind, Record) and isinstance(value, dict)):
        return None
    names = list(kind.__struct_fields__)
    if unknown := [name for name in value if name not in names]:
        return WrongRecordError(f"only the fields {listed(names, 20)}", shown(unknown[0]), path)
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    missing = [name for name in required if name not in value]
    return WrongRecordError(f"the field {listed(missing)}", "none", path) if missing else None


def _members(kind: Any, value: object) -> list[tuple[object, Any, object]]:
    """Key, type and value of each member of an object or a list."""
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, dict) and origin is dict:
        return [(key, parameters[1], item) for key, item in value.items()]
    if isinstance(value, dict) and isinstance(kind, type) and (issubclass(kind, Record) or is_dataclass(kind)):
        hints = typing.get_type_hints(kind, include_extras=True)
        return [(key, hints[key], item) for key, item in value.items() if key in hints]
    if isinstance(value, (list, tuple)) and origin in (list, tuple):
        return [(number, parameters[0], item) for number, item in enumerate(value)]
    return []


def _worded(kind: Any, value: object, text: str, path: tuple[object, ...]) -> WrongRecordError:
    """msgspec's message about ``value`` itself, in the words of this project."""
    if kinds := re.fullmatch("Expected `([^`]*)`, got .*", text):
        expected = " or ".join(WORDS.get(word, word) for word in kinds[1].split(" | "))
    elif typing.get_origin(_plain(kind)) is typing.Literal:
        expected = " or ".join(map(shown, typing.get_args(_plain(kind))))
    else:
        words = [rule.description for rule in _rules(kind) if rule.description]
        expected = ", ".join(words) or text.removeprefix("Expected ")
    return WrongRecordError(expected, shown(value), path)


def _rules(kind: Any) -> list[Meta]:
    """The bounds of a type, or of the parts of a union."""
    if typing.get_origin(kind) is Annotated:
        return [rule for rule in typing.get_args(kind) if isinstance(rule, Meta)]
    if typing.get_origin(kind) in UNIONS:
        return [rule for part in typing.get_args(kind) for rule in _rules(part)]
    return []
