"""Results of the requests of a run, and the figures of the run, by the definitions of SGLang and vLLM.

Times are seconds of one clock (``time.perf_counter``). With t0 just before a request's submission and τ1 … τn the times
of its tokens: TTFT = τ1 - t0, E2E = τn - t0, TPOT = (E2E - TTFT) / (n - 1) where n > 1, and the n - 1 inter-token
latencies (ITL) are τ(j+1) - τj. Failed requests count in ``failed`` and nowhere else.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class RequestResult:
    """A request that was sent."""

    start: float  # just before its submission
    # When each token came; tokens of one piece have equal times. Pieces count if the server does not count tokens.
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0  # of the answer
    text: str = ""
    retokenized: int = 0  # tokens of the text when it is tokenized again; ``tokens`` without a tokenizer
    cached: int | None = None  # tokens of the prompt that came from a cache; None if the server does not report it
    error: str | None = None  # why it failed
    pieces: list[float] = field(default_factory=list)  # when each piece with text came over HTTP

    @property
    def ttft(self) -> float:
        """Seconds until the first token; 0 without one."""
        return self.times[0] - self.start if self.times else 0.0

    @property
    def e2e(self) -> float:
        """Seconds until the last token; 0 without one."""
        return self.times[-1] - self.start if self.times else 0.0

    @property
    def tpot(self) -> float:
        """Mean seconds of a token after the first; 0 for one token or none."""
        return (self.e2e - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def itl(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [after - before for before, after in itertools.pairwise(self.times)]


@dataclass(frozen=True)
class Spread:
    """Figures of one kind of time, in milliseconds; all 0 without a value. ``std`` is that of a population."""

    mean: float = 0.0
    median: float = 0.0
    std: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread":
        """The figures of values in seconds."""
        values = 1e3 * np.fromiter(seconds, float)
        if not values.size:
            return cls()
        median, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        return cls(float(values.mean()), median, float(values.std()), p95, p99, float(values.max()))


@dataclass(frozen=True)
class Figures:
    """The figures of a run. Throughputs are per second; a figure that no server reports is None.

    Attributes:
        duration: Seconds from the first submission to the last completion.
        concurrency: Sum of all E2E over the duration.
        cache_hit_rate: Share of the prompts' tokens that came from a cache.
    """

    completed: int
    failed: int
    duration: float
    input_tokens: int
    output_tokens: int
    retokenized: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    concurrency: float
    e2e: Spread
    ttft: Spread
    tpot: Spread
    itl: Spread
    cache_hit_rate: float | None = None


def figures(results: Sequence[RequestResult], duration: float) -> Figures:
    """The figures of a run of ``duration`` seconds; ``results`` has all requests that ended."""
    done = [result for result in results if result.error is None]
    inputs, outputs = sum(result.prompt_tokens for result in done), sum(result.tokens for result in done)
    cached = [result.cached for result in done if result.cached is not None]

    def rate(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    return Figures(
        completed=len(done),
        failed=len(results) - len(done),
        duration=duration,
        input_tokens=inputs,
        output_tokens=outputs,
        retokenized=sum(result.retokenized for result in done),
        request_throughput=rate(len(done)),
        input_throughput=rate(inputs),
        output_throughput=rate(outputs),
        total_throughput=rate(inputs + outputs),
        concurrency=rate(sum(result.e2e for result in done)),
        e2e=Spread.of(result.e2e for result in done),
        ttft=Spread.of(result.ttft for result in done),
        tpot=Spread.of(result.tpot for result in done if result.tokens > 1),
        itl=Spread.of(gap for result in done for gap in result.itl),
        cache_hit_rate=sum(cached) / inputs if cached and inputs else None,
    )
