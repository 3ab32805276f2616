"""/v1/chat/completions: what a body asks of the engine, and the messages of a conversation."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ling3export.foundation.errors import shown
from ling3export.runners.serve.completions import GenerationCall, check_choices, generation, refusing
from ling3export.runners.serve.schema import (
    CHOICES,
    TOOL_CHOICE,
    Flag,
    GenerationBody,
    ListedObject,
    TemplateBody,
    TopLogprobs,
    refusal,
    text_of_parts,
    validated,
)
from ling3export.runners.serve.structure import tools
from ling3export.runners.text.answer import AnswerFormat

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine


class ChatMessage(ListedObject):
    """A message of a conversation, its content joined from its parts. One with calls or a thought needs no content."""

    role: str
    content: Annotated[str, BeforeValidator(text_of_parts)]
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _spoken(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if (thought := value.pop("reasoning", None)) is not None and value.get("reasoning_content") is None:
            value["reasoning_content"] = thought
        if isinstance(value.get("annotations"), list):  # clients send answers back as they got them
            del value["annotations"]
        if value.get("content") is None and (value.get("tool_calls") or value.get("reasoning_content")):
            value["content"] = ""
        return value

    @field_validator("role")
    @classmethod
    def _developer(cls, role: str) -> str:
        return "system" if role == "developer" else role


Messages = Annotated[
    list[ChatMessage],
    Field(fail_fast=True, min_length=1, description='a list of messages, [{"role": TEXT, "content": TEXT}, ...]'),
]


class ChatBody(GenerationBody, TemplateBody):
    """The body of /v1/chat/completions, into which those of other protocols are translated."""

    prompt_name: ClassVar[str] = "messages"

    logprobs: Flag = False
    top_logprobs: TopLogprobs = 0
    tools: Annotated[
        list[dict[str, Any]],
        Field(default_factory=list, max_length=CHOICES, description=f"a list of at most {CHOICES} functions"),
    ]
    tool_choice: Annotated[str | dict[str, Any], Field(description=TOOL_CHOICE)] = "auto"
    parallel_tool_calls: Flag = True
    messages: Messages

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def chat(
    body: dict[str, Any], engine: "Engine", model: str, most: int = CHOICES, default: int | None = None
) -> GenerationCall:
    """A call of /v1/chat/completions.

    Args:
        model: The name that the model is served under.
        most: Maximum number of answers of one call.
        default: Tokens that an answer may have where the body does not say; None for what the context leaves.

    Raises:
        ApiError: The call can never be served.
        QueueFull: The engine has no room for the call now.
    """
    check_messages(body, "messages", engine)
    request, files = validated(ChatBody, body, model), engine.files
    if request.top_logprobs and not request.logprobs:
        raise refusal("top_logprobs", "it with `logprobs` only", str(request.top_logprobs))
    if not files.exist or not files.chats:
        raise refusal("messages", "a model with a chat template", "none: use /v1/completions", "no_chat_template")
    check_choices(request, engine, request.n, most)
    offered = tools(request, files.template_text)
    with refusing("messages"):
        text = files.render_chat(conversation(request.messages), tools=offered.offered, **request.template_options)
    begun = request.continue_final_message
    format = AnswerFormat.of(files.template_text, text, offered.functions, offered.reader, begun=begun)
    within = format is not None and format.within
    ends = () if request.ignore_eos else files.spelled_ends
    call = generation(
        request, engine, [text], request.limit, default=default, tools=offered, within=within, special=False, ends=ends
    )
    return replace(call, format=format)


def check_messages(body: dict[str, Any], name: str, engine: "Engine") -> None:
    """Refuses more messages than tokens fit, before anybody looks at them."""
    messages, context = body.get(name), engine.limits.context
    if isinstance(messages, list) and len(messages) > context:
        raise refusal(name, f"at most {context} messages", str(len(messages)))


def conversation(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: arguments of calls are objects, which OpenAI's API writes as text.

    Raises:
        ApiError: A call has no function with a name, or arguments that are no object.
    """
    dumped = [message.model_dump(exclude_none=True) for message in messages]
    for call in (call for message in dumped for call in message.get("tool_calls", ())):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refusal(
                "messages", 'calls of functions, {"function": {"name": NAME, "arguments": TEXT}}', "another call"
            )
        written = function.get("arguments") or {}
        try:
            arguments = json.loads(written) if isinstance(written, str) else written
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            wanted = f"an earlier call of {shown(function['name'])} with a JSON object as its arguments"
            raise refusal("messages", wanted, shown(written))
        function["arguments"] = arguments
    return dumped
