"""JSON that others wrote, read strictly: bounded in size and depth before it is parsed, each key once, no NaN."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

LARGEST = 8 << 20  # bytes of a text, unless its reader says otherwise
DEPTH = 16  # levels of objects and lists
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
        ValueError: The text is longer than ``largest`` bytes, deeper than DEPTH, no UTF-8 or no JSON, or it has NaN or
            an infinity. The error's text follows "found".
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
    return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)


def read_json(path: Path, largest: int = LARGEST) -> Any:
    """The value of a JSON file; a pipe or a device is not waited for.

    Raises:
        OSError: The file is missing, no regular file, or cannot be read.
        DoubledKeyError, ValueError: The file's text is none that :func:`parse_json` takes.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "something that is no regular file", str(path))
        return parse_json(file.read(largest + 1), largest)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise DoubledKeyError(key)
        unique[key] = value
    return unique


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}")
