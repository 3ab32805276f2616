"""The router's application: a prompt goes to a server that prefills, its state's address to one that decodes.

A request is never lost: where a server that prefills fails, another one does, and where none can, the server that
decodes computes the prompt itself. Where one that decodes fails, another one answers: an answer that is no stream is
held until it is whole. Once bytes of a stream are out nothing can take its place, and it ends with an error event.
"""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

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
from ling3export.runners.route.blocks import Tokens
from ling3export.runners.route.events import KVEventSubscriber
from ling3export.runners.route.prompts import Prompts
from ling3export.runners.route.workers import BUSY, PrefillRefusedError, Worker, best, prefilled
from ling3export.runners.serve.answers import event, unless_left
from ling3export.runners.serve.app import Policy, RequestMiddleware, no_route, received
from ling3export.runners.serve.connection import ConnectionLimits
from ling3export.runners.serve.page import page_routes
from ling3export.runners.serve.run import affordable, begin, http_server
from ling3export.runners.serve.schema import ApiError, parse, refused

RESPONSES = "/v1/responses"
CHARACTERS_A_TOKEN = 4  # of a text, about
HEARD = ("received", "gaps", "replays", "restarts", "malformed", "failed")
EVENTS = "text/event-stream"
HELD = 256 << 20  # bytes of whole answers that are held until their end, of all calls together
GONE = (OSError, TimeoutError, h11.ProtocolError)


@dataclass(frozen=True)
class RoutingPolicy:
    """How a router chooses.

    Attributes:
        weight: What the share of a prompt that a server knows counts, against the server's load.
        every: Seconds between two looks at each server.
        most_local: A prompt that lacks no more tokens than these is prefilled by the server that decodes it.
        most_queued: While each server that prefills has so many requests, so is every prompt.
    """

    weight: float = 1.0
    every: float = 1.0
    most_local: int = 0
    most_queued: int = 64


class Router:
    """Sends requests on.

    Args:
        prefill: Servers that prefill for others; none where each does both.
        decode: Servers that answer.
        policy: How to choose.
    """

    def __init__(self, prefill: Sequence[Worker], decode: Sequence[Worker], policy: RoutingPolicy) -> None:
        self.prefill, self.decode, self._policy = list(prefill), list(decode), policy
        self._registry = registry = CollectorRegistry()
        self._ends = Counter("ling3_route_requests", "Requests, by how they ended.", ["how"], registry=registry)
        self._responses = Counter(
            "ling3_http_responses", "Responses that were begun.", ["path", "status"], registry=registry
        )
        self._falls = Counter("ling3_route_fallbacks", "What others had to do.", ["why"], registry=registry)
        names = ["role", "url"]
        self._well = Gauge("ling3_route_well", "Whether a server answers.", names, registry=registry)
        self._picked = Gauge("ling3_route_picked", "How often a server was chosen.", names, registry=registry)
        self._failed = Gauge("ling3_route_failed", "How often it did not answer.", names, registry=registry)
        self._blocks = Gauge("ling3_route_blocks", "Blocks that it has, by its events.", names, registry=registry)
        self._heard = Gauge(
            "ling3_route_kv_events", "What happened to a server's events.", [*names, "what"], registry=registry
        )
        self._known = Counter(
            "ling3_route_prompts", "Prompts, by what decided where they go.", ["by"], registry=registry
        )
        self._prompts = Prompts([*self.prefill, *self.decode])
        self._held = 0  # bytes

    def responded(self, path: str, status: int) -> None:
        """Counts a response that was begun."""
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """All counters in Prometheus' text format."""
        for role, workers in (("prefill", self.prefill), ("decode", self.decode)):
            for worker in workers:
                self._well.labels(role, worker.url).set(worker.well)
                self._picked.labels(role, worker.url).set(worker.picked)
                self._failed.labels(role, worker.url).set(worker.failed)
                self._blocks.labels(role, worker.url).set(worker.events.blocks)
                for what in HEARD:
                    self._heard.labels(role, worker.url, what).set(worker.events.counts[what])
        return generate_latest(self._registry)

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None, None]:
        """Looks at every server again and again within the block, and hears what they tell of their blocks."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            for worker in (*self.prefill, *self.decode):
                worker.events.end()
            await asyncio.sleep(0)  # the listeners to events end, too

    async def _watch(self) -> None:
        while True:
            await asyncio.gather(*(worker.look() for worker in (*self.prefill, *self.decode)))
            await asyncio.sleep(self._policy.every)

    async def answer(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Reply, None]:
        """The answer to a request as it comes.

        Raises:
            ApiError: No server is there.
            PrefillRefusedError: The request is wrong for every server.
        """
        prompt = await self._tokens(path, body)
        self._known.labels("load" if prompt is None else "events").inc()
        if self.prefill and path != RESPONSES:  # has no kv_transfer_params: D computes the prompt
            params = await self._prefilled(path, body, prompt) if self._goes_apart(body, prompt) else None
            body = body if params is None else body | {"kv_transfer_params": params}
        tried: list[Worker] = []
        while (worker := self._pick(self.decode, prompt, tried)) is not None:
            begun = False
            try:
                async with aclosing(self._ask(worker, path, body)) as replies:
                    async for reply in replies:
                        if not begun and reply.status in BUSY and self._pick(self.decode, prompt, [*tried, worker]):
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
        raise ApiError(
            503,
            "router: expected a server that decodes, found none that answers",
            code="no_server",
            headers={"Retry-After": "1"},
        )

    def _goes_apart(self, body: dict[str, Any], prompt: Tokens | None) -> bool:
        """Whether a prompt is long enough for a server that prefills, and one of them has room; why not is counted."""
        if self._lacking(body, prompt) <= self._policy.most_local:
            self._falls.labels("short").inc()
            return False
        if all(worker.queued + worker.live >= self._policy.most_queued for worker in self.prefill):
            self._falls.labels("queue_full").inc()
            return False
        return True

    def _lacking(self, body: dict[str, Any], prompt: Tokens | None) -> int:
        """How many tokens of a prompt no server that decodes has cached; an estimate where the tokens are not known."""
        if prompt is not None:
            hits = [worker.events.hit(prompt) for worker in self.decode if worker.events.live]
            return prompt.length - max(hits, default=0)
        text = body.get("prompt", body.get("messages"))
        if isinstance(text, list) and all(type(each) is int for each in text):
            return len(text)
        return len(text if isinstance(text, str) else json.dumps(text)) // CHARACTERS_A_TOKEN

    async def _prefilled(self, path: str, body: dict[str, Any], prompt: Tokens | None) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` of a server that prefilled the prompt; None if none could.

        Raises:
            PrefillRefusedError: The request is wrong for every server.
        """
        tried: list[Worker] = []
        while (worker := self._pick(self.prefill, prompt, tried)) is not None:
            try:
                with worker.asked():
                    params = await prefilled(worker.endpoint, path, body)
            except PrefillRefusedError as error:
                if error.wrong:
                    raise
                self._falls.labels("prefill_refused").inc()
            except Ling3Error:
                worker.lost()
                self._falls.labels("prefill_gone").inc()
            else:
                return params
            tried.append(worker)
        self._falls.labels("prefill_by_decode").inc()
        return None

    async def _ask(self, worker: Worker, path: str, body: dict[str, Any]) -> AsyncGenerator[Reply, None]:
        """The pieces of a stream as they come; any other answer in one piece, once it is whole.

        One that would make more than HELD bytes of such answers goes on as it comes: no other server can give it then.
        """
        with worker.asked():
            async with aclosing(worker.endpoint.replies("POST", path, json.dumps(body).encode())) as replies:
                first, parts, size = await anext(replies), list[bytes](), 0
                try:
                    while not first.kind.startswith(EVENTS):
                        reply = await anext(replies, None)
                        if reply is not None:
                            parts.append(reply.data)
                            size, self._held = size + len(reply.data), self._held + len(reply.data)
                        if reply is None or self._held > HELD:
                            first = replace(first, data=b"".join(parts))
                            break
                finally:
                    self._held -= size
                yield first
                async for reply in replies:
                    yield reply

    async def _tokens(self, path: str, body: dict[str, Any]) -> Tokens | None:
        several = len(self.decode) > 1 or len(self.prefill) > 1
        return await self._prompts.tokens(path, body) if several else None  # else there is nothing to choose

    def _pick(self, workers: Sequence[Worker], prompt: Tokens | None, tried: Sequence[Worker]) -> Worker | None:
        left = [worker for worker in workers if worker not in tried]
        return best(left, self._policy.weight, prompt)


class _Call:
    """One call of a client; when the client leaves, the connection to the server that works for it is closed, too."""

    def __init__(self, router: Router, path: str, body: dict[str, Any]) -> None:
        self._router, self._path, self._body = router, path, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await unless_left(self._work(scope, receive, send), receive)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with aclosing(self._router.answer(self._path, self._body)) as replies:
                async for reply in replies:
                    if not begun:
                        headers = [(b"content-type", reply.kind.encode("latin-1"))]
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
    return [
        Worker(url, Endpoint(url, key=key, timeout=timeout), KVEventSubscriber(urlsplit(url).hostname or ""))
        for url in urls
    ]


def application(router: Router, policy: Policy) -> Starlette:
    """The router's endpoints."""

    async def pass_on(request: Request) -> Any:
        try:
            data = b"".join([chunk async for chunk in received(request, policy.max_body)])
            return _Call(router, request.url.path, parse(data))
        except ApiError as error:
            return refused(error)

    async def models(request: Request) -> Response:
        for worker in router.decode:
            try:
                status, data = await worker.endpoint.whole("GET", request.url.path)
            except Ling3Error:
                continue
            return Response(data, status, media_type="application/json")
        return refused(ApiError(503, "router: expected a server that decodes, found none", code="no_server"))

    async def health(request: Request) -> Response:
        there = any(worker.well for worker in router.decode)
        state = {
            role: [{"url": worker.url, "well": worker.well, "events": worker.events.live} for worker in workers]
            for role, workers in (("prefill", router.prefill), ("decode", router.decode))
        }
        return JSONResponse({"status": "ok" if there else "no server"} | state, 200 if there else 503)

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


def serve(router: Router, policy: Policy, listener: socket.socket, bounds: ConnectionLimits, grace: int) -> None:
    """Serves at the address of ``listener`` until SIGTERM or SIGINT; prints it once clients may connect."""
    server = http_server(application(router, policy), affordable(bounds), grace)

    async def run() -> None:
        async with router.watching():
            await server.serve(sockets=[listener])

    with listener:
        begin(server, listener)
        asyncio.run(run())
