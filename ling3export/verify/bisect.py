"""``ling3export graph bisect``: the first layer whose output or state differs between two programs."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ling3export.artifacts.manifest import target_of
from ling3export.artifacts.schema import Manifest, SequenceRecord
from ling3export.artifacts.signing import read_trusted
from ling3export.foundation.errors import ArtifactError, listed
from ling3export.foundation.tables import aligned
from ling3export.model.config import Config
from ling3export.plan.recorded import config_of
from ling3export.verify.probe import PHASES, computed, probe_apart, runs_here
from ling3export.verify.stored import stored_reference

Values = Mapping[str, np.ndarray]  # as `probe` gives them
# Relative L2: of each value where all is fp32, else of the median (rounding may send a token to another expert).
FLOAT32, ROUNDED = 1e-5, 0.15
STATES = {"kda": ("kda_conv", "kda_recurrent"), "mla": ("mla_latent",)}
REFERENCE = "the numpy reference"


@dataclass(frozen=True)
class Difference:
    """One step of one layer, or one array of its state.

    Attributes:
        layer: None for the embedding.
        what: ``embed``, ``kda``, ``mla``, ``dense``, ``moe`` for the residual stream after that step; or the name of a
            state array.
        error: Relative L2 that is judged: the largest, or the median, over positions of logits or over sequences.
        worst: The largest.
    """

    layer: int | None
    what: str
    error: float
    worst: float

    @property
    def name(self) -> str:
        """``layer 3 moe``."""
        return self.what if self.layer is None else f"layer {self.layer} {self.what}"


@dataclass(frozen=True)
class Bisection:
    """The errors of every layer.

    Attributes:
        measure: ``largest`` or ``median``.
        differences: In the order of the computation: a layer's state, its attention, its MLP.
        equal: Whether the final logits of the unchanged programs are equal bit by bit.
    """

    sides: tuple[str, str]
    cell: str
    measure: str
    tolerance: float
    differences: tuple[Difference, ...]
    equal: bool

    @property
    def first(self) -> Difference | None:
        """The first one beyond the tolerance."""
        return next((one for one in self.differences if not one.error <= self.tolerance), None)

    @property
    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [vars(one) for one in self.differences]
        first = None if self.first is None else vars(self.first)
        return {
            "sides": self.sides,
            "cell": self.cell,
            "measure": self.measure,
            "tolerance": self.tolerance,
            "outputs_equal": self.equal,
            "first": first,
            "rows": rows,
        }

    def table(self) -> str:
        """For a person."""
        columns = list(dict.fromkeys(one.what for one in self.differences if one.layer is not None))
        layers: dict[int, dict[str, str]] = {}
        for one in self.differences:
            if one.layer is not None:
                mark = " *" if not one.error <= self.tolerance else ""
                layers.setdefault(one.layer, {})[one.what] = f"{one.error:.1e}{mark}"
        rows = [("layer", *columns)]
        rows += [(str(layer), *(cells.get(what, "-") for what in columns)) for layer, cells in layers.items()]
        first, bound = self.first, f"{self.tolerance:.1e}"
        return "\n".join(
            [
                f"{self.cell}: {self.sides[0]} against {self.sides[1]}",
                *aligned(rows),
                f"  errors are relative L2 distances; the {self.measure} of all positions and sequences is judged; "
                f"* is more than {bound}",
                f"  embedding: {self.differences[0].error:.1e}",
                f"final logits: {'equal bit by bit' if self.equal else 'not equal bit by bit'}",
                f"no layer differs by more than {bound}"
                if first is None
                else f"first difference: {first.name}, {first.error:.1e}, more than {bound}",
                *self._notes(),
            ]
        )

    def _notes(self) -> list[str]:
        """Prefill gives logits at the ends of chunks only; other tokens show in the next layer's state."""
        names = [name for states in STATES.values() for name in states]
        if self.first is None or not self.first.layer or self.first.what not in names or self.cell.startswith("decode"):
            return []
        return [f"or layer {self.first.layer - 1}, at tokens that are no end of a chunk"]


def compare(
    one: Values,
    other: Values,
    config: Config,
    count: int,
    sides: tuple[str, str],
    cell: str,
    measure: str,
    tolerance: float,
) -> Bisection:
    """Compares the values of two sides over ``count`` sequences; the values of ``one`` are judged."""
    numbers = range(count)

    def difference(layer: int | None, what: str, errors: Sequence[float]) -> Difference:
        judged = float(np.max(errors) if measure == "largest" else np.median(errors))
        return Difference(layer, what, judged, float(np.max(errors)))

    def output(point: int) -> list[float]:
        keys = [f"out {point} {number}" for number in numbers]
        return [error for key in keys for error in distances(one[key], other[key])]

    def state(name: str, row: int) -> list[float]:
        width = config.latent_dim if name == "mla_latent" else None  # a row of the pool may be padded
        keys = [f"state {name} {number}" for number in numbers]
        pairs = [[side[key][row, ..., :width].reshape(1, -1) for side in (one, other)] for key in keys]
        return [distances(*pair)[0] for pair in pairs]

    differences = [difference(None, "embed", output(0))]
    for layer, (attention, mlp) in enumerate(zip(config.attention_kinds, config.mlp_kinds, strict=True)):
        row = config.layers(attention).index(layer)
        differences += [difference(layer, name, state(name, row)) for name in STATES[attention]]
        differences += [
            difference(layer, attention, output(2 * layer + 1)),
            difference(layer, mlp, output(2 * layer + 2)),
        ]
    last = [f"out {2 * config.num_hidden_layers} {number}" for number in numbers]
    equal = all(np.array_equal(one[key], other[key]) for key in last)
    return Bisection(sides, cell, measure, tolerance, tuple(differences), equal)


def distances(one: np.ndarray, other: np.ndarray) -> list[float]:
    """Relative L2 distance of each row, in float64; infinite where a value is not finite."""
    left, right = one.astype(np.float64), other.astype(np.float64)
    norms = np.linalg.norm(right, axis=-1)
    apart = np.linalg.norm(left - right, axis=-1)
    values = np.where(norms > 0, apart / np.where(norms > 0, norms, 1), np.where(apart > 0, np.inf, 0))
    return [float(value) if np.isfinite(value) else float("inf") for value in values]


def expected(manifest: Manifest, folder: Path, phase: str, sequences: Sequence[SequenceRecord]) -> Values:
    """The numpy reference's value of each point and state, from the artifact's own weights."""
    config = config_of(manifest)
    reference = stored_reference(folder, manifest.weights, config, manifest.plan)
    ids = [sequence.ids[: computed(phase, sequence)] for sequence in sequences]
    starts = np.cumsum([0, *map(len, ids)])
    positions = [judged(phase, sequence) for sequence in sequences]
    rows = [start + np.array(chosen) for start, chosen in zip(starts, positions, strict=False)]
    streams: list[list[np.ndarray]] = []
    states: dict[str, list[list[np.ndarray]]] = {}

    def observe(layer: int, name: str, value: np.ndarray) -> None:
        if name in ("embed", "attention", "mlp"):
            streams.append([value[chosen] for chosen in rows])
            return
        kept = states.setdefault(name, [[] for _ in sequences])
        least = min(map(len, kept))
        next(values_of for values_of in kept if len(values_of) == least).append(value)

    reference.observer = observe
    reference.logits_many(ids, [[0]] * len(ids))
    heads = reference.head([stream for point in streams for stream in point])
    values = {
        f"out {point} {number}": heads[point * len(ids) + number]
        for point in range(len(streams))
        for number in range(len(ids))
    }
    for name, kept in states.items():
        values |= {
            f"state {name} {number}": _ordered(name, np.stack(values_of)) for number, values_of in enumerate(kept)
        }
    return values


def _ordered(name: str, value: np.ndarray) -> np.ndarray:
    """The reference's state in the order of the pools: a head's conv inputs are one row."""
    return value.transpose(0, 3, 1, 2, 4) if name == "kda_conv" else value


def judged(phase: str, sequence: SequenceRecord) -> list[int]:
    """The positions whose logits a cell gives: ends of chunks, or every decoded token."""
    if phase == "decode":
        return list(range(sequence.prompt, len(sequence.ids)))
    length, chunk = computed(phase, sequence), 16
    return [min(stop, length) - 1 for stop in range(chunk, length + chunk, chunk)]


def bisect(
    artifact: Path,
    other: Path | None,
    cell: str | None,
    target: str | None = None,
    other_target: str | None = None,
    *,
    portable: bool = False,
    tolerance: float | None = None,
) -> Bisection:
    """Runs the vectors of ``artifact`` through both, layer by layer, and compares every layer.

    Args:
        other: The other side of the comparison; None is the numpy reference, with the weights of ``artifact``.
        cell: ``decode@16``; None is the smallest decode cell, which prefills too.
        portable: Run the portable programs of both. Targets that do not run here always run so.
        tolerance: Relative L2; None is 1e-5 of the largest if all is fp32, else 0.15 of the median.

    Raises:
        ArtifactError: There is no such target or cell, a program does not run, or the two hold different models.
    """
    manifest = read_trusted(artifact, lambda _: None)
    name, record = target_of(manifest, target)
    cell = cell or f"decode@{record.paddings('decode')[0]}"
    phase = cell.partition("@")[0]
    if phase not in PHASES:
        raise ArtifactError(f"bisect: {cell} has no layers; choose a cell of {listed(list(PHASES))}")
    config, sequences = config_of(manifest), manifest.vectors.sequences
    if not manifest.has_weights:
        raise ArtifactError(f"{artifact.name}: the artifact has no weights", "ling3export attach writes them")
    rounded = manifest.plan.dtype != "float32"
    with ExitStack() as stack:

        def run(folder: Path, manifest: Manifest, name: str) -> tuple[str, Values]:
            if cell not in manifest.targets[name].cells:
                cells = sorted(cell_name for cell_name in manifest.targets[name].cells if cell_name.startswith(PHASES))
                raise ArtifactError(f"{folder.name}: {name} has no cell {cell}; it has {listed(cells, 20)}")
            moved = portable or not runs_here(manifest.targets[name])
            held, values = probe_apart(folder, name, cell, sequences, config.num_hidden_layers, portable=moved)
            stack.callback(held.cleanup)
            return f"{folder.name} {name}{' (portable program)' * moved}", values

        one, values = run(artifact, manifest, name)
        if other is None:
            against, wanted = REFERENCE, expected(manifest, artifact, phase, sequences)
        else:
            second = read_trusted(other, lambda _: None)
            if config_of(second).semantic() != config.semantic():
                raise ArtifactError(f"{artifact.name} and {other.name} hold models of different configurations")
            rounded = rounded or second.plan.dtype != "float32" or second.plan.forms != manifest.plan.forms
            against, wanted = run(other, second, target_of(second, other_target)[0])
        measure = "median" if rounded else "largest"
        bound = tolerance if tolerance is not None else ROUNDED if rounded else FLOAT32
        return compare(values, wanted, config, len(sequences), (one, against), cell, measure, bound)
