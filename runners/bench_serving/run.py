"""A run: requests are sent when they are due, at most so many at once, and what became of each is kept.

They go to an engine in this process, or to a server (``http_client``).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter as now
from typing import Any, Protocol

from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.runners.bench_serving.metrics import RequestResult
from ling3export.runners.bench_serving.workloads import WARM_UP, SampleRequest
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import RequestFailed
from ling3export.runners.text.tokenizer import Tokenizer

Told = Callable[[int, int], None]


class Client(Protocol):
    """What requests are sent to.

    Attributes:
        backend: What the table calls it.
    """

    backend: str

    def prepare(self, ask: SampleRequest) -> Any:
        """What ``send`` takes for a request: made before the clock runs.

        Raises:
            RequestError: It can never be served.
        """

    async def send(self, prepared: Any) -> RequestResult:
        """Sends a request and waits for its end. What goes wrong is the result's error."""

    async def compiles(self) -> int | None:
        """Programs that were compiled since its start; None where it does not say."""


class EngineClient:
    """An engine in this process. Token times are the engine's own, in which a token was read.

    Args:
        engine: The engine.
        ignore_eos: Go on behind an end-of-text token, so that every answer has its full length.
    """

    backend = "ling3"

    def __init__(self, engine: Engine, *, ignore_eos: bool) -> None:
        self._engine, self._ignore_eos = engine, ignore_eos

    def prepare(self, ask: SampleRequest) -> Any:
        """An engine's request, tokenized."""
        request = self._engine.request(ask.prompt, ask.output, ignore_eos=self._ignore_eos)
        self._engine.check(request)
        return request

    async def send(self, prepared: Any) -> RequestResult:
        """Submits a request."""
        result = RequestResult(now())
        try:
            (handle,) = self._engine.submit(prepared)
            done = await handle.wait()
        except (RequestFailed, RequestError) as error:
            result.error = error.message
            return result
        result.times = [result.start + at / 1e3 for at in done.token_ms]
        result.prompt_tokens, result.tokens = len(done.prompt_ids), len(done.token_ids)
        result.text, result.cached = done.text or "", done.cached_tokens
        result.take(done.times)
        return result

    async def compiles(self) -> int | None:
        """The engine's own counter."""
        return int(self._engine.stats()["compile_events"])


@dataclass(frozen=True)
class Run:
    """What a run gave.

    Attributes:
        results: Of the requests that ended, in the order of their end.
        duration: Seconds from the first submission to the last completion, or to the interruption.
        unfinished: Requests that had not ended when the run was interrupted; 0 where it was not.
        compiles: Programs that were compiled meanwhile; None where nobody says it.
    """

    results: list[RequestResult]
    duration: float
    unfinished: int
    compiles: int | None


async def run(
    measured: Client,
    asks: Sequence[SampleRequest],
    times: Sequence[float],
    *,
    limit: int | None = None,
    tokenizer: Tokenizer | None = None,
    told: Told | None = None,
) -> Run:
    """Sends a workload and waits for all answers. If it is cancelled, it returns what there is by then.

    Args:
        measured: What is measured.
        asks: The requests.
        times: When each is due, in seconds after the start.
        limit: How many may run at once; one more waits before its clock starts.
        tokenizer: Counts the answers' tokens again.
        told: Told how many requests have ended, and how many there are.

    Raises:
        RequestError: A request can never be served.
        Ling3Error: The request before the run, which is not measured, failed.
    """
    prepared = [measured.prepare(ask) for ask in asks]
    first = await measured.send(measured.prepare(replace(asks[0], output=min(asks[0].output, WARM_UP))))
    if first.error is not None:
        raise Ling3Error(f"warm-up: expected an answer to the first request, found {first.error}")
    before, results = await measured.compiles(), list[RequestResult]()
    gate = asyncio.Semaphore(limit or len(asks))

    async def one(request: Any) -> None:
        async with gate:
            results.append(await measured.send(request))
        if told is not None:
            told(len(results), len(asks))

    sending: list[asyncio.Task[None]] = []
    started = now()
    try:
        for request, due in zip(prepared, times, strict=True):
            if (wait := started + due - now()) > 0:
                await asyncio.sleep(wait)
            sending.append(asyncio.create_task(one(request)))
        await asyncio.gather(*sending)
    except asyncio.CancelledError:
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    duration = now() - started
    after = await measured.compiles()
    for result in results:
        result.retokenized = result.tokens
        if tokenizer is not None:
            result.retokenized = len(tokenizer.encode(result.text, special=False))
    compiled = None if before is None or after is None else after - before
    return Run(results, duration, len(asks) - len(results), compiled)
