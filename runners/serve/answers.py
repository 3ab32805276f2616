"""A call's answer, whole or as server-sent events. When a client leaves, its requests are cancelled at once."""

import asyncio
import itertools
import json
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ling3export.runners.engine.handle import (
    EngineStalled,
    EngineStopped,
    GrammarFailed,
    HostGone,
    LogitsError,
    RequestDelta,
    RequestFailed,
    RequestHandle,
)
from ling3export.runners.engine.request import Completion, Logprobs
from ling3export.runners.serve.generation import ChatBody, GenerationCall
from ling3export.runners.serve.metrics import Metrics
from ling3export.runners.serve.schema import ApiError, StreamOptions
from ling3export.runners.text.answer import REASONING, TEXT, TOOL, AnswerParser

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")
REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
FAILURES = {LogitsError: "logits_not_finite", GrammarFailed: "grammar_failed", EngineStalled: "engine_stalled"}


def stopped(error: RequestFailed, *, log: bool = True) -> ApiError:
    """The error for clients when a request ended without an answer. Other details go to the log only."""
    if log:
        LOG.error("%s", error)
    code = FAILURES.get(type(error), "request_failed")
    if not isinstance(error, EngineStopped):  # a grammar that cannot be followed is the client's
        return ApiError(400 if isinstance(error, GrammarFailed) else 500, error.message, code=code)
    if isinstance(error, EngineStalled):
        return ApiError(503, error.message, code=code)
    if isinstance(error, HostGone):
        return ApiError(503, "engine: expected every host to run, found one gone: the server ends", code="host_gone")
    return ApiError(503, "engine: expected it running, found it stopped", code="engine_stopped")


class Answer(ABC):
    """The answer to one call in the JSON of a protocol, whole or as the events of a stream."""

    ending = ""  # the text that a stream ends with

    @abstractmethod
    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer, from the completions of the call's requests."""

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """The events before anything of the answer is known."""

    @abstractmethod
    def piece(self, index: int, piece: RequestDelta) -> list[dict[str, Any]]:
        """The events that a piece of the answer to request ``index`` adds to a stream."""

    def end(self) -> list[dict[str, Any]]:
        """The events after the last piece."""
        return []

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event that ends a stream that cannot go on."""
        return error.body()


class ChoicesAnswer(Answer):
    """The answer to one call as the JSON of OpenAI's API, whole or in the chunks of a stream.

    A whole answer, which has ``n`` choices for each prompt, consists of the chunks that a stream of it would have.
    """

    ending = "data: [DONE]\n\n"

    def __init__(self, call: GenerationCall, model: str) -> None:
        self._call, body = call, call.body
        self._chat = isinstance(body, ChatBody)
        self._kind, name = ("chat.completion", "chatcmpl") if self._chat else ("text_completion", "cmpl")
        self._head = {"id": f"{name}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        choices = range(len(call.prompts) * body.n)
        self._parsers = [AnswerParser(call.format) for _ in choices] if call.format is not None else []
        self._counts = [0 for _ in choices]  # tokens of each choice so far
        self._cached = 0  # tokens of prompts that were not computed, of the choices that have ended
        self._times: dict[str, Any] = {}  # of the first choice, once it ended
        self._offsets = [len(self._echo(index)) for index in choices]
        self._options = body.stream_options or StreamOptions()
        self._token_ids = body.return_token_ids or call.tokenizer is None

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        generated = len(completions) - self._call.scores
        choices = [self._choice(index, {TEXT: self._echo(index)}, "length") for index in range(len(self._counts))]
        for index, choice in enumerate(choices):
            choice["logprobs"] = self._likely(index, (), ())
            if self._token_ids:
                choice["token_ids"] = []
            if self._chat:
                choice["message"] = {"role": "assistant"} | choice.pop("delta")
        for index, done in enumerate(completions[:generated]):
            for chunk in self.piece(index, RequestDelta.whole(done)):
                _add(choices[index], chunk["choices"][0])
            message = choices[index].get("message", {})
            if TOOL in message:
                message[TEXT] = message[TEXT] or None
        if self._call.echo is not None and self._call.body.top is not None:
            scores = iter(completions[generated:])
            prompts = [self._scored(ids, next(scores) if len(ids) > 1 else None) for ids in self._call.prompts]
            for index, choice in enumerate(choices):
                prompt = prompts[index // self._call.body.n]
                choice["logprobs"] = {name: prompt[name] + choice["logprobs"][name] for name in prompt}
        params = completions[0].kv_transfer_params if generated else None
        more = {} if params is None else {"kv_transfer_params": params}
        return {**self._head, "object": self._kind, "choices": choices, "usage": self.usage(), **more}

    def begin(self) -> list[dict[str, Any]]:
        choices = range(len(self._counts))
        if self._chat:
            return [self._chunk([self._choice(index, {"role": "assistant", TEXT: ""})]) for index in choices]
        echoes = choices if self._call.echo else ()
        return [self._chunk([self._choice(index, {TEXT: self._echo(index)})]) for index in echoes]

    def piece(self, index: int, piece: RequestDelta) -> list[dict[str, Any]]:
        chunks = []
        self._counts[index] += len(piece.token_ids)
        more: dict[str, Any] = {"token_ids": piece.token_ids} if self._token_ids else {}
        if piece.logprobs:
            more["logprobs"] = self._likely(index, piece.token_ids, piece.logprobs)
        parts: list[tuple[str, Any]] = [(TEXT, piece.text)] if piece.text else []
        if self._parsers:
            parts = self._parsers[index].push(piece.text, last=piece.completion is not None)
        if not parts and any(more.values()):
            parts = [(TEXT, "")]
        for kind, content in parts:
            if kind == TOOL and content["index"] and not getattr(self._call.body, "parallel_tool_calls", True):
                continue
            delta = {kind: [content] if kind == TOOL else content}
            chunks.append(self._chunk([self._choice(index, delta) | more]))
            more = {}
        if piece.completion is not None:
            self._cached += piece.completion.cached_tokens
            self._times = self._times if index else piece.completion.times
            reason = REASONS.get(piece.completion.stop_reason, piece.completion.stop_reason)
            if self._parsers and self._parsers[index].calls and reason == "stop":
                reason = "tool_calls"
            chunks.append(self._chunk([self._choice(index, {}, reason)]))
        return chunks

    def end(self) -> list[dict[str, Any]]:
        """The chunk that ends a stream, with numbers of tokens and the first choice's times, if it was requested."""
        if not self._options.include_usage:
            return []
        return [self._chunk([]) | {"usage": self.usage(), **self._times}]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else self._kind
        counts: dict[str, Any] = {"usage": None} if self._options.include_usage else {}
        return {**self._head, "object": kind, "choices": choices, **counts}

    def _choice(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": delta} if self._chat else {"text": delta.get(TEXT, "")}
        return {"index": index, **content, "finish_reason": reason, "logprobs": None}

    def usage(self) -> dict[str, Any]:
        """The numbers of tokens in and out, and how many of those in did not have to be computed.

        A prompt counts once, however many choices it has.
        """
        prompt, answer = sum(map(len, self._call.prompts)), sum(self._counts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": min(self._cached, prompt)},
        }

    def _echo(self, index: int) -> str:
        return self._call.echo[index // self._call.body.n] if self._call.echo is not None else ""

    def _scored(self, ids: Sequence[int], score: Completion | None) -> dict[str, Any]:
        """The log-probabilities of a prompt's tokens, in the form of /v1/completions; the first one has none."""
        logprobs = (score.logprobs or []) if score is not None else []
        listed = self._listed(
            0, ids[1:], [logprobs._replace(top=logprobs.top[: self._call.body.top]) for logprobs in logprobs]
        )
        first = self._spelled(ids[0])[0]
        return {
            "tokens": [first, *listed["tokens"]],
            "token_logprobs": [None, *listed["token_logprobs"]],
            "top_logprobs": [None, *listed["top_logprobs"]],
            "text_offset": [0, *(at + len(first) for at in listed["text_offset"])],
        }

    def _likely(self, index: int, ids: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
        """The log-probabilities of generated tokens in the form of the endpoint, if they were requested."""
        if self._call.body.top is None:
            return None
        if not self._chat:
            listed = self._listed(self._offsets[index], ids, logprobs)
            self._offsets[index] += sum(map(len, listed["tokens"]))
            return listed
        return {
            "content": [
                {**self._entry(id, logprobs.logprob), "top_logprobs": [self._entry(*top) for top in logprobs.top]}
                for id, logprobs in zip(ids, logprobs, strict=True)
            ]
        }

    def _listed(self, offset: int, ids: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any]:
        tokens = [self._spelled(id)[0] for id in ids]
        offsets = itertools.accumulate(map(len, tokens[:-1]), initial=offset) if tokens else ()
        tops = [{self._spelled(id)[0]: logprob for id, logprob in reversed(entry.top)} for entry in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        text, data = self._spelled(id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    def _spelled(self, id: int) -> tuple[str, bytes]:
        """A token's text and bytes; those that are no text are written ``bytes:\\xf0``, as OpenAI's API does."""
        assert self._call.tokenizer is not None
        data = self._call.tokenizer.bytes_of(id)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def _add(choice: dict[str, Any], chunk: dict[str, Any]) -> None:
    """Adds a chunk's choice to that of a whole answer."""
    message, delta = choice.get("message"), chunk.get("delta", {})
    if message is None:
        choice["text"] += chunk["text"]
    else:
        for kind in (TEXT, REASONING):
            if kind in delta:
                message[kind] = message.get(kind, "") + delta[kind]
        for call in delta.get(TOOL, ()):
            message.setdefault(TOOL, []).append({name: value for name, value in call.items() if name != "index"})
    for name, values in (chunk["logprobs"] or {}).items():
        choice["logprobs"][name] += values
    if "token_ids" in chunk:
        choice["token_ids"] += chunk["token_ids"]
    choice["finish_reason"] = chunk["finish_reason"]


async def unless_left(work: Awaitable[Result], receive: Receive) -> Result:
    """The result of ``work``, which is cancelled when the client leaves.

    Raises:
        ClientDisconnect: The client left first.
    """
    answer, left = asyncio.ensure_future(work), asyncio.create_task(_left(receive))
    both: list[asyncio.Future[Any]] = [answer, left]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        for waiting in both:
            waiting.cancel()
        await asyncio.gather(*both, return_exceptions=True)


class Stream(StreamingResponse):
    """The answer as server-sent events. When the client leaves, the requests are cancelled."""

    def __init__(self, handles: Sequence[RequestHandle], answer: Answer, metrics: Metrics) -> None:
        self._handles, self._metrics = handles, metrics
        super().__init__(
            events(handles, answer, metrics), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            release(self._handles, self._metrics)


def release(handles: Sequence[RequestHandle], metrics: Metrics) -> None:
    """Cancels the requests that have not ended, since nobody waits for them."""
    for handle in handles:
        if not handle.done:
            handle.cancel()
            metrics.left()


async def events(handles: Sequence[RequestHandle], answer: Answer, metrics: Metrics) -> AsyncGenerator[str, None]:
    """The events of a stream."""
    for first in answer.begin():
        yield event(first)
    try:
        async with aclosing(merged(handles)) as pieces:
            async for index, piece in pieces:
                if piece.completion is not None:
                    metrics.ended(piece.completion)
                for chunk in answer.piece(index, piece):
                    yield event(chunk)
    except RequestFailed as error:
        yield event(answer.failed(stopped(error)))
        return
    for last in answer.end():
        yield event(last)
    if answer.ending:
        yield answer.ending


async def merged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, RequestDelta], None]:
    """The pieces of all requests as they come, each with the place of its request.

    Raises:
        RequestFailed: A request ended without an answer.
    """
    # A queue of one: what a slow client does not take yet is joined in the handles, and piles up nowhere.
    pieces: asyncio.Queue[tuple[int, RequestDelta | Exception]] = asyncio.Queue(1)

    async def pump(index: int, handle: RequestHandle) -> None:
        try:
            async with aclosing(handle.pieces()) as source:
                async for piece in source:
                    await pieces.put((index, piece))
        except RequestFailed as error:
            await pieces.put((index, error))

    pumps = [asyncio.create_task(pump(index, handle)) for index, handle in enumerate(handles)]
    try:
        ended = 0
        while ended < len(handles):
            index, piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            ended += piece.completion is not None
            yield index, piece
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: dict[str, Any]) -> str:
    """A server-sent event, named by its data's type if that has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"
