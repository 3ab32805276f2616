"""/v1/responses: a chat in other words, whose answer is a list of items, and the events in which they grow."""

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ling3export.foundation.errors import shown
from ling3export.runners.engine.handle import RequestDelta
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.generation import ChatBody, GenerationCall
from ling3export.runners.serve.schema import (
    CHOICES,
    LABELS,
    NEUTRAL,
    ApiError,
    Count,
    Effort,
    ListedObject,
    refusal,
    text_of_parts,
)
from ling3export.runners.serve.translation import Event, TranslatedAnswer, TranslatedBody
from ling3export.runners.text.answer import REASONING, TEXT

# By the kind of a chat's part: the type of the item, the begin of its id, the type of its content.
FORMS = {TEXT: ("message", "msg", "output_text"), REASONING: ("reasoning", "rs", "reasoning_text")}
LOGPROBS: dict[str, dict[str, Any]] = {TEXT: {"logprobs": []}, REASONING: {}}  # chats give log-probabilities
# By the type of an item of a conversation: the fields that it has, and those that it may have.
ITEMS = {
    "message": ({"role", "content"}, {"phase"}),
    "function_call": ({"call_id", "name", "arguments"}, set[str]()),
    "function_call_output": ({"call_id", "output"}, set[str]()),
    "reasoning": (set[str](), {"summary", "content"}),
}
# Fields of a chat that this API does not have, or has in another form.
NOT_PASSED = frozenset(
    "logprobs max_completion_tokens max_tokens messages n kv_transfer_params response_format return_token_ids "
    "stream_options top_logprobs tools ".split()
)
ONLY_A_THOUGHT = {"role", "content", "reasoning_content"}  # fields of a message
STORED = frozenset({"store", "previous_response_id", "conversation"})  # fields that would have a server keep answers
# A copy of thoughts that a server which keeps none could read again: here thoughts go back as the text that they are.
ENCRYPTED = "reasoning.encrypted_content"

Content = Annotated[str, BeforeValidator(partial(text_of_parts, kinds=("input_text", "output_text", "reasoning_text")))]


class _Item(ListedObject):
    type: str = "message"
    id: Any = None
    status: Any = None
    phase: Any = None
    summary: Any = None
    role: str = ""
    content: Content = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Content = ""

    @model_validator(mode="before")
    @classmethod
    def _fields_of_its_type(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type") or "message"
        if not isinstance(kind, str) or kind not in ITEMS:
            wanted = f"items of type {', '.join(ITEMS)}"
            raise PydanticCustomError("item", "an unknown item", {"wanted": wanted, "found": shown(kind)})
        needed, others = ITEMS[kind]
        fields = {name for name, item in value.items() if item is not None}
        for name in sorted(needed - fields):
            raise PydanticCustomError("lacking", "a field that is not there", {"found": f"no `{name}`"})
        for name in fields - needed - others - {"type", "id", "status"}:
            cls._refuse_unless_neutral(name, value[name])
        return value


class _Reasoning(ListedObject):
    effort: Effort = None
    summary: Literal["auto"] | None = None


class _Text(ListedObject):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(TranslatedBody):
    """The body of /v1/responses."""

    passed = frozenset({*ChatBody.model_fields}) - NOT_PASSED
    renamed: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    }
    labels = LABELS
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        **NEUTRAL,
        "store": (False,),
        "stream_options": ({}, {"include_obfuscation": False}),
    }

    input: Annotated[
        Annotated[str, Tag("TEXT")] | Annotated[list[_Item], Field(fail_fast=True, min_length=1), Tag("ITEMS")],
        Discriminator(lambda value: "TEXT" if isinstance(value, str) else "ITEMS"),
        Field(description='a text or a list of items, [{"role": TEXT, "content": TEXT}, ...]'),
    ]
    instructions: Annotated[str | None, Field(description="a text")] = None
    max_output_tokens: Count = None
    text: Annotated[
        _Text | None, Field(description="an object with a format, and at most a verbosity of medium beside it")
    ] = None
    tools: Annotated[
        list[dict[str, Any]],
        Field(default_factory=list, max_length=CHOICES, description=f"a list of at most {CHOICES} functions"),
    ]
    include: Annotated[
        list[Literal["reasoning.encrypted_content"]],
        Field(default_factory=list, description=f'a list of "{ENCRYPTED}" at most'),
    ]
    reasoning: Annotated[
        _Reasoning | None, Field(description="an object with an effort, and at most a summary of auto beside it")
    ] = None
    metadata: Annotated[dict[str, Any], Field(default_factory=dict, description="an object")]

    @classmethod
    def _refuse_unless_neutral(cls, name: str, value: Any) -> None:
        if name in STORED and value is not False:
            wanted = "it left out: this server keeps no answers, so `input` has the whole conversation"
            raise refusal(name, wanted, shown(value), "unsupported_parameter")
        super()._refuse_unless_neutral(name, value)

    @property
    def form(self) -> dict[str, Any]:
        """The form of the answer's text."""
        return (self.text and self.text.format) or {"type": "text"}

    @property
    def chat(self) -> dict[str, Any]:
        form = self.form
        fields = self.same | {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "tools": [_function(tool) for tool in self.tools],
            "response_format": {"type": form["type"], "json_schema": form}
            if form.get("type") == "json_schema"
            else form,
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
            if item.type == "reasoning":
                messages.append({"role": "assistant", "content": "", "reasoning_content": item.content})
            elif item.type == "function_call":
                if last.get("role") != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            elif item.type == "function_call_output":
                messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            elif item.role == "assistant" and last.get("content") == "" and last.keys() == ONLY_A_THOUGHT:
                last["content"] = item.content  # the text of the reasoning
            else:
                messages.append({"role": item.role, "content": item.content})
        return messages


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": tool.get("type"), "function": function}


class ResponsesAnswer(TranslatedAnswer):
    """The answer to one call of /v1/responses, whose output is a list of items.

    A whole answer is in the last event of a stream, so both are the same.
    """

    def __init__(self, call: GenerationCall, model: str) -> None:
        super().__init__(call, model)
        request, body = call.outer, call.body
        repeated = ("instructions", "max_output_tokens", "metadata")
        shared = ("parallel_tool_calls", "temperature", "tool_choice", "top_p")
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **{name: getattr(request, name) for name in repeated},
            **{name: getattr(body, name) for name in shared},
            "text": {"format": request.form},
            "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in request.tools],
            "reasoning": {"effort": getattr(body, "reasoning_effort", None), "summary": None},
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
        }
        self._events = itertools.count()
        self._id = self._text = ""
        self._reasoning_tokens = 0

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        *_, last = self.piece(0, RequestDelta.whole(completions[0]))
        return dict(last["response"])

    def begin(self) -> list[Event]:
        response = self._response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def failed(self, error: ApiError) -> Event:
        details = {"code": error.code or "server_error", "message": error.message}
        return self._event("failed", response=self._response("failed", error=details))

    def grow(self, kind: str, delta: str) -> Iterator[Event]:
        if self.kind is None:
            yield from self._opened(kind)
        self._text += delta
        yield self._event(f"{FORMS[kind][2]}.delta", **self._place(), delta=delta, **LOGPROBS[kind])

    def close(self, status: str = "completed") -> Iterator[Event]:
        if self.kind is None:
            return
        if self.kind == REASONING and self._call.tokenizer is not None:
            self._reasoning_tokens += len(self._call.tokenizer.encode(self._text, special=False))
        part = self._part()
        yield self._event(f"{part['type']}.done", **self._place(), text=self._text, **LOGPROBS[self.kind])
        yield self._event("content_part.done", **self._place(), part=part)
        yield self._added(self._item(status, [part]))
        self.kind = None

    def tool_call(self, id: str, name: str, arguments: str) -> Iterator[Event]:
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": id, "name": name}
        place: dict[str, Any] = {"output_index": len(self.blocks)}
        yield self._event("output_item.added", **place, item=item | {"arguments": "", "status": "in_progress"})
        place["item_id"] = item["id"]
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        yield self._event("function_call_arguments.done", **place, name=name, arguments=arguments)
        yield self._added(item | {"arguments": arguments, "status": "completed"})

    def finish(self, completion: Completion, reason: str) -> Iterator[Event]:
        status = "incomplete" if reason == "length" else "completed"
        if not self.blocks and self.kind is None:  # not even a character
            yield from self._opened(TEXT)
        yield from self.close(status)
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        yield self._event(status, response=self._response(status, usage=self._counted(), **more))

    def _opened(self, kind: str) -> Iterator[Event]:
        self.kind, self._text = kind, ""
        self._id = f"{FORMS[kind][1]}_{secrets.token_hex(12)}"
        yield self._event("output_item.added", output_index=len(self.blocks), item=self._item("in_progress", []))
        yield self._event("content_part.added", **self._place(), part=self._part())

    def _added(self, item: dict[str, Any]) -> Event:
        self.blocks.append(item)
        return self._event("output_item.done", output_index=len(self.blocks) - 1, item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", **fields, "sequence_number": next(self._events)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.blocks), "content_index": 0}

    def _part(self) -> dict[str, Any]:
        assert self.kind is not None
        more: dict[str, Any] = {"annotations": []} if self.kind == TEXT else {}
        return {"type": FORMS[self.kind][2], "text": self._text, **more, **LOGPROBS[self.kind]}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        assert self.kind is not None
        more: dict[str, Any] = {"role": "assistant"} if self.kind == TEXT else {"summary": []}
        return {"type": FORMS[self.kind][0], "id": self._id, "status": status, **more, "content": content}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": list(self.blocks), **empty, **more}

    def _counted(self) -> dict[str, Any]:
        counts = self._chat.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }
