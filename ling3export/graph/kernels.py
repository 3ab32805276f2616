"""Kernels of a card's trace as operations of the program that it traced.

A CUDA graph has many kernels. The trace says which graph each belongs to, and gives a kernel's own name: that of the
first operation with the same content, or a library's. So kernels get the names of operations by their order, in which
a card's program and its graphs agree. Nothing in such a trace says where one call ends and the next begins.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ling3export.graph.record import Operation

KNOWN = 0.9  # the share of a program that a trace must have to be one of it


@dataclass(frozen=True)
class Event:
    """One run of an operation on one device: microseconds of its beginning and its length.

    Attributes:
        name: The operation, or a kernel of a CUDA graph.
        run: The call; empty if the trace does not say.
        node: The kernel's node in the process's CUDA graphs; None outside of them.
    """

    name: str
    run: str
    device: str
    thread: tuple[str, str]
    begin: float
    length: float
    node: str | None = None


def named(events: Iterable[Event], operations: Sequence[Operation]) -> list[Event]:
    """Events in the order of their beginning, kernels with the names of their instructions.

    A kernel is the next operation, in the program's order, that may run a kernel of this name. Kernels of other names
    are the operations in between that have no kernel of their own. The rest keep their names.
    """
    ordered = sorted(events, key=lambda event: (event.begin, -event.length))
    search = _Search(operations, {event.name for event in ordered if event.node is not None})
    for event in ordered:
        search.add(event)
    search.end()
    return [event if event.node is None else replace(event, name=search.name(event) or event.name) for event in ordered]


class _Search:
    def __init__(self, operations: Sequence[Operation], kernels: set[str]) -> None:
        first: dict[str, Operation] = {}  # an instruction that is called in several places counts as one
        for operation in operations:
            first.setdefault(operation.instruction, operation)
        self._names = list(first)
        self._place = {name: number for number, name in enumerate(self._names)}
        self._kernels = {re.sub(r"\W", "_", name): name for name in self._names}
        self._alike: dict[str, list[int]] = {}
        self._shared = {name: operation.shared or name for name, operation in first.items()}
        for number, shared in enumerate(self._shared.values()):
            self._alike.setdefault(shared, []).append(number)
        own = {self._shared[self._kernels[kernel]] for kernel in kernels & self._kernels.keys()}
        self._others = [number for number, shared in enumerate(self._shared.values()) if shared not in own]
        self._found: dict[tuple[str, str | None], str] = {}  # the name of each device's node
        self._last: dict[str, int] = {}  # the place of each device's operation before
        self._waiting: dict[str, dict[str, None]] = {}  # nodes of libraries since then

    def name(self, event: Event) -> str | None:
        return event.name if event.node is None else self._found.get((event.device, event.node))

    def add(self, event: Event) -> None:
        device, name = event.device, self.name(event)
        if name is not None:
            if name in self._place:
                self._arrive(device, self._place[name])
        elif (kernel := self._kernels.get(event.name)) is not None:
            alike = self._alike[self._shared[kernel]]
            place = alike[bisect_right(alike, self._last.get(device, -1)) % len(alike)]
            self._arrive(device, place)
            self._found[device, event.node] = self._names[place]
        elif event.node is not None:
            self._waiting.setdefault(device, {})[event.node] = None

    def end(self) -> None:
        for device in [*self._waiting]:
            self._arrive(device, len(self._names))

    def _arrive(self, device: str, place: int) -> None:
        last, waiting = self._last.get(device, -1), self._waiting.pop(device, {})
        if waiting:
            between = self._others[bisect_right(self._others, last) : bisect_right(self._others, place - 1)]
            for number, node in enumerate(waiting if between else ()):
                self._found[device, node] = self._names[between[number * len(between) // len(waiting)]]
        self._last[device] = place


def calls_of(events: Iterable[Event], operations: Sequence[Operation]) -> dict[str, int]:
    """How many calls of a program each device of a card's trace has; none for a device with another program.

    The program's fusions outside of loops and branches run once a call; ``KNOWN`` of them did so equally often.
    """
    once = {one.name for one in operations if one.opcode == "fusion" and "/" not in one.name}
    counts: dict[str, Counter[str]] = {}
    for event in events:
        if event.name in once:
            counts.setdefault(event.device, Counter())[event.name] += 1
    often = {device: Counter(count.values()).most_common(1)[0] for device, count in counts.items()}
    return {device: most for device, (most, equal) in often.items() if equal >= KNOWN * len(once)}
