"""Seeded damage: JSON trees with values of other types and sizes, and bytes that are flipped, cut or moved."""

import copy
import json
import re
from random import Random
from typing import Any

# Spellings that Python's JSON writer never produces. A tree has a mark in the place of each; `json_text` replaces the
# marks by the spellings.
SPELLINGS = (
    "1e999", "-1e999", "NaN", "Infinity", "-0", "0.1e1", "9" * 5000, "[" * 100_000 + "]" * 100_000, "[" * 40 + "]" * 40,
    '{"a":' * 5000 + "1" + "}" * 5000, "[" * 100_000, "{", '"\\ud800"', '"\\x"', "'a'", "tru", "1 2", "//", "\x1b[2J",
)  # fmt: skip
MARK = re.compile('"(?:\ue000|\\\\ue000)([0-9]+)(?:\ue001|\\\\ue001)"')
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 16, -1, 2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**62, 2**63, 2**64, 10**9, -(2**63),
    10**30, 0.5, -0.0, 1e-320, 1e308, "", " ", "1", "a", "é", "\x00", "\n", "\x1b[2J\x1b[31mred", "\ud800",
    "\udfff\ud800", "\u202e", "../../etc/passwd", "/etc/passwd", "a" * 100_000, [], {}, [[]], [None], [0] * 2000,
    ["a"] * 2000, {"": 0}, {"\ud800": 1}, {"a": {"b": {"c": []}}},
)  # fmt: skip
NAMES = ("", "a", "__class__", "sha256", "\x1b[31m", "\ud800", "name", "0", "type")
ODD_BYTES = (b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\r\n", b"\n", b'"', b"\\", b"}", b"[" * 5000)
LENGTHS = (0, 1, 7, 8, 255, 2**16, 2**24, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)


class Twice(str):
    """A key that is unequal to equal text, so that a dict, and the JSON object written from it, has the key twice."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def mutated(rng: Random, tree: Any, most: int = 3) -> Any:
    """A copy of a JSON value with one to ``most`` changes; the original is not changed."""
    root = [copy.deepcopy(tree)]
    for _ in range(rng.randint(1, most)):
        _change(rng, root)
    return root[0] if root else None


def json_text(tree: Any, indent: int | None = None) -> bytes:
    """The tree as JSON, with marks replaced by their spellings."""
    return spelled(json.dumps(tree, indent=indent)).encode("utf-8", "surrogatepass")


def spelled(text: str) -> str:
    """A JSON text with every mark replaced by its spelling."""
    return MARK.sub(lambda found: SPELLINGS[int(found[1]) % len(SPELLINGS)], text)


def mutated_bytes(rng: Random, data: bytes, most: int = 4) -> bytes:
    """A copy of ``data`` with one to ``most`` changes."""
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 1, 2, 4, 8, 64, 1000))
        piece = data[at : at + size]
        match rng.randrange(9):
            case 0 | 1:  # a flipped bit
                data = data[:at] + bytes(byte ^ 1 << rng.randrange(8) for byte in piece[:1]) + data[at + 1 :]
            case 2:
                data = data[:at] + rng.randbytes(len(piece)) + data[at + size :]
            case 3:
                data = data[:at]
            case 4:
                data = data[:at] + rng.randbytes(size) + data[at:]
            case 5:
                data = data[:at] + data[at + size :]
            case 6:
                data = data[:at] + piece * rng.choice((2, 3, 100)) + data[at + size :]
            case 7:  # a wrong length
                width, order = rng.choice(((4, "big"), (4, "little"), (8, "little"), (8, "big")))
                length = (rng.choice(LENGTHS) % 256**width).to_bytes(width, order)
                at = rng.choice((0, 1, at))
                data = data[:at] + length + data[at + width :]
            case 8:
                data = data[:at] + rng.choice(ODD_BYTES) + data[at:]
    return data


def _change(rng: Random, root: list[Any]) -> None:
    """Changes the tree in ``root`` at one place, which a random walk from the root selects."""
    holder, key = _place(rng, root)
    old = holder[key]
    match rng.randrange(12):
        case 0 | 1:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        case 2:
            holder[key] = f"\ue000{rng.randrange(len(SPELLINGS))}\ue001"
        case 3 | 4 | 5:
            holder[key] = _near(rng, old)
        case 6:  # a value from another place
            other, name = _place(rng, root)
            holder[key] = copy.deepcopy(other[name])
        case 7:  # two values change places
            other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key], holder[other] = holder[other], holder[key]
        case 8 if holder is not root:
            del holder[key]
        case 9 if isinstance(old, dict):
            old[rng.choice(NAMES)] = copy.deepcopy(rng.choice(ODD))
        case 10 if isinstance(holder, dict):
            holder[rng.choice((Twice(key), *NAMES))] = copy.deepcopy(old)
        case 11 if isinstance(holder, dict):
            holder[rng.choice((key + "s", key.upper(), *NAMES))] = holder.pop(key)
        case _:
            holder[key] = _near(rng, old)


def _place(rng: Random, root: list[Any]) -> tuple[Any, Any]:
    """A list or dict in the tree, and one of its indices or keys."""
    holder, key = root, 0
    while isinstance(child := holder[key], (dict, list)) and child and rng.random() < 0.85:
        holder, key = child, rng.choice(list(child) if isinstance(child, dict) else range(len(child)))
    return holder, key


def _near(rng: Random, old: Any) -> Any:
    """A value that could be mistaken for the old one, mostly of the same type."""
    if isinstance(old, bool) or old is None:
        return rng.choice((True, False, None, int(bool(old)), "true"))
    if isinstance(old, (int, float)):
        changed = (old + 1, old - 1, -old, old * 2, old // 2, old * 10**9, old * 1.0, str(old), [old], 0)
        return rng.choice(changed)
    if isinstance(old, str):
        cut = rng.randrange(len(old) + 1)
        changed = (old[:cut], old + old, old[:cut] + rng.choice("0/\\.\x1b\ud800 é@") + old[cut:], old.upper(), [old])
        return rng.choice(changed)
    if isinstance(old, list):
        return rng.choice(
            (old[::-1], old + old, old[1:], old[:1], [*old, *old[-1:]], [old], {str(n): v for n, v in enumerate(old)})
        )
    return rng.choice(({}, [old], [*map(list, old.items())], [*old.values()], dict([*old.items()][::-1])))
