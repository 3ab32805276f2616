"""A server of OpenAI's API over HTTP, as a client of any such server sees it."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import perf_counter as now
from typing import Any

import h11
from prometheus_client.parser import text_string_to_metric_families

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.bench_serving.metrics import RequestResult
from ling3export.runners.bench_serving.workloads import SampleRequest
from ling3export.runners.endpoint import LARGEST, Endpoint, told

COMPILES = "ling3_compile_events"
OURS = "ling3export"  # the owner of our server's models


class HttpClient:
    """A server of OpenAI's API: ``/v1/completions`` as a stream, greedy, a connection for each request.

    Args:
        url: With or without ``/v1``.
        timeout: Seconds without a byte after which a request counts as failed.
    """

    backend = "openai"

    def __init__(
        self, url: str, model: str | None, key: str | None, *, ignore_eos: bool, timeout: float = 600.0
    ) -> None:
        self._server = Endpoint(url.rstrip("/").removesuffix("/v1"), key=key, timeout=timeout)
        self._model, self._ignore_eos = model, ignore_eos
        self._ours = False

    async def open(self) -> None:
        """Reads the list of models: for the model's name, and whether the server is ours, which sends token ids.

        Raises:
            Ling3Error: There is no server, or it lists no models and no name was given.
        """
        if self._model is not None and (await self._server.whole("GET", "/v1/models"))[0] != 200:
            return  # it need not list what it has
        try:
            listed = parse_json(await _whole(self._server, "/v1/models"), LARGEST)
            models = {model["id"]: model.get("owned_by") for model in listed["data"]}
            first = next(iter(models))
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            if self._model is None:
                raise Ling3Error(
                    "server: expected a list of models at /v1/models, found something else", "name the model: --model"
                ) from error
            return
        self._model = self._model or str(first)
        self._ours = models.get(self._model) == OURS

    def prepare(self, sample: SampleRequest) -> Any:
        body = {
            "model": self._model,
            "prompt": sample.prompt,
            "max_tokens": sample.output,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._ours:
            body["return_token_ids"] = True
        return json.dumps(body).encode()

    async def send(self, prepared: Any) -> RequestResult:
        result, finished, last = RequestResult(now()), False, 0.0
        try:
            async for data, last in self._events(prepared):
                if data == b"[DONE]":
                    finished = True
                    break
                finished |= _take(result, parse_json(data, LARGEST), last)
            if not finished and result.error is None:
                result.error = "stream: expected [DONE] or a finish_reason at its end, found it cut short"
        except (Ling3Error, OSError, TimeoutError, TypeError, ValueError, h11.ProtocolError) as error:
            result.error = f"{type(error).__name__}: {error}"[:500]
        if result.tokens and not result.times:  # an answer without text
            result.times = [last]
        result.tokens = result.tokens or len(result.times)
        return result

    async def compiles(self) -> int | None:
        """Programs that a server of ours has compiled, by ``/metrics``; None of other servers."""
        if not self._ours:
            return None
        families = text_string_to_metric_families((await _whole(self._server, "/metrics")).decode())
        samples = (sample for family in families for sample in family.samples)
        names = (COMPILES, f"{COMPILES}_total")
        return next((int(sample.value) for sample in samples if sample.name in names), None)

    async def _events(self, body: bytes) -> AsyncGenerator[tuple[bytes, float], None]:
        """The data of each server-sent event, and its time."""
        held = b""
        async with aclosing(self._server.replies("POST", "/v1/completions", body)) as replies:
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
            raise ValueError(f"status {reply.status}: {told(held)}")


async def _whole(server: Endpoint, path: str) -> bytes:
    status, data = await server.whole("GET", path)
    if status != 200:
        raise Ling3Error(f"server: expected 200 for {path}, found {status}: {told(data)}")
    return data


def _take(result: RequestResult, chunk: Any, at: float) -> bool:
    """Adds an event of a stream to its request's result; returns whether the answer is finished.

    Some servers, such as that of transformers, send no [DONE].
    """
    finished = False
    if not isinstance(chunk, dict):
        raise ValueError("an event that is no object")
    if chunk.get("error"):
        result.error = told(json.dumps(chunk).encode())
    for choice in chunk.get("choices") or ():
        ids, text = choice.get("token_ids"), choice.get("text") or ""
        result.times += [at] * (len(ids) if ids is not None else bool(text))
        result.pieces += [at] * bool(text)
        result.text += text
        finished |= bool(choice.get("finish_reason"))
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        result.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        result.tokens = int(usage.get("completion_tokens") or 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        result.cached = cached if cached is None else int(cached)
    return finished
