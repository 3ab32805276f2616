"""The table of a run, byte for byte as SGLang prints it, and whether the figures of such a table agree."""

import re
from collections.abc import Iterator

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.bench_serving.metrics import Figures, Spread

WIDTH = 50
TITLE = " Serving Benchmark Result "
CONCURRENCY_LIMIT = {None: "Max request concurrency:", "2025": "Max reqeuest concurrency:"}  # 2025: with its old typo
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
# Figures of which the first can never be above the second.
ASCENDING = (
    ("Median TTFT (ms)", "P99 TTFT (ms)"),
    ("Median TPOT (ms)", "P99 TPOT (ms)"),
    ("Median ITL (ms)", "P99 ITL (ms)"),
    ("Mean TTFT (ms)", "Mean E2E Latency (ms)"),
    ("Median TTFT (ms)", "Median E2E Latency (ms)"),
)


def render(
    found: Figures, *, backend: str, rate: float, limit: int | None, compat: str | None = None, extended: bool = False
) -> str:
    """The table of a run, with a line end before it as SGLang prints it, without one behind it.

    Args:
        found: The figures.
        backend: What was measured.
        rate: Requests a second that were sent; infinite for all at once.
        limit: How many requests may run at once.
        compat: ``2025`` writes one row's name with the typo that tables of that year have.
        extended: Also P95 and Max ITL, the cache's hit rate and the share of prefills by another engine.
    """
    rows: list[tuple[str, object] | str] = [
        ("Backend:", backend),
        ("Traffic request rate:", rate),
        (CONCURRENCY_LIMIT[compat], "not set" if limit is None else limit),
        ("Successful requests:", found.completed),
        ("Benchmark duration (s):", _two(found.duration)),
        ("Total input tokens:", found.input_tokens),
        ("Total generated tokens:", found.output_tokens),
        ("Total generated tokens (retokenized):", found.retokenized),
        ("Request throughput (req/s):", _two(found.request_throughput)),
        ("Input token throughput (tok/s):", _two(found.input_throughput)),
        ("Output token throughput (tok/s):", _two(found.output_throughput)),
        ("Total token throughput (tok/s):", _two(found.total_throughput)),
        ("Concurrency:", _two(found.concurrency)),
        "End-to-End Latency",
        *_spread("E2E Latency", found.e2e, ("Mean", "Median")),
        "Time to First Token",
        *_spread("TTFT", found.ttft),
        "Time per Output Token (excl. 1st token)",
        *_spread("TPOT", found.tpot),
        "Inter-Token Latency",
        *_spread("ITL", found.itl),
    ]
    if extended:
        rows += [
            ("P95 ITL (ms):", _two(found.itl.p95)),
            ("Max ITL (ms):", _two(found.itl.max)),
            "Prefill",
            ("Cache hit rate (%):", _percent(found.cache_hit_rate)),
            ("Remote prefill share (%):", _percent(found.remote_prefill_share)),
        ]
    if found.goodput is not None:
        rows += ["Goodput", ("Request goodput (req/s):", _two(found.goodput))]
    if found.steady is not None:
        steady = found.steady
        rows += [
            "Steady State",
            ("Duration (s):", _two(steady.duration)),
            ("Whole requests:", steady.requests),
            ("Output token throughput (tok/s):", _two(steady.output_throughput)),
            *_spread("TTFT", steady.ttft),
            *_spread("TPOT", steady.tpot),
        ]
    lines = [f"{row:-^{WIDTH}}" if isinstance(row, str) else "{:<40} {:<10}".format(*row) for row in rows]
    return "\n".join([f"\n{TITLE:=^{WIDTH}}", *lines, "=" * WIDTH])


def parse(text: str) -> dict[str, str]:
    """The rows of a table by name, without their colons. Of rows of one name the first counts.

    Raises:
        Ling3Error: There is no such table, or it has not the rows that are compared.
    """
    if TITLE.strip() not in text:
        raise Ling3Error(f"table: expected a line with{TITLE.rstrip()}, found none")
    found: dict[str, str] = {}
    for line in text.splitlines():
        if row := ROW.fullmatch(line.strip()):
            found.setdefault(row["name"], row["value"])
    for name in NEEDED:
        if not NUMBER.fullmatch(value := found.get(name, "nothing")):
            raise Ling3Error(f"table: expected a number in the row `{name}`, found {value[:60]}")
    return found


def check(text: str) -> list[str]:
    """What does not agree in a table, a sentence each; nothing for one that agrees within its rounding.

    Each rate times the duration is what it counts, the two kinds of tokens add up, and requests times their mean
    latency is the concurrency times the duration: together they leave a range of durations that no rounding explains
    away. Beyond that no median may lie above its 99th percentile, and no first token behind the last.

    Raises:
        Ling3Error: There is no such table, or it has not the rows that are compared.
    """
    rows = parse(text)
    values = {name: float(value) for name, value in rows.items() if NUMBER.fullmatch(value)}
    wrong = list(_ascending(values))
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
            there = f"`{rate}` {rows[rate]}"
            wrong.append(f"{there}: expected {what} / duration ({low / most:.2f} or so), which {why} allows")
            continue
        least, most = max(least, shortest), min(most, longest)
    if abs(values[TOTAL] - sum(values[rate] for _, rate in RATES[1:])) > 3 * HALF + SLACK:
        wrong.append(f"`{TOTAL}` {rows[TOTAL]}: expected the sum of the rates of input and output tokens")
    return wrong


def _ascending(values: dict[str, float]) -> Iterator[str]:
    for low, high in ASCENDING:
        if low in values and high in values and values[low] > values[high]:
            yield f"`{low}` {values[low]:.2f}: expected at most `{high}`, found {values[high]:.2f}"


def _spread(name: str, spread: Spread, columns: tuple[str, ...] = ("Mean", "Median", "P99")) -> list[tuple[str, str]]:
    return [(f"{column} {name} (ms):", _two(getattr(spread, column.lower()))) for column in columns]


def _two(value: float) -> str:
    return f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "not known" if share is None else _two(100 * share)
