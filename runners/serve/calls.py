"""What a client asks for: the engine's requests that a body stands for."""

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ling3export.errors import ArtifactError, RequestError
from ling3export.runners.engine.request import SEEDS, Request, Sampling
from ling3export.runners.serve.schema import ApiError, Body, ChatBody, CompletionsBody, checked, refusal

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine, Prompt

MAX_TOKENS = 16  # of /v1/completions if a body does not say, like OpenAI's API


@dataclass(frozen=True)
class Call:
    """A call, checked.

    Attributes:
        requests: One request for each prompt.
        chat: Whether messages were sent.
        stream: Whether the answer goes out piece by piece.
        include_usage: Whether a stream ends with the numbers of tokens.
        token_ids: Whether the answer has the tokens' ids, too.
    """

    requests: list[Request]
    chat: bool
    stream: bool
    include_usage: bool
    token_ids: bool


def completions(body: dict[str, Any], engine: "Engine", model: str, most: int) -> Call:
    """A call of /v1/completions.

    Args:
        body: The object that was sent.
        engine: The engine that is to answer.
        model: The name that the model is served under.
        most: Number of prompts that one call may have.

    Raises:
        ApiError: The call can never be served.
        QueueFull: The engine has no room for the call now.
    """
    _check_lengths(body.get("prompt"), most, engine.limits.context)
    asked = checked(CompletionsBody, body, model)
    prompts = asked.prompts
    if isinstance(prompts[0], str) and not engine.files.there:
        raise refusal("prompt", "token ids", "text: this model has no tokenizer", "no_tokenizer")
    return _call(asked, engine, prompts, chat=False)


def chat(body: dict[str, Any], engine: "Engine", model: str) -> Call:
    """A call of /v1/chat/completions; the arguments are those of ``completions``.

    Raises:
        ApiError: The call can never be served.
        QueueFull: The engine has no room for the call now.
    """
    messages, context = body.get("messages"), engine.limits.context
    if isinstance(messages, list) and len(messages) > context:
        raise refusal("messages", f"at most {context} messages", str(len(messages)))
    asked = checked(ChatBody, body, model)
    if not engine.files.there or not engine.files.chats:
        raise refusal("messages", "a model with a chat template", "none: use /v1/completions", "no_chat_template")
    conversation = [message.model_dump(exclude_none=True) for message in asked.messages]
    return _call(asked, engine, [conversation], chat=True)


def _call(asked: Body, engine: "Engine", prompts: "list[Prompt]", *, chat: bool) -> Call:
    if asked.stop and not engine.files.there:
        raise refusal("stop", "none", "some: this model has no tokenizer", "no_tokenizer")
    engine.check_room(len(prompts))  # before the work of rendering and tokenizing them
    limit = asked.max_tokens or asked.max_completion_tokens
    name = "messages" if chat else "prompt"
    requests = []
    for number, prompt in enumerate(prompts):
        called = name if len(prompts) == 1 else f"{name} {number}"
        seed = secrets.randbelow(SEEDS) if asked.seed is None else asked.seed
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, seed)
        try:
            request = engine.request(
                prompt, limit or MAX_TOKENS, sampling, asked.stop, ignore_eos=asked.ignore_eos, name=called,
                cache_salt=asked.cache_salt,
            )  # fmt: skip
            if limit is None and chat:
                request = replace(request, max_tokens=max(1, _room(engine, len(request.prompt_ids))))
            engine.check(request)
        except (RequestError, ArtifactError) as error:  # the latter if the chat template breaks on these messages
            raise ApiError(400, str(error), param=name, code="invalid_value") from None
        requests.append(request)
    usage = asked.stream_options is not None and asked.stream_options.include_usage
    return Call(requests, chat, asked.stream, usage, asked.return_token_ids or not engine.files.there)


def _check_lengths(prompt: object, most: int, context: int) -> None:
    """Refuses lists that can never fit before anybody looks at all that is in them."""
    if not isinstance(prompt, list) or not prompt:
        return
    lists = [prompt] if type(prompt[0]) is int else prompt
    if len(lists) > most:
        raise refusal("prompt", f"at most {most} prompts", str(len(lists)))
    longest = max(len(ids) for ids in lists if isinstance(ids, list)) if isinstance(lists[0], list) else 0
    if longest > context:
        raise refusal("prompt", f"at most {context} token ids", str(longest))


def _room(engine: "Engine", length: int) -> int:
    """The most tokens that the answer to a prompt of ``length`` tokens may have."""
    limits = engine.limits
    return min(limits.context, limits.pages * limits.page_size + 1) - length  # the last token is never fed back
