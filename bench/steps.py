"""The programs of an artifact alone: no scheduler, but each call with its sampling and the read of its tokens.

A decode step of some sequences runs through every program that holds them, in turn, which shows what padding costs.
"""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.drive import Driver
from bench.report import machine, say, show, table
from bench.roof import bytes_touched, read_bandwidth
from bench.speed_ours import fill, median_seconds, prefill
from ling3export.runners.load.loader import load

PROMPT, STEPS = 16, 5  # tokens that a sequence holds at first; decode steps of a turn, after one that is dropped


def main(folder: Path, rounds: int, counts: Sequence[int]) -> None:
    """Prints milliseconds of each prefill, and of each number of sequences in each decode program that holds them."""
    loaded = load(folder, report=say)
    driver, vocabulary = Driver(loaded.runner, loaded.record), loaded.manifest.vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, 4096)
    paddings = driver.paddings["decode"]
    counts = [count for count in counts if count <= min(paddings[-1], loaded.record.state.slots)]
    calls = [(count, padding) for count in counts for padding in paddings if padding >= count]
    if len(calls) * (STEPS + 1) * rounds > driver.longest - PROMPT:
        raise SystemExit("steps: a sequence has no room for so many; build with a longer --context, or ask for less")
    prefills = [[f"prefill@{size}", prefill(driver, size, ids)["seconds"] * 1e3] for size in driver.paddings["prefill"]]
    fill(driver, max(counts), PROMPT, ids)
    seconds: dict[tuple[int, int], list[float]] = {call: [] for call in calls}
    position = itertools.count(PROMPT)
    for _ in range(rounds):
        for count, padding in calls:
            slots = range(1, count + 1)

            def step(slots: range = slots, padding: int = padding) -> None:
                driver.runner.read(driver.decode(padding, dict.fromkeys(slots, next(position))))

            seconds[count, padding].append(median_seconds(step, STEPS))
    rows = []
    for (count, padding), own in seconds.items():
        smallest = seconds[count, min(each for each in paddings if each >= count)]
        ratio = statistics.median(one / two for one, two in zip(own, smallest, strict=True))
        rate = bytes_touched(loaded.manifest, loaded.record, count) / statistics.median(own) / 1e9
        rows.append([count, f"decode@{padding}", statistics.median(own) * 1e3, ratio, rate])
    read = read_bandwidth() / 1e9
    head = ["sequences", "program", "ms", "times the smallest", "GB/s of weights"]
    show(
        f"the programs of {folder} alone, medians of {rounds}; a plain read gets {read:.1f} GB/s",
        [table(["program", "ms"], prefills), table(head, rows)],
        {"machine": machine(), "prefill": prefills, "decode": rows, "read": read},
    )
