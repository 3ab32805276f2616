"""Results of the requests of a run, and the figures of the run, by the definitions of SGLang and vLLM.

Times are seconds of one clock (``time.perf_counter``). With t0 just before a request's submission and τ1 … τn the times
of its tokens: TTFT = τ1 - t0, E2E = τn - t0, TPOT = (E2E - TTFT) / (n - 1) where n > 1, and the n - 1 inter-token
latencies (ITL) are τ(j+1) - τj. Failed requests count in ``failed`` and nowhere else.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# The phases up to the first token that a server reports, and their names in figures.
REPORTED = {"queue": "queue", "prefill": "prefill", "save": "save", "transfer": "transfer", "decode": "first"}
PHASES = (*REPORTED.values(), "http", "decode")


@dataclass
class RequestResult:
    """A request that was sent.

    Attributes:
        start: Time just before its submission.
        times: When each token came; tokens of one piece have equal times. If the server does not report how many
            tokens a piece of text is, the times of pieces.
        prompt_tokens: Tokens of the prompt.
        tokens: Tokens of the answer.
        retokenized: Tokens of the answer's text when it is tokenized again; ``tokens`` without a tokenizer.
        cached: Tokens of the prompt that came from a cache; None if the server does not report it.
        server_phases: Seconds by phase up to the first token, as the server reports them, else None. ``queue`` and
            ``prefill`` of one engine. If another engine prefilled, also ``save``, until the state could be taken,
            ``transfer``, until it was taken, and ``first``, until the engine that decodes gave the first token.
        transfer_bytes: Bytes of that state; None if none came.
        error: Why it failed; None if it did not.
        pieces: When each piece with text came over HTTP: other clients see only these.
    """

    start: float
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    retokenized: int = 0
    cached: int | None = None
    server_phases: dict[str, float] | None = None
    transfer_bytes: int | None = None
    error: str | None = None
    pieces: list[float] = field(default_factory=list)

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

    def take(self, report: Mapping[str, Any]) -> None:
        """Adds the times that a server of ours reports of its request (``Completion.times``), if it reports any.

        Raises:
            TypeError, ValueError: They have another form.
        """
        if isinstance(phases := report.get("phases_ms"), Mapping):
            self.server_phases = {ours: float(phases[name]) / 1e3 for name, ours in REPORTED.items() if name in phases}
        if report.get("transfer_bytes") is not None:
            self.transfer_bytes = int(report["transfer_bytes"])

    @property
    def phases(self) -> dict[str, float] | None:
        """Seconds by phase; all but ``decode`` add up to TTFT. None if the server reported none.

        ``http`` is the rest of TTFT: client, connections and a router.
        """
        if self.server_phases is None:
            return None
        rest = self.ttft - sum(self.server_phases.values())
        return {**self.server_phases, "http": rest, "decode": self.e2e - self.ttft}


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
        remote_prefill_share: Share of the requests whose prefill another engine did.
        phases: Of the requests whose server reported them; one without a phase counts as 0 for it.
        moving_share: Share of all TTFT in which states were saved and transferred.
        transfer_bytes: Mean bytes of a state that went from one engine to another.
        transfer_speed: All bytes of these states over the sum of their ``transfer``, per second.
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
    remote_prefill_share: float | None = None
    phases: dict[str, Spread] | None = None
    moving_share: float | None = None
    transfer_bytes: float | None = None
    transfer_speed: float | None = None


def figures(results: Sequence[RequestResult], duration: float) -> Figures:
    """The figures of a run.

    Args:
        results: Of all requests that ended.
        duration: Seconds from the first submission to the last completion.
    """
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
        **_phases(done),
    )


def _phases(done: Sequence[RequestResult]) -> dict[str, Any]:
    """The figures that need a server of ours, which reports phases; none of them without such a report."""
    reported = [result.phases for result in done if result.phases is not None]
    if not reported:
        return {}
    names = [name for name in PHASES if any(name in phases for phases in reported)]
    moved = [result for result in done if result.transfer_bytes is not None]
    size = sum(result.transfer_bytes or 0 for result in moved)
    save, transfer = (
        sum((result.server_phases or {}).get(name, 0.0) for result in moved) for name in ("save", "transfer")
    )
    return {
        "phases": {name: Spread.of(phases.get(name, 0.0) for phases in reported) for name in names},
        "remote_prefill_share": len(moved) / len(done),
        "moving_share": (save + transfer) / (sum(result.ttft for result in moved) or 1.0) if moved else None,
        "transfer_bytes": size / len(moved) if moved else None,
        "transfer_speed": size / transfer if transfer else None,
    }
