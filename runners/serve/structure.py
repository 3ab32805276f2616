"""What a body says of the form of its answer: grammars, tools, thoughts; and how an answer's text is taken apart."""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from ling3export.runners.serve.schema import TOOL_CHOICE, ConversationBody, GenerationBody, refusal, shown
from ling3export.runners.text.detokenize import overlap
from ling3export.runners.text.grammar import AS_WRITTEN, LARGEST, Grammar

DEPTH = 64  # objects and lists within each other that a schema may have
THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"  # around {"name": NAME, "arguments": OBJECT}, as Ling's templates write it
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)  # of JSON
# A text with one call at its end, or with none.
AT_MOST_ONE = Grammar(
    "lark",
    "start: SAID | before called\nSAID: /(?s:.*)/\n"
    f'before[suffix="{CALL}"]: /(?s:.*)/\n'
    rf'called[suffix="{CALLED}"]: /(?s:([^"]|"([^"\\]|\\.)*")*)/' + "\n",  # a mark in a string ends no call
)
TEXT, REASONING, TOOL = "content", "reasoning_content", "tool_calls"

GUIDES = {"guided_regex": "regex", "guided_grammar": "lark"}


def asked_grammar(asked: GenerationBody) -> tuple[str, Grammar] | None:
    """The field that says what the text has to be, and the grammar of it; None where a body does not say.

    Raises:
        ApiError: It says so twice, or in a form that is unknown; or its schema is too large or nested too deeply.
    """
    name = asked.format_name
    found = {each: value for each in GUIDES if (value := getattr(asked, each)) is not None}
    form = asked.form or {"type": "text"}
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise refusal(name, "a type of text, json_object or json_schema", shown(kind))
    if len(found) + (kind != "text") > 1:
        given = [*found, *([name] if kind != "text" else [])]
        raise refusal(name, f"one of {name}, guided_regex, guided_grammar", " and ".join(given))
    for each, value in found.items():
        return each, Grammar(GUIDES[each], value)
    if kind != "json_schema":
        return (name, Grammar("json", '{"type": "object"}')) if kind == "json_object" else None
    inner = form.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, (dict, bool)):
        raise refusal(name, "a json_schema with a schema, an object", "none")
    return name, Grammar("json", schema_text({} if schema is True else schema, name))


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
        inner = [each for each in level if isinstance(each, (dict, list))]
        level = [value for each in inner for value in (each.values() if isinstance(each, dict) else each)]
    text = json.dumps(schema)
    if len(text) > LARGEST:
        raise refusal(param, f"a schema of at most {LARGEST:,} characters", f"{len(text):,}")
    return text


@dataclass(frozen=True)
class Tools:
    """What a body says of tools.

    Attributes:
        offered: What the chat template is given; None where there are none.
        names: Functions that an answer may call.
        grammar: What the answer has to be, where it has to call one.
    """

    offered: list[dict[str, Any]] | None = None
    names: frozenset[str] = frozenset()
    grammar: Grammar | None = None


NO_TOOLS = Tools()


def tools(asked: ConversationBody, template: str) -> Tools:
    """What a body says of tools.

    Args:
        asked: The body.
        template: The chat template.

    Raises:
        ApiError: They are malformed, or the template does not write tools in a form that is known here.
    """
    offered = asked.offered
    functions: dict[str, dict[str, Any]] = {}
    for place, tool in enumerate(offered):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not 0 < len(name) <= 64:
            wanted = 'functions, {"type": "function", "function": {"name": NAME, …}}'
            raise refusal("tools", wanted, f"another at place {place}")
        functions[name] = dict(function or {})
    choice = asked.tool_choice
    inner = choice.get("function", choice) if isinstance(choice, dict) else {}
    named = inner.get("name") if isinstance(inner, dict) else None
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
    called = [str(named)] if isinstance(choice, dict) else list(functions) if choice == "required" else []
    if not called:
        return Tools(offered, frozenset(functions), None if asked.parallel_tool_calls else AT_MOST_ONE)
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": functions[name].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in called
    ]
    schema = schema_text({"x-guidance": AS_WRITTEN} | (calls[0] if len(calls) == 1 else {"anyOf": calls}), "tools")
    text = f'start: "{CALL}\\n" call "\\n{CALLED}"\ncall: %json {schema}\n'
    return Tools(offered, frozenset(functions), Grammar("lark", text))


@dataclass(frozen=True)
class AnswerFormat:
    """Which marks an answer's text has.

    Attributes:
        thinks: Whether thoughts stand between marks.
        within: Whether the answer begins within a thought.
        names: Functions that it may call.
    """

    thinks: bool
    within: bool
    names: frozenset[str]

    @classmethod
    def of(cls, template: str, prompt: str, tools: Tools) -> "AnswerFormat | None":
        """The format of answers to ``prompt``; None where its text has no marks."""
        thinks = THOUGHT in template
        within = thinks and prompt.rfind(THINK) > prompt.rfind(THOUGHT)
        return cls(thinks, within, tools.names) if thinks or tools.names else None


class AnswerParser:
    """Takes the text of one answer apart as it comes.

    Args:
        form: Which marks it has.
    """

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._kind = REASONING if form.within else TEXT
        self._held = ""
        self._begun = False  # whether the content has anything but blanks
        self._blanks = ""  # before a call that begins the content
        self._marked = form.within  # whether there was a mark
        self.calls = 0

    @property
    def thinking(self) -> bool:
        """Whether what comes next belongs to a thought."""
        return self._kind == REASONING

    def push(self, text: str, *, last: bool = False) -> list[tuple[str, Any]]:
        """The parts that are certain now: (``content`` or ``reasoning_content``, text) or (``tool_calls``, call).

        Args:
            text: What came.
            last: Nothing follows: what was held back is given, too. A call that did not end is content.
        """
        self._held += text
        found: list[tuple[str, Any]] = []
        while True:
            marks = {REASONING: (THOUGHT,), TOOL: (CALLED,)}.get(self._kind, self._openings())
            places = {place: mark for mark in marks if (place := self._place(mark, len(text), last)) >= 0}
            if not places:
                break
            place = min(places)
            before, self._held = self._held[:place], self._held[place + len(places[place]) :]
            self._give(found, before, places[place])
            self._marked = True
            opened = {THINK: REASONING, CALL: TOOL}
            self._kind = opened.get(places[place], TEXT)
        keep = 0 if last else max((overlap(self._held, mark) for mark in marks), default=0)
        if self._kind == TOOL and not last:
            return found
        rest, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if self._kind == TOOL:
            self._kind, self._begun, rest = TEXT, True, self._blanks + CALL + rest
        self._give(found, rest, None)
        return found

    def _place(self, mark: str, new: int, last: bool) -> int:
        """Where a mark stands that counts; -1 where there is none yet. In a string of a call its end's mark is text.

        Args:
            mark: It.
            new: Characters that came now: those before have been looked at.
            last: Nothing follows.
        """
        first = place = self._held.find(mark)
        if mark != CALLED:
            return first
        if not last and mark not in self._held[-(new + len(mark) - 1) :]:
            return -1
        while place >= 0:
            if '"' not in STRING.sub("", self._held[:place]):
                return first if _call_of(self._held[:place], self._form.names) is None else place
            place = self._held.find(mark, place + 1)
        return first if last else -1

    def _openings(self) -> tuple[str, ...]:
        return (*((THINK,) if self._form.thinks else ()), *((CALL,) if self._form.names else ()))

    def _give(self, found: list[tuple[str, Any]], text: str, mark: str | None) -> None:
        if self._kind == TOOL:
            call = _call_of(text, self._form.names)
            if call is None:
                found.append((TEXT, f"{self._blanks}{CALL}{text}{CALLED}"))
                self._begun = True
            else:
                found.append((TOOL, {"index": self.calls, **call}))
                self.calls += 1
            return
        if self._kind == TEXT and not self._begun:
            if mark is None or text.strip():
                text = text.lstrip() if self._marked else text
                self._begun = bool(text)
            else:
                self._blanks, text = text if mark == CALL and not self._marked else "", ""
        if text:
            found.append((self._kind, text))


def _call_of(text: str, names: frozenset[str]) -> dict[str, Any] | None:
    """The call that a model wrote, as OpenAI's API writes it; None where it is none of a function that was offered."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or call.get("name") not in names or not isinstance(call.get("arguments", {}), dict):
        return None
    arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }
