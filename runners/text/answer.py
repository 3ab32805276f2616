"""An answer's text: what of it is content, what a thought, and what the call of a tool, in two dialects.

A reader of calls takes the text after the mark that opens a call, as it grows. It returns the end of the call once
that is certain, so no part of an answer is ever taken back.
"""

import json
import re
import secrets
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from ling3export.runners.text.vocabulary import overlap

THINK, THOUGHT = "<think>", "</think>"
TEXT, REASONING, TOOL = "content", "reasoning_content", "tool_calls"
CALL, CALLED = "<tool_call>", "</tool_call>"
KEY, KEYED, VALUE, VALUED = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
IN_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)  # of JSON, as far as it goes
OUTSIDE = re.compile(f'"|{CALLED}')  # of strings
QUOTES = re.compile(r"\\.", re.DOTALL)  # what stands for itself in one, quotes too
NAME = re.compile(r"\s*([\w.:/-]{0,64})")  # of a function, where it is written bare
BLANKS = re.compile(r"\s*")
MARK = re.compile("</?(?:tool_call|arg_key|arg_value)>")
LONGEST = len(VALUED)
KINDS = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})

Functions = Mapping[str, Any]  # the schema of the arguments of each function, by its name


class Call(NamedTuple):
    """A call that has ended: the function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class Read(NamedTuple):
    """A call, or a text that looked like one."""

    end: int  # characters after the opening mark that belong to it
    call: Call | None  # None where all of it is text


class JsonCall:
    """Reads ``{"name": NAME, "arguments": OBJECT}``, as Ling-2's templates write it.

    A mark in a string ends nothing.
    """

    def __init__(self, functions: Functions) -> None:
        self._place = 0  # characters before it are read
        self._in_string = False  # at that place

    def read(self, text: str, last: bool) -> Read | None:
        """The call, or a text; None while that is open. Each character is looked at once.

        Args:
            text: The text after the opening mark, so far.
            last: Nothing follows.
        """
        if (end := self._end(text)) is not None and (call := _json_call(text[:end])) is not None:
            return Read(end + len(CALLED), call)
        if end is None and not last:
            return None
        first = text.find(CALLED)
        return Read(len(text) if first < 0 else first + len(CALLED), None)

    def _end(self, text: str) -> int | None:
        """Where the first closing mark outside of a string begins; None where there is none yet."""
        while True:
            if self._in_string:
                self._place = IN_STRING.match(text, self._place).end()  # type: ignore[union-attr]  # it takes nothing
                if not text.startswith('"', self._place):
                    return None
                self._place, self._in_string = self._place + 1, False
            elif (match := OUTSIDE.search(text, self._place)) is None:
                self._place = max(self._place, len(text) - len(CALLED) + 1)
                return None
            elif match[0] == CALLED:
                return match.start()
            else:
                self._place, self._in_string = match.end(), True


def _json_call(text: str) -> Call | None:
    try:
        call = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))


class KeyedCall:
    """Reads a name and then pairs of marked keys and values, as Ling-3's templates write them.

    Between the parts stands any white space. A value ends at the first closing mark before a key or the end of
    the call; any other mark in it is text. A string is written bare: what a value is follows from its schema.
    One that is JSON and no string does not end within a string of its own, where that comes to an end.
    """

    def __init__(self, functions: Functions) -> None:
        self._functions, self._text, self._last = functions, "", False
        self._steps = self._run()

    def read(self, text: str, last: bool) -> Read | None:
        """See ``JsonCall.read``."""
        self._text, self._last = text, last
        try:
            next(self._steps)
        except StopIteration as ended:
            return Read(*ended.value)
        return None

    def _run(self) -> Generator[None, None, tuple[int, Call | None]]:
        at = 0
        while True:
            name = NAME.match(self._text, at)
            assert name is not None  # it takes an empty text
            if self._last or name.end() < len(self._text):
                break
            at = at if name[1] else name.end()
            yield
        if not name[1]:
            return name.end(), None
        mark, at = yield from self._mark(name.end())
        schema, values = self._functions.get(name[1], {}), dict[str, str]()
        while mark == KEY:
            key = yield from self._until(at)
            if key is None or key[0] != KEYED:
                return len(self._text) if key is None else key.start(), None
            written = self._text[at : key.start()]
            mark, at = yield from self._mark(key.end(), (VALUE,))
            if not mark:
                return at, None
            kinds = kinds_of_property(schema, written)
            start = place = counted = at
            mark, quotes, first = "", 0, ("", 0, 0)
            while not mark:
                while (place := self._text.find(VALUED, at)) < 0 and not self._last:
                    at = max(at, len(self._text) - len(VALUED) + 1)
                    yield
                if place < 0 and not first[0]:
                    return len(self._text), None
                if place < 0:
                    mark, end, place = first  # no string ends after it
                    break
                at = place + len(VALUED)
                mark, end = yield from self._mark(at)
                quotes, counted = quotes + QUOTES.sub("", self._text[counted:place]).count('"'), place
                if mark and quotes % 2 and "string" not in kinds:
                    first, mark = first if first[0] else (mark, end, place), ""
            at, values[written] = end, argument(self._text[start:place], kinds)
        pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
        return at, Call(name[1], f"{{{', '.join(pairs)}}}") if mark else None

    def _mark(self, at: int, marks: tuple[str, ...] = (KEY, CALLED)) -> Generator[None, None, tuple[str, int]]:
        """The mark after white space, and its end; where there is none, an empty mark and the place."""
        while True:
            blanks = BLANKS.match(self._text, at)
            at = at if blanks is None else blanks.end()
            rest = self._text[at : at + LONGEST]
            for mark in marks:
                if rest.startswith(mark):
                    return mark, at + len(mark)
            if self._last or not any(mark.startswith(rest) for mark in marks):
                return "", at
            yield

    def _until(self, at: int) -> Generator[None, None, re.Match[str] | None]:
        """The next mark, whichever it is; None where none comes."""
        while (mark := MARK.search(self._text, at)) is None and not self._last:
            at = max(at, len(self._text) - LONGEST + 1)
            yield
        return mark


Reader = JsonCall | KeyedCall


def reader_of(template: str) -> type[Reader]:
    """The reader of a model's calls: its chat template writes earlier calls as the model does."""
    return KeyedCall if KEY in template else JsonCall


def argument(text: str, kinds: frozenset[str]) -> str:
    """A value as JSON: a string where it has to be one, else what JSON it is, else the text that it is.

    Args:
        text: The model's own text.
        kinds: JSON types that its schema takes.
    """
    if kinds != {"string"}:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        else:
            # Where a string is one of several types it is written bare, so what is no other type is the text itself.
            if "string" not in kinds or kinds == KINDS or kind_of(value) & kinds - {"string"}:
                return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def kind_of(value: object) -> frozenset[str]:
    """The JSON types that a value has."""
    if isinstance(value, bool) or value is None:
        return frozenset({"null" if value is None else "boolean"})
    names = {int: ("integer", "number"), float: ("number",), str: ("string",), list: ("array",), dict: ("object",)}
    return frozenset(names[type(value)])


def kinds_of_property(schema: object, name: str) -> frozenset[str]:
    """The JSON types that the schema of an object takes for one of its members: all of them where it says nothing."""
    try:
        return next((kinds_of(member, schema) for member in _properties(schema, schema, name, set())), KINDS)
    except RecursionError:
        return KINDS


def _properties(schema: object, root: object, name: str, seen: set[int]) -> Generator[object, None, None]:
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    members = schema.get("properties")
    if isinstance(members, dict) and name in members:
        yield members[name]
    for inner in (resolved(schema, root), *listed(schema, "allOf", "anyOf", "oneOf")):
        yield from _properties(inner, root, name, seen)
    if isinstance(schema.get("additionalProperties"), dict):
        yield schema["additionalProperties"]


def kinds_of(schema: object, root: object, seen: dict[int, frozenset[str]] | None = None) -> frozenset[str]:
    """The JSON types that a schema takes.

    Args:
        schema: Nothing of it has been checked.
        root: The document in which its references are looked up.
        seen: Types of the schemas that were read, each once: there may be circles, and many ways to each.
    """
    if not isinstance(schema, dict):
        return KINDS
    seen = {} if seen is None else seen
    if id(schema) in seen:
        return seen[id(schema)]
    kinds = seen[id(schema)] = KINDS
    declared = schema.get("type")
    named = {part for part in (declared if isinstance(declared, list) else [declared]) if isinstance(part, str)} & KINDS
    if named:
        kinds &= named | ({"integer"} if "number" in named else set())
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        kinds &= frozenset().union(*map(kind_of, values))
    for name in ("anyOf", "oneOf"):
        if branches := listed(schema, name):
            kinds &= frozenset().union(*(kinds_of(branch, root, seen) for branch in branches))
    for part in (resolved(schema, root), *listed(schema, "allOf")):
        kinds &= kinds_of(part, root, seen)
    kinds = seen[id(schema)] = kinds | {"null"} if schema.get("nullable") is True else kinds
    return kinds


def listed(schema: dict[str, Any], *names: str) -> list[Any]:
    lists = (schema.get(name) for name in names)
    return [item for values in lists if isinstance(values, list) for item in values]


def resolved(schema: dict[str, Any], root: object) -> object:
    """The target of a schema's reference within its document; True, which takes anything, where it has none."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    value = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, dict) or part not in value:
            return True
        value = value[part]
    return value


@dataclass(frozen=True)
class AnswerFormat:
    """The marks that an answer's text has."""

    thinks: bool  # whether thoughts stand between marks
    within: bool  # whether the answer begins within a thought
    functions: Functions = field(default_factory=dict)  # functions that it may call
    reader: type[Reader] = JsonCall

    @classmethod
    def of(
        cls, template: str, prompt: str, functions: Functions, reader: type[Reader] = JsonCall, *, begun: bool = False
    ) -> "AnswerFormat | None":
        """The format of answers to ``prompt``; None where its text has no marks.

        Args:
            template: The chat template.
            prompt: The text that it wrote. Where that ends with a closed thought, the answer has none.
            begun: The prompt ends within an answer, which goes on.
        """
        thinks, end = THOUGHT in template, prompt.rstrip()
        if begun:
            thinks = within = thinks and prompt.rfind(THINK) > prompt.rfind(THOUGHT)
        else:
            within = thinks and end.endswith(THINK)
            thinks = thinks and not end.endswith(THOUGHT)
        return cls(thinks, within, functions, reader) if thinks or functions else None


def split_thought(text: str, template: str, prompt: str) -> tuple[str, str]:
    """A whole answer's thought and content, as the server gives them; arguments as :meth:`AnswerFormat.of`."""
    form = AnswerFormat.of(template, prompt, {})
    if form is None:
        return "", text
    parts = AnswerParser(form).push(text, last=True)
    thought, content = ("".join(part for kind, part in parts if kind == wanted) for wanted in (REASONING, TEXT))
    return thought, content


class AnswerParser:
    """Takes the text of one answer apart as it comes, into the same parts in whatever pieces that is.

    Mere white space at the begin, between the marks of calls and after them is no content.
    """

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._kind = REASONING if form.within else TEXT
        self._held = ""  # what is not yet certain
        self._reader: Reader | None = None  # of the call that has begun
        self._blanks: str | None = ""  # what content has since the last call, while that is white space alone
        self._begun = False  # whether there was any content
        self._marked = form.within  # whether there was a mark
        self._open = False  # whether a call ended a thought, whose own end may still come
        self.calls = 0  # that have ended

    @property
    def thinking(self) -> bool:
        """Whether what comes next belongs to a thought."""
        return self._kind == REASONING and self._reader is None

    def push(self, text: str, *, last: bool = False) -> list[tuple[str, Any]]:
        """The parts that are certain now: (``content`` or ``reasoning_content``, text) or (``tool_calls``, call).

        Args:
            text: The next piece.
            last: Nothing follows, so held text is released. A call that did not end is text.
        """
        self._held += text
        parts: list[tuple[str, Any]] = []
        while self._called(parts, last) if self._reader is not None else self._said(parts, last):
            pass
        if last and self._blanks and not self._marked:
            parts.append((TEXT, self._blanks))
        return parts

    def _said(self, parts: list[tuple[str, Any]], last: bool) -> bool:
        marks = self._marks()
        places = {place: mark for mark in marks if (place := self._held.find(mark)) >= 0}
        if not places:
            keep = 0 if last else max((overlap(self._held, mark) for mark in marks), default=0)
            end = len(self._held) - keep
            before, self._held = self._held[:end], self._held[end:]
            self._say(parts, before)
            return False
        place, mark = min(places.items())
        before, self._held = self._held[:place], self._held[place + len(mark) :]
        self._say(parts, before)
        if mark == CALL:
            self._reader = self._form.reader(self._form.functions)
        else:
            self._marked, self._open = True, False
            self._kind = REASONING if mark == THINK else TEXT
        return True

    def _called(self, parts: list[tuple[str, Any]], last: bool) -> bool:
        assert self._reader is not None
        read = self._reader.read(self._held, last)
        if read is None:
            return False
        text, self._held, self._reader = self._held[: read.end], self._held[read.end :], None
        if read.call is None:
            thought, closed, text = (
                (CALL + text).partition(THOUGHT) if self._kind == REASONING else ("", "", CALL + text)
            )
            self._say(parts, thought)
            if closed:
                self._kind, self._marked = TEXT, True
            self._say(parts, text)
            return True
        function = {"name": read.call.name, "arguments": read.call.arguments}
        id = f"call_{secrets.token_hex(12)}"
        parts.append((TOOL, {"index": self.calls, "id": id, "type": "function", "function": function}))
        self._open = self._kind == REASONING
        self.calls, self._kind, self._blanks, self._marked = self.calls + 1, TEXT, "", True
        return True

    def _marks(self) -> tuple[str, ...]:
        calls = (CALL,) if self._form.functions else ()
        if self._kind == REASONING:
            return (THOUGHT, *(calls if self._form.reader is KeyedCall else ()))
        opening = (THINK,) if self._form.thinks and not self._form.within else ()
        return (*calls, *opening, *((THOUGHT,) if self._open else ()))

    def _say(self, parts: list[tuple[str, Any]], text: str) -> None:
        if self._kind == TEXT and self._blanks is not None:
            blank, text = not text.strip(), self._blanks + text
            if blank:
                self._blanks = text
                return
            text = text.lstrip() if self._marked and not self._begun else text
            self._blanks, self._begun = None, True
        if text:
            parts.append((self._kind, text))
