"""The table of a run, byte for byte as SGLang prints it, and whether the figures of such a table agree."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.tables import aligned
from ling3export.runners.bench_serving.metrics import Figures, Spread

WIDTH = 50
TITLE = " Serving Benchmark Result "
ROW = re.compile(r"(?P<name>[A-Z][^:]*):\s*(?P<value>\S.*?)\s*$")
NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,6})?")
HALF = 0.005  # what rounding to two decimals may hide
SLACK = 1e-9  # what floats of such sizes may hide
# (what is counted, its rate)
RATES = (
    ("Successful requests", "Request throughput (req/s)"),
    ("Total input tokens", "Input token throughput (tok/s)"),
    ("Total generated tokens", "Output token throughput (tok/s)"),
)
TOTAL, CONCURRENCY = "Total token throughput (tok/s)", "Concurrency"
DURATION, LATENCY = "Benchmark duration (s)", "Mean E2E Latency (ms)"
NEEDED = (*(name for pair in RATES for name in pair), TOTAL, CONCURRENCY, DURATION, LATENCY)
# Pairs of figures; the first can never be above the second.
ASCENDING = (
    ("Median TTFT (ms)", "P99 TTFT (ms)"),
    ("Median TPOT (ms)", "P99 TPOT (ms)"),
    ("Median ITL (ms)", "P99 ITL (ms)"),
    ("Mean TTFT (ms)", "Mean E2E Latency (ms)"),
    ("Median TTFT (ms)", "Median E2E Latency (ms)"),
)

MEANS = ("Mean", "Median")
# For runs side by side: (what a row is called, where its figure is in a record, the record's unit in the row's).
ROWS: tuple[tuple[str, str, float], ...] = (
    ("Successful requests", "completed", 1),
    ("Failed requests", "failed", 1),
    ("Benchmark duration (s)", "duration", 1),
    ("Request throughput (req/s)", "request_throughput", 1),
    ("Output token throughput (tok/s)", "output_throughput", 1),
    ("Total token throughput (tok/s)", "total_throughput", 1),
    ("Concurrency", "concurrency", 1),
    ("Mean E2E Latency (ms)", "e2e.mean", 1),
    ("Mean TTFT (ms)", "ttft.mean", 1),
    ("P99 TTFT (ms)", "ttft.p99", 1),
    ("Mean TPOT (ms)", "tpot.mean", 1),
    ("Mean ITL (ms)", "itl.mean", 1),
    ("P99 ITL (ms)", "itl.p99", 1),
    ("Cache hit rate (%)", "cache_hit_rate", 100),
)


def render(figures: Figures, *, backend: str, rate: float, limit: int | None, extended: bool = False) -> str:
    """The table of a run, with a line end before it as SGLang prints it, without one at its end.

    Args:
        extended: Also P95 and Max ITL, and the cache's hit rate.
    """
    rows: list[tuple[str, object] | str] = [
        ("Backend:", backend),
        ("Traffic request rate:", rate),
        ("Max request concurrency:", "not set" if limit is None else limit),
        ("Successful requests:", figures.completed),
        ("Benchmark duration (s):", _two(figures.duration)),
        ("Total input tokens:", figures.input_tokens),
        ("Total generated tokens:", figures.output_tokens),
        ("Total generated tokens (retokenized):", figures.retokenized),
        ("Request throughput (req/s):", _two(figures.request_throughput)),
        ("Input token throughput (tok/s):", _two(figures.input_throughput)),
        ("Output token throughput (tok/s):", _two(figures.output_throughput)),
        ("Total token throughput (tok/s):", _two(figures.total_throughput)),
        ("Concurrency:", _two(figures.concurrency)),
        "End-to-End Latency",
        *_spread("E2E Latency", figures.e2e, MEANS),
        "Time to First Token",
        *_spread("TTFT", figures.ttft),
        "Time per Output Token (excl. 1st token)",
        *_spread("TPOT", figures.tpot),
        "Inter-Token Latency",
        *_spread("ITL", figures.itl),
    ]
    if extended:
        rows += [
            ("P95 ITL (ms):", _two(figures.itl.p95)),
            ("Max ITL (ms):", _two(figures.itl.max)),
            "Prefill",
            ("Cache hit rate (%):", _percent(figures.cache_hit_rate)),
        ]
    lines = [f"{row:-^{WIDTH}}" if isinstance(row, str) else "{:<40} {:<10}".format(*row) for row in rows]
    return "\n".join([f"\n{TITLE:=^{WIDTH}}", *lines, "=" * WIDTH])


def parse(text: str) -> dict[str, str]:
    """The rows of a table by name, without their colons. The first of several rows of one name counts.

    Raises:
        Ling3Error: There is no such table, or it has not the rows that are compared.
    """
    if TITLE.strip() not in text:
        raise Ling3Error(f"table: no line with{TITLE.rstrip()}")
    values: dict[str, str] = {}
    for line in text.splitlines():
        if row := ROW.fullmatch(line.strip()):
            values.setdefault(row["name"], row["value"])
    for name in NEEDED:
        if not NUMBER.fullmatch(value := values.get(name, "nothing")):
            raise Ling3Error(f"table: expected a number in the row `{name}`, found {value[:60]}")
    return values


def check(text: str) -> list[str]:
    """The contradictions in a table, a sentence each; none if its figures agree within their rounding.

    One duration must fit all figures. A rate times the duration is its count. The two kinds of tokens add up. Requests
    times their mean latency are the concurrency times the duration. Also, no median lies above its 99th percentile, and
    the first token is not later than the last.

    Raises:
        Ling3Error: There is no such table, or it has not the rows that are compared.
    """
    rows = parse(text)
    values = {name: float(value) for name, value in rows.items() if NUMBER.fullmatch(value)}
    ordered = [(low, high) for low, high in ASCENDING if low in values and high in values]
    wrong = [
        f"`{low}` {values[low]:.2f}: expected at most `{high}`, found {values[high]:.2f}"
        for low, high in ordered
        if values[low] > values[high]
    ]
    least, most, why = values[DURATION] - HALF, values[DURATION] + HALF, f"`{DURATION}` {rows[DURATION]}"
    amounts = [(counted, values[counted], values[counted], rate) for counted, rate in RATES]
    both = values["Total input tokens"] + values["Total generated tokens"]
    amounts.append(("all tokens", both, both, TOTAL))
    latencies, requests = values[LATENCY], values["Successful requests"]
    busy = [requests * max(latencies + sign * HALF, 0.0) / 1e3 for sign in (-1, 1)]
    amounts.append((f"requests × `{LATENCY}`", busy[0], busy[1], CONCURRENCY))
    for what, low, high, rate in amounts:
        shortest = low / (values[rate] + HALF)
        longest = high / (values[rate] - HALF) if values[rate] > HALF else float("inf")
        if shortest > most * (1 + SLACK) or longest < least * (1 - SLACK):
            row = f"`{rate}` {rows[rate]}"
            wrong.append(f"{row}: expected {what} / duration ({low / most:.2f} or so), which {why} allows")
            continue
        least, most = max(least, shortest), min(most, longest)
    if abs(values[TOTAL] - sum(values[rate] for _, rate in RATES[1:])) > 3 * HALF + SLACK:
        wrong.append(f"`{TOTAL}` {rows[TOTAL]}: expected the sum of the rates of input and output tokens")
    return wrong


def _spread(name: str, spread: Spread, columns: tuple[str, ...] = (*MEANS, "P99")) -> list[tuple[str, str]]:
    return [(f"{column} {name} (ms):", _two(getattr(spread, column.lower()))) for column in columns]


def _two(value: float) -> str:
    return f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "not known" if share is None else _two(100 * share)


def side_by_side(records: Sequence[Mapping[str, Any]]) -> str:
    """Runs as columns, each but the first with its ratio to the first; without rows whose figure no run knows."""
    rows = [("", *(str(record["name"]) for record in records))]
    for title, path, scale in ROWS:
        values = [_figure(record, path) for record in records]
        if any(value is not None for value in values):
            rows.append(
                (title, *(_cell(value, None if at == 0 else values[0], scale) for at, value in enumerate(values)))
            )
    return "\n".join(aligned(rows))


def _figure(record: Mapping[str, Any], path: str) -> Any:
    value: Any = record["figures"]
    for name in path.split("."):
        value = (value or {}).get(name)
    return value


def _cell(value: Any, first: Any, scale: float) -> str:
    if value is None:
        return "-"
    text = f"{value * scale:.{3 if scale < 1 else 2}f}" if isinstance(value, float) else str(value)
    return f"{text} ({value / first:.2f}×)" if first else text
