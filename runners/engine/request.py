"""Requests and their results. A request that can never be served is refused at once.

``Sampling`` and ``Request`` check and convert what they are made of, so that the same is refused wherever it enters:
Python, the command line, prompt files, HTTP, evaluations, other hosts. The fields have exact types.
"""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ling3export.foundation.errors import RequestError, shown
from ling3export.runners.engine.validation import (
    BOUNDS,
    MAX_TOKENS,
    NONE,
    PLACE,
    PRIORITY,
    TOP_LOGPROBS,
    NumberRange,
    biases,
    stop_strings,
    token_ids,
)
from ling3export.runners.text.grammar import Grammar, grammar_of

if TYPE_CHECKING:
    import numpy as np

BYTES_A_TOKEN = 1024  # more than any tokenizer writes in one, but for white space
SHORTEN = "shorten the prompt, or build the artifact with a larger --context"


@dataclass(frozen=True)
class Sampling:
    """How a token is taken from logits. The randomness comes from the seed and the token's position, nothing else.

    Attributes:
        temperature: 0 takes the best token; ties go to the lowest id. At most 2.
        top_k: Keep only the best k tokens; 0 keeps all.
        top_p: Then keep the fewest tokens that hold this probability; 1 keeps all.
        min_p: Before those two, keep tokens whose probability is at least this share of the highest; 0 keeps all.
        seed: 0 … 2³² - 1.
        presence_penalty: Subtracted from the logit of a token that was generated before.
        frequency_penalty: Subtracted as often as it was generated before.
        repetition_penalty: Divides the logit of a token of the prompt or the answer where that is positive, and
            multiplies it where it is not; 1 changes nothing. This comes before the other two.
        logit_bias: Added to logits: token ids and addends, or a mapping of them.

    Raises:
        RequestError: A value outside its BOUNDS.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, bounds in BOUNDS.items():
            object.__setattr__(self, name, bounds.number(getattr(self, name), f"sampling `{name}`"))
        object.__setattr__(self, "logit_bias", biases(self.logit_bias))

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


@dataclass(frozen=True)
class Request:
    """One prompt and what to do with it.

    Attributes:
        max_tokens: At most this many are generated; the context may end it sooner. 0 where tokens are scored.
        stop: Strings of at least one character that end the text; they are not part of it.
        ignore_eos: Go on after an end-of-text token.
        stop_token_ids: Tokens that end the text, whatever ``ignore_eos`` says.
        include_stop_str_in_output: The text has what ended it.
        skip_special_tokens: The text does not have special tokens.
        min_tokens: The answer has at least this many tokens: before, no end-of-text or stop token is sampled, and no
            stop string ends it. A grammar's text may end earlier all the same.
        priority: The lowest is admitted first, and the highest gives its pages back first; among equals the order of
            arrival decides.
        logits: Also return the logits that each token was taken from.
        score_from: Generate nothing: score the prompt's tokens from this place on, each after those before it.
        cache_salt: Only requests with the same one share what the prefix cache keeps.
        logprobs: Also return the log-probability of each token, and of this many of the most likely ones; None returns
            neither.
        grammar: The form of the text, from its first character on.
        kv_transfer_params: Whether the prompt's state goes to another engine (``do_remote_decode``), or comes from one
            (``do_remote_prefill``, and what that one's completion said); None where it stays.

    Raises:
        RequestError: A value of another type, or one that no artifact can serve; the message begins with ``name``.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logits: bool = False
    name: str = "request"
    score_from: int | None = None
    cache_salt: str = ""
    logprobs: int | None = None
    grammar: Grammar | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        if not isinstance(self.name, str):
            raise RequestError(f"request `name`: expected a text, found {shown(self.name)}")
        name = str(self.name)
        put("name", name)
        put("prompt_ids", token_ids(self.prompt_ids, name))
        put("stop", stop_strings(self.stop, name))
        put("stop_token_ids", token_ids(self.stop_token_ids, f"{name}: stop_token_ids"))
        if not isinstance(self.sampling, Sampling):
            raise RequestError(f"{name}: expected sampling of the type Sampling, found {shown(self.sampling)}")
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"{name}: expected a cache_salt that is a text, found {shown(self.cache_salt)}")
        put("cache_salt", str(self.cache_salt))
        for flag in ("ignore_eos", "logits", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, flag), bool):
                raise RequestError(f"{name}: expected {flag} to be true or false, found {shown(getattr(self, flag))}")
        if self.logprobs is not None:
            put("logprobs", TOP_LOGPROBS.number(self.logprobs, f"{name}: logprobs"))
        if self.grammar is not None:
            put("grammar", grammar_of(self.grammar, name))
        if self.kv_transfer_params is not None:
            self._check_transfer(self.kv_transfer_params)
        if self.score_from is not None:
            put("score_from", PLACE.number(self.score_from, f"{name}: score_from"))
            put("max_tokens", NONE.number(self.max_tokens, f"{name}: max_tokens where tokens are scored"))
            self._check_scores(self.score_from)
        elif not self.prompt_ids:
            raise RequestError(f"{name}: expected a prompt of at least one token, found an empty one")
        else:
            put("max_tokens", MAX_TOKENS.number(self.max_tokens, f"{name}: max_tokens"))
        at_least = NumberRange(0, self.max_tokens, whole=True)
        put("min_tokens", at_least.number(self.min_tokens, f"{name}: min_tokens"))
        put("priority", PRIORITY.number(self.priority, f"{name}: priority"))

    def sampled(self, sampling: Sampling) -> "Request":
        """The same request with other sampling; nothing of it is checked again."""
        same = copy.copy(self)
        object.__setattr__(same, "sampling", sampling)
        return same

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is taken from them."""
        delays = self.min_tokens > 0 and (not self.ignore_eos or bool(self.stop_token_ids))
        return self.grammar is not None or self.sampling.penalises or bool(self.sampling.logit_bias) or delays

    @property
    def do_remote_decode(self) -> bool:
        return self.kv_transfer_params is not None and bool(self.kv_transfer_params.get("do_remote_decode"))

    @property
    def do_remote_prefill(self) -> bool:
        return self.kv_transfer_params is not None and bool(self.kv_transfer_params.get("do_remote_prefill"))

    def _check_transfer(self, params: object) -> None:
        if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
            raise RequestError(f"{self.name}: expected kv_transfer_params that are an object, found {shown(params)}")
        if not (self.do_remote_decode or self.do_remote_prefill):
            return
        if self.do_remote_decode and (self.do_remote_prefill or self.max_tokens != 1):
            actual = "both directions" if self.do_remote_prefill else f"{shown(self.max_tokens)}"
            raise RequestError(f"{self.name}: expected do_remote_decode alone and max_tokens of 1, found {actual}")
        if self.score_from is not None or self.logits:
            actual = "logits" if self.logits else "scores"
            raise RequestError(f"{self.name}: expected tokens alone with kv_transfer_params, found {actual}")

    def _check_scores(self, first: int) -> None:
        if first == 0:
            raise RequestError(
                f"{self.name}: expected a context of at least one token, found an empty one",
                "begin with the token that begins or ends texts: the model says nothing of a first token",
            )
        if first >= len(self.prompt_ids):
            raise RequestError(f"{self.name}: expected a continuation of at least one token, found an empty one")


def request_of(fields: Mapping[str, Any]) -> Request:
    """The request that ``dataclasses.asdict`` gave ``fields`` of, which may have gone through JSON since.

    Raises:
        RequestError, LookupError, TypeError: They are those of none.
    """
    return Request(**{**fields, "sampling": Sampling(**fields["sampling"])})


class EngineStep(NamedTuple):
    """An engine step whose call a request took part in.

    Attributes:
        t_ms: Milliseconds from the request's submission to the call's dispatch.
        tokens: How many tokens of the request it stored. Each decode call and the last prefill call gave a token.
    """

    t_ms: float
    kind: str
    padding: int
    tokens: int


class Logprobs(NamedTuple):
    """How likely a token was, under the plain softmax of the model's logits, whatever changed them before sampling.

    Attributes:
        logprob: Natural logarithm of its probability.
        top: Ids and log-probabilities of the most likely tokens in its place, the most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Completion:
    """The result of a request.

    Attributes:
        token_ids: Generated ids, with the end-of-text token where that ended them.
        text: Their text without special tokens and without the stop string; None where the artifact has no tokenizer.
        stop_reason: ``eos``, ``stop``, ``length``, ``scored`` or ``cancelled``.
        ttft_ms: Milliseconds from submission to the first token; 0 if there is none.
        e2e_ms: Milliseconds from submission to the last one.
        logits: fp32 ``[len(token_ids), vocab]`` if asked for: row i is what token i was taken from.
        queue_ms: Milliseconds from submission until its first call was dispatched.
        token_ms: Milliseconds from submission until each token was read.
        steps: The calls that it took part in. A request that gave its pages back was prefilled again.
        cached_tokens: How many of the prompt's first tokens the prefix cache had, so that they were not computed.
        logprobs: How likely each generated token was, if asked for. For a request that scores, each token from
            ``score_from`` on, with the best one in its place.
        kv_transfer_params: Where the prompt's state left: what the request that goes on from it has to have. Where it
            came: ``phases_ms``, the milliseconds of each phase up to the first token, and ``transfer_bytes``, the
            state's.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    stop_reason: str
    ttft_ms: float
    e2e_ms: float
    logits: "np.ndarray | None" = None
    queue_ms: float = 0.0
    token_ms: list[float] = field(default_factory=list)
    steps: list[EngineStep] = field(default_factory=list)
    cached_tokens: int = 0
    logprobs: list[Logprobs] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def times(self) -> dict[str, Any]:
        """``phases_ms`` up to the first token, and ``transfer_bytes`` where the prompt's state came from elsewhere.

        The phases add up to the time to the first token: ``queue`` and ``prefill`` of one engine; of two, ``queue``,
        ``prefill`` and ``save`` of the one that prefilled, ``transfer`` and ``decode`` of the one that decodes. Nothing
        without a token.
        """
        if not self.token_ids:
            return {}
        phases = {"queue": self.queue_ms, "prefill": self.ttft_ms - self.queue_ms}
        told = {"phases_ms": phases} | (self.kv_transfer_params or {})
        return {name: told[name] for name in ("phases_ms", "transfer_bytes") if name in told}

    @property
    def gaps_ms(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.token_ms)]


@dataclass(frozen=True)
class Limits:
    """Limits of one request to an artifact.

    Attributes:
        context: Tokens of prompt and answer together.
        vocab_size: Token ids are below it.
        pages: Pages that one sequence can have.
        page_size: Tokens a page.
    """

    context: int
    vocab_size: int
    pages: int
    page_size: int

    def answer(self, request: Request) -> int:
        """How many tokens may be generated: ``max_tokens``, cut by the context."""
        return min(request.max_tokens, self.context - len(request.prompt_ids))

    def room(self, length: int) -> int:
        """The most tokens that the answer to a prompt of ``length`` tokens may have."""
        return min(self.context, self.pages * self.page_size + 1) - length  # the last token is never fed back

    def check_text(self, size: int, name: str) -> None:
        """Refuses a text of ``size`` bytes that can never fit, before it is tokenized, which takes seconds.

        Raises:
            RequestError: The text has over BYTES_A_TOKEN bytes for each token of the context.
        """
        if size > self.context * BYTES_A_TOKEN:
            most = f"{self.context} tokens of at most {BYTES_A_TOKEN} bytes"
            raise RequestError(f"{name}: expected text within the context of {most}, found {size:,} bytes", SHORTEN)

    def check(self, request: Request) -> None:
        """Refuses a request that this artifact can never serve.

        Raises:
            RequestError: An id outside the vocabulary, a prompt that leaves no room for a token, or more pages than
                exist.
        """
        ids, name, scores = request.prompt_ids, request.name, request.score_from is not None
        length = len(ids)
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            place, token = next((place, id) for place, id in enumerate(ids) if not 0 <= id < self.vocab_size)
            raise RequestError(
                f"{name}: expected token ids from 0 to {self.vocab_size - 1}, found {shown(token)} at place {place}"
            )
        if wrong := [token for token, _ in request.sampling.logit_bias if token >= self.vocab_size]:
            raise RequestError(
                f"{name}: expected logit_bias of token ids from 0 to {self.vocab_size - 1}, found {shown(wrong[0])}"
            )
        if wrong := [token for token in request.stop_token_ids if not 0 <= token < self.vocab_size]:
            raise RequestError(
                f"{name}: expected stop_token_ids from 0 to {self.vocab_size - 1}, found {shown(wrong[0])}"
            )
        if scores and length > self.context:
            raise RequestError(
                f"{name}: expected context and continuation within {self.context} tokens, found {request.score_from} + "
                f"{length - (request.score_from or 0)} = {length}",
                "shorten the context, or build the artifact with a larger --context",
            )
        if length >= self.context and not scores:
            raise RequestError(
                f"{name}: expected prompt and answer within the context of {self.context} tokens, found a prompt of "
                f"{length} tokens + 1 = {length + 1}",
                SHORTEN,
            )
        stored = length + self.answer(request) - 1  # the last token is never fed back
        needed = -(-stored // self.page_size)
        if needed > self.pages:
            parts = "" if scores else f"{length} prompt tokens + {stored - length} of the answer = "
            raise RequestError(
                f"{name}: expected at most {self.pages} pages of {self.page_size} tokens, found {parts}{stored} tokens "
                f"= {needed} pages",
                "ask for fewer tokens, or build the artifact with more --pages",
            )
