"""/v1/messages: Anthropic's protocol as a translation to a chat, and of a chat's answer into content blocks."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from ling3export.foundation.errors import shown
from ling3export.runners.engine.handle import RequestDelta
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.generation import GenerationCall, check_messages
from ling3export.runners.serve.schema import CHOICES, COUNT, MESSAGES, ApiError, refusal, validated
from ling3export.runners.serve.tokenize import tokenize
from ling3export.runners.serve.translation import Event, TranslatedAnswer, TranslatedBody
from ling3export.runners.text.answer import REASONING, TEXT, TOOL

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine

# A line of the system text that differs in each request: no prefix would be equal.
BILLING = "x-anthropic-billing-header"
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
CHOICE_KINDS = {"auto": "auto", "any": "required", "none": "none"}
# By the kind of a chat's part: the type of the content block and the name of its text, and the type of its deltas.
BLOCKS = {TEXT: ("text", "text_delta"), REASONING: ("thinking", "thinking_delta")}
# By the role of a message: the types of blocks that it may have.
ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
Settings = dict[str, Any]
Objects = list[Settings]


class MessagesBody(TranslatedBody):
    """The body of /v1/messages and of /v1/messages/count_tokens."""

    passed = frozenset({"max_tokens", "stream", "temperature", "top_p", "top_k"})
    labels = frozenset({"metadata", "service_tier", "context_management", "cache_control", "inference_geo"})
    renamed: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences", "response_format": "output_config", "reasoning_effort": "output_config",
        "parallel_tool_calls": "tool_choice",
    }  # fmt: skip

    messages: Annotated[Objects, Field(min_length=1, description='a list of messages, [{"role": TEXT, …}, …]')]
    system: Annotated[str | Objects, Field(description="a text or a list of text blocks")] = ""
    tools: Annotated[Objects, Field(default_factory=list, max_length=CHOICES, description="a list of tools")]
    tool_choice: Annotated[Settings, Field(default_factory=dict, description="an object with a type")]
    stop_sequences: Annotated[list[str], Field(default_factory=list, description="a list of texts")]
    thinking: Annotated[Settings, Field(default_factory=dict, description="an object with a type")]
    output_config: Annotated[Settings, Field(default_factory=dict, description="an object with an effort or a format")]

    @property
    def conversation(self) -> dict[str, Any]:
        """The fields of the same chat that its prompt depends on."""
        fields: dict[str, Any] = {"model": self.model, "messages": list(self._messages()), "tools": self._tools()}
        kind = self.thinking.get("type")
        if self.thinking and kind not in ("enabled", "adaptive", "disabled"):
            raise refusal("thinking", "a type of enabled, adaptive or disabled", shown(kind))
        if kind:
            fields["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
        return fields | {"reasoning_effort": self.output_config.get("effort")}

    @property
    def chat(self) -> dict[str, Any]:
        if "max_tokens" not in self.same:
            raise refusal("max_tokens", COUNT, "none")
        form = self.output_config.get("format")
        if form is not None and not (isinstance(form, dict) and form.get("type") == "json_schema"):
            raise refusal("output_config", "a format of type json_schema", shown(form))
        more: dict[str, Any] = {"stop": self.stop_sequences}
        if form is not None:
            more["response_format"] = {"type": "json_schema", "json_schema": form}
        return self.same | self.conversation | self._tool_choice() | more

    def _messages(self) -> Iterator[dict[str, Any]]:
        system = _text(self.system, "system", "system")
        system = "\n".join(line for line in system.split("\n") if not line.startswith(BILLING))
        if system:
            yield {"role": "system", "content": system}
        for place, message in enumerate(self.messages):
            role, content, where = message.get("role"), message.get("content"), f" at place {place}"
            if not isinstance(role, str) or role not in ROLES:
                raise refusal("messages", "a role of user or assistant", f"{shown(role)}{where}")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
                raise refusal("messages", "content that is a text or a list of blocks", f"{shown(content)}{where}")
            for block in blocks:
                if block.get("type") not in ROLES[role]:
                    wanted = f"blocks of type {', '.join(ROLES[role])} in a message of the {role}"
                    raise refusal("messages", wanted, f"{shown(block.get('type'))}{where}")
            yield from _assistant(blocks, where) if role == "assistant" else _user(role, blocks, where)

    def _tools(self) -> Objects:
        tools: Objects = []
        for place, tool in enumerate(self.tools):
            if tool.get("type", "custom") != "custom":
                raise refusal("tools", "tools with an input_schema", f"{shown(tool['type'])} at place {place}")
            function = {"name": tool.get("name"), "description": tool.get("description")}
            function = {name: value for name, value in function.items() if value is not None}
            parameters = tool.get("input_schema") or {"type": "object"}
            tools.append({"type": "function", "function": function | {"parameters": parameters}})
        return tools

    def _tool_choice(self) -> dict[str, Any]:
        kind = self.tool_choice.get("type", "auto")
        if kind == "tool":
            choice: Any = {"type": "function", "function": {"name": self.tool_choice.get("name")}}
        elif isinstance(kind, str) and kind in CHOICE_KINDS:
            choice = CHOICE_KINDS[kind]
        else:
            raise refusal("tool_choice", "a type of auto, any, tool or none", shown(kind))
        parallel = self.tool_choice.get("disable_parallel_tool_use", False)
        if not isinstance(parallel, bool):
            raise refusal("tool_choice", "true or false as `disable_parallel_tool_use`", shown(parallel))
        return {"tool_choice": choice, "parallel_tool_calls": not parallel}


def _assistant(blocks: Objects, where: str) -> Iterator[dict[str, Any]]:
    """The message of the assistant with these blocks; thoughts that only Anthropic's servers can read are left out."""
    message: dict[str, Any] = {"role": "assistant", "content": _text(_of(blocks, "text"), "messages", where)}
    thoughts = [block.get("thinking") for block in _of(blocks, "thinking")]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise refusal("messages", "a text as `thinking`", f"another{where}")
    if thoughts:
        message["reasoning_content"] = "".join(map(str, thoughts))
    for block in _of(blocks, "tool_use"):
        function = {"name": block.get("name"), "arguments": block.get("input")}
        message.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
    yield message


def _user(role: str, blocks: Objects, where: str) -> Iterator[dict[str, Any]]:
    for block in _of(blocks, "tool_result"):
        text, id = _text(block.get("content") or "", "messages", where), block.get("tool_use_id")
        if not isinstance(id, str):
            raise refusal("messages", "a `tool_use_id` in each tool_result", f"{shown(id)}{where}")
        yield {"role": "tool", "content": text, "tool_call_id": id}
    texts = _of(blocks, "text")
    if texts or not blocks:
        yield {"role": role, "content": _text(texts, "messages", where)}


def _of(blocks: Objects, kind: str) -> Objects:
    return [block for block in blocks if block["type"] == kind]


def _text(content: Any, name: str, where: str) -> str:
    """The text of a text or of text blocks; others are refused."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise refusal(name, "content of text alone", f"{shown(block)}{where if name != where else ''}")
        if not text.startswith(BILLING) or name != "system":
            texts.append(text)
    return ("\n" if name == "system" else "").join(texts)


def count_tokens(body: dict[str, Any], engine: "Engine", model: str) -> dict[str, Any]:
    """The answer of /v1/messages/count_tokens.

    Raises:
        ApiError: The body is malformed, or the model has no chat template.
    """
    check_messages(body, "messages", engine)
    request = validated(MessagesBody, body, model)
    with request.named():
        fields = request.conversation
        return {"input_tokens": tokenize({**fields, "tools": fields["tools"] or None}, engine, model)["count"]}


class MessagesAnswer(TranslatedAnswer):
    """The answer to one call of /v1/messages, whose content is a list of blocks."""

    def __init__(self, call: GenerationCall, model: str) -> None:
        super().__init__(call, model)
        self._message = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        *_, last = self.piece(0, RequestDelta.whole(completions[0]))
        return {**self._message, "content": self.blocks, **last["delta"], "usage": last["usage"]}

    def begin(self) -> list[Event]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return [{"type": "message_start", "message": {**self._message, **empty}}]

    def end(self) -> list[Event]:
        return [{"type": "message_stop"}]

    def failed(self, error: ApiError) -> Event:
        return error.body(MESSAGES)

    def grow(self, kind: str, delta: str) -> Iterator[Event]:
        name, delta_type = BLOCKS[kind]
        if self.kind is None:
            yield self._open(kind, {"type": name, name: ""} | ({"signature": ""} if kind == REASONING else {}))
        self.blocks[-1][name] += delta
        yield self._delta({"type": delta_type, name: delta})

    def tool_call(self, id: str, name: str, arguments: str) -> Iterator[Event]:
        yield self._open(TOOL, {"type": "tool_use", "id": id, "name": name, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        self.blocks[-1]["input"] = json.loads(arguments)
        yield from self.close()

    def close(self) -> Iterator[Event]:
        if self.kind is not None:
            self.kind = None
            yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def finish(self, completion: Completion, reason: str) -> Iterator[Event]:
        yield from self.close()
        stop = self._stop_sequence(completion) if reason == "stop" else None
        reason = REASONS.get(reason, "end_turn" if stop is None else "stop_sequence")
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage()}

    def _open(self, kind: str, block: dict[str, Any]) -> Event:
        self.kind = kind
        self.blocks.append(block)
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _stop_sequence(self, completion: Completion) -> str | None:
        if self._call.tokenizer is None:
            return None
        ending = self._call.tokenizer.decode(completion.token_ids)[len(completion.text or "") :]
        return next((stop for stop in self._call.outer.stop_sequences if ending.startswith(stop)), None)

    def _usage(self) -> dict[str, int]:
        usage = self._chat.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
