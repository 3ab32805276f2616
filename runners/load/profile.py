"""Where the time of programs goes: a trace of their calls, and the operations that take most of it."""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ling3export.errors import Ling3Error
from ling3export.hlo import parse
from ling3export.operations import kinds_of
from ling3export.runners import flight

UNKNOWN = "?"  # the program of a run that the engine did not start
DEPTH = 3  # how many of the last parts of an operation's source are shown
_NAMED = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = (?:.*?op_name="([^"]*)")?', re.MULTILINE)
_Event = tuple[int, int, str]  # nanoseconds of begin and end, and the operation


class Operation(NamedTuple):
    """One operation of one program.

    Attributes:
        program: ``decode@16``.
        name: What the compiler calls it.
        source: What the model calls it: the last parts of jax's name, empty where the compiler keeps none.
        kind: What kind of work it is: one of ``operations.KINDS`` or COLLECTIVES; empty where no program tells.
        calls: How often it ran, on all devices.
        seconds: Its own time, without that of operations inside it, over all devices and threads.
    """

    program: str
    name: str
    source: str
    kind: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """What a trace says.

    Attributes:
        file: The trace, as xprof reads it; ``perfetto_trace.json.gz`` lies beside it.
        calls: How often the engine called each program.
        operations: All operations, the dearest first.
        spans: Of each program, the seconds of every call from its first operation's begin to its last one's end.
    """

    file: Path
    calls: Counter[str]
    operations: list[Operation]
    spans: dict[str, list[float]]

    @property
    def seconds(self) -> float:
        """The operations' time, over all devices and threads."""
        return sum(each.seconds for each in self.operations)


def profile(work: Callable[[], object], folder: Path) -> Profile:
    """Runs ``work`` twice, the second time under jax's profiler.

    Args:
        work: Lets an engine that is idle answer requests.
        folder: Where the profiler writes ``plugins/profile/TIME``.

    Raises:
        Ling3Error: The trace has no operations: jax's profiler knows none of this device.
    """
    work()
    return traced(work, folder, perfetto=True)


def traced(work: Callable[[], object], folder: Path, *, perfetto: bool = False) -> Profile:
    """Runs ``work`` once under jax's profiler; otherwise like :func:`profile`.

    Args:
        work: Calls programs of a model runner.
        folder: Where the profiler writes.
        perfetto: Also write the trace for Perfetto, which takes longer.
    """
    with flight.journal() as called, jax.profiler.trace(str(folder), create_perfetto_trace=perfetto):
        work()
    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxlib; an error would abort
        runs = _runs(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    order = sorted(runs, key=lambda run: min(events[0][0] for events in runs[run]))
    # A run is of the program that was called as the same of them, by the time of its beginning.
    names = dict(zip(order, called if len(called) == len(order) else [UNKNOWN] * len(order), strict=True))
    operations = _operations(runs, names)
    if not operations:
        raise Ling3Error(f"profile: expected operations in the trace, found none, at {files[-1]}")
    spans: dict[str, list[float]] = defaultdict(list)
    for run in order:
        events = [event for line in runs[run] for event in line]
        spans[names[run]].append((max(end for _, end, _ in events) - min(begin for begin, _, _ in events)) / 1e9)
    return Profile(files[-1], Counter(called), operations, spans)


def _runs(planes: Any) -> dict[int, list[list[_Event]]]:
    """The operations of each run of a program, by its number, as a list for each thread or stream."""
    runs: dict[int, list[list[_Event]]] = defaultdict(list)
    for plane in planes:
        for line in plane.lines:
            found: dict[int, list[_Event]] = defaultdict(list)
            for event in line.events:
                stats = dict(event.stats)
                if "run_id" in stats and stats.get("hlo_op") == event.name:
                    begin = int(event.start_ns)
                    found[stats["run_id"]].append((begin, begin + int(event.duration_ns), event.name))
            for run, events in found.items():
                runs[run].append(events)
    return runs


def _operations(runs: dict[int, list[list[_Event]]], names: Mapping[int, str]) -> list[Operation]:
    """The sums over runs, whose programs have ``names``."""
    counts: Counter[tuple[str, str]] = Counter()
    spent: Counter[tuple[str, str]] = Counter()
    for run, program in names.items():
        for events in runs[run]:
            for name, own in own_times(events):
                counts[program, name] += 1
                spent[program, name] += own
    loaded = list(_loaded())
    told = {each: _told({name for p, name in counts if p == each}, loaded) for each in {*names.values()}}
    return [
        Operation(program, name, *told[program].get(name, ("", "")), counts[program, name], own / 1e9)
        for (program, name), own in spent.most_common()
    ]


def own_times(events: Sequence[_Event]) -> Iterator[tuple[str, int]]:
    """The name of each event of one thread, and its nanoseconds without those of the events inside it."""
    open_: list[list[Any]] = []  # end, name, own time
    for begin, end, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_ and open_[-1][0] <= begin:
            yield open_[-1][1], open_.pop()[2]
        if open_:
            open_[-1][2] -= end - begin
        open_.append([end, name, end - begin])
    while open_:
        yield open_[-1][1], open_.pop()[2]


def _loaded() -> Iterator[tuple[dict[str, str], str]]:
    """Every loaded program: by operation what jax calls it, and the program's text."""
    for executable in jax.devices()[0].client.live_executables():
        text = "\n".join(module.to_string() for module in executable.hlo_modules())
        yield dict(_NAMED.findall(text)), text


def _told(names: set[str], loaded: Iterable[tuple[dict[str, str], str]]) -> dict[str, tuple[str, str]]:
    """Source and kind of a program's operations, by the loaded one which has them all, and the fewest others."""
    fitting = [each for each in loaded if names <= each[0].keys()]
    if not fitting:
        return {}
    sources, text = min(fitting, key=lambda each: len(each[0]))
    kinds = kinds_of(parse(text))
    return {name: ("/".join(sources[name].split("/")[-DEPTH:]), kinds.get(name, "")) for name in names}
