"""The graphs of an artifact's cells, from the files that its manifest names. No device is needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.program_records import Program
from ling3export.artifacts.schema import Cell, Manifest
from ling3export.cost.chips import device
from ling3export.cost.estimates import context_of
from ling3export.cost.roofline import expected_collectives
from ling3export.foundation.errors import ArtifactError, listed
from ling3export.foundation.phases import PHASES
from ling3export.graph import optimized, portable
from ling3export.graph.audit import Expected
from ling3export.graph.diff import compare
from ling3export.graph.hlo import unpacked
from ling3export.graph.memory import Timeline, timeline
from ling3export.graph.record import Graph
from ling3export.graph.view import Shown
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.scopes import LAYER_KINDS
from ling3export.plan.recorded import config_of, plan_of


def graph_of(folder: Path, manifest: Manifest, target: str, name: str, *, from_portable: bool = False) -> Graph:
    """The graph of one cell: of its optimized program if the artifact keeps one, else of its portable program.

    ``name`` is a cell. ``from_portable`` reads the portable program even if the optimized one is kept.

    Raises:
        ArtifactError: A file is missing or damaged, or has a form that this version does not know.
    """
    record = manifest.targets[target]
    cell, where = record.cells[name], f"{folder.name}: {target} {name}"
    config, plan = config_of(manifest), plan_of(manifest, target)
    chip = device(record.platform, record.kind, record.tp)
    compiled = not from_portable and cell.graph is not None
    context = context_of(config, plan.geometry, cell.phase, cell.padding, input_names(cell, compiled=compiled), chip)
    with known_form(where):
        if compiled:
            return optimized.read(text_of(folder, cell, where), name, target, context, cell.memory.compiler_peak)
        return portable.read(read_checked(folder, cell.stablehlo), name, target, context)


def memory_of(folder: Path, manifest: Manifest, target: str, name: str) -> Timeline:
    """The memory of one cell's optimized program. Arguments and errors as of :func:`graph_of`."""
    record, where = manifest.targets[target], f"{folder.name}: {target} {name}"
    cell = record.cells[name]
    # The peak of XLA's compiler for processors leaves temporaries out.
    peak = cell.memory.peak if record.platform == "cpu" else cell.memory.compiler_peak
    with known_form(where):
        return timeline(text_of(folder, cell, where), input_names(cell, compiled=True), frozenset(LAYER_KINDS), peak)


def shown_of(folder: Path, manifest: Manifest, target: str, graph: Graph, before: Graph | None = None) -> Shown:
    """A cell for the page: its graph, its memory if its program is scheduled, and changes since another program."""
    memory = memory_of(folder, manifest, target, graph.cell) if graph.form == "optimized" else None
    difference = None if before is None else compare(before, graph)
    return Shown(graph, memory, difference)


def file_changes(before: tuple[Manifest, str, str], after: tuple[Manifest, str, str]) -> list[str]:
    """Why the files of two cells differ although their programs may be equal; each is manifest, target, cell."""
    old, new = before[0].targets[before[1]], after[0].targets[after[1]]
    one, other = old.cells[before[2]], new.cells[after[2]]
    versions = [
        f"{package} {old.toolchain.get(package, 'none')} → {new.toolchain.get(package, 'none')}"
        for package in sorted({*old.toolchain, *new.toolchain})
        if old.toolchain.get(package) != new.toolchain.get(package)
    ]
    notes = [f"other versions: {listed(versions)}"] if versions else []
    if one.stablehlo.sha256 != other.stablehlo.sha256:
        notes.append("the portable programs have other bytes; names of scopes are a part of them")
    if one.exec is not None and other.exec is not None and one.exec.sha256 != other.exec.sha256:
        notes.append("the executables have other bytes; a compiler may give other bytes for the same program")
    return notes


def input_names(cell: Program, *, compiled: bool) -> tuple[str, ...]:
    """Names of a program's inputs; of a compiled one, those that it keeps."""
    names = tuple(f"{leaf.group}.{leaf.name}" for leaf in cell.inputs)
    if not compiled or cell.call is None:
        return names
    return tuple(name for name, passed in zip(names, cell.call.inputs, strict=True) if passed.kept)


def text_of(folder: Path, cell: Cell, where: str) -> str:
    """The optimized HLO of a cell.

    Raises:
        ArtifactError: The artifact does not keep it, or the file is damaged.
    """
    if cell.graph is None:
        raise ArtifactError(
            f"{where}: the artifact keeps no optimized program", "build it with --graphs keep, or read --portable"
        )
    return unpacked(read_checked(folder, cell.graph))


@contextmanager
def known_form(where: str) -> Iterator[None]:
    """Errors of readers as one that names the program."""
    try:
        yield
    except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError, RecursionError) as error:
        raise ArtifactError(
            f"{where}: the program has a form that this version does not read ({error!r:.200})",
            "report it with the version of jax that built the artifact",
        ) from error


def expected_of(manifest: Manifest, target: str, name: str) -> Expected:
    """The plan's facts about a cell's program: its state, its collectives and its FLOPs."""
    cell = manifest.targets[target].cells[name]
    return expected(config_of(manifest), plan_of(manifest, target).geometry, cell)


def expected(config: Config, geometry: Geometry, program: Program) -> Expected:
    """The state, the collectives and the FLOPs of a program by the model's formulas."""
    state = tuple(f"state.{leaf.name}" for leaf in program.outputs if leaf.group == "state")
    layered = PHASES[program.phase].family == "logits"
    collectives = expected_collectives(config, geometry, program.phase) if layered else None
    flops = program.floor.flops if program.floor is not None and layered else None
    return Expected(state=state, collectives=collectives, flops=flops)
