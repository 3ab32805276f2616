"""Grammars of the calls of tools, in the dialect of a chat template, with arguments as the schemas of tools say."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ling3export.runners.serve.schema import refusal
from ling3export.runners.text.answer import THOUGHT
from ling3export.runners.text.calls import (
    CALL,
    CALLED,
    KEY,
    KEYED,
    VALUE,
    VALUED,
    Functions,
    kinds_of,
    listed,
    resolved,
)
from ling3export.runners.text.grammar import AS_WRITTEN, LARGEST, Grammar

# A text with one call at its end, or with none.
AT_MOST_ONE = Grammar(
    "lark",
    "start: SAID | before called\nSAID: /(?s:.*)/\n"
    f'before[suffix="{CALL}"]: /(?s:.*)/\n'
    rf'called[suffix="{CALLED}"]: /(?s:([^"]|"([^"\\]|\\.)*")*)/' + "\n",  # a mark in a string ends no call
)
DEPTH = 64  # objects and lists within each other that a schema may have
ANY = "/(?s:.*)/"
BOTH = ("pattern", "minLength", "maxLength", "enum", "const", "allOf", "anyOf", "oneOf", "$ref")


def schema_text(schema: Any, param: str) -> str:
    """A schema as JSON.

    Raises:
        ApiError: It is too large or nested too deeply.
    """
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > DEPTH:
            raise refusal(param, f"a schema of at most {DEPTH} levels", "more")
        inner = [member for member in level if isinstance(member, (dict, list))]
        level = [value for member in inner for value in (member.values() if isinstance(member, dict) else member)]
    text = json.dumps(schema)
    if len(text) > LARGEST:
        raise refusal(param, f"a schema of at most {LARGEST:,} characters", f"{len(text):,}")
    return text


def one_json_call(functions: Functions, called: Sequence[str]) -> Grammar:
    """A call of one of the functions ``called``, as an object.

    Raises:
        ApiError: Their schemas are too large or nested too deeply.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": functions[name] or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in called
    ]
    schema = schema_text({"x-guidance": AS_WRITTEN} | (calls[0] if len(calls) == 1 else {"anyOf": calls}), "tools")
    return Grammar("lark", f'start: "{CALL}\\n" call "\\n{CALLED}"\ncall: %json {schema}\n')


def one_keyed_call(functions: Functions, called: Sequence[str], *, within: bool, free: bool) -> tuple[Grammar, Grammar]:
    """A call of one of the functions ``called``, as marked keys and values; and a grammar of its values alone.

    Args:
        functions: The schema of each one's arguments.
        called: Names.
        within: It stands behind a thought that is open, or ends it.
        free: Any text may stand before it, and there may be no call.

    Raises:
        ApiError: Their schemas are too large or nested too deeply.
    """
    rules = _Rules()
    try:
        calls = [rules.call(name, functions[name] or {}) for name in called]
    except RecursionError:
        raise refusal("tools", "schemas that come to an end", "references that lead on and on") from None
    start = f'"{CALL}" call'
    if free:
        start = "SAID | open call"
    elif within:
        start = f'thought BLANKS "{CALL}" call | open call'
    common = (
        f"call: {' | '.join(calls)}",
        f"SAID: {ANY}",
        f'open[suffix="{CALL}"]: {ANY}',
        f'thought[suffix="{THOUGHT}"]: {ANY}',
        "BLANKS: /\\n{0,2}/",
        "NL: /\\n?/",
        *rules.lines,
    )
    text = "\n".join(("", *common, ""))
    return Grammar("lark", f"start: {start}{text}"), Grammar(
        "lark", f"start: {' | '.join(rules.values) or 'SAID'}{text}"
    )


class _Rules:
    """Rules of a grammar in Lark's form.

    Attributes:
        lines: All rules, a line each.
        values: Names of the rules of the arguments' values.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.values: list[str] = []
        self._size = 0

    def call(self, name: str, schema: Any) -> str:
        """The rule of a call, from the function's name on."""
        members, required, more = _members(schema, schema, set())
        parts = []
        for key in {**members, **dict.fromkeys(required)}:
            value = self._value(members.get(key, True), schema)
            argument = self._rule(f"{_quoted(KEY + key + KEYED)} NL {_quoted(VALUE)} {value}")
            parts.append(argument if key in required else f"{argument}?")
        if not members and more is not False:
            key = self._rule(r"/[^<>\n]{1,64}/", f'suffix="{KEYED}"')
            parts.append(f"({_quoted(KEY)} {key} NL {_quoted(VALUE)} {self._value(more, schema)})*")
        return self._rule(" ".join((_quoted(name), "NL", *parts, "NL", _quoted(CALLED))))

    def _value(self, schema: Any, root: Any) -> str:
        rules = []
        for kind, form in _forms(schema, root, set()):
            if form == ANY:  # whatever else it may be
                rules = [self._rule(form, f'suffix="{VALUED}"')]
                break
            if kind == "text":
                rules.append(self._rule(form, f'suffix="{VALUED}"'))
            elif kind == "literal":
                rules.append(_quoted(form + VALUED))
            else:
                rules.append(f"{self._rule(f'%json {form}')} {_quoted(VALUED)}")
        self.values.append(self._rule(" | ".join(rules)))
        return self.values[-1]

    def _rule(self, text: str, attributes: str = "") -> str:
        name, self._size = f"r{len(self.lines)}", self._size + len(text)
        if self._size > LARGEST:
            raise refusal("tools", f"schemas that take a grammar of at most {LARGEST:,} characters", "larger ones")
        self.lines.append(f"{name}[{attributes}]: {text}" if attributes else f"{name}: {text}")
        return name


def _members(schema: Any, root: Any, seen: set[int]) -> tuple[dict[str, Any], list[str], Any]:
    """The members of an object's schema, those that it has to have, and the schema of others."""
    members: dict[str, Any] = {}
    required: list[str] = []
    more: Any = True
    if not isinstance(schema, dict) or id(schema) in seen:
        return members, required, more
    seen.add(id(schema))
    for part in (resolved(schema, root), *listed(schema, "allOf")):
        inner = _members(part, root, seen)
        members, required, more = members | inner[0], required + inner[1], more if inner[2] is True else inner[2]
    own = schema.get("properties")
    members |= own if isinstance(own, dict) else {}
    required += [name for name in listed(schema, "required") if isinstance(name, str)]
    return members, required, schema.get("additionalProperties", more)


def _forms(schema: Any, root: Any, seen: set[str]) -> Iterator[tuple[str, str]]:
    """How a value may be written: (``text``, a regex), (``literal``, a text) or (``json``, a schema).

    Args:
        schema: Of the value.
        root: The document in which its references are looked up.
        seen: References that were followed, each once: there may be circles, and many ways to each.
    """
    if not isinstance(schema, dict):
        yield "text", ANY
        return
    kinds = kinds_of(schema, root)
    for name in ("$ref", "allOf", "anyOf", "oneOf") if "string" in kinds else ():
        if name not in schema:
            continue
        rest = {key: value for key, value in schema.items() if key != name}
        parts = listed(schema, name)
        if name in ("$ref", "allOf"):
            merged: dict[str, Any] = {}
            joined: list[Any] = [{name: schema[name]}] if name == "$ref" else parts
            for part in joined:
                reference = str(part.get("$ref", "")) if isinstance(part, dict) else ""
                target = resolved(part, root) if reference and reference not in seen else part
                seen.add(reference)
                merged = _merged(merged, {} if target is part and reference else target, name)
            parts = [merged]
        for part in parts:
            yield from _forms(_merged(rest, part, name), root, seen)
        return
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        for value in values:
            yield "literal", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return
    if "string" in kinds:
        yield "text", _regex(schema)
    if kinds == {"string"}:
        return
    others = kinds - {"string"} - ({"integer"} if "number" in kinds else set())
    typed = schema if "string" not in kinds else schema | {"type": sorted(others)}
    documents = {name: root[name] for name in ("$defs", "definitions") if name in root}
    yield "json", schema_text({"x-guidance": AS_WRITTEN} | documents | typed, "tools")


def _merged(one: dict[str, Any], other: Any, name: str) -> dict[str, Any]:
    """A schema that holds where both do, of which ``other`` may have nothing to say; ``name`` is what joins them."""
    if not isinstance(other, dict):
        return one
    if twice := [key for key in BOTH if key in one and key in other and one[key] != other[key]]:
        raise refusal("tools", f"schemas of texts that say `{twice[0]}` once", f"another beside `{name}`")
    return one | other


def _regex(schema: Mapping[str, Any]) -> str:
    """What a bare text has to match, as a terminal in Lark's form; a `format` is not looked at."""
    terms = []
    if isinstance(pattern := schema.get("pattern"), str):
        before = "" if pattern.startswith("^") else "(?s:.*)"
        behind = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^")
        inner = inner if behind else inner.removesuffix("$")
        slashes = re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], inner, flags=re.DOTALL)
        terms.append(f"/{before}(?:{slashes}){behind}/".replace("\n", r"\n"))
    least, most = (value if type(value := schema.get(name)) is int else None for name in ("minLength", "maxLength"))
    if least or most is not None:
        terms.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    # A reader closes the value at the first mark, so a text that is not yet complete must not go on behind it.
    return " & ".join([*terms, rf"~/(?s:.*){VALUED[:1]}\/{VALUED[2:]}(?s:.*)/"]) if terms else ANY


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
