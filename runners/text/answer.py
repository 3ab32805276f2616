"""What of an answer's text is content, what a thought, and what the call of a tool."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from ling3export.runners.text.calls import CALL, Functions, JsonCall, KeyedCall, Reader
from ling3export.runners.text.detokenize import overlap

THINK, THOUGHT = "<think>", "</think>"
TEXT, REASONING, TOOL = "content", "reasoning_content", "tool_calls"


@dataclass(frozen=True)
class AnswerFormat:
    """Which marks an answer's text has.

    Attributes:
        thinks: Whether thoughts stand between marks.
        within: Whether the answer begins within a thought.
        functions: Those that it may call, each with the schema of its arguments.
        reader: What reads a call.
    """

    thinks: bool
    within: bool
    functions: Functions = field(default_factory=dict)
    reader: type[Reader] = JsonCall

    @classmethod
    def of(
        cls, template: str, prompt: str, functions: Functions, reader: type[Reader] = JsonCall, *, begun: bool = False
    ) -> "AnswerFormat | None":
        """The format of answers to ``prompt``; None where its text has no marks.

        Args:
            template: The chat template.
            prompt: What it wrote. Where it ends with a closed thought, the answer has none.
            functions: Those that it may call.
            reader: What reads a call.
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

    White space alone at the begin, between the marks of calls and behind them is no content.

    Args:
        form: Which marks the text has.

    Attributes:
        calls: How many calls have ended.
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
        self.calls = 0

    @property
    def thinking(self) -> bool:
        """Whether what comes next belongs to a thought."""
        return self._kind == REASONING and self._reader is None

    def push(self, text: str, *, last: bool = False) -> list[tuple[str, Any]]:
        """The parts that are certain now: (``content`` or ``reasoning_content``, text) or (``tool_calls``, call).

        Args:
            text: What came.
            last: Nothing follows: what was held back is given, too. A call that did not end is text.
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
