"""Malformed answers of a model: marks, names and values in any order, cut anywhere, with damaged schemas."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from ling3export.runners.text.answer import REASONING, TEXT, TOOL, AnswerFormat, AnswerParser, JsonCall, KeyedCall
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"anyOf": [{"type": "string"}, {"type": ["null", "integer"]}]},
        "c": {"$ref": "#/$defs/D"},
        "d": {"allOf": [{"enum": ["1", 2]}, {"nullable": True}]},
    },
    "additionalProperties": {"const": "x"},
    "$defs": {"D": {"oneOf": [{"$ref": "#/$defs/D"}, {"type": "array"}]}},
}
WHOLE = (
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>"
    "<arg_key>b</arg_key>\n<arg_value>4</arg_value>\n</tool_call>"
)
PARTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "f", "g h", "a", "b", "c", "\n", " ", "<", "</", "<tool_", '"', "\\", '{"name": "f", "arguments": {"a": "', '"}}',
    "[1, 2]", "1e999", "null", "NaN", "&lt;", "\ufffd", "\u2028", "😀", "9" * 5000, "[" * 2000, WHOLE,
)  # fmt: skip


@contextmanager
def answers(folder: Path) -> Iterator[Case]:
    """Answers are parsed without an error, into the same parts whether whole or in pieces, and no text is lost."""

    def case(rng: Random) -> None:
        text = "".join(rng.choices(PARTS, k=rng.randrange(24)))
        while rng.random() < 0.5:
            text = _damaged(rng, text)
        try:
            schema = json.loads(json_text(mutated(rng, SCHEMA))) if rng.random() < 0.7 else SCHEMA
        except (ValueError, RecursionError):
            schema = None
        reader = rng.choice((KeyedCall, KeyedCall, JsonCall))
        look(AnswerFormat(rng.random() < 0.7, rng.random() < 0.5, {"f": schema}, reader), text, rng)

    def look(form: AnswerFormat, text: str, rng: Random) -> None:
        whole = _parts(form, text, [len(text)])
        cuts = [rng.randint(1, rng.choice((2, 9, 99))) for _ in text]
        if (cut := _parts(form, text, cuts)) != whole:
            raise WrongResultError(f"{text!r}: {whole} and in pieces {cut}")
        if not (whole[TOOL] or "think>" in text) and whole[REASONING] + whole[TEXT] != text:
            raise WrongResultError(f"{text!r}: lost something: {whole}")
        for _, arguments in whole[TOOL]:
            if not isinstance(json.loads(arguments), dict):
                raise WrongResultError(f"{text!r}: {arguments}")

    look(AnswerFormat(True, True, {"f": SCHEMA}, KeyedCall), f"a{WHOLE}", Random(0))
    yield case


def _parts(form: AnswerFormat, text: str, sizes: list[int]) -> dict[str, Any]:
    """Thoughts and content, joined, and the calls."""
    parser, at = AnswerParser(form), 0
    found: dict[str, Any] = {TEXT: "", REASONING: "", TOOL: []}
    for size in [*sizes, len(text)]:
        for kind, part in parser.push(text[at : at + size], last=at + size >= len(text)):
            found[kind] += [tuple(part["function"].values())] if kind == TOOL else part
        if (at := at + size) >= len(text):
            break
    return found


def _damaged(rng: Random, text: str) -> str:
    at, size = rng.randrange(len(text) + 1), rng.randrange(9)
    return rng.choice((text[:at] + text[at + size :], text[:at] + rng.choice(PARTS) + text[at:], text[:at]))
