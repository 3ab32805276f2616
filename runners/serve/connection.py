"""A client's connection: what uvicorn's does, and bounds on what it may cost.

uvicorn waits without end for the rest of a request, and for a client that reads nothing of its answer. Here each has a
deadline, the number of connections is bounded, and whatever is refused before the application sees it is refused with
an error object, too.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ling3export.runners.serve.schema import ApiError, refused

PIECES, PIECE = 1024, 256  # after 1,024 chunks, a body whose chunks average under 256 bytes is refused
READ = 1 << 15  # bytes that are read of a body in its client's turn: 50 turns of WHOLE are 0.1 s
WHOLE = 1 << 18  # bytes of other reads, as asyncio does: too long headers are read before they are refused
FOUND = 200  # characters of h11's message about bytes that are no request


@dataclass(frozen=True)
class ConnectionLimits:
    """What a client may take of a server.

    Attributes:
        connections: Most at once.
        idle: Seconds that a connection may wait before the first byte of a request.
        head: Seconds from that byte to the end of the headers.
        body: Seconds from there to the end of the body.
        unread: Seconds that a client may take nothing of an answer that waits for it.
    """

    connections: int = 512
    idle: int = 75
    head: float = 10.0
    body: float = 60.0
    unread: float = 60.0


class Connection(H11Protocol):
    """One connection.

    When there are too many, the one that has waited longest for its client makes room for a new one. Where none waits,
    the new one's request gets 503.
    """

    def __init__(self, bounds: ConnectionLimits, **given: Any) -> None:
        super().__init__(**given)
        self.conn = _Parser(h11.SERVER)
        self._bounds = bounds
        self._owes: str | None = None  # what the client owes now: "idle", "head", "body"
        self._since = 0.0
        self._due: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes the connection, or refuses its first request where no other one can be closed for it."""
        super().connection_made(transport)
        others = cast("set[Connection]", self.connections - {self})
        if len(others) >= self._bounds.connections:
            waiting = [other for other in others if other._owes is not None]
            found = f"expected at most {self._bounds.connections} at once, found one more"
            error = ApiError(503, f"connections: {found}", code="too_many_connections", headers={"Retry-After": "1"})
            if waiting:
                min(waiting, key=lambda other: other._since).end(error)
            else:
                error.headers["Connection"] = "close"
                self.app = refused(error)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Takes bytes of the client."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Goes on with the next request."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what waits for the client."""
        for timer in (self._due, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to: from now on it has a deadline."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._bounds.unread, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are no request, for the reason that h11 gives."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self.end(ApiError(status, f"request: expected HTTP/1.1, found {str(error)[:FOUND]}", code="invalid_http"))

    def end(self, error: ApiError) -> None:
        """Closes the connection at once; tells why if a request has begun and is not answered yet."""
        if not self._idle and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *error.headers.items()]
            head = h11.Response(
                status_code=error.status,
                headers=[*headers, ("Connection", "close")],
                reason=HTTPStatus(error.status).phrase.encode(),
            )
            self.transport.write((self.conn.send(head) or b"") + body)
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application's own answer must not follow
        self.connections.discard(self)
        self.transport.abort()

    @property
    def _idle(self) -> bool:
        """Whether nothing of a request has come."""
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _watch(self) -> None:
        """Begins the time for what the client owes now, unless it runs."""
        owes = None
        if self.conn.their_state is h11.IDLE:
            owes = "idle" if self._idle else "head"
        elif self.conn.their_state is h11.SEND_BODY:
            owes = "body"
        if owes == self._owes or self.transport.is_closing():
            return
        if self._due is not None:
            self._due.cancel()
        self._owes, self._due = owes, None
        self.transport.max_size = READ if owes == "body" else WHOLE  # type: ignore[attr-defined]
        if owes is not None:
            self._since = self.loop.time()
            self._due = self.loop.call_later(getattr(self._bounds, owes), self._overdue)

    def _overdue(self) -> None:
        what = {"head": "headers", "body": "body"}.get(self._owes or "", "")
        within = getattr(self._bounds, self._owes or "")
        found = f"{what}: expected all of it within {within:g} s, found a part"
        self.end(ApiError(408, found, code="request_timeout"))


class _Parser(h11.Connection):
    """h11's parser, which takes some 20 µs a piece of a body: so the pieces may not be tiny ones without end."""

    _pieces = _bytes = 0

    def next_event(self) -> Any:
        """The next event of the client."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._pieces, self._bytes = self._pieces + 1, self._bytes + len(event.data)
            if self._pieces > PIECES and self._bytes < self._pieces * PIECE:
                raise h11.RemoteProtocolError(f"a body in pieces of less than {PIECE} bytes")
        return event
