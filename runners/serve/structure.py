"""What a body says of the form of its answer: grammars and tools."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ling3export.runners.serve.call_grammar import AT_MOST_ONE, one_json_call, one_keyed_call, schema_text
from ling3export.runners.serve.schema import TOOL_CHOICE, GenerationBody, refusal, shown
from ling3export.runners.text.answer import THOUGHT
from ling3export.runners.text.calls import CALL, CALLED, NAME, JsonCall, KeyedCall, Reader, reader_of
from ling3export.runners.text.grammar import Grammar

if TYPE_CHECKING:
    from ling3export.runners.serve.chat import ChatBody

KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of vLLM's `structured_outputs`


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
        if len(named) != 1 or not named.keys() <= set(KINDS):
            raise refusal("structured_outputs", f"an object with one of {', '.join(KINDS)}", shown(outputs))
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
    """What a body says of tools.

    Attributes:
        offered: What the chat template is given; None where there are none.
        functions: Those that an answer may call, each with the schema of its arguments.
        called: Those of which it has to call one; none where it need not.
        single: Whether it may call no more than one.
        reader: What reads a call, as the template writes it.
    """

    offered: list[dict[str, Any]] | None = None
    functions: Mapping[str, Any] = field(default_factory=dict)
    called: tuple[str, ...] = ()
    single: bool = False
    reader: type[Reader] = JsonCall

    @property
    def reason(self) -> str | None:
        """The field that asks for a grammar; None where none does."""
        return "tool_choice" if self.called else "parallel_tool_calls" if self.single else None

    def grammars(self, within: bool = False) -> list[Grammar]:
        """What the answer has to be, where it has to call a function or may call one alone; none elsewhere.

        Args:
            within: Whether the answer begins within a thought.

        Returns:
            The grammar, and others to try beside it: those of its values, if it begins with any text.

        Raises:
            ApiError: The schemas of its arguments are too large or nested too deeply.
        """
        if self.reason is None:
            return []
        if self.reader is KeyedCall:
            called = self.called or tuple(self.functions)
            return list(one_keyed_call(self.functions, called, within=within, free=not self.called))
        grammar = one_json_call(self.functions, self.called) if self.called else AT_MOST_ONE
        return [grammar._replace(behind=THOUGHT if within else "")]


NO_TOOLS = Tools()


def tools(body: "ChatBody", template: str) -> Tools:
    """What a body says of tools.

    Args:
        template: The chat template.

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
    return Tools(offered, functions, called, not (called or body.parallel_tool_calls), reader)
