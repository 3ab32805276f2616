"""What /v1/responses takes: the items of a conversation, which become the messages of a chat."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from ling3export.runners.engine.validation import TOP_LOGPROBS
from ling3export.runners.serve.schema import (
    CHOICES,
    ITEMS,
    NEUTRAL,
    ChatBody,
    Count,
    Flag,
    Inner,
    Message,
    Sampled,
    ToolChoice,
    joined,
    refusal,
    shown,
)

# Fields that would have a server keep answers.
STORED = frozenset({"store", "previous_response_id", "conversation"})
LOGPROBS = "message.output_text.logprobs"
# A copy of thoughts that a server which keeps none could read again: here thoughts go back as the text that they are.
ENCRYPTED = "reasoning.encrypted_content"

Content = Annotated[str, BeforeValidator(partial(joined, kinds=("input_text", "output_text")))]


class _Item(Inner):
    """What any item may have that was an answer's."""

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
    content: Annotated[str, BeforeValidator(partial(joined, kinds=("reasoning_text",)))] = ""


class _Function(Inner):
    """A function that an answer may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Text(Inner):
    """The form of an answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


def _input_kind(value: Any) -> str:
    return "TEXT" if isinstance(value, str) else "ITEMS"


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


class ResponsesBody(Sampled):
    """The body of /v1/responses."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        **NEUTRAL,
        "reasoning": ({}, {"summary": "auto"}),
        "stream_options": ({}, {"include_obfuscation": False}),
    }

    input: Annotated[
        Annotated[str, Tag("TEXT")] | Annotated[list[_AnyItem], Field(fail_fast=True, min_length=1), Tag("ITEMS")],
        Discriminator(_input_kind),
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
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: Flag = True
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
        Field(default_factory=list, description=f'a list of "{LOGPROBS}" and "{ENCRYPTED}" at most'),
    ]
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS.high, description=str(TOP_LOGPROBS))] = 0
    metadata: Annotated[dict[str, Any], Field(default_factory=dict, description="an object")]

    @classmethod
    def _refuse_unless_neutral(cls, name: str, value: Any) -> None:
        if name in STORED and value is not False:
            wanted = "it left out: this server keeps no answers, so `input` has the whole conversation"
            raise refusal(name, wanted, shown(value), "unsupported_parameter")
        super()._refuse_unless_neutral(name, value)

    def as_chat(self) -> ChatBody:
        """The same as a body of /v1/chat/completions."""
        same = {name: getattr(self, name) for name in Sampled.model_fields}
        form = self.text.format if self.text else None
        if form is not None and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return ChatBody.model_construct(
            **same,
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            response_format=form,
            tools=[{"type": tool.pop("type"), "function": tool} for tool in tools],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            top_logprobs=self.top_logprobs,
            logprobs=LOGPROBS in self.include or self.top_logprobs > 0,
        )

    def repeated(self) -> dict[str, Any]:
        """What the answer repeats."""
        names = (
            "instructions",
            "max_output_tokens",
            "metadata",
            "parallel_tool_calls",
            "temperature",
            "tool_choice",
            "top_logprobs",
            "top_p",
        )
        same = {name: getattr(self, name) for name in names}
        form = self.text.format if self.text and self.text.format else {"type": "text"}
        return same | {
            "text": {"format": form},
            "tools": [tool.model_dump() for tool in self.tools],
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
        }

    def _messages(self) -> list[Message]:
        told: list[dict[str, Any]] = []
        if self.instructions is not None:
            told.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [Message(**each) for each in (*told, {"role": "user", "content": self.input})]
        for item in self.input:
            last = told[-1] if told else {}
            if isinstance(item, _ReasoningItem):
                told.append({"role": "assistant", "content": "", "reasoning_content": item.content})
            elif isinstance(item, _CallItem):
                if last.get("role") != "assistant":
                    told.append({"role": "assistant", "content": ""})
                called = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": called}
                told[-1].setdefault("tool_calls", []).append(call)
            elif isinstance(item, _OutputItem):
                told.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            elif (
                item.role == "assistant"
                and "reasoning_content" in last
                and not (last["content"] or "tool_calls" in last)
            ):
                last["content"] = item.content  # the text of the reasoning
            else:
                told.append({"role": item.role, "content": item.content})
        return [Message(**each) for each in told]
