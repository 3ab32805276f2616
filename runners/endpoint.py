"""A server of OpenAI's API over HTTP, as its clients see it: a connection for each request, the answer as it comes.

On h11, for httpx takes two to eight times the processor time for each request (docs/log/serving.md, 2026-11-25), and a
benchmark's client or a router has one core.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import perf_counter as now
from urllib.parse import urlsplit

import h11

from ling3export.foundation.errors import Ling3Error, RequestError

READ = 1 << 16  # bytes at a time
LARGEST = 64 << 20  # bytes of an answer that is read whole, and of a line of a stream


@dataclass(frozen=True)
class Reply:
    """A piece of an answer's body and when it came. The first has headers and no bytes."""

    status: int
    data: bytes
    at: float
    kind: str = ""
    retry_after: str = ""


class Endpoint:
    """A server.

    Args:
        timeout: Seconds without a byte after which an answer is given up.

    Attributes:
        place: Host and port as the address has them.

    Raises:
        RequestError: The address is none.
    """

    def __init__(self, url: str, *, key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise RequestError(f"url: expected http://HOST:PORT, found {url[:100]}")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self._secure else 80)
        self.place, self._path = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
        self._key, self._timeout = key, timeout

    async def whole(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """The status and the body of an answer.

        Raises:
            Ling3Error: Nobody answered, or not in HTTP, or with too much.
        """
        data, status = b"", 0
        try:
            async with aclosing(self.replies(method, path, body)) as replies:
                async for reply in replies:
                    status, data = reply.status, data + reply.data
                    if len(data) > LARGEST:
                        raise ValueError(f"more than {LARGEST:,} bytes")
        except (OSError, TimeoutError, ValueError, h11.ProtocolError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            hint = "start it first: ling3-runner serve ARTIFACT"
            raise Ling3Error(f"server: expected one at {self.place}, found {reason}", hint) from error
        return status, data

    async def replies(self, method: str, path: str, body: bytes = b"") -> AsyncGenerator[Reply, None]:
        """The pieces of an answer as they come. Leaving early closes the connection.

        Raises:
            OSError, TimeoutError, h11.ProtocolError: Nobody answered, or the answer broke off.
        """
        http = h11.Connection(h11.CLIENT)
        context = ssl.create_default_context() if self._secure else None
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(self._host, self._port, ssl=context), self._timeout
        )
        try:
            sent = [("Host", self.place), ("Connection", "close"), ("Accept", "*/*")]
            if body:
                sent += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            if self._key:
                sent.append(("Authorization", f"Bearer {self._key}"))
            request = h11.Request(method=method, target=self._path + path, headers=sent)
            parts = [request, h11.Data(data=body), h11.EndOfMessage()] if body else [request, h11.EndOfMessage()]
            writer.write(b"".join(http.send(part) or b"" for part in parts))
            await writer.drain()
            status, at = 0, now()
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(await asyncio.wait_for(reader.read(READ), self._timeout))
                    at = now()
                elif isinstance(event, h11.Response):
                    status = event.status_code
                    headers = {name: value.decode("latin-1") for name, value in event.headers}
                    yield Reply(status, b"", at, headers.get(b"content-type", ""), headers.get(b"retry-after", ""))
                elif isinstance(event, h11.Data):
                    yield Reply(status, bytes(event.data), at)
                elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    return
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def told(data: bytes) -> str:
    """The message of an error object, else the beginning of the answer."""
    try:
        error = json.loads(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return data[:300].decode(errors="replace")
