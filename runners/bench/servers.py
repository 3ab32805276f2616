"""What is measured: an engine in this process; ``over_http`` has a server."""

from time import perf_counter as now
from typing import Any, Protocol

from ling3export.foundation.errors import RequestError
from ling3export.runners.bench.metrics import Outcome
from ling3export.runners.bench.workloads import Ask
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import RequestFailed


class Measured(Protocol):
    """What requests are sent to.

    Attributes:
        backend: What the table calls it.
    """

    backend: str

    def prepare(self, ask: Ask) -> Any:
        """What ``send`` takes for a request: made before the clock runs.

        Raises:
            RequestError: It can never be served.
        """

    async def send(self, prepared: Any) -> Outcome:
        """Sends a request and waits for its end. What goes wrong is the outcome's error."""

    async def compiles(self) -> int | None:
        """Programs that were compiled since its start; None where it does not say."""


class InProcess:
    """An engine in this process. Token times are the engine's own, in which a token was read.

    Args:
        engine: The engine.
        ignore_eos: Go on behind an end-of-text token, so that every answer has its full length.
    """

    backend = "ling3"

    def __init__(self, engine: Engine, *, ignore_eos: bool) -> None:
        self._engine, self._ignore_eos = engine, ignore_eos

    def prepare(self, ask: Ask) -> Any:
        """An engine's request, tokenized."""
        request = self._engine.request(ask.prompt, ask.output, ignore_eos=self._ignore_eos)
        self._engine.check(request)
        return request

    async def send(self, prepared: Any) -> Outcome:
        """Submits a request."""
        outcome = Outcome(now())
        try:
            (handle,) = self._engine.submit(prepared)
            done = await handle.wait()
        except (RequestFailed, RequestError) as error:
            outcome.error = error.message
            return outcome
        outcome.times = [outcome.start + at / 1e3 for at in done.token_ms]
        outcome.prompt_tokens, outcome.tokens = len(done.prompt_ids), len(done.token_ids)
        outcome.text, outcome.cached = done.text or "", done.cached_tokens
        outcome.take(done.times)
        return outcome

    async def compiles(self) -> int | None:
        """The engine's own counter."""
        return int(self._engine.stats()["compile_events"])
