"""The simulation of a fleet against one and three replicas of this machine: throughput and times to the first token.

What the calls of a replica take is measured first, with one, two and three replicas that are busy at once, because they
share the machine's cores, or its memory alone where each has cores of its own: requests like those of the runs, of
other seeds, so many at once in each replica. The runs themselves say nothing to the simulation.

Where a device stands in for the processor, replicas take nothing from each other, as in a fleet whose replicas have
machines of their own: the calls of one are measured, and hold for all.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine import DEMO
from bench.fleet_ours import Note, Speed, lengths
from bench.inputs import ROOT, artifact
from bench.report import machine, say, show, table
from ling3export.artifacts.files import replace_file
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import Target
from ling3export.simulation.fleet import Fleet, simulate
from ling3export.simulation.replica import Ask, Times

SHARES = (0.5, 0.8, 1.3)  # of what the simulation says that the replicas pass at most
WARNING = 0.3  # seconds from an order to its beginning
USUAL = 0.65  # of what replicas pass at most: the load under which calls are timed
LONGER = 15  # times as long as a measurement of calls a run takes
FEWEST = 8  # calls of a kind from which a time is taken
ENOUGH = 40  # calls of a kind under that load from which its times are taken, and no others of what they held
Trace = list[list[float]]  # second, tokens of the prompt, tokens of the answer
Spread = tuple[float, float, float]  # tokens a second, median and p99 of the seconds to the first token


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
def started(folder: Path, count: int, cores: int | None, device: Speed | None) -> Iterator[Replicas]:
    """``count`` replicas of an artifact, which end with the block; with ``cores`` each has so many of its own."""
    own = [[str(core) for core in range(number * (cores or 0), (number + 1) * (cores or 0))] for number in range(count)]
    commands = [[sys.executable, "-m", "bench.fleet_ours", str(folder), json.dumps(device), *those] for those in own]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for command in commands]
    try:
        for process in processes:
            assert line(process) == "ready"
        yield Replicas(processes)
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def _line(seen: Sequence[tuple[int, float]]) -> tuple[float, Callable[[int], float]]:
    """Seconds of a call over what it holds, as a line that does not fall: its slope, and a place on it."""
    rows, seconds = np.array(seen).T
    slope = max(0.0, float(np.polyfit(rows, seconds, 1)[0])) if np.ptp(rows) > 0 else 0.0
    middle, mean = float(rows.mean()), float(seconds.mean())
    return slope, lambda count: mean + slope * (count - middle)


def fitted(notes: Sequence[Note], target: Target, page: int) -> Times:
    """Times of calls from calls that were made, by their padding and what they held.

    A padding that hardly any call had takes as long for each row or padded token as the one below it, or above.
    """
    prefill: dict[int, float] = {}
    decode: dict[int, float] = {}
    spared: dict[int, float] = {}
    for phase, found in (("prefill", prefill), ("decode", decode)):
        below = 0
        for padding in sorted(target.paddings(phase)):
            seen = [(held, seconds) for cell, held, seconds in notes if cell == f"{phase}@{padding}"]
            if len(seen) >= FEWEST:
                slope, line = _line(seen)
                found[padding] = line(padding)
                if phase == "prefill":
                    spared[padding] = min(slope, found[padding] / padding)  # a call of nothing takes no negative time
                else:
                    found[below + 1] = max(line(below + 1), min(seconds for _, seconds in seen))
            below = padding
        assert found, f"no call of {phase} was made"
        for padding in sorted(target.paddings(phase)):
            near = max((each for each in found if each <= padding), default=min(found))
            found.setdefault(padding, found[near] * max(1.0, padding / near))
    decode.setdefault(1, decode[min(decode)])
    slots, pool, chunk = target.state.slots, target.state.pages * page, target.state.chunk
    return Times(prefill, decode, slots, pool, chunk=chunk, spared=spared, interpolated=True)


def measured(replicas: Replicas, folder: Path, busy: int, seconds: float, alone: bool) -> Times:
    """The times of calls while ``busy`` replicas make such calls at once, of all of them.

    Where replicas take nothing from each other (``alone``), requests then arrive at random, at a share of what those
    times let pass, and calls are timed by what that shows of them: an engine that is always busy is slower.
    """
    manifest = read_manifest(folder)
    (target,) = manifest.targets.values()
    notes: list[Note] = []
    for at_once in sorted({max(1, padding // n) for padding in target.paddings("decode") for n in (1, 4)}):

        def order(number: int, start: float, at_once: int = at_once) -> dict[str, Any]:
            return {"at_once": at_once, "until": start + seconds, "seed": 100 * at_once + number}

        notes += [(cell, held, took) for each in replicas.order(busy, order) for cell, held, took in each]
    times = fitted(notes, target, manifest.plan.page_size)
    if alone:
        rate = USUAL * capacity((times,) * busy, busy)
        trace = arrivals(max(ENOUGH, int(LONGER * seconds * rate)), rate, 3)
        told = replicas.order(busy, lambda number, _: {"trace": trace[number::busy]})
        found = [(cell, held, took) for _, calls in told for cell, held, took in calls]
        notes = found + unseen(notes, found)
        times = fitted(notes, target, manifest.plan.page_size)
    rows = [
        (f"{phase}@{size}", took) for phase in ("prefill", "decode") for size, took in getattr(times, phase).items()
    ]
    say(f"{busy} busy, {len(notes)} calls, ms: {', '.join(f'{cell} {1e3 * took:.2f}' for cell, took in rows)}")
    return times


def unseen(notes: Sequence[Note], found: Sequence[Note]) -> list[Note]:
    """Those of ``notes`` of whose calls ``found`` shows too few, or none that held as little or as much.

    A line through calls that held nearly the same says nothing of others: what one of them took by chance decides it.
    """
    held: dict[str, list[int]] = {}
    for cell, count, _ in found:
        held.setdefault(cell, []).append(count)
    enough = {cell: (min(each), max(each)) for cell, each in held.items() if len(each) >= ENOUGH}

    def shown(cell: str, count: int) -> bool:
        return cell in enough and enough[cell][0] <= count <= enough[cell][1]

    return [note for note in notes if not shown(note[0], note[1])]


def arrivals(count: int, rate: float, seed: int) -> Trace:
    """Requests at random gaps; all at once where ``rate`` is 0."""
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate) if rate else 0.0
        found.append([at, *lengths(rng)])
    return found


def simulated(times: tuple[Times, ...], count: int, trace: Trace) -> Spread:
    """What ``real`` gives, of simulated replicas."""
    found = simulate(Fleet(times[:count], both=count), [Ask(at, int(asked), int(said)) for at, asked, said in trace])
    return found.tokens_per_second, *found.first_token()


def capacity(times: tuple[Times, ...], count: int) -> float:
    """Requests a second that ``count`` simulated replicas pass at most."""
    asks = [Ask(at, int(prompt), int(answer)) for at, prompt, answer in arrivals(100 * count, 0, 1)]
    return simulate(Fleet(times[:count], both=count), asks).capacity


def real(replicas: Replicas, count: int, trace: Trace) -> tuple[Spread, dict[str, list[float]]]:
    """Tokens a second, and p50 and p99 of the seconds to the first token: ``count`` replicas, in turn.

    And by cell the number of calls, the mean of what they held, and of their seconds.
    """
    told = replicas.order(count, lambda number, _: {"trace": trace[number::count]})
    found, calls = [ends for ends, _ in told], [tuple(call) for _, notes in told for call in notes]
    ends = [end for each in found for _, end in each]
    first = [
        came - ask[0]
        for number, each in enumerate(found)
        for ask, (came, _) in zip(trace[number::count], each, strict=True)
    ]
    median, p99 = np.percentile(first, (50, 99))
    cells: dict[str, list[float]] = {}
    for cell in sorted({cell for cell, _, _ in calls}):
        those = [(held, seconds) for name, held, seconds in calls if name == cell]
        cells[cell] = [len(those), *(float(each) for each in np.mean(those, axis=0))]
    return (sum(answer for _, _, answer in trace) / max(ends), float(median), float(p99)), cells


class Kept:
    """What was measured, by the name of its part, in a file for each where there is a folder.

    Args:
        folder: See above.
        apart: Whether replicas take nothing from each other, so that the times of one hold for each.
    """

    def __init__(self, folder: Path | None, apart: bool) -> None:
        self._folder, self._apart = folder, apart
        self.parts: dict[str, Any] = {}
        for path in sorted(folder.glob("*.json")) if folder is not None and folder.exists() else ():
            self.parts[path.stem] = json.loads(path.read_text())

    def keep(self, part: str, value: Any) -> None:
        """Notes a part."""
        self.parts[part] = value
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / f"{part}.json", json.dumps(value).encode())

    def measures(self, count: int) -> list[str]:
        """The parts that have the times of calls of so many replicas: with one busy, with two, and so on."""
        return [f"times-{busy}" for busy in range(1, (1 if self._apart else count) + 1)]

    def times(self, count: int) -> tuple[Times, ...]:
        """Those of ``measures``.

        Raises:
            ValueError: They were not measured yet.
        """
        names = self.measures(count)
        if missing := [name for name in names if name not in self.parts]:
            raise ValueError(f"expected the part {missing[0]} measured before the runs, found it missing")
        return tuple(read_times(self.parts[name]) for name in names)


def read_times(value: Mapping[str, Any]) -> Times:
    """What ``asdict`` made of times, behind JSON."""
    rows = {name: {int(size): each for size, each in value[name].items()} for name in ("prefill", "decode", "spared")}
    return Times(**{**value, **rows, "costs": tuple(value["costs"])})


def trace_of(run: Mapping[str, Any]) -> Trace:
    """The requests of a run, which are the same each time."""
    return arrivals(run["requests"], run["rate"], 2)


def ran(
    replicas: Replicas,
    run: Mapping[str, Any] | None,
    count: int,
    times: tuple[Times, ...],
    share: float,
    seconds: float,
    fewest: int,
) -> Any:
    """A run with one more time of ``count`` replicas; None for one that was not made before."""
    if run is None:
        rate = share * capacity(times, count)
        run = {"rate": rate, "requests": max(fewest, int(LONGER * seconds * rate)), "real": [], "calls": []}
    here, calls = real(replicas, count, trace_of(run))
    return {**run, "real": [*run["real"], here], "calls": [*run["calls"], calls]}


def slower(run: Mapping[str, Any], times: tuple[Times, ...]) -> float:
    """How many times as long as in the measurement with one busy replica the calls of the runs took."""
    took = expected = 0.0
    for cells in run["calls"]:
        for cell, (count, held, seconds) in cells.items():
            phase, _, padding = cell.partition("@")
            took += count * seconds
            steps = times[0].steps
            if phase == "prefill":
                expected += count * times[0].prefilled(int(padding), held)
            else:
                expected += count * float(np.interp(held, range(len(steps)), steps))
    return took / expected


def compared(kept: Kept, runs: Mapping[str, tuple[int, float]]) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """The rows of the table, and what the line of JSON says of the runs that are there."""
    rows, told = [], []
    for part, (count, share) in runs.items():
        if (run := kept.parts.get(part)) is None:
            continue
        times = kept.times(count)
        there, here = simulated(times, count, trace_of(run)), [float(each) for each in np.median(run["real"], axis=0)]
        ratios = [model / truth for model, truth in zip(there, here, strict=True)]
        again = np.max(run["real"], axis=0) / np.min(run["real"], axis=0)
        load = run["rate"] / capacity(times, count)
        calls = slower(run, times)
        shown = here[0], *(1e3 * each for each in here[1:]), calls, *ratios, *map(float, again)
        rows.append([count, f"{load:.0%}", run["requests"], len(run["real"]), *shown])
        told.append(
            {
                "replicas": count,
                "share": share,
                "load": load,
                "real": here,
                "simulated": list(there),
                "calls": calls,
                "longest/shortest": again.tolist(),
            }
        )
        say(f"{count} replicas at {load:.0%}: simulated / real {[round(each, 3) for each in ratios]}")
    return rows, told


HEAD = (
    "replicas",
    "load",
    "requests",
    "runs",
    "tokens/s",
    "TTFT p50 ms",
    "p99 ms",
    "calls",
    "simulated/real: tokens/s",
    "p50",
    "p99",
    "most/least of the runs: tokens/s",
    "p50",
    "p99",
)


def main(
    given: Path | None,
    counts: Sequence[int],
    seconds: float,
    folder: Path | None = None,
    only: Sequence[str] = (),
    cores: int | None = None,
    device: Speed | None = None,
    fewest: int = 40,
) -> dict[str, Any]:
    """Measures what is not kept yet, simulates, compares and prints.

    Args:
        given: An artifact; None for one of the demo checkpoint.
        counts: Numbers of replicas.
        seconds: Of each measurement of calls; a run takes LONGER times as long.
        folder: What is measured is kept there, and is not measured again.
        only: Parts that are measured, once more if they are there; empty for all that are not. Such are ``times-2``,
            the calls with two busy replicas, and ``3@0.8``, a run of three at this share of what they pass.
        cores: Of this machine, for each replica alone; None lets them share all.
        device: Stands in for the processor in each replica; None leaves the processor's own times.
        fewest: Requests that a run has at least.
    """
    if cores is not None and cores * max(counts) > (there := len(os.sched_getaffinity(0))):
        raise ValueError(f"expected {cores * max(counts)} cores for {max(counts)} replicas, found {there}")
    options = ["--paddings", "16,128,512", "--decode-paddings", "1,16,64", "--tp", 1]
    given = artifact(DEMO, "serve-tp1", options) if given is None else given.resolve()
    kept = Kept(folder, device is not None)
    runs = {f"{count}@{share:g}": (count, share) for count in counts for share in SHARES}
    parts = {part: busy for busy, part in enumerate(kept.measures(max(counts)), 1)}
    parts |= {part: count for part, (count, _) in runs.items()}
    if unknown := [part for part in only if part not in parts]:
        raise ValueError(f"expected parts among {', '.join(parts)}, found {unknown[0]}")
    wanted = [part for part in parts if (part in only if only else part not in kept.parts)]
    with started(given, max((parts[part] for part in wanted), default=0), cores, device) as replicas:
        for part in wanted:
            if part in runs:
                count, share = runs[part]
                found = ran(replicas, kept.parts.get(part), count, kept.times(count), share, seconds, fewest)
            else:
                alone = cores is not None or parts[part] == 1
                found = asdict(measured(replicas, given, parts[part], seconds, alone))
            kept.keep(part, found)
    rows, told = compared(kept, runs)
    result = {"benchmark": "fleet", "machine": machine(), "cores": cores, "device_ms": device, "runs": told}
    show(f"A fleet of {given.name} in reality and simulated", [table(HEAD, rows)], result)
    return result
