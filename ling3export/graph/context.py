"""Knowledge of a program apart from its text, and the layer kind and layers of each operation."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ling3export.graph.hlo import Instruction, Module
from ling3export.graph.record import UNKNOWN, Operation


@dataclass(frozen=True)
class Context:
    """Knowledge of a program that its text does not have.

    Attributes:
        inputs: Names of the entry's parameters in their order; ``params.`` and ``state.`` name weights and state.
        kinds: Scopes that are layer kinds.
        weights: Layer kinds by the beginning of a weight's name.
        layers: By scope of a loop over layers, the numbers of the layers that its body runs.
        dense: Layers with a dense MLP, for the conditional that chooses between it and experts.
        trips: By scope, the trips of a loop with a bound that the batch decides; of a conditional, 0 if its dearest
            branch is not taken.
        clock: Cycles a second, for the compiler's estimates; None if it makes none.
        bandwidth: Bytes a second of the device's memory; None if nothing is estimated.
        peak: FLOPs a second of the device; None bounds operations by their bytes.
        experts: Routed experts of a layer on all devices, for native kernels.
        pages: Pages that each decoding sequence has cached; None counts every page of the table.
    """

    inputs: Sequence[str] = ()
    kinds: frozenset[str] = frozenset()
    weights: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dense: frozenset[int] = frozenset()
    trips: Mapping[str, float] = field(default_factory=dict)
    clock: float | None = None
    bandwidth: float | None = None
    peak: float | None = None
    experts: int = 0
    pages: float | None = None

    def counted(self, known: int | None, scope: str) -> tuple[float, str]:
        """The trips of a loop and their source: of the program, of the workload, or once."""
        if known is not None:
            return float(known), "the program"
        if scope in self.trips:
            return self.trips[scope], f"the workload's `{scope}`"
        return 1.0, UNKNOWN

    def bounded(self, operation: Operation) -> Operation:
        """The operation with the seconds of its bytes or its FLOPs, whichever are more, on this device."""
        if self.bandwidth is None:
            return operation
        seconds = max(operation.bytes / self.bandwidth, operation.flops / self.peak if self.peak else 0.0)
        return replace(operation, seconds=seconds, source="roofline")


def enclosing(label: str) -> str:
    """The named scope that the model put right around a loop or a conditional: ``…/pages/while``."""
    steps = label.split("/")
    return steps[-2] if len(steps) > 1 else ""


def scope_of(module: Module, instruction: Instruction) -> str:
    """The scopes around an instruction; of a fusion without any, those of the product or the last operation in it."""
    if instruction.label or instruction.opcode != "fusion":
        return instruction.label
    inner = module.fused(instruction).instructions.values()
    labelled = [one for one in inner if one.label or one.opcode == "fusion"]
    products = [one for one in labelled if one.opcode in ("dot", "convolution")]
    return next((label for one in [*products, *reversed(labelled)] if (label := scope_of(module, one))), "")


def attributed(
    operations: Sequence[Operation], users: Mapping[str, Sequence[str]], context: Context
) -> Iterator[Operation]:
    """Operations with their layer kind and layers.

    An operation without a scope has the kind of its user, else of a maker of its operands, else of its weight.
    """
    by_name = {one.name: one for one in operations}
    known = {one.name: classified(one.scope, context) for one in operations}

    def nearest(name: str, depth: int, down: bool) -> tuple[str | None, tuple[int, ...]]:
        ahead = users.get(name, ()) if down else by_name[name].operands if name in by_name else ()
        for other in ahead:
            if known.get(other, (None, ()))[0] is not None:
                return known[other]
        if depth:
            for other in ahead:
                if (result := nearest(other, depth - 1, down))[0] is not None:
                    return result
        return None, ()

    for one in operations:
        layer_kind, layers = known[one.name]
        layers = one.layers or layers
        if layer_kind is None:
            layer_kind, layers = nearest(one.name, 2, True)
        if layer_kind is None:
            layer_kind, layers = nearest(one.name, 2, False)
        if layer_kind is None and one.weights:
            matches = (kind for start, kind in context.weights.items() if one.weights[0].startswith(start))
            layer_kind = next(matches, None)
        yield replace(one, layer_kind=layer_kind, layers=layers)


def classified_kind(scope: str, kinds: frozenset[str]) -> str | None:
    """The innermost layer kind that a scope names; a norm inside another kind belongs to that kind."""
    named = [step for step in scope.split("/") if step in kinds]
    return next((step for step in reversed(named) if step != "norm"), named[-1] if named else None)


def classified(scope: str, context: Context) -> tuple[str | None, tuple[int, ...]]:
    """The layer kind and the layers that a scope names."""
    steps, layer_kind = scope.split("/"), classified_kind(scope, context.kinds)
    for step in steps:
        if match := re.fullmatch(r"layer_(\d+)", step):
            return layer_kind, (int(match[1]),)
    return layer_kind, next((context.layers[step] for step in reversed(steps) if step in context.layers), ())
