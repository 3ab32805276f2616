"""A small server of OpenAI's completions API on loopback. The test chooses its answers and faults."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Body = dict[str, Any]
# bytes to write after the status line, and seconds to wait between them
Answer = Callable[[Body], "list[bytes | float]"]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(value: object) -> bytes:
    """A server-sent event as an HTTP chunk."""
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return chunk(data)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def words(body: Body, *, gap: float = 0.0, ids: bool = False) -> "list[bytes | float]":
    """A streamed answer of the requested number of words, with the token counts at its end."""
    parts: list[bytes | float] = [HEAD]
    for number in range(body["max_tokens"]):
        more = {"token_ids": [number + 1]} if ids else {}
        parts += [gap, event({"choices": [{"index": 0, "text": f"w{number} ", **more}]})]
    usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
    return [*parts, event({"choices": [], "usage": usage}), event(b"[DONE]"), b"0\r\n\r\n"]


def whole(value: object, status: str = "200 OK") -> bytes:
    """A JSON response."""
    data = json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def serving(answer: Answer, models: object = None) -> Iterator[tuple[str, list[Body]]]:
    """Runs the server in a thread; gives its address and the bodies of the requests that it received."""
    bodies: list[Body] = []
    listed = {"data": [{"id": "fake", "owned_by": "tests"}]} if models is None else models

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET"):
                writer.write(listed if isinstance(listed, bytes) else whole(listed))
                return
            length = int(head.lower().partition("content-length:")[2].split()[0])
            body = json.loads(await reader.readexactly(length))
            bodies.append(body)
            for part in answer(body):
                if isinstance(part, float):
                    await asyncio.sleep(part)
                else:
                    writer.write(part)
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    loop, ready = asyncio.new_event_loop(), threading.Event()
    address: list[int] = []

    async def serve() -> None:
        server = await asyncio.start_server(client, "127.0.0.1", 0)
        address.append(server.sockets[0].getsockname()[1])
        ready.set()
        await stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(120)
        yield f"http://127.0.0.1:{address[0]}", bodies
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
        loop.close()
