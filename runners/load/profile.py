"""Where the time of programs goes: a trace of their calls, and the operations that take most of it."""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.hlo import kinds_of, parse
from ling3export.runners import flight

UNKNOWN = "?"  # the program of a run that the engine did not start
CARD = "/device:GPU"  # how the part of a trace begins that is a card's
GRAPH = "command_buffer"  # how the operations begin that are a CUDA graph
DEPTH = 3  # how many of the last parts of an operation's source are shown
_NAMED = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = (?:.*?op_name="([^"]*)")?', re.MULTILINE)
_Event = tuple[int, int, str]  # nanoseconds of begin and end, and the operation


class Operation(NamedTuple):
    """One operation of one program.

    Attributes:
        program: ``decode@16``.
        name: What the compiler calls it.
        source: What the model calls it: the last parts of jax's name, empty where the compiler keeps none.
        kind: What kind of work it is: one of ``hlo.KINDS`` or COLLECTIVES; empty where no program tells.
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


def traced(work: Callable[[], object], folder: Path, *, perfetto: bool = False) -> Profile:
    """Runs ``work`` under jax's profiler.

    Args:
        work: Calls programs of a model runner.
        folder: Where the profiler writes ``plugins/profile/TIME``.
        perfetto: Also write the trace for Perfetto, which takes longer.

    Raises:
        Ling3Error: The trace has no operations: jax's profiler knows none of this device.
    """
    with flight.journal() as called, jax.profiler.trace(str(folder), create_perfetto_trace=perfetto):
        work()
    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxlib; an error would abort
        runs = runs_in(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    names = programs_of(called, len(runs))
    operations = operations_of(runs, [name for name, _ in names])
    if not operations:
        raise Ling3Error(f"profile: expected operations in the trace, found none, at {files[-1]}")
    spans: dict[str, list[float]] = defaultdict(list)
    for lines, (name, count) in zip(runs, names, strict=True):
        events = [event for line in lines for event in line]
        took = max(end for _, end, _ in events) - min(begin for begin, _, _ in events)
        spans[name] += [took / 1e9 / count] * count
    return Profile(files[-1], Counter(called), operations, spans)


def programs_of(called: Sequence[str], runs: int) -> list[tuple[str, int]]:
    """Of each of so many runs, in the order in which they began: the program, and how often it was called.

    A trace of processors has a run for each call. One of cards tells programs apart, not calls: what one program did
    without another in between is one run.
    """
    calls = [(name, 1) for name in called]
    between = [(name, len([*same])) for name, same in groupby(called)]
    return next((each for each in (calls, between) if len(each) == runs), [(UNKNOWN, 1)] * runs)


def runs_in(planes: Any) -> list[list[list[_Event]]]:
    """The operations of each run of a program, as a list for each thread or stream; runs in the order of beginning."""
    runs: dict[int, list[list[_Event]]] = defaultdict(list)
    cards: list[tuple[str, _Event]] = []  # program and kernel
    for plane in planes:
        for line in plane.lines:
            found: dict[int, list[_Event]] = defaultdict(list)
            for event in line.events:
                stats, begin = dict(event.stats), int(event.start_ns)
                end, operation = begin + int(event.duration_ns), stats.get("hlo_op")
                if "run_id" in stats and operation == event.name:
                    found[stats["run_id"]].append((begin, end, event.name))
                elif plane.name.startswith(CARD) and operation and "program_id" in stats:
                    # Kernels of a graph have the graph as their operation, and are called as theirs.
                    name = event.name if str(operation).startswith(GRAPH) else str(operation)
                    cards.append((str(stats["program_id"]), (begin, end, name)))
            for run, events in found.items():
                runs[run].append(events)
    for at, (_, same) in enumerate(groupby(sorted(cards, key=lambda each: each[1]), key=lambda each: each[0])):
        runs[-1 - at] = [[each] for _, each in same]  # kernels overlap, and none is inside another
    return sorted(runs.values(), key=lambda lines: min(line[0][0] for line in lines))


def operations_of(runs: Sequence[list[list[_Event]]], names: Sequence[str]) -> list[Operation]:
    """The sums over runs, whose programs have ``names``."""
    counts: Counter[tuple[str, str]] = Counter()
    spent: Counter[tuple[str, str]] = Counter()
    for lines, program in zip(runs, names, strict=True):
        for events in lines:
            for name, own in own_times(events):
                counts[program, name] += 1
                spent[program, name] += own
    loaded = list(loaded_programs())
    told = {each: _told({name for p, name in counts if p == each}, loaded) for each in {*names}}
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


def loaded_programs() -> Iterator[tuple[dict[str, str], str]]:
    """Every loaded program: by operation, as kernels spell it, what jax calls it, and the program's text."""
    for executable in jax.devices()[0].client.live_executables():
        text = "\n".join(module.to_string() for module in executable.hlo_modules())
        yield {_kernel(name): source for name, source in _NAMED.findall(text)}, text


def _kernel(operation: str) -> str:
    """The name of an operation as that of a card's kernel is spelled."""
    return re.sub(r"[.\-]", "_", operation)


def _told(names: set[str], loaded: Iterable[tuple[dict[str, str], str]]) -> dict[str, tuple[str, str]]:
    """Source and kind of a program's operations, by the loaded one that has the most of them, and the fewest others."""
    spelled = {name: _kernel(name) for name in names}
    fitting = [(len({*spelled.values()} & sources.keys()), -len(sources), sources, text) for sources, text in loaded]
    count, _, sources, text = max(fitting, key=lambda each: each[:2], default=(0, 0, dict[str, str](), ""))
    if not count:
        return {}
    kinds = {_kernel(name): kind for name, kind in kinds_of(parse(text)).items()}
    return {
        name: ("/".join(sources[kernel].split("/")[-DEPTH:]), kinds.get(kernel, ""))
        for name, kernel in spelled.items()
        if kernel in sources
    }
