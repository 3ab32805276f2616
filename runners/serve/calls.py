"""What a client asks for: the engine's requests that a body stands for."""

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.engine.validation import SEEDS
from ling3export.runners.serve import structure
from ling3export.runners.serve.items import ResponsesBody
from ling3export.runners.serve.schema import (
    CHOICES,
    ApiError,
    Body,
    ChatBody,
    CompletionsBody,
    DetokenizeBody,
    TokenizeBody,
    checked,
    refusal,
    shown,
    validated,
)
from ling3export.runners.serve.structure import Format
from ling3export.runners.text.grammar import grammar_of

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine, Prompt
    from ling3export.runners.text.tokenizer import Tokenizer

GRAMMARS = ("response_format", "text", "tools", *structure.GUIDES)  # fields that may say what an answer has to be
MAX_TOKENS = 16  # of /v1/completions if a body does not say, like OpenAI's API


@dataclass(frozen=True)
class Call:
    """A call, checked.

    Attributes:
        requests: ``n`` requests for each prompt, in order, unless nothing is to be generated; then those that score.
        chat: Whether messages were sent.
        stream: Whether the answer goes out piece by piece.
        include_usage: Whether a stream ends with the numbers of tokens.
        token_ids: Whether the answer has the tokens' ids, too.
        n: Choices of each prompt.
        continuous_usage: Whether every chunk of a stream has the numbers of tokens so far.
        prompts: Token ids of each prompt.
        echo: The text of each prompt, to stand before its choices; None where it is not asked for.
        scores: How many of the requests score a prompt's tokens, where they are asked for.
        tokenizer: Says what text tokens stand for; None where the artifact has none.
        top: How many of the most likely tokens are asked for in the place of each; None where no log-probabilities are.
        format: What of an answer's text is a thought or the call of a tool; None where all of it is content.
        repeated: What an answer of /v1/responses repeats of its body; None for the other endpoints.
    """

    requests: list[Request]
    chat: bool
    stream: bool
    include_usage: bool
    token_ids: bool
    n: int = 1
    continuous_usage: bool = False
    prompts: tuple[tuple[int, ...], ...] = ()
    echo: tuple[str, ...] | None = None
    scores: int = 0
    tokenizer: "Tokenizer | None" = None
    top: int | None = None
    format: Format | None = None
    repeated: dict[str, Any] | None = None


class Names(NamedTuple):
    """What messages call the fields of an endpoint."""

    prompt: str
    form: str = "response_format"


def may_have_grammar(body: dict[str, Any]) -> bool:
    """Whether a body of any endpoint may say what its answer has to be."""
    return any(body.get(name) for name in GRAMMARS)


def completions(body: dict[str, Any], engine: "Engine", model: str, most: int) -> Call:
    """A call of /v1/completions.

    Args:
        body: The object that was sent.
        engine: The engine that is to answer.
        model: The name that the model is served under.
        most: Number of answers that one call may have.

    Raises:
        ApiError: The call can never be served.
        QueueFull: The engine has no room for the call now.
    """
    _check_lengths(body.get("prompt"), most, engine.limits.context)
    asked = checked(CompletionsBody, body, model)
    prompts = asked.prompts
    if isinstance(prompts[0], str) and not engine.files.there:
        raise refusal("prompt", "token ids", "text: this model has no tokenizer", "no_tokenizer")
    call = _call(asked, engine, prompts, most, Names("prompt"), logprobs=asked.logprobs)
    if not asked.echo:
        return call
    tokenizer = engine.files.tokenizer("echo")
    texts = (prompt if isinstance(prompt, str) else tokenizer.decode(list(prompt)) for prompt in prompts)  # type: ignore[arg-type]
    call = replace(call, echo=tuple(texts), requests=[] if asked.max_tokens == 0 else call.requests)
    if asked.stream and asked.max_tokens == 0:
        raise refusal("stream", "a whole answer where `max_tokens` is 0", "a stream")
    if asked.logprobs is None:
        return call
    if asked.stream or asked.logprobs > 1:
        found = "a stream" if asked.stream else f"{asked.logprobs} log-probabilities"
        raise refusal("echo", "a whole answer and at most 1 log-probability with `logprobs`", found)
    # Nothing is known of a prompt's first token.
    scores = [Request(ids, 0, name="prompt", score_from=1) for ids in call.prompts if len(ids) > 1]
    with _refusing("echo"):
        for request in scores:
            engine.check(request)
    if scores and asked.logprobs and not engine.scores_best:
        wanted = "score programs that say how likely the best token is, with `logprobs` of 1"
        raise refusal("echo", wanted, "those of an older artifact: build it again")
    return replace(call, requests=[*call.requests, *scores], scores=len(scores))


def chat(body: dict[str, Any], engine: "Engine", model: str, most: int = CHOICES) -> Call:
    """A call of /v1/chat/completions; the arguments are those of ``completions``.

    Raises:
        ApiError: The call can never be served.
        QueueFull: The engine has no room for the call now.
    """
    _check_messages(body, "messages", engine)
    return _chat(checked(ChatBody, body, model), engine, most, Names("messages"))


def responses(body: dict[str, Any], engine: "Engine", model: str, most: int = CHOICES) -> Call:
    """A call of /v1/responses, which is a chat in other words; the arguments are those of ``completions``.

    Raises:
        ApiError: The call can never be served.
        QueueFull: The engine has no room for the call now.
    """
    _check_messages(body, "input", engine)
    asked = validated(ResponsesBody, body, model)
    return replace(_chat(asked.as_chat(), engine, most, Names("input", "text")), repeated=asked.repeated())


def _check_messages(body: dict[str, Any], name: str, engine: "Engine") -> None:
    messages, context = body.get(name), engine.limits.context
    if isinstance(messages, list) and len(messages) > context:
        raise refusal(name, f"at most {context} messages", str(len(messages)))


def _chat(asked: ChatBody, engine: "Engine", most: int, names: Names) -> Call:
    if not engine.files.there or not engine.files.chats:
        raise refusal(names.prompt, "a model with a chat template", "none: use /v1/completions", "no_chat_template")
    if asked.top_logprobs and not asked.logprobs:
        raise refusal("top_logprobs", "it with `logprobs` only", str(asked.top_logprobs))
    logprobs = asked.top_logprobs if asked.logprobs else None
    engine.check_room(asked.n)
    tools = structure.tools(asked, engine.files.template_text)
    conversation = [structure.spoken(message.model_dump(exclude_none=True)) for message in asked.messages]
    with _refusing(names.prompt):
        text = engine.files.render_chat(conversation, tools=tools.offered, name=names.prompt)
    call = _call(asked, engine, [text], most, names, logprobs=logprobs, chat=True, grammar=tools.grammar)
    return replace(call, format=Format.of(engine.files.template_text, text, tools))


def tokenize(body: dict[str, Any], engine: "Engine", model: str) -> dict[str, Any]:
    """The answer of /tokenize: the tokens of a text, or of messages as the chat template writes them.

    Raises:
        ApiError: The body is malformed, or the model has no tokenizer or chat template.
    """
    asked = validated(TokenizeBody, {"model": model, **body}, model)
    if (asked.prompt is None) == (asked.messages is None):
        raise refusal("prompt", "it or `messages`", "both" if asked.messages is not None else "none")
    name = "messages" if asked.prompt is None else "prompt"
    with _refusing(name):
        if asked.prompt is None:
            conversation = [structure.spoken(message.model_dump(exclude_none=True)) for message in asked.messages or ()]
            text = engine.files.render_chat(conversation, add_generation_prompt=asked.add_generation_prompt, name=name)
            special = False
        else:
            text, special = asked.prompt, asked.add_special_tokens
        ids = engine.request(text, 1, name=name, special=special).prompt_ids if text else ()
    return {"tokens": list(ids), "count": len(ids), "max_model_len": engine.limits.context}


def detokenize(body: dict[str, Any], engine: "Engine", model: str) -> dict[str, Any]:
    """The answer of /detokenize: the text of tokens, without special ones.

    Raises:
        ApiError: The body is malformed, or the model has no tokenizer.
    """
    asked = validated(DetokenizeBody, {"model": model, **body}, model)
    most = engine.limits.vocab_size
    if wrong := [id for id in asked.tokens if not 0 <= id < most]:
        raise refusal("tokens", f"token ids from 0 to {most - 1}", shown(wrong[0]))
    with _refusing("tokens"):
        return {"prompt": engine.files.tokenizer("tokens").decode(asked.tokens)}


def tokenizer_info(engine: "Engine") -> dict[str, Any]:
    """The answer of /tokenizer_info: the names of special tokens, and the chat template, as vLLM's servers say them.

    Raises:
        ApiError: The model has no tokenizer.
    """
    if not engine.files.there:
        raise ApiError(404, "tokenizer: expected one, found none: this model takes token ids", code="no_tokenizer")
    return {"eos_token": None, **engine.files.named_tokens, "chat_template": engine.files.template_text or None}


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Refuses the call where the block cannot serve it; an ArtifactError says what the artifact lacks."""
    try:
        yield
    except (RequestError, ArtifactError) as error:
        text = str(error)
        raise ApiError(
            400, text if param in text else f"`{param}`: {text}", param=param, code="invalid_value"
        ) from None


def _call(
    asked: Body,
    engine: "Engine",
    prompts: "list[Prompt]",
    most: int,
    names: Names,
    *,
    logprobs: int | None,
    chat: bool = False,
    grammar: structure.Grammar | None = None,
) -> Call:
    if asked.stop and not engine.files.there:
        raise refusal("stop", "none", "some: this model has no tokenizer", "no_tokenizer")
    if len(prompts) * asked.n > most:
        raise refusal("n", f"at most {most} answers", str(len(prompts) * asked.n))
    engine.check_room(len(prompts) * asked.n)  # before the work of tokenizing them
    limit = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
    name = names.prompt
    formed = structure.grammar(asked, names.form)
    grammar = formed or grammar
    if grammar is not None:
        field = structure.field_of(asked, names.form) if formed else "tools"
        with _refusing(field):
            engine.files.grammars(engine.limits.vocab_size).check(grammar_of(grammar, field), field)
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        called = name if len(prompts) == 1 else f"{name} {number}"
        with _refusing(name):
            first = engine.request(
                prompt,
                limit or MAX_TOKENS,
                None,
                asked.stop,
                ignore_eos=asked.ignore_eos,
                name=called,
                cache_salt=asked.cache_salt,
                special=not chat,
                logprobs=logprobs,
                grammar=grammar,
            )
            if limit is None and chat:
                first = replace(first, max_tokens=max(1, _room(engine, len(first.prompt_ids))))
        with _refusing("logit_bias"):
            same = [replace(first, sampling=_sampling(asked, choice)) for choice in range(asked.n)]
        if asked.kv_transfer_params is not None and not requests:  # one state, so of the first alone
            with _refusing("kv_transfer_params"):
                same[0] = replace(same[0], kv_transfer_params=asked.kv_transfer_params)
                engine.check(same[0])
        with _refusing(name):
            engine.check(same[0])
        requests += same
    options = asked.stream_options
    return Call(
        requests,
        chat,
        asked.stream,
        options is not None and options.include_usage,
        asked.return_token_ids or not engine.files.there,
        asked.n,
        options is not None and options.continuous_usage_stats,
        tuple(request.prompt_ids for request in requests[:: asked.n]),
        tokenizer=None if logprobs is None and not engine.files.there else engine.files.tokenizer("logprobs"),
        top=logprobs,
    )


def _sampling(asked: Body, choice: int) -> Sampling:
    seed = secrets.randbelow(SEEDS) if asked.seed is None else seed_of(asked.seed, choice)
    return Sampling(
        asked.temperature,
        asked.top_k,
        asked.top_p,
        seed,
        asked.presence_penalty,
        asked.frequency_penalty,
        asked.repetition_penalty,
        tuple(asked.logit_bias),
    )


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


def _room(engine: "Engine", length: int) -> int:
    """The most tokens that the answer to a prompt of ``length`` tokens may have."""
    limits = engine.limits
    return min(limits.context, limits.pages * limits.page_size + 1) - length  # the last token is never fed back
