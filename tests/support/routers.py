"""Fake servers for tests of the router."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

HOST = "127.0.0.1"


class FakeServer:
    """A server with prepared answers.

    Args:
        answer: Maps a path and a body to a status and JSON, to the text of a stream, to bytes of JSON after which the
            connection breaks off, or to None: the server closes the connection.
        headers: Headers of each answer, in addition to its content type and length.

    Attributes:
        asked: Paths and bodies of the requests, in order.
        url: The server's address.
    """

    def __init__(
        self, answer: Callable[[str, Any], tuple[int, Any] | str | bytes | None], headers: dict[str, str] | None = None
    ) -> None:
        self._answer = answer
        self._more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self.asked: list[tuple[str, Any]] = []

    async def __aenter__(self) -> "FakeServer":
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r")[0] or 0)
        path, body = head.split(" ")[1], json.loads(await reader.readexactly(length) or b"{}")
        self.asked.append((path, body))
        answer = self._answer(path, body)
        if answer is not None:
            status, said = (answer[0], json.dumps(answer[1])) if isinstance(answer, tuple) else (200, answer)
            kind = "text/event-stream" if isinstance(answer, str) else "application/json"
            data = said if isinstance(said, bytes) else said.encode()
            size = len(data) + 9 * (not isinstance(answer, tuple))
            head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n{self._more}\r\n"
            writer.write(head.encode() + data)
            await writer.drain()
        writer.close()
