"""A call's answer, whole or as server-sent events. When a client leaves, its requests are cancelled at once."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ling3export.runners.engine.handle import (
    EngineStalled,
    HostGone,
    LogitsError,
    Piece,
    RequestFailed,
    RequestHandle,
)
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.calls import Call
from ling3export.runners.serve.metrics import Metrics
from ling3export.runners.serve.schema import ApiError

LOG = logging.getLogger(__name__)
REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


def stopped(error: RequestFailed, *, log: bool = True) -> ApiError:
    """What clients are told when a request ended without an answer. Other details go to the log alone."""
    if log:
        LOG.error("%s", error)
    if isinstance(error, LogitsError):
        return ApiError(500, error.message, code="logits_not_finite")
    if isinstance(error, EngineStalled):
        return ApiError(503, error.message, code="engine_stalled")
    if isinstance(error, HostGone):
        return ApiError(503, "engine: expected every host to run, found one gone: the server ends", code="host_gone")
    return ApiError(503, "engine: expected it running, found it stopped", code="engine_stopped")


def refused(error: ApiError) -> Response:
    """The response that refuses a request."""
    # JSONResponse would fail here: a message may repeat half a character of the client's, which has no UTF-8 form.
    return Response(json.dumps(error.body()), error.status, error.headers, "application/json")


async def whole(handles: Sequence[RequestHandle], receive: Receive) -> list[Completion]:
    """Waits until all requests of a call have ended.

    Args:
        handles: The requests.
        receive: Tells when the client leaves.

    Raises:
        ClientDisconnect: The client left first.
        RequestFailed: A request ended without an answer.
    """
    answers = asyncio.gather(*(handle.wait() for handle in handles))
    left = asyncio.create_task(_left(receive))
    both: list[asyncio.Future[Any]] = [answers, left]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise ClientDisconnect
        return list(answers.result())
    finally:
        for waiting in both:
            waiting.cancel()
        await asyncio.gather(*both, return_exceptions=True)


class Answer:
    """The answer to one call as the JSON of OpenAI's API, whole or in the chunks of a stream.

    Args:
        call: The call.
        model: The name that the model is served under.
    """

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        kind, name = ("chat.completion", "chatcmpl") if call.chat else ("text_completion", "cmpl")
        self._kind = kind
        self._head = {"id": f"{name}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer, which has one choice for each prompt."""
        choices = []
        for index, done in enumerate(completions):
            text, reason = done.text or "", REASONS.get(done.stop_reason, done.stop_reason)
            said = {"message": {"role": "assistant", "content": text}} if self._call.chat else {"text": text}
            ids = {"token_ids": done.token_ids} if self._call.token_ids else {}
            choices.append({"index": index, **said, **ids, "finish_reason": reason, "logprobs": None})
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage(completions)}

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that begins a choice of a stream; None for completions, which have no such chunk."""
        return self._chunk([self._choice(index, {"role": "assistant", "content": ""})]) if self._call.chat else None

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunks that a piece of a choice adds to a stream; none if the piece has no text yet."""
        chunks = []
        ids = {"token_ids": piece.token_ids} if self._call.token_ids else {}
        if piece.text or ids.get("token_ids"):
            chunks.append(self._chunk([self._choice(index, {"content": piece.text}) | ids]))
        if piece.completion is not None:
            reason = piece.completion.stop_reason
            chunks.append(self._chunk([self._choice(index, {}, REASONS.get(reason, reason))]))
        return chunks

    def counts(self, completions: Sequence[Completion]) -> dict[str, Any] | None:
        """The chunk with the numbers of tokens that ends a stream; None if the call did not ask for it."""
        return self._chunk([]) | {"usage": usage(completions)} if self._call.include_usage else None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._call.chat else self._kind
        empty = {"usage": None} if self._call.include_usage else {}
        return {**self._head, "object": kind, "choices": choices, **empty}

    def _choice(self, index: int, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": delta} if self._call.chat else {"text": delta.get("content", "")}
        return {"index": index, **content, "finish_reason": reason, "logprobs": None}


def usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """The numbers of tokens in and out, and how many of those in did not have to be computed."""
    prompt = sum(len(done.prompt_ids) for done in completions)
    answer = sum(len(done.token_ids) for done in completions)
    cached = {"cached_tokens": sum(done.cached_tokens for done in completions)}
    total = prompt + answer
    return {
        "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": total, "prompt_tokens_details": cached,
    }  # fmt: skip


class Stream(StreamingResponse):
    """The answer as server-sent events, ended by ``[DONE]``.

    Args:
        handles: The call's requests, which are cancelled when the client leaves.
        answer: Makes the chunks.
        metrics: Counts how the requests end.
    """

    def __init__(self, handles: Sequence[RequestHandle], answer: Answer, metrics: Metrics) -> None:
        self._handles = handles
        self._metrics = metrics
        super().__init__(
            events(handles, answer, metrics), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events, then cancels what has not ended."""
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
    done: dict[int, Completion] = {}
    for index in range(len(handles)):
        if (first := answer.first(index)) is not None:
            yield event(first)
    try:
        async with aclosing(merged(handles)) as pieces:
            async for index, piece in pieces:
                if piece.completion is not None:
                    done[index] = piece.completion
                    metrics.ended(piece.completion)
                for chunk in answer.piece(index, piece):
                    yield event(chunk)
    except RequestFailed as error:
        yield event(stopped(error).body())
        return
    if (counts := answer.counts(list(done.values()))) is not None:
        yield event(counts)
    yield "data: [DONE]\n\n"


async def merged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all requests as they come, each with the place of its request.

    Raises:
        RequestFailed: A request ended without an answer.
    """
    # A queue of one: what a slow client does not take yet is joined in the handles, and piles up nowhere.
    pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(1)

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
    """A server-sent event."""
    return f"data: {json.dumps(data)}\n\n"
