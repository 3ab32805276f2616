"""/v1/completions and /v1/chat/completions: what a body asks of the engine. Other protocols become chats."""

import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.engine.validation import BOUNDS, SEEDS, TOP_LOGPROBS
from ling3export.runners.serve.schema import (
    CHOICES,
    COUNT,
    MOST,
    TOOL_CHOICE,
    ApiError,
    Flag,
    GenerationBody,
    Ids,
    ListedObject,
    TemplateBody,
    TopLogprobs,
    refusal,
    shown,
    text_of_parts,
    validated,
)
from ling3export.runners.serve.structure import NO_TOOLS, Tools, grammar_field, tools
from ling3export.runners.text.answer import THOUGHT, AnswerFormat
from ling3export.runners.text.grammar import grammar_of

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine, Prompt
    from ling3export.runners.text.vocabulary import Tokenizer

# Fields of a body that a request and its sampling have by the same names.
REQUESTED = (
    "ignore_eos cache_salt stop_token_ids include_stop_str_in_output skip_special_tokens min_tokens priority".split()
)
SAMPLED = "logit_bias", *(BOUNDS.keys() - {"seed"})
MAX_TOKENS = 16  # of /v1/completions if a body does not say, like OpenAI's API


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "TEXT"
    first = value[0] if isinstance(value, list) and value else None
    return "IDS" if type(first) is int else "IDS_LISTS" if isinstance(first, list) else "TEXTS"


class CompletionsBody(GenerationBody):
    """The body of /v1/completions."""

    prompt_name: ClassVar[str] = "prompt"

    max_tokens: Annotated[int | None, Field(ge=0, le=MOST, description=COUNT)] = None
    echo: Flag = False
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=TOP_LOGPROBS.high, description=str(TOP_LOGPROBS)),
        BeforeValidator(lambda value: None if value is False else value),
    ] = None
    prompt: Annotated[
        Annotated[str, Tag("TEXT")]
        | Annotated[list[str], Field(fail_fast=True, min_length=1), Tag("TEXTS")]
        | Annotated[Ids, Tag("IDS")]
        | Annotated[list[Ids], Field(fail_fast=True), Tag("IDS_LISTS")],
        Discriminator(_kind),
        Field(description="a text, a list of texts, a list of token ids or a list of lists of token ids"),
    ]

    @property
    def prompts(self) -> "list[Prompt]":
        """The prompts, each a text or a list of token ids."""
        one = _kind(self.prompt) in ("TEXT", "IDS")
        return cast("list[Prompt]", [self.prompt] if one else self.prompt)

    @property
    def top(self) -> int | None:
        return self.logprobs


@dataclass(frozen=True)
class GenerationCall:
    """A call that generates, checked."""

    body: GenerationBody
    requests: list[Request]  # ``body.n`` for each prompt, if something is to be generated; then those that score
    prompts: tuple[tuple[int, ...], ...]  # token ids
    tokenizer: "Tokenizer | None" = None
    echo: tuple[str, ...] | None = None  # the text of each prompt, to stand before its choices, if it is requested
    scores: int = 0  # number of requests that score a prompt's tokens
    format: AnswerFormat | None = None  # marks of thoughts and calls in an answer's text; None where all is content
    outer: Any = None  # the body in another protocol, from which ``body`` was translated


def completions(
    body: dict[str, Any], engine: "Engine", model: str, most: int, default: int | None = None
) -> GenerationCall:
    """A call of /v1/completions.

    Raises:
        ApiError: The call can never be served.
        QueueFull: The engine has no room for the call now.
    """
    _check_lengths(body.get("prompt"), most, engine.limits.context)
    request = validated(CompletionsBody, body, model)
    prompts = request.prompts
    if isinstance(prompts[0], str) and not engine.files.exist:
        raise refusal("prompt", "token ids", "text: this model has no tokenizer", "no_tokenizer")
    scores = len(prompts) if request.echo and request.logprobs is not None else 0
    answers = 0 if request.max_tokens == 0 else len(prompts) * request.n
    check_choices(request, engine, answers + scores, most)
    call = generation(request, engine, prompts, MAX_TOKENS if request.limit is None else request.limit)
    return _echoed(call, request, engine) if request.echo else call


def _echoed(call: GenerationCall, body: CompletionsBody, engine: "Engine") -> GenerationCall:
    tokenizer = engine.files.tokenizer("echo")
    texts = (prompt if isinstance(prompt, str) else tokenizer.decode(list(prompt)) for prompt in body.prompts)  # type: ignore[arg-type]
    call = replace(call, echo=tuple(texts))
    if body.stream and body.max_tokens == 0:
        raise refusal("stream", "a whole answer where `max_tokens` is 0", "a stream")
    if body.logprobs is None:
        return call
    if body.stream or body.logprobs > 1:
        cause = "a stream" if body.stream else f"{body.logprobs} log-probabilities"
        raise refusal("echo", "a whole answer and at most 1 log-probability with `logprobs`", cause)
    # A prompt's first token has no log-probability.
    scores = [Request(ids, 0, name="prompt", score_from=1) for ids in call.prompts if len(ids) > 1]
    with refusing("echo"):
        for request in scores:
            engine.check(request)
    return replace(call, requests=[*call.requests, *scores], scores=len(scores))


def may_have_grammar(body: dict[str, Any]) -> bool:
    """Whether a body of any endpoint may say what its answer has to be."""
    forms = any(body.get(name) for name in ("response_format", "text", "structured_outputs"))
    return forms or body.get("tool_choice") not in (None, "auto", "none")


@contextmanager
def refusing(param: str) -> Iterator[None]:
    """Refuses the call where the block cannot serve it; an ArtifactError says what the artifact lacks."""
    try:
        yield
    except (RequestError, ArtifactError) as error:
        text = str(error)
        text = text if param in text else f"`{param}`: {text}"
        raise ApiError(400, text, param=param, code="invalid_value") from None


def check_choices(body: GenerationBody, engine: "Engine", count: int, most: int) -> None:
    """Refuses a call of ``count`` answers before any text of it is looked at.

    Raises:
        ApiError: There may be ``most`` at once; or stop strings, log-probabilities and an echo need a tokenizer.
        QueueFull: The engine has no room for them now.
    """
    needing = {"stop": body.stop, "logprobs": body.top is not None, "echo": getattr(body, "echo", False)}
    for name, asks in needing.items():
        if asks and not engine.files.exist:
            raise refusal(name, "it left out", "it requested: this model has no tokenizer", "no_tokenizer")
    if count > most:
        raise refusal("n", f"at most {most} answers", str(count))
    engine.check_room(count)


def generation(
    body: GenerationBody,
    engine: "Engine",
    prompts: "Sequence[Prompt]",
    limit: int | None,
    *,
    default: int | None = None,
    tools: Tools = NO_TOOLS,
    within: bool = False,
    special: bool = True,
    ends: tuple[str, ...] = (),
) -> GenerationCall:
    """The requests of a call whose body has been checked.

    Args:
        limit: Maximum number of tokens of an answer; None where the body does not say.
        default: The maximum then; None for what the context leaves.
        within: Whether the answer begins within a thought, after which a grammar begins.
        special: Whether texts begin with the special tokens that the tokenizer adds.
        ends: Stop strings in addition to the body's.

    Raises:
        ApiError: The call can never be served.
    """
    name = body.prompt_name
    field, grammars = "tools", tools.grammars(within)
    if (form := grammar_field(body)) is not None:
        field, grammar = form
        if grammars:
            wanted = f'"auto" or "none" with `{field}`'
            raise refusal("tool_choice", wanted, shown(getattr(body, "tool_choice", None)))
        grammars = [grammar._replace(behind=THOUGHT if within else "")]
    with refusing(field):
        for grammar in grammars:
            engine.files.grammars(engine.limits.vocab_size).check(grammar_of(grammar, field), field)
    with refusing("logit_bias"):
        samplings = [_sampling(body, choice) for choice in range(body.n)]
    fields: dict[str, Any] = {name: getattr(body, name) for name in REQUESTED}
    fields |= {"stop": (*body.stop, *ends), "logprobs": body.top, "grammar": grammars[0] if grammars else None}
    requests: list[Request] = []
    encoded: list[tuple[int, ...]] = []
    for number, prompt in enumerate(prompts):
        called = name if len(prompts) == 1 else f"{name} {number}"
        with refusing(name):
            ids = engine.prompt_ids(prompt, called, special=special)
            encoded.append(ids)
            if limit == 0:  # only an echo
                engine.limits.check(Request(ids, 0, name=called, score_from=1) if ids[1:] else Request(ids, 1))
                continue
            left = max(1, engine.limits.room(len(ids)))
            room = limit or min(left, default or left)
            if body.min_tokens > room:
                raise refusal("min_tokens", f"at most {room}, as the answer may have", str(body.min_tokens))
            first = Request(ids, room, samplings[0], name=called, **fields)
            engine.check(first)
        choices = [first, *map(first.sampled, samplings[1:])]
        if body.kv_transfer_params is not None and not requests:  # they are of one state
            with refusing("kv_transfer_params"):
                choices[0] = replace(first, kv_transfer_params=body.kv_transfer_params)
                engine.check_transfer(choices[0])
        requests += choices
    tokenizer = engine.files.tokenizer("text out") if engine.files.exist else None
    return GenerationCall(body, requests, tuple(encoded), tokenizer)


def _sampling(body: GenerationBody, choice: int) -> Sampling:
    settings = {name: getattr(body, name) for name in SAMPLED}
    return Sampling(seed=secrets.randbelow(SEEDS) if body.seed is None else seed_of(body.seed, choice), **settings)


def seed_of(seed: int, choice: int = 0) -> int:
    """The program's seed for one of a client's, of up to 64 bits: itself if it is one, else the first 32 bits of the
    sha256 of its decimal digits. Choices after the first have ``SEED/CHOICE`` in the place of the digits.
    """
    if not choice and 0 <= seed < SEEDS:
        return seed
    text = f"{seed}/{choice}" if choice else str(seed)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


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
        message = "`messages`: this model has no chat template: use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
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
