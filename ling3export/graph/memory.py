"""Which tensors are alive at a program's memory peak, and memory over program order.

The reader walks scheduled HLO: a buffer lives from the instruction that makes it until the last one that reads it, and
the last reader's result may take its place. Inputs live throughout. Results that reuse an operand's buffer (updates in
place, loops, tuples, bitcasts) make none. Inside a loop, branch or call, its own buffers come on top of the surrounding
ones. Buffers in a chip's fast memory count, as in the compiler's own peak; the program itself does not.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ling3export.foundation.tables import aligned, footnotes
from ling3export.graph.context import classified_kind, scope_of
from ling3export.graph.hlo import TYPE, WIDTHS, Computation, Instruction, Module, dims, parse
from ling3export.graph.optimized import FREE, updated_by_call, updated_by_fusion

# Results of these are no new buffers.
VIEWS = {"while", "conditional", "call", *FREE}
IN_PLACE = {"dynamic-update-slice", "scatter"}
TILED = re.compile(r"\{([0-9,]*):T\(([0-9,]+)\)")


@dataclass(frozen=True)
class Tensor:
    """A buffer; ``bytes`` are on one device, ``what`` is ``weights``, ``state``, ``other`` or ``temporary``."""

    name: str
    bytes: int
    what: str
    shape: str
    layer_kind: str | None = None


@dataclass(frozen=True)
class Timeline:
    """Memory of one device while a program runs.

    Attributes:
        points: For each instruction of the entry: its name, and bytes of temporaries that live while it runs.
        inputs: Buffers that live throughout.
        at_peak: Temporaries that live at the peak, the largest first.
        compiler_peak: The compiler's own peak; None if the artifact does not have it.
    """

    points: tuple[tuple[str, int], ...]
    inputs: tuple[Tensor, ...]
    at_peak: tuple[Tensor, ...]
    compiler_peak: int | None

    @property
    def peak(self) -> int:
        """Inputs and the temporaries at the peak."""
        return sum(one.bytes for one in (*self.inputs, *self.at_peak))


def timeline(text: str, inputs: Sequence[str], kinds: frozenset[str], compiler_peak: int | None) -> Timeline:
    """The memory of a program from ``Compiled.as_text()``.

    ``inputs`` are the names of the entry's parameters in their order, ``kinds`` the scopes that are layer kinds.

    Raises:
        ValueError: The text has no entry computation.
    """
    module = parse(text)
    names = {number: name for name, number in module.entry.parameters.items()}
    held = []
    for number, name in sorted(names.items()):
        label = inputs[number] if number < len(inputs) else f"input {number}"
        what = {"params": "weights", "state": "state"}.get(label.partition(".")[0], "other")
        shape = module.entry.instructions[name].shape
        held.append(Tensor(label, padded_bytes(shape), what, plain(shape)))
    points, alive = _Walk(module, kinds).run(module.entry)
    at_peak = sorted(_largest(points, alive), key=lambda one: -one.bytes)
    held.sort(key=lambda one: -one.bytes)
    return Timeline(tuple(points), tuple(held), tuple(at_peak), compiler_peak)


class _Walk:
    def __init__(self, module: Module, kinds: frozenset[str]) -> None:
        self._module, self._kinds = module, kinds
        self._peaks: dict[str, list[Tensor]] = {}

    def run(self, computation: Computation) -> tuple[list[tuple[str, int]], list[list[Tensor]]]:
        """For each instruction in order: its name and the bytes that live while it runs; and the tensors that live."""
        made, ends = self._lifetimes(computation)
        points, alive, live = [], [], dict[str, Tensor]()
        by_end: dict[int, list[str]] = {}
        for name, end in ends.items():
            by_end.setdefault(end, []).append(name)
        for place, one in enumerate(computation.instructions.values()):
            for name in by_end.get(place, []):
                live.pop(name, None)
            if one.name in made:
                live[one.name] = made[one.name]
            inside = [tensor for names in one.called.values() for name in names for tensor in self._inner(one, name)]
            now = [*live.values(), *inside]
            points.append((one.name, sum(tensor.bytes for tensor in now)))
            alive.append(now)
            if ends.get(one.name) == place:
                live.pop(one.name, None)
        return points, alive

    def _inner(self, instruction: Instruction, name: str) -> list[Tensor]:
        """Buffers of a called computation at its own peak; what is inside a fusion needs none."""
        if instruction.opcode not in ("while", "conditional", "call", "call-start"):
            return []
        if name not in self._peaks:
            self._peaks[name] = _largest(*self.run(self._module.computations[name]))
        return self._peaks[name]

    def _lifetimes(self, computation: Computation) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Buffers that instructions make, by name, and the place of the last instruction that reads each."""
        made, roots, ends = dict[str, Tensor](), dict[str, set[str]](), dict[str, int]()
        last = len(computation.instructions) - 1
        for place, one in enumerate(computation.instructions.values()):
            sources = [root for name in one.operands for root in roots.get(name, set())]
            for root in sources:
                ends[root] = place
            reused, new = self._results(computation, one, [roots.get(name, set()) for name in one.operands])
            if new:
                scope = scope_of(self._module, one)
                kind = classified_kind(scope, self._kinds)
                made[one.name] = Tensor(one.name, new, "temporary", plain(one.shape), kind)
                reused, ends[one.name] = reused | {one.name}, place
            roots[one.name] = reused
            if one.root:
                for root in roots.get(one.name, set()):
                    ends[root] = last + 1
        return made, ends

    def _results(
        self, computation: Computation, one: Instruction, operands: Sequence[set[str]]
    ) -> tuple[set[str], int]:
        """The buffers of an instruction's ``operands`` that its results are in, and the bytes of its new ones."""
        if one.opcode in VIEWS:
            return set[str]().union(*operands), 0
        if one.opcode in IN_PLACE:
            return operands[0], 0
        if one.opcode.endswith("-start"):  # it also returns its operand, which is no new buffer
            moved = sum(padded_bytes(computation.instructions[name].shape) for name in one.operands)
            return set(), max(0, padded_bytes(one.shape) - moved)
        updated = None
        if one.opcode == "fusion":
            updated = updated_by_fusion(self._module, one, operands)
        elif one.opcode == "custom-call" and "output_to_operand_aliasing" in one.attributes:
            updated = updated_by_call(one, operands)
        results = updated if isinstance(updated, tuple) else (updated,)
        arrays = TYPE.findall(one.shape) if isinstance(updated, tuple) else [one.shape]
        sizes = [padded_bytes(array) for array, result in zip(arrays, results, strict=True) if result is None]
        return set[str]().union(*(result for result in results if result is not None)), sum(sizes)


def _largest(points: Sequence[tuple[str, int]], alive: Sequence[list[Tensor]]) -> list[Tensor]:
    """The tensors that live at the largest point; none of an empty computation."""
    return alive[max(range(len(points)), key=lambda place: points[place][1])] if points else []


def padded_bytes(shape: str) -> int:
    """Bytes of the arrays of a type, with the padding of their tiles."""
    return sum(_array_bytes(array) for array in TYPE.findall(shape))


def _array_bytes(array: str) -> int:
    dtype, _, rest = array.partition("[")
    sizes = list(dims(rest.partition("]")[0]))
    if match := TILED.search(array):
        order, tile = ([int(size) for size in part.split(",") if size] for part in match.groups())
        for axis, size in zip(order, reversed(tile), strict=False):
            sizes[axis] = -(-sizes[axis] // size) * size
    return WIDTHS.get(dtype, 4) * math.prod(sizes)


def plain(shape: str) -> str:
    """A type without its layout."""
    return re.sub(r"\{[^}]*\}", "", shape)


def document(memory: Timeline) -> dict[str, Any]:
    """A timeline as JSON values."""
    return {
        "peak_bytes": memory.peak,
        "compiler_peak_bytes": memory.compiler_peak,
        "inputs": [vars(one) for one in memory.inputs],
        "at_peak": [vars(one) for one in memory.at_peak],
        "timeline": [list(point) for point in memory.points],
    }


def table(memory: Timeline, most: int = 15) -> list[str]:
    """Tensors that live at the peak, for a person, the largest first."""
    tensors = sorted((*memory.inputs, *memory.at_peak), key=lambda one: -one.bytes)
    sums: Mapping[str, int] = {
        what: sum(one.bytes for one in tensors if one.what == what)
        for what in ("weights", "state", "other", "temporary")
    }
    rows = [("at the peak", "MB", "what", "layer kind", "type")]
    rows += [
        (one.name, f"{one.bytes / 1e6:,.3f}", one.what, one.layer_kind or "-", one.shape[:40]) for one in tensors[:most]
    ]
    rows += [(f"all {what}", f"{size / 1e6:,.3f}", "", "", "") for what, size in sums.items() if size]
    rows += [("all", f"{memory.peak / 1e6:,.3f}", "", "", "")]
    peak = memory.compiler_peak
    note = (
        "" if peak is None else f"the compiler's own peak is {peak / 1e6:,.3f} MB, the program itself left out in both"
    )
    return [*aligned(rows), *footnotes([note])]
