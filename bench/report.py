"""The output of every benchmark: a text table for people, then one line of JSON; progress goes to stderr."""

import json
import os
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from typing import Any

from ling3export.foundation.tables import aligned


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Place and time of the measurement; the load average shows how reliable it is."""
    return {
        "date": date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "jax": metadata.version("jax"),
    }


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of every key over ``runs``, all of the same keys."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def cell(value: Any) -> str:
    """A number with three significant digits; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns, the first to the left."""
    lines = aligned([tuple(head), *(tuple(map(cell, row)) for row in rows)])
    return "\n".join(line[2:].rstrip() for line in lines)


def show(title: str, tables: Sequence[str], result: dict[str, Any]) -> None:
    """Prints a benchmark's result on stdout."""
    print(title, *tables, json.dumps(result), sep="\n\n", end="\n\n", flush=True)
