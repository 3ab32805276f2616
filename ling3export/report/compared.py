"""The pairs of graphs that two artifacts, or an artifact and an earlier summary, have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ling3export.artifacts.manifest import cell_of, read_manifest, target_of
from ling3export.foundation.errors import ArtifactError, listed
from ling3export.foundation.reading import read_bytes
from ling3export.graph import saved
from ling3export.graph.record import Graph
from ling3export.report.cells import file_changes, graph_of

LARGEST_SUMMARY = 2**26  # bytes
Side = tuple[Path, str | None, str | None]  # an artifact or a summary's file, a target, a cell


@dataclass(frozen=True)
class Pair:
    """Two graphs to compare, and why the files of both may differ."""

    graphs: tuple[Graph, Graph]
    notes: Sequence[str] = ()


def pairs_of(before: Side, after: Side, portable: bool) -> dict[str, Pair]:
    """The cells to compare, by the name of the first: the named ones, or all that both sides have.

    Raises:
        ArtifactError: A side cannot be read, lacks the named cell, or they have no cell in common.
    """
    folder, target, cell = after
    manifest = read_manifest(folder)
    name, record = target_of(manifest, target)
    path, target_before, cell_before = before
    if path.is_file():
        graphs = saved.read(read_bytes(path.parent, path.name, LARGEST_SUMMARY, links=True), str(path))
        names = [cell_before] if cell_before else [one for one in graphs if one in record.cells]
        if unknown := [one for one in names if one not in graphs]:
            raise ArtifactError(f"{path}: no cell {unknown[0]}; it has {listed(sorted(graphs), 20)}")
    else:
        earlier = read_manifest(path)
        name_before, record_before = target_of(earlier, target_before)
        shared = [one for one in record_before.cells if one in record.cells]
        names = [cell_of(record_before, cell_before).name] if cell_before else shared
    if not names:
        raise ArtifactError(
            f"{path} and {folder}: no cell in common", "name one of each: graph diff BEFORE AFTER CELL CELL"
        )
    pairs = {}
    for one in names:
        other = cell_of(record, cell or one).name
        graph = graph_of(folder, manifest, name, other, from_portable=portable)
        if path.is_file():
            pairs[one] = Pair((graphs[one], saved.rolled(graph)))
        else:
            first = graph_of(path, earlier, name_before, one, from_portable=portable)
            pairs[one] = Pair((first, graph), file_changes((earlier, name_before, one), (manifest, name, other)))
    return pairs
