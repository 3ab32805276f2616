"""A call's answer: whole or as server-sent events. Whoever leaves is cancelled in the engine at once."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ling3export.runners.engine.handle import EngineStopped, HostGone, Piece, RequestHandle
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.errors import ApiError
from ling3export.runners.serve.metrics import Metrics
from ling3export.runners.serve.shapes import Shapes

STOPPED = "engine: expected it running, found it stopped"
HOST_GONE = "engine: expected every host to run, found one gone: the server ends"
LOG = logging.getLogger(__name__)


def stopped(error: EngineStopped) -> ApiError:
    """What clients are told when the engine ended; the details are for the log, and not their business."""
    if isinstance(error, HostGone):
        return ApiError(503, HOST_GONE, code="host_gone")
    return ApiError(503, STOPPED, code="engine_stopped")


def logged(error: EngineStopped) -> ApiError:
    """`stopped`, and a line in the log."""
    LOG.error("%s", error)
    return stopped(error)


async def whole(handles: Sequence[RequestHandle], receive: Receive) -> list[Completion]:
    """Waits for all of them.

    Raises:
        ClientDisconnect: Nobody waits for the answer any more.
        EngineStopped: The engine ended first.
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


class Stream(StreamingResponse):
    """The answer as server-sent events, ended by ``[DONE]``.

    Args:
        handles: Submitted; cancelled when the client leaves.
        shapes: Of this call.
        metrics: Told of the ends.
    """

    def __init__(self, handles: Sequence[RequestHandle], shapes: Shapes, metrics: Metrics) -> None:
        self._handles = handles
        self._metrics = metrics
        super().__init__(
            events(handles, shapes, metrics), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            release(self._handles, self._metrics)


def release(handles: Sequence[RequestHandle], metrics: Metrics) -> None:
    """Cancels what has not ended: nobody waits for it."""
    for handle in handles:
        if not handle.done:
            handle.cancel()
            metrics.left()


async def events(handles: Sequence[RequestHandle], shapes: Shapes, metrics: Metrics) -> AsyncGenerator[str, None]:
    """The events of a stream."""
    done: dict[int, Completion] = {}
    for index in range(len(handles)):
        if (first := shapes.first(index)) is not None:
            yield _event(first)
    try:
        async with aclosing(merged(handles)) as pieces:
            async for index, piece in pieces:
                if piece.completion is not None:
                    done[index] = piece.completion
                    metrics.ended(piece.completion)
                for chunk in shapes.piece(index, piece):
                    yield _event(chunk)
    except EngineStopped as error:
        yield _event(logged(error).body())
        return
    if (counts := shapes.counts(list(done.values()))) is not None:
        yield _event(counts)
    yield "data: [DONE]\n\n"


async def merged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all handles as they come, each with the number of its handle.

    Raises:
        EngineStopped: The engine ended first.
    """
    # One place: a slow client's pieces are joined in the handles and pile up nowhere.
    pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(1)

    async def pump(index: int, handle: RequestHandle) -> None:
        try:
            async with aclosing(handle.pieces()) as source:
                async for piece in source:
                    await pieces.put((index, piece))
        except EngineStopped as error:
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


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
