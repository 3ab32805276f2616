"""/v1/responses: a chat in other words, whose answer is a list of items, and the events in which they grow."""

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from ling3export.runners.engine.handle import RequestDelta
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.answers import ChoicesAnswer
from ling3export.runners.serve.chat import ChatBody, TranslatedBody, chat, check_messages
from ling3export.runners.serve.completions import GenerationCall
from ling3export.runners.serve.schema import (
    CHOICES,
    LABELS,
    NEUTRAL,
    ApiError,
    Count,
    Effort,
    ListedObject,
    TopLogprobs,
    refusal,
    refuse_unless_neutral,
    shown,
    text_of_parts,
    validated,
)
from ling3export.runners.text.answer import REASONING, TEXT, TOOL, AnswerParser

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine

Event = dict[str, Any]
# Of an item of an answer: its type, the begin of its id, the type of its content.
FORMS = {TEXT: ("message", "msg", "output_text"), REASONING: ("reasoning", "rs", "reasoning_text")}
# Types of the items of a conversation, and what their models are called here.
ITEMS = {"message": "MESSAGE", "function_call": "CALL", "function_call_output": "OUTPUT", "reasoning": "REASONING"}
# Fields that would have a server keep answers.
NOT_PASSED = frozenset(
    "logprobs max_completion_tokens max_tokens messages n kv_transfer_params response_format return_token_ids "
    "stream_options top_logprobs tools truncate_prompt_tokens".split()
)  # fields of a chat that this API does not have, or has in another form
REPEATED = ("instructions", "max_output_tokens", "metadata", "top_logprobs")  # fields that an answer has, too
ONLY_A_THOUGHT = {"role", "content", "reasoning_content"}  # fields of a message
STORED = frozenset({"store", "previous_response_id", "conversation"})
LOGPROBS = "message.output_text.logprobs"
# A copy of thoughts that a server which keeps none could read again: here thoughts go back as the text that they are.
ENCRYPTED = "reasoning.encrypted_content"

Content = Annotated[str, BeforeValidator(partial(text_of_parts, kinds=("input_text", "output_text")))]


class _Item(ListedObject):
    type: Any = None
    id: Any = None
    status: Any = None


class _MessageItem(_Item):
    role: str
    content: Content
    phase: Any = None


class _CallItem(_Item):
    call_id: str
    name: str
    arguments: str


class _OutputItem(_Item):
    call_id: str
    output: Content


class _ReasoningItem(_Item):
    summary: Any = None
    content: Annotated[str, BeforeValidator(partial(text_of_parts, kinds=("reasoning_text",)))] = ""


class _Function(ListedObject):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Reasoning(ListedObject):
    effort: Effort = None
    summary: Literal["auto"] | None = None


class _Text(ListedObject):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


def _item_kind(value: Any) -> str:
    return ITEMS[value.get("type") or "message"] if isinstance(value, dict) else "MESSAGE"


def _known(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is not None and (not isinstance(kind, str) or kind not in ITEMS):
        wanted = f"items of type {', '.join(ITEMS)}"
        raise PydanticCustomError("item", "an unknown item", {"wanted": wanted, "found": shown(kind)})
    return value


_AnyItem = Annotated[
    Annotated[_MessageItem, Tag("MESSAGE")]
    | Annotated[_CallItem, Tag("CALL")]
    | Annotated[_OutputItem, Tag("OUTPUT")]
    | Annotated[_ReasoningItem, Tag("REASONING")],
    Discriminator(_item_kind),
    BeforeValidator(_known),
]


class ResponsesBody(TranslatedBody):
    """The body of /v1/responses."""

    passed = frozenset({*ChatBody.model_fields}) - NOT_PASSED
    renamed: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    }
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {**NEUTRAL, "stream_options": ({}, {"include_obfuscation": False})}

    input: Annotated[
        Annotated[str, Tag("TEXT")] | Annotated[list[_AnyItem], Field(fail_fast=True, min_length=1), Tag("ITEMS")],
        Discriminator(lambda value: "TEXT" if isinstance(value, str) else "ITEMS"),
        Field(description='a text or a list of items, [{"role": TEXT, "content": TEXT}, ...]'),
    ]
    instructions: Annotated[str | None, Field(description="a text")] = None
    max_output_tokens: Count = None
    text: Annotated[
        _Text | None, Field(description="an object with a format, and at most a verbosity of medium beside it")
    ] = None
    tools: Annotated[
        list[_Function],
        Field(
            fail_fast=True,
            default_factory=list,
            max_length=CHOICES,
            description=f'a list of at most {CHOICES} functions, {{"type": "function", "name": NAME, ...}}',
        ),
    ]
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
        Field(default_factory=list, description=f'a list of "{LOGPROBS}" and "{ENCRYPTED}" at most'),
    ]
    top_logprobs: TopLogprobs = 0
    reasoning: Annotated[
        _Reasoning | None, Field(description="an object with an effort, and at most a summary of auto beside it")
    ] = None
    metadata: Annotated[dict[str, Any], Field(default_factory=dict, description="an object")]

    @classmethod
    def _refuse_unless_neutral(cls, name: str, value: Any) -> None:
        if name in STORED and value is not False:
            wanted = "it left out: this server keeps no answers, so `input` has the whole conversation"
            raise refusal(name, wanted, shown(value), "unsupported_parameter")
        if name not in LABELS and name not in cls.neutral:
            super()._refuse_unless_neutral(name, value)
        refuse_unless_neutral(name, value, cls.neutral)

    @property
    def chat(self) -> dict[str, Any]:
        """The body of the same chat."""
        functions = [tool.model_dump(exclude_none=True) for tool in self.tools]
        form = self.text.format if self.text else None
        fields = self.same | {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "tools": [{"type": function.pop("type"), "function": function} for function in functions],
            "response_format": {"type": "json_schema", "json_schema": form}
            if form and form.get("type") == "json_schema"
            else form,
            "logprobs": LOGPROBS in self.include or self.top_logprobs > 0,
            "top_logprobs": self.top_logprobs,
        }
        return fields if self.reasoning is None else fields | {"reasoning_effort": self.reasoning.effort}

    def _messages(self) -> list[dict[str, Any]]:
        """The messages: consecutive items of one answer are one message of the assistant."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            last = messages[-1] if messages else {}
            if isinstance(item, _ReasoningItem):
                messages.append({"role": "assistant", "content": "", "reasoning_content": item.content})
            elif isinstance(item, _CallItem):
                if last.get("role") != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            elif isinstance(item, _OutputItem):
                messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            elif item.role == "assistant" and last.get("content") == "" and last.keys() == ONLY_A_THOUGHT:
                last["content"] = item.content  # the text of the reasoning
            else:
                messages.append({"role": item.role, "content": item.content})
        return messages


def responses(
    body: dict[str, Any], engine: "Engine", model: str, most: int = CHOICES, default: int | None = None
) -> GenerationCall:
    """A call of /v1/responses; the arguments and errors are those of ``chat``."""
    check_messages(body, "input", engine)
    request = validated(ResponsesBody, body, model)
    with request.named():
        return replace(chat(request.chat, engine, model, most, default), outer=request)


class ResponsesAnswer:
    """The answer to one call of /v1/responses: the chunks of a chat's stream as events.

    A whole answer is what the last event of a stream has, so both are the same.

    Args:
        call: The call.
        model: The name that the model is served under.
    """

    ending = ""

    def __init__(self, call: GenerationCall, model: str) -> None:
        self._chat, request, body = ChoicesAnswer(call, model), call.outer, call.body
        assert isinstance(request, ResponsesBody) and isinstance(body, ChatBody)
        form = request.text.format if request.text and request.text.format else {"type": "text"}
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **{
                name: getattr(request, name)
                for name in ("instructions", "max_output_tokens", "metadata", "top_logprobs")
            },
            **{name: getattr(body, name) for name in ("parallel_tool_calls", "temperature", "tool_choice", "top_p")},
            "text": {"format": form},
            "tools": [tool.model_dump() for tool in request.tools],
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
        }
        self._events = itertools.count()
        self._items: list[dict[str, Any]] = []  # that are complete
        self._grows: str | None = None  # the kind of the open item: content or reasoning_content
        self._id = self._text = ""
        self._entries: list[dict[str, Any]] = []  # log-probabilities of its tokens
        self._unsaid: list[dict[str, Any]] = []  # those of tokens whose text did not come yet
        self._thoughts = _Thoughts(call) if call.format is not None and call.format.thinks else None

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer.

        Args:
            completions: The one of the call's request.
        """
        *_, last = self.piece(0, RequestDelta.whole(completions[0]))
        return dict(last["response"])

    def begin(self) -> list[Event]:
        """The events before anything of the answer is known."""
        response = self._response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def piece(self, index: int, piece: RequestDelta) -> list[Event]:
        """The events that a piece of the answer adds to a stream; the last of an answer has the whole of it."""
        thought = [False] * len(piece.token_ids) if self._thoughts is None else self._thoughts.push(piece.token_ids)
        choices = [chunk["choices"][0] for chunk in self._chat.piece(index, piece)]
        entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
        self._unsaid += [entry for entry, own in zip(entries, thought, strict=bool(entries)) if not own]
        events: list[Event] = []
        for choice in choices:
            for kind, delta in choice["delta"].items():
                events += self._grown(kind, delta)
        return events if piece.completion is None else [*events, *self._ended(piece.completion)]

    def end(self) -> list[Event]:
        """Nothing: the last piece had the last event."""
        return []

    def failed(self, error: ApiError) -> Event:
        """The event that ends a stream that cannot go on."""
        details = {"code": error.code or "server_error", "message": error.message}
        return self._event("failed", response=self._response("failed", error=details))

    def _grown(self, kind: str, delta: Any) -> Iterator[Event]:
        if kind != self._grows and delta:
            yield from self._closed("completed")
        if kind == TOOL:
            yield from self._called(delta[0]["id"], delta[0]["function"])
            return
        if not delta:
            return
        if self._grows is None:
            yield from self._opened(kind)
        self._text += delta
        entries = {}
        if kind == TEXT:
            entries, self._unsaid = {"logprobs": self._unsaid}, []
            self._entries += entries["logprobs"]
        yield self._event(f"{FORMS[kind][2]}.delta", **self._place(), delta=delta, **entries)

    def _opened(self, kind: str) -> Iterator[Event]:
        self._grows, self._text, self._entries = kind, "", []
        self._id = f"{FORMS[kind][1]}_{secrets.token_hex(12)}"
        yield self._event("output_item.added", output_index=len(self._items), item=self._item("in_progress", []))
        yield self._event("content_part.added", **self._place(), part=self._part())

    def _closed(self, status: str) -> Iterator[Event]:
        if self._grows is None:
            return
        if self._grows == TEXT:
            self._entries, self._unsaid = self._entries + self._unsaid, []
        entries = {"logprobs": self._entries} if self._grows == TEXT else {}
        part, item = self._part(), self._item(status, [self._part()])
        yield self._event(f"{part['type']}.done", **self._place(), text=self._text, **entries)
        yield self._event("content_part.done", **self._place(), part=part)
        yield self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._grows = None

    def _called(self, id: str, function: dict[str, Any]) -> Iterator[Event]:
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": id, "name": function["name"]}
        place, arguments = {"output_index": len(self._items)}, function["arguments"]
        done = item | {"arguments": arguments, "status": "completed"}
        yield self._event("output_item.added", **place, item=item | {"arguments": "", "status": "in_progress"})
        place["item_id"] = item["id"]
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        yield self._event("function_call_arguments.done", **place, name=function["name"], arguments=arguments)
        yield self._event("output_item.done", output_index=len(self._items), item=done)
        self._items.append(done)

    def _ended(self, completion: Completion) -> Iterator[Event]:
        status = "incomplete" if completion.stop_reason == "length" else "completed"
        if not self._items and self._grows is None:  # not even a character
            yield from self._opened(TEXT)
        yield from self._closed(status)
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        yield self._event(status, response=self._response(status, usage=self._counted(), **more))

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", **fields, "sequence_number": next(self._events)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self._items), "content_index": 0}

    def _part(self) -> dict[str, Any]:
        assert self._grows is not None
        more = {"annotations": [], "logprobs": self._entries} if self._grows == TEXT else {}
        return {"type": FORMS[self._grows][2], "text": self._text, **more}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._grows is not None
        more: dict[str, Any] = {"role": "assistant"} if self._grows == TEXT else {"summary": []}
        return {"type": FORMS[self._grows][0], "id": self._id, "status": status, **more, "content": content}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": list(self._items), **empty, **more}

    def _counted(self) -> dict[str, Any]:
        counts = self._chat.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0 if self._thoughts is None else self._thoughts.count},
            "total_tokens": counts["total_tokens"],
        }


class _Thoughts:
    """Tells which tokens of an answer belong to thoughts, the marks around them included.

    Args:
        call: The call, whose answers may have thoughts.

    Attributes:
        count: How many did so far.
    """

    def __init__(self, call: GenerationCall) -> None:
        assert call.format is not None and call.tokenizer is not None
        self._parser, self._text = AnswerParser(call.format), call.tokenizer.stream()
        self.count = 0

    def push(self, ids: Sequence[int]) -> list[bool]:
        """Whether each of the next tokens belongs to one."""
        belongs = []
        for id in ids:
            before = self._parser.thinking
            self._parser.push(self._text.push(id))
            belongs.append(before or self._parser.thinking)
        self.count += sum(belongs)
        return belongs
