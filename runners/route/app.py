"""The router's application: a prompt goes to a server that prefills, its state's address to one that decodes.

A request is never lost: where a server that prefills fails, another one does, and where none can, the server that
decodes computes the prompt itself. Where one that decodes fails, another one answers: an answer that is no stream is
held until it is whole. Once bytes of a stream are out nothing can take its place, and it ends with an error event.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import h11
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.endpoint import Endpoint, Reply
from ling3export.runners.route.workers import (
    BUSY,
    PrefillRefusedError,
    Worker,
    least_loaded,
    prefill_body,
    prefilled,
    written,
)
from ling3export.runners.serve.answers import event, unless_left
from ling3export.runners.serve.app import Policy, RequestMiddleware, check_kind, no_route, page_routes
from ling3export.runners.serve.run import affordable, begin, http_server
from ling3export.runners.serve.schema import ApiError, parse, refused

T = TypeVar("T")
RESPONSES = "/v1/responses"
CHARACTERS_A_TOKEN = 4  # of a text, about
EVENTS = "text/event-stream"
BODIES = 256 << 20  # bytes of bodies, of all calls together
GONE = (OSError, TimeoutError, h11.ProtocolError)


@dataclass(frozen=True)
class RoutingPolicy:
    """How a router chooses."""

    every: float = 1.0  # seconds between two looks at each server
    most_local: int = 0  # a prompt of no more tokens is prefilled by the server that decodes it
    most_queued: int = 64  # while each server that prefills has this many requests, so is every prompt


class Router:
    """Sends requests on; without servers of ``prefill``, each of ``decode`` does both."""

    def __init__(self, prefill: Sequence[Worker], decode: Sequence[Worker], policy: RoutingPolicy) -> None:
        self.prefill, self.decode, self._policy = list(prefill), list(decode), policy
        self._registry = registry = CollectorRegistry()
        self._ends = Counter("ling3_route_requests", "Requests, by how they ended.", ["how"], registry=registry)
        self._responses = Counter(
            "ling3_http_responses", "Responses that were begun.", ["path", "status"], registry=registry
        )
        self._falls = Counter("ling3_route_fallbacks", "What others had to do.", ["why"], registry=registry)
        self._well = Gauge("ling3_route_well", "Whether a server answers.", ["role", "url"], registry=registry)
        self.bodies = 0  # bytes of the bodies of all calls
        self._reader = ThreadPoolExecutor(1, "ling3-route")

    async def beside(self, work: Callable[..., T], *arguments: Any) -> T:
        """Reads or writes a body in a thread: a large one takes seconds, in which the event loop would do nothing."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *arguments)

    def responded(self, path: str, status: int) -> None:
        """Counts a response that was begun."""
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """All counters in Prometheus' text format."""
        for role, workers in (("prefill", self.prefill), ("decode", self.decode)):
            for worker in workers:
                self._well.labels(role, worker.url).set(worker.healthy)
        return generate_latest(self._registry)

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None, None]:
        """Looks at every server again and again within the block."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.gather(*(worker.look() for worker in (*self.prefill, *self.decode)))
            await asyncio.sleep(self._policy.every)

    async def answer(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Reply, None]:
        """The answer to a request as it comes.

        Raises:
            ApiError: The request names a state itself, or no server is there.
            PrefillRefusedError: The request is wrong for every server.
        """
        if body.get("kv_transfer_params") is not None:
            message = "kv_transfer_params: the router pairs servers itself and takes none from clients"
            raise ApiError(400, message, param="kv_transfer_params")
        if self.prefill and path != RESPONSES and self._goes_apart(body):  # /v1/responses has no kv_transfer_params
            params = await self._prefilled(path, body)
            body = body if params is None else body | {"kv_transfer_params": params}
        data = await self.beside(written, body)
        tried: list[Worker] = []
        while (worker := least_loaded(self.decode, tried)) is not None:
            begun = False
            try:
                async with aclosing(self._ask(worker, path, data)) as replies:
                    async for reply in replies:
                        if not begun and reply.status in BUSY and least_loaded(self.decode, [*tried, worker]):
                            break
                        begun = True
                        yield reply
                if begun:
                    self._ends.labels("answered").inc()
                    return
                self._falls.labels("decode_refused").inc()
            except GONE:
                worker.lost()
                if begun:
                    self._ends.labels("broken_off").inc()
                    raise
                self._falls.labels("decode_gone").inc()
            tried.append(worker)
        self._ends.labels("no_server").inc()
        message = "router: no server that decodes answers"
        raise ApiError(503, message, code="no_server", headers={"Retry-After": "1"})

    def _goes_apart(self, body: dict[str, Any]) -> bool:
        """Whether a prompt is long enough for a server that prefills, and one of them has room; why not is counted."""
        if _tokens_about(body) <= self._policy.most_local:
            self._falls.labels("short").inc()
            return False
        if all(worker.queued + worker.live >= self._policy.most_queued for worker in self.prefill):
            self._falls.labels("queue_full").inc()
            return False
        return True

    async def _prefilled(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` of a server that prefilled the prompt; None if none could.

        Raises:
            PrefillRefusedError: The request is wrong for every server.
        """
        data = await self.beside(prefill_body, body)
        tried: list[Worker] = []
        while (worker := least_loaded(self.prefill, tried)) is not None:
            try:
                with worker.busy():
                    return await prefilled(worker.endpoint, path, data)
            except PrefillRefusedError as error:
                if error.wrong:
                    raise
                self._falls.labels("prefill_refused").inc()
            except Ling3Error:
                worker.lost()
                self._falls.labels("prefill_gone").inc()
            tried.append(worker)
        self._falls.labels("prefill_by_decode").inc()
        return None

    async def _ask(self, worker: Worker, path: str, body: bytes) -> AsyncGenerator[Reply, None]:
        """The pieces of a stream as they come; any other answer in one piece, once it is whole."""
        with worker.busy():
            async with aclosing(worker.endpoint.replies("POST", path, body)) as replies:
                first = await anext(replies)
                if not first.kind.startswith(EVENTS):
                    first = replace(first, data=b"".join([reply.data async for reply in replies]))
                yield first
                async for reply in replies:
                    yield reply


def _tokens_about(body: dict[str, Any]) -> int:
    """About how many tokens a prompt has; of token ids exactly."""
    text = body.get("prompt", body.get("messages"))
    if not isinstance(text, list):
        return len(str(text)) // CHARACTERS_A_TOKEN
    if all(type(token) is int for token in text):
        return len(text)
    contents = (message.get("content") for message in text if isinstance(message, dict))
    return sum(len(str(content)) for content in contents) // CHARACTERS_A_TOKEN


class _Call:
    """One call of a client; when the client leaves, the connection to the server that works for it is closed, too."""

    def __init__(self, router: Router, path: str, body: dict[str, Any], size: int) -> None:
        self._router, self._path, self._body, self._size = router, path, body, size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await unless_left(self._work(scope, receive, send), receive)
        finally:
            self._router.bodies -= self._size

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with aclosing(self._router.answer(self._path, self._body)) as replies:
                async for reply in replies:
                    if not begun:
                        headers = [(b"content-type", reply.kind.encode("latin-1"))]
                        if reply.retry_after:
                            headers.append((b"retry-after", reply.retry_after.encode("latin-1")))
                        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
                    begun = True
                    if reply.data:
                        await send({"type": "http.response.body", "body": reply.data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except PrefillRefusedError as error:  # another server would not improve it
            await Response(error.data, error.status, media_type="application/json")(scope, receive, send)
        except ApiError as error:
            await refused(error)(scope, receive, send)
        except GONE:
            over = ApiError(502, "router: expected the answer to go on, found its server gone", code="server_gone")
            if begun:
                await send({"type": "http.response.body", "body": event(over.body()).encode()})
            else:
                await refused(over)(scope, receive, send)


def workers_of(urls: Sequence[str], key: str | None, timeout: float) -> list[Worker]:
    """The servers at these addresses.

    Raises:
        RequestError: One of them is none.
    """
    return [Worker(url, Endpoint(url, key=key, timeout=timeout)) for url in urls]


def application(router: Router, policy: Policy) -> Starlette:
    """The router's endpoints."""

    async def pass_on(request: Request) -> Any:
        data = bytearray()
        try:
            check_kind(request)
            async for chunk in request.stream():  # which RequestMiddleware bounds
                data += chunk
                router.bodies += len(chunk)
                if router.bodies > BODIES:
                    raise ApiError(503, "router: too many large bodies at once", headers={"Retry-After": "1"})
            return _Call(router, request.url.path, await router.beside(parse, bytes(data)), len(data))
        except BaseException as error:
            router.bodies -= len(data)
            if isinstance(error, ApiError):
                return refused(error)
            raise

    async def models(request: Request) -> Response:
        for worker in router.decode:
            try:
                status, data = await worker.endpoint.whole("GET", request.url.path)
            except Ling3Error:
                continue
            return Response(data, status, media_type="application/json")
        return refused(ApiError(503, "router: no server that decodes is known", code="no_server"))

    async def health(request: Request) -> Response:
        healthy = any(worker.healthy for worker in router.decode)
        state = {
            role: [{"url": worker.url, "well": worker.healthy} for worker in workers]
            for role, workers in (("prefill", router.prefill), ("decode", router.decode))
        }
        return JSONResponse({"status": "ok" if healthy else "no server"} | state, 200 if healthy else 503)

    async def metrics(request: Request) -> Response:
        return Response(router.text(), media_type="text/plain; version=0.0.4")

    routes = [
        Route("/v1/completions", pass_on, methods=["POST"]),
        Route("/v1/chat/completions", pass_on, methods=["POST"]),
        Route(RESPONSES, pass_on, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        *(page_routes() if policy.page else ()),
    ]
    paths = frozenset(route.path for route in routes)
    return Starlette(
        routes=routes,
        middleware=[Middleware(RequestMiddleware, router.responded, paths, policy)],
        exception_handlers={HTTPException: no_route},
    )


def serve(router: Router, policy: Policy, listener: socket.socket, connections: int, grace: int) -> None:
    """Serves at the address of ``listener`` until SIGTERM or SIGINT; prints it once clients may connect."""
    server = http_server(application(router, policy), affordable(connections), grace)

    async def run() -> None:
        async with router.watching():
            await server.serve(sockets=[listener])

    with listener:
        begin(server, listener)
        asyncio.run(run())
