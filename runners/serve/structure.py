"""The form that a body requests for its answer: grammars and tools.

A call that is forced follows the dialect of the chat template, with arguments as the schemas of tools say.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ling3export.foundation.errors import shown
from ling3export.runners.serve.schema import TOOL_CHOICE, GenerationBody, refusal
from ling3export.runners.text.answer import (
    CALL,
    CALLED,
    KEY,
    KEYED,
    NAME,
    THOUGHT,
    VALUE,
    VALUED,
    Functions,
    JsonCall,
    KeyedCall,
    Reader,
    kinds_of,
    listed,
    reader_of,
    resolved,
)
from ling3export.runners.text.grammar import AS_WRITTEN, LARGEST, Grammar

if TYPE_CHECKING:
    from ling3export.runners.serve.generation import ChatBody

OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")  # of vLLM's `structured_outputs`
DEPTH = 64  # objects and lists within each other that a schema may have
ANY = "/(?s:.*)/"


def grammar_field(body: GenerationBody) -> tuple[str, Grammar] | None:
    """The field that says what the text has to be, and the grammar of it; None where a body does not say.

    Raises:
        ApiError: It says so twice, or in a form that is unknown; or its schema is too large or nested too deeply.
    """
    name, outputs, form = "response_format", body.structured_outputs, body.response_format or {"type": "text"}
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise refusal(name, "a type of text, json_object or json_schema", shown(kind))
    if outputs is not None:
        if kind != "text":
            raise refusal(name, "it or structured_outputs", "both")
        named = {kind: value for kind, value in outputs.items() if value} if isinstance(outputs, dict) else {}
        if len(named) != 1 or not named.keys() <= set(OUTPUTS):
            raise refusal("structured_outputs", f"an object with one of {', '.join(OUTPUTS)}", shown(outputs))
        ((kind, value),) = named.items()
        return "structured_outputs", _grammar(kind, value, "structured_outputs")
    if kind != "json_schema":
        return (name, _grammar("json_object", True, name)) if kind == "json_object" else None
    inner = form.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, (dict, bool)):
        raise refusal(name, "a json_schema with a schema, an object", "none")
    return name, Grammar("json", schema_text({} if schema is True else schema, name))


def _grammar(kind: str, value: Any, name: str) -> Grammar:
    if kind == "json_object":
        return Grammar("json", '{"type": "object"}')
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
            raise refusal(name, "a list of texts", shown(value))
        return Grammar("lark", f"start: {' | '.join(map(json.dumps, value))}\n")
    if kind == "json":
        try:
            schema = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, dict):
            raise refusal(name, "a JSON schema, an object or its text", shown(value))
        return Grammar("json", schema_text(schema, name))
    if not isinstance(value, str):
        raise refusal(name, "a text", shown(value))
    return Grammar("lark" if kind == "grammar" else kind, value)


@dataclass(frozen=True)
class Tools:
    """The tools of a body."""

    offered: list[dict[str, Any]] | None = None  # for the chat template
    functions: Mapping[str, Any] = field(default_factory=dict)  # functions that an answer may call, and their schemas
    called: tuple[str, ...] = ()  # the answer must call one of these, if there are any
    reader: type[Reader] = JsonCall  # reads a call in the template's dialect

    def grammars(self, within: bool = False) -> list[Grammar]:
        """The grammar of an answer that has to call a function, and others to try: that of the values of arguments.

        Raises:
            ApiError: The schemas of its arguments are too large or nested too deeply.
        """
        if not self.called:
            return []
        if self.reader is KeyedCall:
            return list(one_keyed_call(self.functions, self.called, within=within))
        return [one_json_call(self.functions, self.called)._replace(behind=THOUGHT if within else "")]


NO_TOOLS = Tools()


def tools(body: "ChatBody", template: str) -> Tools:
    """The tools of a body, for a chat template.

    Raises:
        ApiError: They are malformed, or the template does not write tools in a form that is known here.
    """
    offered = body.tools
    functions: dict[str, Any] = {}
    for place, tool in enumerate(offered):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not 0 < len(name) <= 64:
            wanted = 'functions, {"type": "function", "function": {"name": NAME, …}}'
            raise refusal("tools", wanted, f"another at place {place}")
        functions[name] = (function or {}).get("parameters")
    choice = body.tool_choice
    inner = choice.get("function", choice) if isinstance(choice, dict) else {}
    named = inner.get("name") if isinstance(inner, dict) else None
    named = named if isinstance(named, str) else None
    if named not in functions if isinstance(choice, dict) else choice not in ("auto", "none", "required"):
        raise refusal("tool_choice", TOOL_CHOICE, shown(choice))
    if choice == "required" and not functions:
        raise refusal("tool_choice", "`tools` with required", "none")
    if not functions or choice == "none":
        return NO_TOOLS
    if "tools" not in template or CALL not in template:
        wanted = f"a chat template that writes tools, and calls between {CALL} and {CALLED}"
        lacks = "calls between these marks" if "tools" in template else "tools"
        raise refusal("tools", wanted, f"this model's, which has no {lacks}")
    reader = reader_of(template)
    for name in functions:
        if reader is KeyedCall and not NAME.fullmatch(name):
            raise refusal("tools", "names of letters, digits and _ . : / - with this model", shown(name))
    called = (str(named),) if isinstance(choice, dict) else tuple(functions) if choice == "required" else ()
    return Tools(offered, functions, called, reader)


def schema_text(schema: Any, param: str) -> str:
    """A schema as JSON. Raises ApiError: it is too large or nested too deeply."""
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


def one_keyed_call(functions: Functions, called: Sequence[str], *, within: bool) -> tuple[Grammar, Grammar]:
    """A call of one of the functions ``called``, as marked keys and values; and a grammar of its values alone.

    Raises:
        ApiError: Their schemas are too large or nested too deeply.
    """
    rules = _Rules()
    try:
        calls = [rules.call(name, functions[name] or {}) for name in called]
    except RecursionError:
        raise refusal("tools", "schemas that come to an end", "references that lead on and on") from None
    start = f'"{CALL}" call'
    if within:
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
        """The rule of a value: one of the values of an ``enum``, any text where it may be one, else its schema's JSON.

        A bare text has no end but its mark, so its pattern and its lengths are not followed.
        """
        kinds = kinds_of(schema, root)
        if isinstance(schema, dict) and schema.keys() == {"$ref"}:
            schema = resolved(schema, root)
        values = ([schema["const"]] if "const" in schema else schema.get("enum")) if isinstance(schema, dict) else None
        if isinstance(values, list):
            texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)
            rule = " | ".join(_quoted(text + VALUED) for text in texts)
        elif "string" in kinds:
            rule = self._rule(ANY, f'suffix="{VALUED}"')
        else:
            documents = {name: root[name] for name in ("$defs", "definitions") if name in root}
            text = schema_text({"x-guidance": AS_WRITTEN} | documents | schema, "tools")
            rule = f"{self._rule(f'%json {text}')} {_quoted(VALUED)}"
        self.values.append(self._rule(rule))
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


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
