"""Random conversations and answers in the dialect of the public checkpoints, with the expected result of parsing each.

They are written from the description of the dialect; no code of the product is used. ``TEMPLATE`` renders prompts in
jinja2, ``Conversation.prompt`` is the expected text of a prompt, written in Python.
"""

import json
import re
from dataclasses import dataclass, field
from random import Random
from typing import Any

ON, OFF = "detailed thinking on", "detailed thinking off"
# Marks that end a string argument wherever they occur in it: a reader cannot tell them from its end.
CLOSES = re.compile(r"</arg_value>.*(<arg_key>|</tool_call>)", re.DOTALL)

TEMPLATE = """\
{%- set first = messages[0] if messages[0].role == 'system' else {'content': ''} -%}
{%- set lines = [first.content] if first.content else [] -%}
{%- if tools %}{% set lines = lines + ['<tools>'] + tools | map('tojson') | list + ['</tools>'] %}{% endif -%}
{%- set thinks = enable_thinking is not defined or enable_thinking -%}
{%- if 'detailed thinking on' not in first.content and 'detailed thinking off' not in first.content -%}
{%- set lines = lines + ['detailed thinking ' ~ ('on' if thinks else 'off')] -%}
{%- endif -%}
<role>SYSTEM</role>{{ lines | join('\\n') }}<|role_end|>
{%- for message in messages -%}
{%- if message.role == 'user' -%}<role>HUMAN</role>{{ message.content }}<|role_end|>
{%- elif message.role == 'tool' -%}
<role>OBSERVATION</role>{{ '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}<|role_end|>
{%- elif message.role == 'assistant' -%}
<role>ASSISTANT</role>{{ '\\n<think>' ~ (message.reasoning_content or '') ~ '</think>' ~ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' ~ call.function.name ~ '\\n' }}
{%- for name, value in call.function.arguments.items() -%}
<arg_key>{{ name }}</arg_key>{{ '\\n' }}<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor -%}
{{ '\\n</tool_call>' }}
{%- endfor -%}
<|role_end|>
{%- elif not loop.first %}{{ raise_exception('a system text is the first message') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<role>ASSISTANT</role>{{ '\\n<think>' if thinks else '\\n<think></think>' }}{% endif -%}
"""

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
WORDS = (
    "the", "weather", "in", "Zürich", "杭州", "3", "true", "null", "π≈3.14", "a < b", "x > y", "&lt;b&gt;", "&amp;",
    '"quoted"', "it's", "\\n", "\\", "{", "}", "[1, 2]", "🙂", "👩‍👩‍👧", "e\u0301", "<", ">", "</", "<tool", "```",
    "\t", "\n", "\n\n", " ", "<role>", "#", "%", "$x", "\u2028", "\u00a0", "</arg", "_>",
)  # fmt: skip
# Strings that would become another value if they were parsed as JSON.
LOOKALIKES = ("3", "-1.5e3", "true", "false", "null", '"a"', '{"a": 1}', "[]", " 3 ", "", "0", "NaN", "''")
NAMES = ("f", "get_weather", "search-web", "a.b", "Tool9", "计算", "get_weather_by_day")
KEYS = ("a", "city", "max-results", "x.y", "größe", "_k", "arguments", "name")
BLANKS = ("", "", "\n", " ", "\n\n", " \n", "\t", "\r\n")


def words(rng: Random, most: int, marks: tuple[str, ...] = ()) -> str:
    """A text of at most ``most`` pieces, some of them ``marks``."""
    pieces = [rng.choice(marks if marks and rng.random() < 0.15 else WORDS) for _ in range(rng.randint(0, most))]
    return rng.choice(("", " ")).join(pieces).replace("<role>", "role")


def prose(rng: Random, most: int) -> str:
    """A text that begins and ends with a letter and has no mark that opens or closes a part."""
    return f"A{words(rng, most, ('</tool_call>', '<arg_key>', '</arg_value>', '<tool_calls>'))}z"


def text_value(rng: Random) -> str:
    """A string argument."""
    while True:
        value = rng.choice(LOOKALIKES) if rng.random() < 0.3 else words(rng, 8, MARKS)
        if not CLOSES.search(value):
            return value


def json_value(rng: Random, depth: int = 3) -> Any:
    """A random JSON value."""
    kind = rng.randrange(5 + 2 * (depth > 0))
    if kind < 5:
        plain = (rng.randint(-(10**12), 10**20), rng.uniform(-9, 9), rng.choice((True, False)), None, words(rng, 3))
        return plain[kind]
    size = range(rng.randint(0, 3))
    if kind == 5:
        return [json_value(rng, depth - 1) for _ in size]
    return {f"{rng.choice(KEYS)}{number}": json_value(rng, depth - 1) for number in size}


SCHEMAS: dict[str, Any] = {
    "string": lambda rng: text_value(rng),
    "integer": lambda rng: rng.randint(-(10**18), 10**18),
    "number": lambda rng: rng.choice((0, -2.5, 1e30, rng.random())),
    "boolean": lambda rng: rng.choice((True, False)),
    "array": lambda rng: [json_value(rng) for _ in range(rng.randint(0, 3))],
    "object": lambda rng: {key: json_value(rng) for key in rng.sample(KEYS, rng.randint(0, 3))},
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function. Its JSON type is None where the schema has no type or an unknown one."""

    kind: str | None
    known: bool = True

    def value(self, rng: Random) -> tuple[Any, str]:
        """A value and its text as the model writes it: strings without quotes, anything else as JSON."""
        if self.kind == "string":
            value = text_value(rng)
            return value, value
        if rng.random() < 0.1:  # not JSON: the parser keeps it as text
            value = rng.choice(("three", "True", "{'a': 1}", "1,5", "[1, 2", "NaN", "-Infinity", '"open', "01"))
            return value, value
        value = json_value(rng) if self.kind is None else SCHEMAS[self.kind](rng)
        while (text := json.dumps(value, ensure_ascii=rng.random() < 0.3)) and CLOSES.search(text):
            value = json_value(rng)
        return value, rng.choice(("", "", " ", "\n")) + text + rng.choice(("", "", "\n"))


@dataclass(frozen=True)
class Function:
    """A function that a client offers."""

    name: str
    parameters: dict[str, Parameter]

    @property
    def tool(self) -> dict[str, Any]:
        """The function in the form of OpenAI's API."""
        known = {key: {"type": each.kind} if each.kind else {} for key, each in self.parameters.items() if each.known}
        schema = {"type": "object", "properties": known}
        return {"type": "function", "function": {"name": self.name, "description": "Does ü.", "parameters": schema}}


def functions(rng: Random, most: int = 4) -> list[Function]:
    """One or several functions with different names."""
    found = []
    for name in rng.sample(NAMES, rng.randint(1, most)):
        kinds = [rng.choice([*SCHEMAS, "string", None]) for _ in range(rng.randint(0, 4))]
        keys = rng.sample(KEYS, len(kinds))
        rows = zip(keys, kinds, strict=True)
        found.append(Function(name, {k: Parameter(kind, kind is not None or rng.random() < 0.5) for k, kind in rows}))
    return found


@dataclass(frozen=True)
class Call:
    """A call: the parsed call that is expected, and the text that the model writes for it."""

    name: str
    arguments: dict[str, Any]
    text: str

    @classmethod
    def of(cls, rng: Random, function: Function) -> "Call":
        """A random call, with white space in all places that allow it."""
        arguments, parts = {}, []
        for key, parameter in function.parameters.items():
            if rng.random() < 0.8:
                arguments[key], text = parameter.value(rng)
                parts.append(f"<arg_key>{key}</arg_key>{rng.choice(BLANKS)}<arg_value>{text}</arg_value>")
        blanks = [rng.choice(BLANKS) for _ in range(len(parts) + 2)]
        inner = "".join(blank + part for blank, part in zip(blanks[1:], parts, strict=False))
        head = rng.choice(("", "", "", "\n")) + function.name
        return cls(function.name, arguments, f"<tool_call>{head}{inner}{blanks[-1]}</tool_call>")

    def said(self, number: int) -> dict[str, Any]:
        """The call in a message of an earlier turn."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": f"call_{number}", "type": "function", "function": function}

    @property
    def written(self) -> str:
        """The text that the template writes for a call of an earlier turn."""
        rows = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>" for key, value in self.arguments.items()
        )
        return f"<tool_call>{self.name}\n{''.join(rows)}\n</tool_call>"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Answer:
    """The text that a model generates after its prompt, and the parsed message that is expected.

    Attributes:
        thinks: Whether the prompt ends inside an open thought.
        text: The generated text.
        reasoning: The thought.
        content: The text of the answer, joined.
        calls: The calls, in order.
        tools: The functions that the client offers.
        mixed: Whether there is text before and after a call; the dialect does not define how such parts are joined.
    """

    thinks: bool
    text: str
    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[Function, ...] = ()
    mixed: bool = False

    @property
    def offered(self) -> dict[str, Any]:
        """The request's field that offers the functions."""
        return {"tools": [each.tool for each in self.tools]} if self.tools else {}

    def assert_read(self, message: dict[str, Any]) -> None:
        """Checks a message of OpenAI's API against the expected one, except for white space around its parts."""
        found = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls") or []]
        expected = [(each.name, json.dumps(each.arguments)) for each in self.calls]
        assert [(name, json.dumps(strict(given))) for name, given in found] == expected, self.text
        assert (message.get("reasoning_content") or "").strip() == self.reasoning.strip(), self.text
        content = message.get("content") or ""
        if self.mixed:
            assert content.split() == self.content.split() or joined(content) == joined(self.content), self.text
        else:
            assert content.strip() == self.content.strip(), self.text


def strict(text: str) -> Any:
    """Parses JSON and refuses NaN and Infinity, which only Python accepts."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON: {text}")

    return json.loads(text, parse_constant=refuse)


def joined(text: str) -> str:
    return "".join(text.split())


def answer(rng: Random) -> Answer:
    """A random answer: perhaps a thought, then text and calls in any order."""
    thinks, tools = rng.random() < 0.6, tuple(functions(rng)) if rng.random() < 0.8 else ()
    calls = tuple(Call.of(rng, rng.choice(tools)) for _ in range(rng.choice((0, 1, 1, 2, 3)))) if tools else ()
    thought = prose(rng, 8) if thinks and rng.random() < 0.9 else ""
    inside = thinks and bool(calls) and rng.random() < 0.3  # the first call ends the thought
    closed = rng.choice(("", "\n")) + "</think>" + rng.choice(("", "\n", "\n\n"))
    begin = rng.choice(("", "\n")) + thought + ("" if inside else closed) if thinks else ""
    texts = ["" if rng.random() < 0.5 else prose(rng, 5) for _ in range(len(calls) + 1)]
    if inside:
        texts[0] = ""
    if not calls:
        texts[0] = texts[0] or prose(rng, 8)
    written = begin + texts[0]
    for call, text in zip(calls, texts[1:], strict=True):
        written += rng.choice(("", "", "\n")) + call.text + (rng.choice(("", "\n")) if text else "") + text
    mixed = bool(calls) and sum(map(bool, texts)) > 1
    return Answer(thinks, written, thought, "".join(texts), calls, tools, mixed)


def broken(rng: Random) -> Answer:
    """An answer with an invalid call: it is cut off, or lacks one of its marks. The whole answer is text."""
    function = Function("f", {"a": Parameter("string")})
    value = rng.choice(("1", "A b", "x\ny", "<b>"))
    blank = rng.choice(("", "\n"))
    call = f"<tool_call>f{blank}<arg_key>a</arg_key>{blank}<arg_value>{value}</arg_value>{blank}</tool_call>"
    if rng.random() < 0.6:
        text = call[: rng.randint(1, len(call) - 1)]
        before = rng.choice(("", "Aha. ", "A\n"))
    else:
        mark = rng.choice(("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"))
        text = call.replace(mark, "") + rng.choice(("", " and so on", "\nB"))
        before = rng.choice(("", "Aha. "))
    thinks = rng.random() < 0.5
    return Answer(thinks, ("T</think>" if thinks else "") + before + text, "T" * thinks, before + text, (), (function,))


@dataclass
class Conversation:
    """Messages and tools as a client sends them, and the expected text of the prompt.

    Attributes:
        body: The fields of a request to /v1/chat/completions.
        prompt: The text.
    """

    body: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""


def parts(rng: Random, text: str) -> Any:
    """Message content, sometimes as a list of parts."""
    if rng.random() < 0.8:
        return text
    at = rng.randint(0, len(text))
    return [{"type": "text", "text": each} for each in (text[:at], text[at:])]


def conversation(rng: Random, turns: int = 3) -> Conversation:
    """A random conversation; its last message is for the model to answer."""
    messages: list[dict[str, Any]] = []
    thinks, tools = rng.choice((None, None, True, False)), functions(rng) if rng.random() < 0.6 else []
    on = thinks is not False
    lines = []
    if rng.random() < 0.6:
        text = prose(rng, 5)
        if rng.random() < 0.3:
            text += f"\n{ON if on else OFF}"
        messages.append({"role": rng.choice(("system", "developer")), "content": parts(rng, text)})
        lines.append(text)
    if tools:
        lines += ["<tools>", *(json.dumps(each.tool, ensure_ascii=False) for each in tools), "</tools>"]
    if not any(word in line for line in lines[:1] if messages for word in (ON, OFF)):
        lines.append(ON if on else OFF)
    prompt = "<role>SYSTEM</role>" + "\n".join(lines) + "<|role_end|>"
    for turn in range(rng.randint(1, turns)):
        asked = prose(rng, 6)
        prompt += f"<role>HUMAN</role>{asked}<|role_end|>"
        messages.append({"role": "user", "content": parts(rng, asked)})
        for _ in range(rng.randint(0, 2) if tools else 0):
            said, text = assistant(rng, [Call.of(rng, rng.choice(tools)) for _ in range(rng.randint(1, 2))], turn)
            messages.append(said)
            prompt += text
            for call in said["tool_calls"]:
                result = words(rng, 5) or "0"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": parts(rng, result)})
                prompt += f"<role>OBSERVATION</role>\n<tool_response>\n{result}\n</tool_response><|role_end|>"
        if turn + 1 < turns and rng.random() < 0.7:
            said, text = assistant(rng, [], turn)
            messages.append(said)
            prompt += text
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "Go on"})
        prompt += "<role>HUMAN</role>Go on<|role_end|>"
    prompt += "<role>ASSISTANT</role>\n<think>" + ("" if on else "</think>")
    body: dict[str, Any] = {"messages": messages} | ({"tools": [each.tool for each in tools]} if tools else {})
    if thinks is not None:
        asks = {"chat_template_kwargs": {"enable_thinking": thinks}}
        body |= {"reasoning_effort": "none"} if not thinks and rng.random() < 0.5 else asks
    return Conversation(body, prompt)


def assistant(rng: Random, calls: list[Call], turn: int) -> tuple[dict[str, Any], str]:
    """An earlier turn of the model: the message and its text in the prompt."""
    thought, text = prose(rng, 5) if rng.random() < 0.6 else None, prose(rng, 5) if rng.random() < 0.6 else ""
    said: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if thought is not None:
        said["reasoning_content"] = thought
    if calls:
        said["tool_calls"] = [call.said(10 * turn + number) for number, call in enumerate(calls)]
    written = f"\n<think>{thought or ''}</think>{text}{''.join(call.written for call in calls)}"
    return said, f"<role>ASSISTANT</role>{written}<|role_end|>"


# A call for tests that need a fixed one.
WEATHER = Function("get_weather", {"city": Parameter("string"), "days": Parameter("integer")})
ARGUMENTS = "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value><arg_key>days</arg_key>\n<arg_value>3</arg_value>"
CALL = f"<tool_call>get_weather\n{ARGUMENTS}\n</tool_call>"
GIVEN = {"city": "Paris", "days": 3}
NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
