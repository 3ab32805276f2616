"""JSON that others wrote, read strictly: bounded in size and depth before it is parsed, each key once, no NaN."""

import json
import math
import re
from pathlib import Path
from typing import Any

from ling3export.reading import read_bytes

LARGEST = 8 << 20  # bytes of a text, unless its reader says otherwise
DEPTH = 16  # levels of objects and lists
HALVES = re.compile(rb"\\u[dD][89a-fA-F]")  # of characters beyond U+FFFF; both together are one
STRINGS = re.compile(rb'"[^"]*"?')
BRACKETS = bytes.maketrans(b"{}", b"[]")
NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


class DoubledKeyError(ValueError):
    """An object has two members of one name, ``key``."""

    def __init__(self, key: str) -> None:
        super().__init__("a key that stands twice in one object")
        self.key = key


def parse_json(data: bytes, largest: int = LARGEST) -> Any:
    """The value of a JSON text.

    Raises:
        DoubledKeyError: A key stands twice in one object.
        ValueError: The text is longer than ``largest`` bytes, deeper than DEPTH, no UTF-8 or no JSON, or it has NaN, an
            infinity or half a character. The error's text follows "found".
    """
    if len(data) > largest:
        raise ValueError(f"more than {largest:,} bytes")
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")  # without escaped backslashes and quotes
    brackets = STRINGS.sub(b"", plain).translate(BRACKETS, NO_BRACKET)
    if b"[" * (DEPTH + 1) not in brackets:
        for _ in range(DEPTH):
            brackets = brackets.replace(b"[]", b"")  # the innermost ones
    if brackets.count(b"[") > DEPTH or (brackets and brackets.count(b"[") == brackets.count(b"]")):
        raise ValueError(f"more than {DEPTH} levels of objects and lists")
    value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    if HALVES.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half a character (a lone surrogate)") from None
    return value


def read_json(path: Path, largest: int = LARGEST, *, links: bool = False) -> Any:
    """The value of a JSON file, opened as ``reading.opened`` does it.

    Raises:
        OSError: The file cannot be opened so, or has more than ``largest`` bytes; ``strerror`` follows "found".
        DoubledKeyError, ValueError: The file's text is none that :func:`parse_json` takes.
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
