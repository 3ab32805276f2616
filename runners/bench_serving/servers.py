"""What is measured: an engine in this process; ``over_http`` has a server."""

from time import perf_counter as now
from typing import Any, Protocol

from ling3export.foundation.errors import RequestError
from ling3export.runners.bench_serving.metrics import RequestResult
from ling3export.runners.bench_serving.workloads import SampleRequest
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import RequestFailed


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
