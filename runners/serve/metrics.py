"""The counters of a server for Prometheus: its own responses and times, and the engine's counters."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ling3export.runners.engine.request import Completion

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The counters of one server."""

    def __init__(self, engine: "Engine") -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCounters(engine))
        self._responses = Counter(
            "ling3_http_responses", "Responses that were begun.", ["path", "status"], registry=registry
        )
        self._ends = Counter("ling3_completions", "Prompts that ended, by reason.", ["reason"], registry=registry)
        self._queue, self._first, self._gap, self._all = (
            Histogram(f"ling3_{name}_seconds", text, buckets=SECONDS, registry=registry)
            for name, text in (
                ("queue", "From submission to the first call."),
                ("first_token", "From submission to the first token."),
                ("token_gap", "Mean time between tokens of an answer."),
                ("request", "From submission to the last token."),
            )
        )

    def responded(self, path: str, status: int) -> None:
        """Counts a response that was begun."""
        self._responses.labels(path, str(status)).inc()

    def ended(self, completion: Completion) -> None:
        """Counts a prompt that was answered."""
        self._ends.labels(completion.stop_reason).inc()
        self._queue.observe(completion.queue_ms / 1e3)
        self._first.observe(completion.ttft_ms / 1e3)
        self._all.observe(completion.e2e_ms / 1e3)
        if completion.gaps_ms:
            self._gap.observe(sum(completion.gaps_ms) / len(completion.gaps_ms) / 1e3)

    def left(self) -> None:
        """Counts a prompt whose client left before its end."""
        self._ends.labels("left").inc()

    def text(self) -> bytes:
        """All counters in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCounters(Collector):
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Reads the engine's counters."""
        stats = self._engine.stats()
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that were stored.", stats["tokens_in"]),
            ("generated_tokens", "Tokens that were generated.", stats["tokens_out"]),
            ("preempted", "Times that a sequence gave its pages back.", stats["preempted"]),
            ("cached_tokens", "Tokens of prompts that the prefix cache had.", stats["prefix_cache"]["cached_tokens"]),
            ("prefix_hits", "Prompts that the prefix cache had a beginning of.", stats["prefix_cache"]["hits"]),
            ("failed", "Prompts whose logits were not finite.", stats["failed"]),
            ("compile_events", "Programs that were compiled here; 0 unless allowed.", stats["compile_events"]),
        ):
            yield CounterMetricFamily(f"ling3_{name}", text, value)
        yield GaugeMetricFamily("ling3_requests_live", "Prompts that have not ended.", stats["live"])
        for pool, size in stats["pools"].items():
            yield GaugeMetricFamily(f"ling3_{pool}", f"All {pool}.", size)
            yield GaugeMetricFamily(f"ling3_{pool}_free", f"Free {pool}.", stats["free"][pool])
        calls = CounterMetricFamily("ling3_calls", "Calls of a program.", labels=["cell"])
        for cell, row in stats["cells"].items():
            calls.add_metric([cell], row["calls"])
        yield calls
        for name, text in (
            ("transfer", "What happened to states on their way."),
            ("prefix_store", "What happened to states in the folder of the prefix cache."),
        ):
            moved = CounterMetricFamily(f"ling3_{name}", text, labels=["what"])
            for what, count in stats.get(name, {}).items():
                moved.add_metric([what], count)
            yield moved
