"""JSON that others wrote, read strictly: bounded in size and depth before it is parsed, each key once, no NaN."""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec

from ling3export.foundation.reading import read_bytes

LARGEST = 8 << 20  # bytes of a text, unless its reader says otherwise
DEPTH = 16  # levels of objects and lists
QUICK = 1 << 16  # elements that msgspec reads in 2 ms, json's decoder in C in 10, and that in Python in 70 (2026-11-27)
OBJECTS = 1 << 14  # objects and lists of a text whose elements are bounded
HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a character beyond U+FFFF; both together are one
WHOLE = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
BRACKETS = bytes.maketrans(b"{}", b"[]")
NO_BRACKET = bytes(set(range(256)) - set(b"[]{},"))
BLANKS = b" \t\r\n"
UNREAD = object()


class DoubledKeyError(ValueError):
    """An object has two members of one name, ``key``."""

    def __init__(self, key: str) -> None:
        super().__init__("a key that stands twice in one object")
        self.key = key


class _Patient(json.JSONDecoder):
    """The decoder in Python: slower than that in C, but other threads run meanwhile."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def parse_json(
    data: bytes, largest: int = LARGEST, *, depth: int = DEPTH, most: int | None = None, halves: bool = False
) -> Any:
    """The value of a JSON text.

    Args:
        largest: Most bytes.
        depth: Most levels of objects and lists.
        most: Most elements in a row that are neither objects nor lists; of those, there may be OBJECTS in all. With it,
            other threads run meanwhile: none waits longer than some milliseconds.
        halves: Allow lone surrogates in strings.

    Raises:
        DoubledKeyError: A key stands twice in one object.
        ValueError: The text is too long or too deep, has too many elements, is no UTF-8 or no JSON, or has NaN, an
            infinity or a lone surrogate. The error's text follows "found".
    """
    if len(data) > largest:
        raise ValueError(f"more than {largest:,} bytes")
    plain = data.replace(rb"\\", b"__").replace(rb"\"", b"__")  # without escaped backslashes and quotes
    marks = b"".join(plain.split(b'"')[::2]).translate(BRACKETS, NO_BRACKET)  # those outside of strings
    if most is not None and b"," * most in marks:
        raise ValueError(f"more than {most:,} elements in a row")
    brackets = marks.translate(None, b",")
    if most is not None and brackets.count(b"[") > OBJECTS:
        raise ValueError(f"more than {OBJECTS:,} lists and objects")
    if b"[" * (depth + 1) not in brackets:
        for _ in range(depth):
            brackets = brackets.replace(b"[]", b"")  # the innermost ones
    if brackets.count(b"[") > depth or (brackets and brackets.count(b"[") == brackets.count(b"]")):
        raise ValueError(f"more than {depth} levels of objects and lists")
    quick = most is None or len(marks) <= QUICK
    value = round_trip(data) if quick else UNREAD
    if value is UNREAD:
        decoder = json.JSONDecoder if quick else _Patient
        value = json.loads(
            data.decode(), cls=decoder, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    if not halves and HALF.search(WHOLE.sub(b"", plain)):
        raise ValueError("half a character (a lone surrogate)")
    return value


def round_trip(data: bytes) -> Any:
    """The value of a text that msgspec writes alike, but for blanks, so no key stands twice; UNREAD for others.

    Valid texts are among the others: with escapes, or with numbers in another notation.
    """
    try:
        value = msgspec.json.decode(data)
        alike = msgspec.json.encode(value).translate(None, BLANKS) == data.translate(None, BLANKS)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return UNREAD
    return value if alike else UNREAD


def read_json(path: Path, largest: int = LARGEST, *, links: bool = False) -> Any:
    """The value of a JSON file; opened by ``reading.opened``.

    Raises:
        OSError: The file cannot be opened, or has more than ``largest`` bytes; ``strerror`` follows "found".
        DoubledKeyError, ValueError: :func:`parse_json` refuses the text.
    """
    return parse_json(read_bytes(path.parent, path.name, largest, links=links), largest)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise DoubledKeyError(key)
        unique[key] = value
    return unique


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number beyond the largest")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}")
