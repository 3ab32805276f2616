"""A server of OpenAI's API over HTTP, as a client of any such server sees it."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import perf_counter as now
from typing import Any
from urllib.parse import urlsplit

import h11

from ling3export.errors import Ling3Error, RequestError
from ling3export.runners.bench.metrics import Outcome
from ling3export.runners.bench.workloads import Ask
from ling3export.strict_json import parse_json

READ = 1 << 16  # bytes at a time
LARGEST = 64 << 20  # bytes of an answer that is read whole, and of a line of a stream
COMPILES = "ling3_compile_events"
OURS = "ling3export"  # the owner of our server's models


@dataclass(frozen=True)
class Reply:
    """A piece of an answer's body and when it came; the first has the status and no bytes."""

    status: int
    data: bytes
    at: float


class OverHttp:
    """A server of OpenAI's API: ``/v1/completions`` as a stream, greedy, a connection for each request.

    Args:
        url: Its address, with or without ``/v1``.
        model: The model's name; None takes the first that it lists.
        key: Sent as bearer token; None for none.
        ignore_eos: Ask it to go on behind an end-of-text token.
        timeout: Seconds without a byte after which a request counts as failed.

    Raises:
        RequestError: The address is none.
    """

    backend = "openai"

    def __init__(
        self, url: str, *, model: str | None, key: str | None, ignore_eos: bool, timeout: float = 600.0
    ) -> None:  # fmt: skip
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise RequestError(f"url: expected http://HOST:PORT, found {url[:100]}")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self._secure else 80)
        self._place, self._path = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
        self._model, self._key, self._ignore_eos, self._timeout = model, key, ignore_eos, timeout
        self._ours = False

    async def open(self) -> None:
        """Asks which models there are: for the model's name, and whether the server is ours, which tells token ids.

        Raises:
            Ling3Error: There is no server, or it says nothing of models and no name was given.
        """
        try:
            listed = parse_json(await self._whole("GET", "/v1/models"), LARGEST)
            models = {each["id"]: each.get("owned_by") for each in listed["data"]}
            first = next(iter(models))
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            if self._model is None:
                raise Ling3Error(
                    "server: expected a list of models at /v1/models, found something else", "name the model: --model"
                ) from error
            return
        self._model = self._model or str(first)
        self._ours = models.get(self._model) == OURS

    def prepare(self, ask: Ask) -> Any:
        """The body of the request."""
        body = {
            "model": self._model, "prompt": ask.prompt, "max_tokens": ask.output, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._ours:
            body["return_token_ids"] = True
        return json.dumps(body).encode()

    async def send(self, prepared: Any) -> Outcome:
        """Streams the answer to a request."""
        outcome, over, last = Outcome(now()), False, 0.0
        try:
            async for data, last in self._events(prepared):
                if data == b"[DONE]":
                    over = True
                    break
                _take(outcome, parse_json(data, LARGEST), last)
            if not over and outcome.error is None:
                outcome.error = "stream: expected [DONE] at its end, found it cut short"
        except (Ling3Error, OSError, TimeoutError, ValueError, h11.ProtocolError) as error:
            outcome.error = f"{type(error).__name__}: {error}"[:500]
        if outcome.tokens and not outcome.times:  # an answer without text
            outcome.times = [last]
        outcome.tokens = outcome.tokens or len(outcome.times)
        return outcome

    async def compiles(self) -> int | None:
        """What our own server says of it at ``/metrics``."""
        if not self._ours:
            return None
        for line in (await self._whole("GET", "/metrics")).decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name in (COMPILES, f"{COMPILES}_total"):
                return int(float(value))
        return None

    async def _whole(self, method: str, path: str) -> bytes:
        data = b""
        try:
            async with aclosing(self._replies(method, path, b"")) as replies:
                async for reply in replies:
                    data += reply.data
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            found = getattr(error, "strerror", None) or str(error) or type(error).__name__
            hint = "start it first: ling3-runner serve ARTIFACT"
            raise Ling3Error(f"server: expected one at {self._place}, found {found}", hint) from error
        if reply.status != 200:
            raise Ling3Error(f"server: expected 200 for {path}, found {reply.status}: {_told(data)}")
        return data

    async def _events(self, body: bytes) -> AsyncGenerator[tuple[bytes, float], None]:
        """The data of each server-sent event, and when it came."""
        held = b""
        async with aclosing(self._replies("POST", "/v1/completions", body)) as replies:
            async for reply in replies:
                held += reply.data
                if len(held) > LARGEST:
                    raise ValueError("a line without an end")
                if reply.status != 200:
                    continue
                *lines, held = held.split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line[5:].strip(), reply.at
        if reply.status != 200:
            raise ValueError(f"status {reply.status}: {_told(held)}")

    async def _replies(self, method: str, path: str, body: bytes) -> AsyncGenerator[Reply, None]:
        """The pieces of an answer as they come."""
        http = h11.Connection(h11.CLIENT)
        context = ssl.create_default_context() if self._secure else None
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(self._host, self._port, ssl=context), self._timeout
        )
        try:
            headers = [("Host", self._place), ("Connection", "close"), ("Accept", "*/*")]
            if body:
                headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            if self._key:
                headers.append(("Authorization", f"Bearer {self._key}"))
            asked = h11.Request(method=method, target=self._path + path, headers=headers)
            parts = [asked, h11.Data(data=body), h11.EndOfMessage()] if body else [asked, h11.EndOfMessage()]
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
                    yield Reply(status, b"", at)
                elif isinstance(event, h11.Data):
                    yield Reply(status, bytes(event.data), at)
                elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    return
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _take(outcome: Outcome, chunk: Any, at: float) -> None:
    """Adds an event of a stream to what is known of its request."""
    if not isinstance(chunk, dict):
        raise ValueError("an event that is no object")
    if chunk.get("error"):
        outcome.error = _told(json.dumps(chunk).encode())
    for choice in chunk.get("choices") or ():
        ids, text = choice.get("token_ids"), choice.get("text") or ""
        outcome.times += [at] * (len(ids) if ids is not None else bool(text))
        outcome.text += text
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        outcome.tokens = int(usage.get("completion_tokens") or 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        outcome.cached = cached if cached is None else int(cached)


def _told(data: bytes) -> str:
    """The message of an error object, else the beginning of what came."""
    try:
        error = json.loads(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return data[:300].decode(errors="replace")
