"""Records as JSON: strict reading of text, one canonical spelling, and frozen dataclasses checked type by type.

A dataclass is its own schema. Field types are ``str``, ``int``, ``float``, ``bool``, ``None``, ``Literal``, ``Path``,
unions, ``tuple[X, ...]``, ``list[X]``, ``dict[str, X]``, ``Any`` and other dataclasses; ``Annotated[X, Rule(...)]``
narrows one. Whole numbers lie in 0 … 2**53, floats are finite, texts are printable (so that no terminal escape passes)
unless a rule says otherwise (UNBOUNDED, FREE). A field with the default None is left out of the JSON where it is None,
and never null there.
"""

import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from ling3export.foundation.errors import listed

CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
SPACED = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
LINE = 100  # characters: a value that fits stands on one line
LARGEST_TEXT = 10_000  # characters of one string
LARGEST_WHOLE = 2**53  # what every JSON library reads exactly

T = TypeVar("T")
Decoder = Callable[[object], Any]


@dataclass(frozen=True)
class Rule:
    """What the values of a type must hold besides.

    Attributes:
        words: What is expected, for messages.
        holds: Whether a value of the right type is right.
    """

    words: str
    holds: Callable[[Any], bool]


def within(low: float, high: float) -> Rule:
    """Numbers from ``low`` to ``high``."""
    return Rule(f"a number from {low:,} to {high:,}", lambda value: low <= value <= high)


def at_most(count: int) -> Rule:
    """No more than ``count`` entries."""
    return Rule(f"at most {count:,} entries", lambda value: len(value) <= count)


def one_of(*words: str) -> Rule:
    """One of a few texts."""
    return Rule(" or ".join(map(repr, words)), lambda value: value in words)


UNBOUNDED = Rule("a number", lambda value: True)  # a float that may be infinite
FREE = Rule("a text", lambda value: True)  # of any length, with any characters
Text = Annotated[str, FREE]
Digest = Annotated[str, Rule("a sha256 in hex", re.compile(r"[0-9a-f]{64}").fullmatch)]


class WrongRecordError(ValueError):
    """A value that its type does not allow.

    Attributes:
        expected: In words.
        found: The value, shortened, control characters escaped.
        path: Keys and indices that lead to the value.
        unknown: The key that a record does not have, where it is that.
    """

    def __init__(self, expected: str, found: str, path: tuple[object, ...] = (), unknown: str | None = None) -> None:
        super().__init__(expected, found)
        self.unknown = unknown
        self.expected, self.found, self.path = expected, found, list(path)[::-1]

    @property
    def where(self) -> str:
        """``targets.cpu-tp2.cells.decode@2.fields[3]``."""
        parts = [f"[{part}]" if isinstance(part, int) else f".{shown(part)[1:-1]}" for part in reversed(self.path)]
        return "".join(parts).lstrip(".")

    def __str__(self) -> str:
        place = f", at {self.where}" if self.path else ""
        return f"expected {self.expected}, found {self.found}{place}"


def shown(value: object) -> str:
    """The begin of a value for a message, control characters escaped."""
    if isinstance(value, (dict, list, tuple)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value):,}"
    text = repr(value[:61] if isinstance(value, str) else value)
    return text if len(text) <= 62 else f"{text[:60]}…"


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
    if not isinstance(value, (dict, list)) or not value:
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


# --- dataclasses -----------------------------------------------------------------------------------------------------


def to_json(value: object) -> Any:
    """A record, or a tuple or dict of records, as plain JSON values, in the order of the fields."""
    if is_dataclass(value) and not isinstance(value, type):
        optional: frozenset[str] = _optional(type(value))
        return {name: to_json(item) for name, item in vars(value).items() if item is not None or name not in optional}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def from_json(kind: type[T], value: object) -> T:
    """A record of ``kind`` from plain JSON values, every one of them checked.

    Raises:
        WrongRecordError: A field is missing, unknown, or of another type than the dataclass says.
    """
    decode: Callable[[Any], Decoder] = _decoder
    record: T = decode(kind)(value)
    return record


@functools.cache
def _optional(kind: type) -> frozenset[str]:
    """Names of the fields that are left out where they are None."""
    return frozenset(field.name for field in fields(kind) if field.default is None)


@functools.cache
def _decoder(kind: Any) -> Decoder:
    """What turns JSON values into values of ``kind``."""
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if origin is Literal:
        return _checked(lambda value: value in parameters, one_of(*parameters).words)
    if origin is Annotated:
        return _ruled(parameters[0], tuple(each for each in parameters[1:] if isinstance(each, Rule)))
    if origin in (typing.Union, types.UnionType):
        return _union([_decoder(each) for each in parameters])
    if origin is tuple and len(parameters) == 2 and parameters[1] is Ellipsis:
        return _list(_decoder(parameters[0]))
    if origin is list:
        return lambda value: list(_list(_decoder(parameters[0]))(value))
    if origin is dict:
        return _mapping(_decoder(parameters[0]), _decoder(parameters[1]))
    if isinstance(kind, type) and is_dataclass(kind):
        return _record(kind)
    raise TypeError(f"record field of type {kind}: expected one that the module's docstring names")


def _checked(holds: Callable[[Any], bool], words: str) -> Decoder:
    def decode(value: object) -> object:
        if not holds(value):
            raise WrongRecordError(words, shown(value))
        return value

    return decode


def _number(value: object) -> float:
    if type(value) is int and abs(value) <= LARGEST_WHOLE:
        return float(value)
    if type(value) is float and math.isfinite(value):
        return value
    raise WrongRecordError("a finite number", shown(value))


def _any_number(value: object) -> float:
    return value if type(value) is float else _number(value)


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= LARGEST_TEXT and value.isprintable()


SCALARS: dict[object, Decoder] = {
    str: _checked(_is_text, f"a printable text of at most {LARGEST_TEXT:,} characters"),
    int: _checked(lambda value: type(value) is int and 0 <= value <= LARGEST_WHOLE, "a whole number"),
    float: _number,
    bool: _checked(lambda value: type(value) is bool, "true or false"),
    Any: lambda value: value,
    type(None): _checked(lambda value: value is None, "null"),
    Path: lambda value: Path(str(value)),  # of messages between our own processes, where any name may stand
}


ANY_TEXT = _checked(lambda value: type(value) is str, FREE.words)


def _ruled(kind: Any, rules: tuple[Rule, ...]) -> Decoder:
    inner = _any_number if UNBOUNDED in rules else ANY_TEXT if FREE in rules else _decoder(kind)

    def decode(value: object) -> object:
        decoded = inner(value)
        for rule in rules:
            if not rule.holds(decoded):
                raise WrongRecordError(rule.words, shown(value))
        return decoded

    return decode


def _union(decoders: list[Decoder]) -> Decoder:
    def decode(value: object) -> object:
        expected = []
        for decoder in decoders:
            try:
                return decoder(value)
            except WrongRecordError as error:
                expected.append(error.expected)
        raise WrongRecordError(" or ".join(expected), shown(value))

    return decode


def _inside(key: object, decode: Decoder, value: object) -> Any:
    """A member of an object or a list, decoded; an error says where it is."""
    try:
        return decode(value)
    except WrongRecordError as error:
        error.path.append(key)
        raise


def _list(element: Decoder) -> Decoder:
    def decode(value: object) -> tuple[Any, ...]:
        if type(value) is not list:
            raise WrongRecordError("a list", shown(value))
        return tuple([_inside(at, element, item) for at, item in enumerate(value)])

    return decode


def _mapping(name: Decoder, element: Decoder) -> Decoder:
    def decode(value: object) -> dict[str, Any]:
        if type(value) is not dict:
            raise WrongRecordError("an object", shown(value))
        return {_inside(key, name, key): _inside(key, element, item) for key, item in value.items()}

    return decode


def _record(kind: type) -> Decoder:
    decoders, defaults = {}, {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        hint = hints[each.name]
        if each.default is None:  # left out where it is None: never null
            hint = typing.Union[tuple(part for part in typing.get_args(hint) if part is not type(None))]  # noqa: UP007
        if each.default is not MISSING:
            defaults[each.name] = each.default
        decoders[each.name] = _decoder(hint)

    def decode(value: object) -> object:
        if type(value) is not dict:
            raise WrongRecordError("an object", shown(value))
        for key in value:
            if key not in decoders:
                raise WrongRecordError(f"only the fields {listed(list(decoders), 20)}", shown(key), unknown=key)
        if missing := [name for name in decoders if name not in value and name not in defaults]:
            raise WrongRecordError(f"the field {listed(missing)}", "none")
        record: Any = object.__new__(kind)  # without the slow assignments of a frozen dataclass's __init__
        given = {key: _inside(key, decoders[key], item) for key, item in value.items()}
        record.__dict__.update({name: given.get(name, defaults.get(name)) for name in decoders})
        return record

    return decode
