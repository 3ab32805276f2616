"""The server's application: the endpoints of OpenAI's API over an engine."""

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ling3export.runners.engine.handle import QueueFull, RequestFailed
from ling3export.runners.serve import calls
from ling3export.runners.serve.calls import Call
from ling3export.runners.serve.metrics import Metrics
from ling3export.runners.serve.responses import Answer, Stream, release, stopped, whole
from ling3export.runners.serve.schema import ApiError, parse

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine

HEALTH = "/health"
LEFT = 499  # the status for a client that left: only the metrics show it


@dataclass(frozen=True)
class Policy:
    """What a server takes.

    Attributes:
        model: The name that the artifact is served under.
        api_key: Bearer token that every call but /health needs; None if calls need none.
        max_requests: Most prompts at once, those that wait included. The engine must be made with the same number.
        max_body: Most bytes of a request's body.
    """

    model: str
    api_key: str | None
    max_requests: int
    max_body: int


def application(engine: "Engine", policy: Policy) -> ASGIApp:
    """The endpoints, with the counting of responses and the check of keys in front of them."""
    server = _Server(engine, policy)
    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/models", server.models, methods=["GET"]),
        Route("/v1/models/{name:path}", server.model, methods=["GET"]),
        Route(HEALTH, server.health, methods=["GET"]),
        Route("/metrics", server.metrics, methods=["GET"]),
    ]
    paths = frozenset(route.path for route in routes)
    return Starlette(
        routes=routes,
        middleware=[Middleware(_Front, server.counters, paths, policy.api_key)],
        exception_handlers={
            ApiError: _handler(lambda request, error: error),
            QueueFull: _handler(_full),
            RequestFailed: _handler(lambda request, error: stopped(error)),
            HTTPException: _handler(_no_route),
            ClientDisconnect: _handler(lambda request, error: ApiError(LEFT, "client: expected to wait, found gone")),
            Exception: _handler(
                lambda request, error: ApiError(500, "server: expected no error, found one: see its log")
            ),
        },
    )


class _Server:
    def __init__(self, engine: "Engine", policy: Policy) -> None:
        self._engine = engine
        self._policy = policy
        self._since = int(time.time())
        self.counters = Metrics(engine)

    async def completions(self, request: Request) -> Response:
        body, policy = await self._body(request), self._policy
        return await self._answer(
            request, partial(calls.completions, body, self._engine, policy.model, policy.max_requests)
        )

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._answer(request, partial(calls.chat, body, self._engine, self._policy.model))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._policy.model:
            raise ApiError(404, f"model: expected {self._policy.model}, found {name[:100]}", code="model_not_found")
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        if (error := self._engine.stopped) is not None:
            raise stopped(error, log=False)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.counters.text(), media_type="text/plain; version=0.0.4")

    async def _answer(self, request: Request, read: Callable[[], Call]) -> Response:
        # In a thread: the event loop must not wait while long texts are tokenized.
        call = await asyncio.to_thread(read)
        handles = self._engine.submit(*call.requests)
        answer = Answer(call, self._policy.model)
        if call.stream:
            return Stream(handles, answer, self.counters)
        try:
            completions = await whole(handles, request.receive)
        finally:
            release(handles, self.counters)
        for completion in completions:
            self.counters.ended(completion)
        return JSONResponse(answer.whole(completions))

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object that a request carries, if it is small enough."""
        kind = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                415, f"`Content-Type`: expected application/json, found {kind[:100]}", code="unsupported_media_type"
            )
        most = self._policy.max_body
        data = bytearray()
        # The header is looked at first, so that a body that is too large is not even received.
        claimed = request.headers.get("content-length", "0")
        size = int(claimed) if claimed.isdecimal() else 0
        if size <= most:
            async for chunk in request.stream():
                data += chunk
                size = max(size, len(data))
                if size > most:
                    break
        if size > most:
            raise ApiError(413, f"body: expected at most {most} bytes, found {size} or more", code="body_too_large")
        return parse(bytes(data))

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._policy.model, "object": "model", "created": self._since, "owned_by": "ling3export",
            "max_model_len": self._engine.limits.context,
        }  # fmt: skip


class _Front:
    """Counts responses by route and status, and refuses calls without the bearer token.

    Paths that are no routes count as ``other``: clients choose them, without a bound.
    """

    def __init__(self, app: ASGIApp, counters: Metrics, paths: frozenset[str], key: str | None) -> None:
        self._app = app
        self._counters = counters
        self._paths = paths
        self._wanted = None if key is None else b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._counters.responded(path, message["status"])
            await send(message)

        app = self._app
        if scope["type"] == "http" and self._wanted is not None and scope["path"] != HEALTH:
            given = dict(scope["headers"]).get(b"authorization", b"")
            # In constant time: how long a comparison takes must not tell how much of a guess is right.
            if not hmac.compare_digest(given, self._wanted):
                found = "another" if given else "none"
                message = f"`Authorization`: expected `Bearer KEY` with this server's key, found {found}"
                headers = {"WWW-Authenticate": "Bearer"}
                app = _response(ApiError(401, message, code="invalid_api_key", headers=headers))
        await app(scope, receive, counted if scope["type"] == "http" else send)


def _response(error: ApiError) -> Response:
    # JSONResponse would fail here: a message may repeat half a character of the client's, which has no UTF-8 form.
    return Response(json.dumps(error.body()), error.status, error.headers, "application/json")


def _handler(make: Callable[[Request, Any], ApiError]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return _response(make(request, error))

    return handle


def _full(request: Request, error: QueueFull) -> ApiError:
    return ApiError(429, error.message, code="queue_full", headers={"Retry-After": "1"})


def _no_route(request: Request, error: HTTPException) -> ApiError:
    message = f"{request.method} {request.url.path[:100]}: expected an endpoint, found {error.detail}"
    return ApiError(error.status_code, message, headers=dict(error.headers or {}))
