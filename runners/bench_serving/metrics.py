"""What became of each request of a run, and the figures of the run, by the definitions of SGLang and vLLM.

Times are seconds of one clock (``time.perf_counter``). With t0 just before a request's submission and τ1 … τn the times
of its tokens: TTFT = τ1 - t0, E2E = τn - t0, TPOT = (E2E - TTFT) / (n - 1) where n > 1, and the n - 1 inter-token
latencies (ITL) are τ(j+1) - τj. Failed requests count in ``failed`` and nowhere else.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ling3export.foundation.errors import RequestError

GOALS = ("ttft", "tpot", "e2el")
# What a server tells of the time up to the first token, and what it is called here.
TOLD = {"queue": "queue", "prefill": "prefill", "save": "save", "transfer": "transfer", "decode": "first"}
PHASES = (*TOLD.values(), "http", "decode")


@dataclass
class RequestResult:
    """A request that was sent.

    Attributes:
        start: When, just before its submission.
        times: When each token came; what came together has equal times. Where the server does not say how many tokens
            a piece of text is, the times of pieces.
        prompt_tokens: Tokens of the prompt.
        tokens: Tokens of the answer.
        text: The answer's text.
        retokenized: Tokens of the answer's text when it is tokenized again; ``tokens`` without a tokenizer.
        cached: Tokens of the prompt that were not computed, but found in a cache; None where nobody says it.
        told: Seconds by phase up to the first token, as the server says them; None where it does not. ``queue`` and
            ``prefill`` of one engine. Where another engine prefilled also ``save``, until the state lay where it can be
            taken, ``transfer``, until it was taken, and ``first``, until the engine that decodes gave the first token.
        transfer_bytes: Bytes of that state; None where none came.
        error: Why it failed; None where it did not.
        pieces: When each piece with text came over HTTP: all that a client sees of tokens whose ids it is not told.
    """

    start: float
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    retokenized: int = 0
    cached: int | None = None
    told: dict[str, float] | None = None
    transfer_bytes: int | None = None
    error: str | None = None
    pieces: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds until the first token; 0 without one."""
        return self.times[0] - self.start if self.times else 0.0

    @property
    def e2e(self) -> float:
        """Seconds until the last token."""
        return self.times[-1] - self.start if self.times else 0.0

    @property
    def tpot(self) -> float:
        """Mean seconds of a token behind the first; 0 for one token or none."""
        return (self.e2e - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def itl(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    def take(self, said: Mapping[str, Any]) -> None:
        """Adds the times that a server of ours says of its request (``Completion.times``); nothing if it says none.

        Raises:
            TypeError, ValueError: They have another form.
        """
        if isinstance(phases := said.get("phases_ms"), Mapping):
            self.told = {ours: float(phases[name]) / 1e3 for name, ours in TOLD.items() if name in phases}
        if said.get("transfer_bytes") is not None:
            self.transfer_bytes = int(said["transfer_bytes"])

    @property
    def phases(self) -> dict[str, float] | None:
        """Seconds by phase: what the server told, ``http``, which is the rest of TTFT, and ``decode`` behind it.

        All but ``decode`` add up to TTFT. ``http`` is the time of client, connections and a router. None where the
        server told none.
        """
        if self.told is None:
            return None
        return {**self.told, "http": self.ttft - sum(self.told.values()), "decode": self.e2e - self.ttft}


@dataclass(frozen=True)
class Spread:
    """Figures of one kind of time, in milliseconds. Without a value all are 0."""

    mean: float = 0.0
    median: float = 0.0
    std: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread":
        """The figures of values in seconds; the standard deviation is that of a population."""
        values = 1e3 * np.fromiter(seconds, float)
        if not values.size:
            return cls()
        median, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        return cls(float(values.mean()), median, float(values.std()), p95, p99, float(values.max()))


@dataclass(frozen=True)
class Figures:
    """The figures of a run. Throughputs are per second; a figure that nobody knows is None.

    Attributes:
        completed: Requests that were answered.
        failed: Requests that were not.
        duration: Seconds from the first submission to the last completion.
        concurrency: Sum of all E2E over the duration.
        cache_hit_rate: Share of the prompts' tokens that were found in a cache.
        remote_prefill_share: Share of the requests whose prefill another engine did.
        goodput: Requests a second that kept all bounds that were asked for.
        phases: Of each phase, of the requests whose server told them; one without a phase counts as 0 there.
        moving_share: Share of all TTFT in which states were saved and transferred.
        transfer_bytes: Mean bytes of a state that went from one engine to another.
        transfer_speed: Bytes a second of these: all bytes over the sum of their ``transfer``.
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
    goodput: float | None = None
    phases: dict[str, Spread] | None = None
    moving_share: float | None = None
    transfer_bytes: float | None = None
    transfer_speed: float | None = None


def figures(results: Sequence[RequestResult], duration: float, goals: dict[str, float] | None = None) -> Figures:
    """The figures of a run.

    Args:
        results: Of all requests that ended.
        duration: Seconds from the first submission to the last completion.
        goals: Most milliseconds of ``ttft``, ``tpot`` and ``e2el``, for the goodput.
    """
    done = [each for each in results if each.error is None]
    inputs, outputs = sum(each.prompt_tokens for each in done), sum(each.tokens for each in done)
    known = [each.cached for each in done if each.cached is not None]

    def rate(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    return Figures(
        len(done),
        len(results) - len(done),
        duration,
        inputs,
        outputs,
        sum(each.retokenized for each in done),
        rate(len(done)),
        rate(inputs),
        rate(outputs),
        rate(inputs + outputs),
        rate(sum(each.e2e for each in done)),
        e2e=Spread.of(each.e2e for each in done),
        ttft=Spread.of(each.ttft for each in done),
        tpot=Spread.of(each.tpot for each in done if each.tokens > 1),
        itl=Spread.of(gap for each in done for gap in each.itl),
        cache_hit_rate=sum(known) / inputs if known and inputs else None,
        goodput=None if goals is None else rate(sum(_keeps(each, goals) for each in done)),
        **_phases(done),
    )


def parse_goals(text: str) -> dict[str, float]:
    """The bounds of ``ttft:200,tpot:20``, in milliseconds.

    Raises:
        RequestError: A name is none of GOALS or stands twice, or a value is no number above 0.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in GOALS or name in found or not 0 < number < math.inf:
            wanted = "NAME:MILLISECONDS with each name of ttft, tpot, e2el once"
            raise RequestError(f"goodput: expected {wanted}, found `{part}`", "write --goodput ttft:200,tpot:20")
        found[name] = number
    return found


def _phases(done: Sequence[RequestResult]) -> dict[str, Any]:
    """Those figures that need a server of ours, which tells phases; none of them where nobody told any."""
    told = [each.phases for each in done if each.phases is not None]
    if not told:
        return {}
    names = [name for name in PHASES if any(name in each for each in told)]
    found: dict[str, Any] = {name: Spread.of(each.get(name, 0.0) for each in told) for name in names}
    moved = [each for each in done if each.transfer_bytes is not None]
    size = sum(each.transfer_bytes or 0 for each in moved)
    save, transfer = (sum((each.told or {}).get(name, 0.0) for each in moved) for name in ("save", "transfer"))
    return {
        "phases": found,
        "remote_prefill_share": len(moved) / len(done),
        "moving_share": (save + transfer) / (sum(each.ttft for each in moved) or 1.0) if moved else None,
        "transfer_bytes": size / len(moved) if moved else None,
        "transfer_speed": size / transfer if transfer else None,
    }


def _keeps(result: RequestResult, goals: dict[str, float]) -> bool:
    values = {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.e2e}
    return all(1e3 * values[name] <= most for name, most in goals.items())
