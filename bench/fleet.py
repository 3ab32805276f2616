"""The simulation of a fleet against one and three replicas of this machine: throughput and times to the first token.

Three replicas share its cores, so the times of their calls are measured with one, two and three of them busy.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine import DEMO
from bench.inputs import ROOT, artifact
from bench.report import machine, say, show, table
from ling3export.artifacts.manifest import read_manifest
from ling3export.simulation.fleet import Fleet, simulate
from ling3export.simulation.replica import Ask, Times

SHARES = (0.5, 0.8, 1.3)  # of what the simulation says that the replicas pass at most
WARNING = 0.3  # seconds from an order to its beginning
Trace = list[list[float]]  # second, tokens of the prompt, tokens of the answer


class Replicas:
    """Processes with an engine each."""

    def __init__(self, processes: Sequence["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    def order(self, count: int, what: Callable[[int, float], dict[str, Any]]) -> list[Any]:
        """What the first ``count`` say to orders that begin at the same moment.

        Args:
            count: How many are asked.
            what: The order to a number, given the moment.
        """
        start = time.monotonic() + WARNING
        for number, process in enumerate(self._processes[:count]):
            assert process.stdin is not None
            process.stdin.write(json.dumps({"start": start, **what(number, start)}) + "\n")
            process.stdin.flush()
        return [json.loads(line(process)) for process in self._processes[:count]]


def line(process: "subprocess.Popen[str]") -> str:
    """The next line that a process says."""
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said, "a replica has ended"
    return said.strip()


@contextmanager
def started(folder: Path, count: int) -> Iterator[Replicas]:
    """``count`` replicas of an artifact, which end with the block."""
    command = [sys.executable, "-m", "bench.fleet_ours", str(folder)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    try:
        for process in processes:
            assert line(process) == "ready"
        yield Replicas(processes)
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def measured(replicas: Replicas, folder: Path, busy: int, seconds: float) -> Times:
    """The times of calls while ``busy`` replicas make such calls at once: means over the replicas."""
    manifest = read_manifest(folder)
    (target,) = manifest.targets.values()
    paddings = {phase: sorted(target.paddings(phase)) for phase in ("prefill", "decode")}
    rows = sorted({1, *paddings["decode"], *(below + 1 for below in paddings["decode"][:-1])})
    found: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
    for phase, sizes in (("prefill", paddings["prefill"]), ("decode", rows)):
        for size in sizes:

            def order(_: int, start: float, cell: tuple[str, int] = (phase, size)) -> dict[str, Any]:
                return {"cell": cell, "until": start + seconds}

            found[phase][size] = float(np.mean(replicas.order(busy, order)))
    told = {f"{phase}@{size}": round(1e3 * each, 2) for phase, row in found.items() for size, each in row.items()}
    say(f"{busy} busy, ms a call: {told}")
    slots, tokens = target.state.slots, target.state.pages * manifest.plan.page_size
    return Times(found["prefill"], found["decode"], slots, tokens, chunk=target.state.chunk, interpolated=True)


def arrivals(count: int, rate: float, seed: int) -> Trace:
    """Requests at random gaps; all at once where ``rate`` is 0."""
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate) if rate else 0.0
        found.append([at, rng.randint(16, 400), rng.randint(8, 64)])
    return found


def asked(trace: Trace) -> list[Ask]:
    """The same for the simulation."""
    return [Ask(at, int(prompt), int(answer)) for at, prompt, answer in trace]


def real(replicas: Replicas, count: int, trace: Trace) -> tuple[float, float, float]:
    """Tokens a second, and p50 and p99 of the seconds to the first token: ``count`` replicas, in turn."""
    found = replicas.order(count, lambda number, _: {"trace": trace[number::count]})
    ends = [end for each in found for _, end in each]
    first = [
        came - ask[0]
        for number, each in enumerate(found)
        for ask, (came, _) in zip(trace[number::count], each, strict=True)
    ]
    median, p99 = np.percentile(first, (50, 99))
    return sum(answer for _, _, answer in trace) / max(ends), float(median), float(p99)


def main(given: Path | None, counts: Sequence[int], seconds: float) -> dict[str, Any]:
    """Measures, simulates, compares and prints.

    Args:
        given: An artifact; None for one of the demo checkpoint.
        counts: Numbers of replicas.
        seconds: Of each measured kind of call; a run takes eight times as long.
    """
    options = ["--paddings", "16,128,512", "--decode-paddings", "1,16,64", "--tp", 1]
    folder = artifact(DEMO, "serve-tp1", options) if given is None else given.resolve()
    rows, runs = [], []
    with started(folder, max(counts)) as replicas:
        for count in counts:
            times = tuple(measured(replicas, folder, busy, seconds) for busy in range(1, count + 1))
            fleet = Fleet(times, both=count)
            most = simulate(fleet, asked(arrivals(100 * count, 0, 1))).capacity
            for share in SHARES:
                trace = arrivals(max(40, int(8 * seconds * share * most)), share * most, 2)
                found = simulate(fleet, asked(trace))
                here = real(replicas, count, trace)
                there = found.tokens_per_second, *found.first_token()
                ratios = [model / truth for model, truth in zip(there, here, strict=True)]
                rows.append([count, f"{share:.0%}", len(trace), here[0], *(1e3 * each for each in here[1:]), *ratios])
                runs.append({"replicas": count, "share": share, "real": here, "simulated": there})
                say(f"{count} replicas at {share:.0%}: simulated / real {[round(each, 3) for each in ratios]}")
    head = [
        "replicas",
        "load",
        "requests",
        "tokens/s",
        "TTFT p50 ms",
        "p99 ms",
        "simulated/real tokens/s",
        "p50",
        "p99",
    ]
    result = {"benchmark": "fleet", "machine": machine(), "runs": runs}
    show(f"A fleet of {folder.name} in reality and simulated", [table(head, rows)], result)
    return result
