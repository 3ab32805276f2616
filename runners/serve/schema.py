"""What a client asks for: a call's body, checked whole, as requests of the engine."""

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ling3export.errors import ArtifactError, RequestError
from ling3export.runners.engine.request import SEEDS, Request, Sampling
from ling3export.runners.serve.errors import ApiError, malformed
from ling3export.runners.serve.fields import Fields, found

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine, Prompt

MAX_TOKENS = 16  # of /v1/completions where none are asked for, as OpenAI's API has it
STOPS, STOP_LENGTH = 16, 1000
COMMON = frozenset(
    "model max_tokens max_completion_tokens temperature top_p top_k seed stop stream stream_options "
    "return_token_ids ignore_eos".split()
)
PROMPT = "a text, a list of texts, a list of token ids or a list of lists of token ids"
MESSAGES = 'a list of messages, [{"role": TEXT, "content": TEXT}, ...]'


@dataclass(frozen=True)
class Call:
    """A call, checked.

    Attributes:
        requests: One a prompt.
        chat: Whether messages were sent.
        stream: Answer piece by piece.
        include_usage: End a stream with the counts of tokens.
        token_ids: Also give the ids of the tokens.
    """

    requests: list[Request]
    chat: bool
    stream: bool
    include_usage: bool
    token_ids: bool


def completions(body: dict[str, Any], engine: "Engine", model: str, most: int) -> Call:
    """A call of /v1/completions.

    Args:
        body: As it was sent.
        engine: Which is to answer.
        model: Name that it is served under.
        most: Prompts that one call may have.

    Raises:
        ApiError: It can never be served.
    """
    fields = Fields(body, COMMON | {"prompt"})
    _check_model(fields, model)
    prompts = _prompts(fields.get("prompt"), most)
    if any(isinstance(prompt, str) for prompt in prompts) and not engine.files.there:
        raise ApiError(
            400, "`prompt`: expected token ids, found text: this model has no tokenizer", param="prompt",
            code="no_tokenizer",
        )  # fmt: skip
    return _call(fields, engine, prompts, chat=False)


def chat(body: dict[str, Any], engine: "Engine", model: str) -> Call:
    """A call of /v1/chat/completions.

    Raises:
        ApiError: It can never be served.
    """
    fields = Fields(body, COMMON | {"messages"})
    _check_model(fields, model)
    if not engine.files.there or not engine.files.chats:
        raise ApiError(
            400, "`messages`: expected a model with a chat template, found none: use /v1/completions", param="messages",
            code="no_chat_template",
        )  # fmt: skip
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise malformed("messages", MESSAGES, "none" if messages is None else found(messages))
    return _call(fields, engine, [[_message(each, place) for place, each in enumerate(messages)]], chat=True)


def _call(fields: Fields, engine: "Engine", prompts: "list[Prompt]", *, chat: bool) -> Call:
    stream = fields.flag("stream")
    options = fields.get("stream_options")
    if options is not None and (not stream or not isinstance(options, dict)):
        raise malformed("stream_options", "it with `stream` only, and an object", found(options))
    usage = Fields(options or {}, frozenset({"include_usage", "include_obfuscation"})).flag("include_usage")
    stops = _stops(fields.get("stop"))
    if stops and not engine.files.there:
        raise ApiError(400, "`stop`: expected none, found some: this model has no tokenizer", param="stop",
                       code="no_tokenizer")  # fmt: skip
    limit, how = _max_tokens(fields), _sampling(fields)
    endless = fields.flag("ignore_eos")
    seed = None if fields.get("seed") is None else fields.sampling("seed", 0)
    requests = []
    name = "messages" if chat else "prompt"
    for number, prompt in enumerate(prompts):
        called = name if len(prompts) == 1 else f"{name} {number}"
        sampling = Sampling(*how, secrets.randbelow(SEEDS) if seed is None else seed)
        try:
            request = engine.request(prompt, limit or MAX_TOKENS, sampling, stops, ignore_eos=endless, name=called)
            if limit is None and chat:
                request = replace(request, max_tokens=max(1, _room(engine, len(request.prompt_ids))))
            engine.check(request)
        except (RequestError, ArtifactError) as error:  # the latter: the chat template broke on these messages
            raise ApiError(400, str(error), param=name, code="invalid_value") from None
        requests.append(request)
    ids = fields.flag("return_token_ids") or not engine.files.there
    return Call(requests, chat, stream, usage, ids)


def _room(engine: "Engine", length: int) -> int:
    """Tokens that an answer to a prompt of ``length`` may have at most."""
    limits = engine.limits
    return min(limits.context, limits.pages * limits.page_size + 1) - length  # the last token is never fed back


def _check_model(fields: Fields, model: str) -> None:
    name = fields.text("model")
    if name != model:
        raise ApiError(
            404, f"`model`: expected {found(model)}, found {found(name)}", param="model", code="model_not_found"
        )


def _prompts(value: Any, most: int) -> "list[Prompt]":
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise malformed("prompt", PROMPT, "none" if value is None else found(value))
    if not value:
        raise malformed("prompt", PROMPT, "an empty list")
    if _ids(value):
        return [value]
    for place, each in enumerate(value):
        if type(each) is not type(value[0]) or not (isinstance(each, str) or (isinstance(each, list) and _ids(each))):
            raise malformed("prompt", PROMPT, f"{found(each)} at place {place}")
    if len(value) > most:
        raise malformed("prompt", f"at most {most} prompts", str(len(value)))
    return value


def _ids(value: list[Any]) -> bool:
    return all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def _message(message: Any, place: int) -> dict[str, str]:
    """A message of texts; content in parts is joined, where all of them are text."""
    if not isinstance(message, dict):
        raise malformed("messages", MESSAGES, f"{found(message)} at place {place}")
    taken = {}
    for name, value in message.items():
        if name == "content" and isinstance(value, list):
            taken[name] = "".join(_part(part, place) for part in value)
        elif name in ("role", "content", "name") and isinstance(value, str):
            taken[name] = value
        elif value is not None:
            raise malformed("messages", MESSAGES, f"`{name[:60]}` {found(value)} at place {place}")
    for name in ("role", "content"):
        if name not in taken:
            raise malformed("messages", MESSAGES, f"no `{name}` at place {place}")
    return taken


def _part(part: Any, place: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise malformed("messages", "content of text alone", f"a part of type {found(kind)} at place {place}")


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    wanted = f"a text or a list of at most {STOPS} texts of 1 to {STOP_LENGTH} characters"
    if not isinstance(stops, list) or len(stops) > STOPS:
        raise malformed("stop", wanted, found(value))
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= STOP_LENGTH:
            raise malformed("stop", wanted, found(stop))
    return tuple(stops)


def _max_tokens(fields: Fields) -> int | None:
    names = ("max_tokens", "max_completion_tokens")
    given = [limit for limit in (fields.whole(name, 1, (1 << 31) - 1) for name in names) if limit is not None]
    if len(set(given)) > 1:
        raise malformed(names[0], f"the same as `{names[1]}`, {given[1]}", str(given[0]))
    return given[0] if given else None


def _sampling(fields: Fields) -> tuple[float, int, float]:
    """Temperature, top_k and top_p; without any, OpenAI's defaults: 1, all and 1."""
    temperature, top_p = fields.sampling("temperature", 1.0), fields.sampling("top_p", 1.0)
    return float(temperature), fields.sampling("top_k", 0), float(top_p)
