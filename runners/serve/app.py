"""The server's application: the endpoints of OpenAI's API over an engine."""

import asyncio
import base64
import hashlib
import hmac
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ling3export.foundation.threads import failures
from ling3export.runners.engine.handle import QueueFull, RequestFailed
from ling3export.runners.serve.answers import Answer, ChoicesAnswer, Stream, event, release, stopped, unless_left
from ling3export.runners.serve.generation import GenerationCall, chat, completions, may_have_grammar
from ling3export.runners.serve.messages import MessagesAnswer, MessagesBody, count_tokens
from ling3export.runners.serve.metrics import Metrics
from ling3export.runners.serve.responses import ResponsesAnswer, ResponsesBody
from ling3export.runners.serve.schema import ELEMENTS, MESSAGES, ApiError, json_response, parse, refused
from ling3export.runners.serve.tokenize import detokenize, tokenize, tokenizer_info
from ling3export.runners.text.trial import PROCESSES, GrammarBusy
from ling3export.runners.transfer.http import PROOF, STATES, HttpStore

if TYPE_CHECKING:
    import numpy as np

    from ling3export.runners.engine.engine import Engine
    from ling3export.runners.serve.kv_events import Publisher

PAGE, HEALTH = "/", "/health"
PIECE = 1 << 20  # bytes of a state that are sent at a time
SMALL = 1 << 16  # bytes of a body that is read at once
BODY_SECONDS = 60.0  # from the headers to the end of a body
LEFT = 499  # the status for a client that left: only the metrics show it


@dataclass(frozen=True)
class Policy:
    """Limits, names and defaults of a server."""

    model: str  # the name that the artifact is served under
    api_key: str | None  # of every call but those of /health and of the page; None if calls need none
    max_requests: int  # prompts at once, those that wait included; the engine has the same number
    max_body: int  # bytes
    hosts: frozenset[str] | None = None  # names that a call's `Host` may have, without the port; None for any
    origins: tuple[str, ...] = ()  # of pages of other sites that browsers may let call (CORS); ``*`` is any
    page: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)  # values of fields that a body does not have
    max_new_tokens: int | None = None  # of a chat whose body does not say; None for what the context leaves


# The reader of bodies, and the maker of answers, of each endpoint that generates.
GENERATING: dict[str, tuple[Callable[..., GenerationCall], Callable[[GenerationCall, str], Answer]]] = {
    "/v1/completions": (completions, ChoicesAnswer),
    "/v1/chat/completions": (chat, ChoicesAnswer),
    "/v1/responses": (ResponsesBody.call, ResponsesAnswer),
    MESSAGES: (MessagesBody.call, MessagesAnswer),
}


def application(engine: "Engine", policy: Policy, events: "Publisher | None" = None) -> ASGIApp:
    """The endpoints, with the counting of responses and the check of keys in front of them."""
    server = _Endpoints(engine, policy, events)
    routes = [
        *(Route(path, server.generate, methods=["POST"]) for path in GENERATING),
        Route(f"{MESSAGES}/count_tokens", server.reading(count_tokens), methods=["POST"]),
        Route("/tokenize", server.reading(tokenize), methods=["POST"]),
        Route("/detokenize", server.reading(detokenize), methods=["POST"]),
        Route("/tokenizer_info", server.tokenizer_info, methods=["GET"]),
        Route("/v1/models", server.models, methods=["GET"]),
        Route("/v1/models/{name:path}", server.model, methods=["GET"]),
        Route(HEALTH, server.health, methods=["GET"]),
        Route("/metrics", server.metrics, methods=["GET"]),
        *(page_routes() if policy.page else ()),
        *(() if engine.shared_states is None else state_routes(engine.shared_states)),
    ]
    paths = frozenset(route.path for route in routes)
    return Starlette(
        routes=routes,
        middleware=[Middleware(RequestMiddleware, server.counters.responded, paths, policy)],
        exception_handlers={
            ApiError: _handler(lambda request, error: error),
            QueueFull: _handler(_full),
            GrammarBusy: _handler(
                lambda request, error: ApiError(503, error.message, code="busy", headers={"Retry-After": "1"})
            ),
            RequestFailed: _handler(lambda request, error: stopped(error)),
            HTTPException: no_route,
            ClientDisconnect: _handler(lambda request, error: ApiError(LEFT, "client: expected to wait, found gone")),
            Exception: _handler(
                lambda request, error: ApiError(500, "server: expected no error, found one: see its log")
            ),
        },
    )


Read = TypeVar("Read")
Endpoint = Callable[[Request], Awaitable[Response]]


class _Endpoints:
    def __init__(self, engine: "Engine", policy: Policy, events: "Publisher | None") -> None:
        self._engine, self._events = engine, events
        self._policy = policy
        self._since = int(time.time())
        self._readers = ThreadPoolExecutor(2, "ling3-read")
        self._slow_readers = ThreadPoolExecutor(1, "ling3-read-large")
        self._grammar_readers = ThreadPoolExecutor(2 * PROCESSES, "ling3-read-grammar")
        self.counters = Metrics(engine)

    async def generate(self, request: Request) -> Response:
        read, form = GENERATING[request.url.path]
        policy, engine = self._policy, self._engine

        def checked(body: dict[str, Any]) -> GenerationCall:
            body |= {name: value for name, value in policy.defaults.items() if body.get(name) is None}
            return read(body, engine, policy.model, policy.max_requests, policy.max_new_tokens)

        call = await self._read(request, checked)
        answer = form(call, policy.model)
        handles = engine.submit(*call.requests, checked=True)
        if call.body.stream:
            return Stream(handles, answer, self.counters)
        try:
            completed = await unless_left(asyncio.gather(*(handle.wait() for handle in handles)), request.receive)
        finally:
            release(handles, self.counters)
        for completion in completed:
            self.counters.ended(completion)
        return json_response(answer.whole(completed))

    def reading(self, read: "Callable[[dict[str, Any], Engine, str], dict[str, Any]]") -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return json_response(await self._read(request, lambda body: read(body, self._engine, self._policy.model)))

        return endpoint

    async def tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(tokenizer_info(self._engine))

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
        for name, failure in failures().items():
            raise ApiError(503, f"thread {name}: ended: {failure}", code="thread_ended")
        events = self._events and {"kv_events": self._events.record(self._engine.limits.page_size)}
        return JSONResponse({"status": "ok", **(events or {})})

    async def metrics(self, request: Request) -> Response:
        return Response(self.counters.text(), media_type="text/plain; version=0.0.4")

    async def _read(self, request: Request, read: Callable[[dict[str, Any]], Read]) -> Read:
        """Receives a body, and reads it in one of a few threads.

        The event loop does not wait while long texts are tokenized. Small bodies wait for no large one, and bodies
        without a grammar wait for none with one, whose trial may take seconds.
        """
        check_kind(request)
        data = await request.body()
        elements = max(ELEMENTS, self._engine.limits.context)
        readers = self._readers if len(data) <= SMALL else self._slow_readers
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(readers, parse, data, elements)
        if may_have_grammar(body):
            readers = self._grammar_readers
        return await loop.run_in_executor(readers, read, body)

    def _model(self) -> dict[str, Any]:
        most = {"max_tokens": self._policy.max_new_tokens} if self._policy.max_new_tokens else {}
        return {
            "id": self._policy.model,
            "object": "model",
            "created": self._since,
            "owned_by": "ling3export",
            "max_model_len": self._engine.limits.context,
            "default_sampling": {"temperature": 1.0, "top_p": 1.0, **most, **self._policy.defaults},  # for the page
        }


def check_kind(request: Request) -> None:
    """Refuses a body that is not declared as JSON: pages of other sites can send those without being asked.

    Raises:
        ApiError: 415.
    """
    kind = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"`Content-Type`: expected application/json, found {kind[:100]}"
        raise ApiError(415, message, code="unsupported_media_type")


class RequestMiddleware:
    """Counts responses by route and status, refuses calls for their headers, and bounds bodies in bytes and seconds.

    Paths that are no routes count as ``other``: clients choose them, without a bound.
    """

    def __init__(
        self, app: ASGIApp, responded: Callable[[str, int], None], paths: frozenset[str], policy: Policy
    ) -> None:
        self._app, self._responded = _crossing(app, policy), responded
        self._paths, self._policy = paths, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: Message | None = None

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = message
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._responded(path, message["status"])
            await send(message)

        headers = Headers(scope=scope)
        error = _misframed(scope, headers)
        if not scope["path"].startswith(STATES):  # other servers prove their own secret
            error = error or self._misdirected(headers) or self._unknown(scope, headers)
        error = error or self._oversized(headers)
        try:
            app = self._app if error is None else self._refused(scope, error)
            await app(scope, self._bounded(receive), counted)
        except asyncio.CancelledError:  # so uvicorn ends what runs when the grace is over
            over = ApiError(503, "server: expected the call to end before the server, found it running", code="ending")
            if begun is None:
                await refused(over, scope["path"])(scope, receive, counted)
            else:  # a stream: nothing else takes time between its start and its end
                await send({"type": "http.response.body", "body": event(over.body(scope["path"])).encode()})

    def _bounded(self, receive: Receive) -> Receive:
        """Receives a body of at most ``max_body`` bytes within BODY_SECONDS, else raises an ApiError."""
        deadline, length, complete = asyncio.get_running_loop().time() + BODY_SECONDS, 0, False

        async def bounded() -> Message:
            nonlocal length, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"body: expected all of it within {BODY_SECONDS:g} s, found a part"
                raise ApiError(408, late, code="request_timeout", headers={"Connection": "close"}) from None
            length += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if length > self._policy.max_body:
                raise _too_large(self._policy.max_body, length)
            return message

        return bounded

    def _oversized(self, headers: Headers) -> ApiError | None:
        """The refusal of a body whose header claims too many bytes; it is not received."""
        claimed, most = headers.get("content-length", "0"), self._policy.max_body
        return _too_large(most, int(claimed)) if claimed.isdecimal() and int(claimed) > most else None

    def _refused(self, scope: Scope, error: ApiError) -> ASGIApp:
        """Refuses a call, so that a page that may call can read why; but what CORS asks beforehand gets no yes."""
        response = refused(error, scope["path"])
        return response if scope["method"] == "OPTIONS" else _crossing(response, self._policy)

    def _misdirected(self, headers: Headers) -> ApiError | None:
        """The refusal of a name that is not this server's.

        A page of any site may have its own name lead to this machine, and its scripts call a server here under it.
        """
        hosts, host = self._policy.hosts, headers.get("host")
        if hosts is None or host is None or re.sub(r":\d*$", "", host).lower() in hosts:
            return None
        wanted = f"one of {', '.join(sorted(hosts))}"
        return ApiError(421, f"`Host`: expected {wanted}, found {host[:100]}: see --allow-host", code="unknown_host")

    def _unknown(self, scope: Scope, headers: Headers) -> ApiError | None:
        key = self._policy.api_key
        asks = bool(self._policy.origins) and scope["method"] == "OPTIONS"  # to which browsers add no key
        if key is None or asks or scope["path"] in (HEALTH, *((PAGE,) if self._policy.page else ())):
            return None
        header = headers.get("authorization", "")
        if scope["path"].startswith(MESSAGES) and "x-api-key" in headers:  # as Anthropic's clients send it
            header = f"bearer {headers['x-api-key']}"
        scheme, _, credentials = header.partition(" ")
        # In constant time: how long a comparison takes must not tell how much of a guess is right.
        if hmac.compare_digest(credentials.strip().encode(), key.encode()) and scheme.lower() == "bearer":
            return None
        message = (
            f"`Authorization`: expected `Bearer KEY` with this server's key, found {'another' if header else 'none'}"
        )
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _crossing(app: ASGIApp, policy: Policy) -> ASGIApp:
    """``app`` with what tells browsers that pages of ``policy.origins`` may call it."""
    if not policy.origins:
        return app
    return CORSMiddleware(
        app, policy.origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=("Retry-After",)
    )


def _misframed(scope: Scope, headers: Headers) -> ApiError | None:
    """The refusal of a request whose end others may see elsewhere (RFC 9112, 6.1). The server reads no further."""
    if "transfer-encoding" not in headers or ("content-length" not in headers and scope["http_version"] != "1.0"):
        return None
    beside = "`Content-Length` beside it" if "content-length" in headers else "HTTP/1.0"
    message = f"`Transfer-Encoding`: expected it alone and in HTTP/1.1, found {beside}"
    return ApiError(400, message, code="invalid_http", headers={"Connection": "close"})


def _too_large(most: int, size: int) -> ApiError:
    return ApiError(413, f"body: expected at most {most} bytes, found {size} or more", code="body_too_large")


def state_routes(store: HttpStore) -> list[Route]:
    """``GET`` and ``DELETE /v1/states/ID``: another server takes the state of a prompt, or gives it back.

    The shared secret is the key of these calls, not the clients' API key (``runners/transfer/http.py``).
    """

    async def state(request: Request) -> Response | Any:
        name = request.path_params["name"]
        if not store.holds(name, request.method, request.headers.get("authorization", "")):
            return refused(ApiError(401, "state: the caller does not prove the secret", code="invalid_secret"))
        proof = {PROOF: store.proof(name)}
        unknown = refused(ApiError(404, "state: it was taken, given back or never here, or its lease is over"))
        if request.method == "DELETE":
            return Response(headers=proof) if store.give_back(name) else unknown
        if (taken := store.take(name)) is None:
            return unknown
        return _StateResponse(*taken, proof)

    return [Route(STATES + "{name}", state, methods=["GET", "DELETE"])]


class _StateResponse(StreamingResponse):
    """The bytes of a state. However the response ends, the state is freed."""

    def __init__(self, memory: "np.ndarray", sent: Callable[[bool], None], headers: Mapping[str, str]) -> None:
        headers = {**headers, "Content-Length": str(memory.nbytes)}
        super().__init__(self._pieces(memory.data), headers=headers, media_type="application/octet-stream")
        self._sent, self._whole = sent, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._sent(self._whole)

    async def _pieces(self, memory: memoryview) -> AsyncGenerator[memoryview, None]:
        for at in range(0, len(memory), PIECE):
            yield memory[at : at + PIECE]
        self._whole = True


def page_routes() -> list[Route]:
    """The page at ``/``: a conversation in a browser, in one file that refers to nothing else.

    The browser runs only the page's own script and style, and lets them reach only this server (CSP 3).
    """
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    own = {}
    for kind in ("script", "style"):
        (inner,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        own[kind] = f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"
    policy = (
        f"default-src 'none'; script-src {own['script']}; style-src {own['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    page = Response(text, media_type="text/html", headers=headers)
    return [Route(PAGE, lambda request: page, methods=["GET"])]


def _handler(make: Callable[[Request, Any], ApiError]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return refused(make(request, error), request.url.path)

    return handle


def _full(request: Request, error: QueueFull) -> ApiError:
    return ApiError(429, error.message, code="queue_full", headers={"Retry-After": "1"})


async def no_route(request: Request, error: Any) -> Response:
    """The refusal of a path that an application does not have, or of a method that a path does not take."""
    headers, path = dict(error.headers or {}), request.url.path[:100]
    message = f"path: expected one of {', '.join(route.path for route in request.app.routes)}, found {path}"
    if error.status_code == 405:
        message = f"{path}: expected {headers['Allow']}, found {request.method}"
    return refused(ApiError(error.status_code, message, headers=headers), request.url.path)
