"""Speed of an artifact, step by step: ``python -m bench.speed_ours ARTIFACT CONTEXT``; medians as JSON.

A step is what one call of the runner is: batch packed and sent, program, sampling, token read. State is donated.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ling3export.runners.load.loader import load

PREFILLS, STEPS, DISPATCHES = 5, 16, 50


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Of ``repeats`` calls after one that is dropped."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def prefill(driver: Any, padding: int, ids: np.ndarray) -> dict[str, float]:
    """One sequence that fills the call."""
    tokens = ids[:padding].tolist()
    seconds = median_seconds(lambda: driver.runner.read(driver.prefill(1, tokens, padding=padding)), PREFILLS)
    return {"seconds": seconds, "tokens_per_second": padding / seconds}


def fill(driver: Any, slots: int, context: int, ids: np.ndarray) -> None:
    """Gives each of the slots its own ``context`` tokens."""
    largest = driver.paddings["prefill"][-1]
    for slot in range(1, slots + 1):
        tokens = np.roll(ids, 37 * slot)[:context].tolist()
        for start in range(0, context, largest):
            driver.runner.read(driver.prefill(slot, tokens[start : start + largest], start))


def decode(driver: Any, padding: int, rows: int, context: int) -> dict[str, float]:
    """``rows`` sequences of ``context`` tokens, greedy, each step from the last one's tokens."""
    at = iter(range(context, context + STEPS + 1))

    def step() -> None:
        position = next(at)
        driver.runner.read(driver.decode(padding, dict.fromkeys(range(1, rows + 1), position)))

    seconds = median_seconds(step, STEPS)
    return {"seconds": seconds, "tokens_per_second": rows / seconds, "rows": rows}


def dispatch(driver: Any) -> dict[str, float]:
    """A call that has next to nothing to do, the smallest sample: until it returns, and until its token is here."""
    driver.runner.read(driver.prefill(1, [1], padding=16))  # leaves one row of logits
    logits, rows = driver.logits, driver.logits.shape[0]
    returned: list[float] = []

    def call() -> None:
        started = time.perf_counter()
        handle = driver.sample(logits, rows, {})
        returned.append(time.perf_counter() - started)
        driver.runner.read(handle)

    done = median_seconds(call, DISPATCHES)
    return {"returned_seconds": statistics.median(returned), "done_seconds": done}


def main() -> None:
    context = int(sys.argv[2])
    loaded = load(Path(sys.argv[1]), report=lambda text: None)
    from bench.drive import Driver
    from bench.roof import bytes_touched, read_bandwidth

    driver = Driver(loaded.runner, loaded.record)
    ids = np.random.default_rng(0).integers(0, loaded.manifest.vocab_size, 4096)
    slots = loaded.record.state.slots
    result: dict[str, Any] = {
        "prefill": {padding: prefill(driver, padding, ids) for padding in driver.paddings["prefill"]},
        "dispatch": dispatch(driver),
        "decode": {},
    }
    batches = {padding: min(padding, slots) for padding in driver.paddings["decode"]}
    fill(driver, max(batches.values()), context, ids)
    for padding, rows in batches.items():
        result["decode"][padding] = decode(driver, padding, rows, context)
        touched = bytes_touched(loaded.manifest, loaded.record, rows)
        result["decode"][padding] |= {"weight_bytes": touched}
    assert loaded.compiles.count == 0, f"compiled: expected nothing, found {loaded.compiles.count} programs"
    result["read_bandwidth"] = read_bandwidth()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
