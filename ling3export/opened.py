"""An artifact in Python: its programs as graphs, as text, and as functions for people who use JAX themselves."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ling3export.artifacts.files import REBUILD
from ling3export.artifacts.manifest import cell_of, read_checked, read_manifest, target_of
from ling3export.artifacts.schema import Manifest
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.extras import require

if TYPE_CHECKING:
    import jax

    from ling3export.graph.record import Graph
    from ling3export.runners.load.loader import Loaded

Arrays = Mapping[str, Any]


class Artifact:
    """An artifact on disk. Nothing of it is loaded, and no weights are read.

    Raises:
        ArtifactError: There is no artifact, or its manifest is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(self.folder)

    @property
    def targets(self) -> list[str]:
        """Names of its targets."""
        return list(self.manifest.targets)

    def cells(self, target: str | None = None) -> list[str]:
        """Names of a target's programs, such as ``decode@16``; ``target`` may be None if there is only one."""
        return list(target_of(self.manifest, target)[1].cells)

    def program(self, cell: str, target: str | None = None) -> "Program":
        """One program; ``target`` may be None if there is only one.

        Raises:
            ArtifactError: There is no such target or cell.
        """
        name, record = target_of(self.manifest, target)
        cell_of(record, cell)
        return Program(self.folder, self.manifest, name, cell)


class Program:
    """A program of an artifact: a cell, such as ``decode@16``, of one of its targets."""

    def __init__(self, folder: Path, manifest: Manifest, target: str, cell: str) -> None:
        self.folder, self.manifest, self.target, self.cell = folder, manifest, target, cell

    def graph(self, *, portable: bool = False) -> "Graph":
        """Its operations with their costs, of the optimized program, or of the portable one (StableHLO).

        Raises:
            ArtifactError: The program is missing, damaged, or has a form that this version does not read.
            Ling3Error: The extra ``build`` is not installed; all else of an artifact needs the base only.
        """
        require("graphs of programs", "build", "flax")
        from ling3export.report.cells import graph_of

        return graph_of(self.folder, self.manifest, self.target, self.cell, from_portable=portable)

    def text(self, *, portable: bool = False) -> str:
        """Optimized HLO, or StableHLO if the artifact does not keep it or ``portable`` asks for it.

        Raises:
            ArtifactError: The program is missing or damaged.
        """
        from ling3export.graph.hlo import unpacked
        from ling3export.machine.portable import module

        record = self.manifest.targets[self.target].cells[self.cell]
        if record.graph is not None and not portable:
            try:
                return unpacked(read_checked(self.folder, record.graph))
            except ValueError as error:
                raise ArtifactError(f"{record.graph.path}: {error}", REBUILD) from error
        with module(read_checked(self.folder, record.stablehlo)) as parsed:
            return str(parsed)

    def load(self, *, programs: str = "prebuilt-only", check: str = "all") -> "Step":
        """The program as a function, with the weights that it takes, on this machine's devices.

        Args:
            programs: ``allow-compile`` compiles the portable program if the executable does not fit this machine.
            check: See :attr:`EngineConfig.check`.

        Raises:
            ArtifactError: The program does not fit this machine, or a file is missing or damaged.
            Ling3Error: jax has started in this process, with too few devices.
        """
        from ling3export.runners.load.loader import load

        phase = self.manifest.targets[self.target].cells[self.cell].phase
        loaded = load(self.folder, target=self.target, programs=programs, check=check, phases={phase})
        return Step(loaded, self.cell)


class Step:
    """A loaded program: ``state, out = step(step.params, state, batch)``.

    Use it in a ``with`` block, or call :meth:`close`.

    Attributes:
        params: The weights by name, on the devices.
    """

    def __init__(self, loaded: "Loaded", name: str) -> None:
        self._loaded, self._cell = loaded, loaded.runner.cells[name]
        self._record = loaded.record.cells[name]
        names = [leaf.name for leaf in self._record.inputs if leaf.group == "params"]
        self.params: dict[str, jax.Array] = dict(zip(names, self._cell.params, strict=True))

    def __call__(self, params: Arrays, state: Arrays, batch: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs the program; both results are still being computed.

        The arrays of ``state`` that the program takes are donated: use those that it returns from then on.
        """
        groups = {"params": params, "state": state, "batch": batch}
        outputs = self._cell.program(*(groups[leaf.group][leaf.name] for leaf in self._record.inputs))
        results: dict[str, dict[str, Any]] = {"state": dict(state), "out": {}}
        for leaf, array in zip(self._record.outputs, outputs, strict=True):
            results[leaf.group][leaf.name] = array
        return results["state"], results["out"]

    def state(self) -> "dict[str, jax.Array]":
        """An empty state: zeros. The memory of the last one must be free: drop what refers to it first."""
        runner = self._loaded.runner
        if not runner.state:
            runner.reset()
        state, runner.state = runner.state, {}
        return state

    def batch(self, **values: Any) -> "dict[str, jax.Array]":
        """The inputs of a call. artifacts/FORMAT.md has the fields and arrays of each phase.

        Args:
            values: Fields, such as ``token=[5]``, and arrays, such as ``logits``, by name. A smaller value fills the
                beginning of its array; the rest is 0, which stands for padding.

        Raises:
            ValueError: A name is unknown, or a value is larger than its array.
        """
        fields = {
            row.name: _filled(row.name, row.shape, row.dtype, values.pop(row.name, ())) for row in self._record.fields
        }
        batch = {"packed": self._cell.pack(fields)}
        for leaf in self._record.inputs:
            if leaf.group == "batch" and leaf.name != "packed":
                value = values.pop(leaf.name, ())
                batch[leaf.name] = _filled(leaf.name, leaf.shape, leaf.dtype, value)
        if values:
            raise ValueError(
                f"{', '.join(values)}: the program has no such input; it has {', '.join([*fields, *batch])}"
            )
        return self._placed(batch)

    def close(self) -> None:
        """Releases the programs. Arrays live on."""
        self._loaded.programs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _placed(self, batch: dict[str, np.ndarray]) -> "dict[str, jax.Array]":
        from jax.sharding import NamedSharding, PartitionSpec

        from ling3export.machine.pjrt import recorded_mesh
        from ling3export.runners.load.model_runner import device_array

        mesh = recorded_mesh(self._loaded.record.mesh)
        specs = {leaf.name: PartitionSpec(*leaf.spec) for leaf in self._record.inputs if leaf.group == "batch"}
        return {name: device_array(value, NamedSharding(mesh, specs[name])) for name, value in batch.items()}


def _filled(name: str, shape: tuple[int, ...], dtype: str, value: Any) -> np.ndarray:
    """Zeros that begin with a value."""
    whole, part = np.zeros(shape, np.dtype(dtype)), np.asarray(value)
    if part.size:
        if part.ndim != len(shape) or any(size > most for size, most in zip(part.shape, shape, strict=True)):
            raise ValueError(f"{name}: shape {list(part.shape)} does not fit into {list(shape)}")
        whole[tuple(slice(size) for size in part.shape)] = part
    return whole
