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
    names = search.names
    return [
        event if event.node is None else replace(event, name=names.get(event.node, event.name)) for event in ordered
    ]


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
        self.names: dict[str, str] = {}  # of each node of a graph
        self._last = -1  # the place of the operation before
        self._waiting: list[str] = []  # nodes of libraries since then

    def add(self, event: Event) -> None:
        name = event.name if event.node is None else self.names.get(event.node)
        if name is not None:
            if name in self._place:
                self._arrive(self._place[name])
        elif event.node is not None and (kernel := self._kernels.get(event.name)) is not None:
            alike = self._alike[self._shared[kernel]]
            after = bisect_right(alike, self._last)
            self._arrive(alike[after % len(alike)])
            self.names[event.node] = self._names[self._last]
        elif event.node is not None and event.node not in self._waiting:
            self._waiting.append(event.node)

    def end(self) -> None:
        self._arrive(len(self._names))

    def _arrive(self, place: int) -> None:
        between = self._others[bisect_right(self._others, self._last) : bisect_right(self._others, place - 1)]
        for number, node in enumerate(self._waiting if between else ()):
            self.names[node] = self._names[between[number * len(between) // len(self._waiting)]]
        self._waiting, self._last = [], place


def calls_of(events: Iterable[Event], operations: Sequence[Operation]) -> int:
    """How many calls of a program a card's trace has; 0 if it is of another program.

    The program's fusions outside of loops and branches run once a call; ``KNOWN`` of them did so equally often.
    """
    once = {one.name for one in operations if one.opcode == "fusion" and "/" not in one.name}
    counts = Counter(event.name for event in events if event.name in once)
    most, equal = max(Counter(counts.values()).items(), key=lambda item: item[1], default=(0, 0))
    return most if equal and equal >= KNOWN * len(once) else 0
