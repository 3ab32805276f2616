"""``ling3export graph``: look into an artifact's programs, compare them, check them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ling3export.cli.layers import bisect, extract
from ling3export.cli.options import JSON
from ling3export.runners.cli.command import NOT_DETERMINISTIC as DIFFERENT
from ling3export.runners.cli.command import Group
from ling3export.runners.cli.options import PATH
from ling3export.runners.cli.references import ARTIFACT

if TYPE_CHECKING:
    from ling3export.artifacts.schema import Manifest
    from ling3export.graph.record import Graph

TARGET = click.option("--target", metavar="TARGET", help="The target, if the artifact has several.")
PORTABLE = click.option("--portable", is_flag=True, help="Read the portable programs, not the compiled ones.")
LARGEST_BUDGETS = 2**20  # bytes
PROFILE = click.option("--profile", type=PATH, metavar="TRACE", help="Measured times: a trace, or a folder of them.")
OUTPUT = click.option("--output", type=PATH, help="Write to this file.  [default: standard output]")


@click.group(
    cls=Group,
    sections={
        "Look": ("summary", "show", "diff", "memory", "view"),
        "Check": ("audit", "bisect"),
        "Take apart": ("extract",),
    },
)
def graph() -> None:
    """Look into ARTIFACT's programs, compare two, check them. Only bisect and extract need weights and run them.

    A CELL is one program: a phase and its padding, such as decode@16. `ling3export inspect ARTIFACT` lists them.
    """


graph.add_command(bisect)
graph.add_command(extract)


def chosen(artifact: Path, cell: str | None, target: str | None) -> "tuple[Manifest, str, list[str]]":
    """The manifest, the name of the target, and the named cell of it, or all."""
    from ling3export.artifacts.manifest import cell_of, read_manifest, target_of

    manifest = read_manifest(artifact)
    name, record = target_of(manifest, target)
    return manifest, name, list(record.cells) if cell is None else [cell_of(record, cell).name]


def read(artifact: Path, cell: str | None, target: str | None, portable: bool) -> "list[Graph]":
    """The graphs of the named cell, or of all cells."""
    from ling3export.report.cells import graph_of

    manifest, name, cells = chosen(artifact, cell, target)
    return [graph_of(artifact, manifest, name, one, from_portable=portable) for one in cells]


def measured(graph: "Graph", profile: Path, artifact: Path) -> "Graph":
    """A graph with the times of a trace; lines on stderr say what they are."""
    from ling3export.artifacts.calibration import found_beside
    from ling3export.artifacts.manifest import read_manifest
    from ling3export.graph.profile import events, joined, trace_of

    data, where = trace_of(profile, graph.cell)
    result = joined(graph, events(data, where), where)
    share = f"{100 * result.unmatched:.1f} % of the time is that of loops and calls themselves, and in no row"
    click.echo(f"{graph.cell}: mean of {result.calls} calls in {where}, over all devices; {share}", err=True)
    calibration, _ = found_beside(artifact, read_manifest(artifact))
    if calibration is not None and calibration.target == graph.target and graph.cell in calibration.cells:
        whole = sum(one.times * one.seconds for one in result.graph.operations if one.seconds) / (1 - result.unmatched)
        plain = calibration.cells[graph.cell].median
        why = "tracing makes small operations longer" if whole > plain else "the host's part of a call is in no row"
        click.echo(
            f"{graph.cell}: {whole * 1e3:.3f} ms in the trace, {plain * 1e3:.3f} ms a call without: {why}", err=True
        )
    return result.graph


def write(text: str, output: Path | None) -> None:
    """Writes a result to a file, whole or not at all, or to stdout."""
    from ling3export.artifacts.files import replace_file

    if output is None:
        click.echo(text)
    else:
        replace_file(output, text.encode() + b"\n")


@graph.command()
@click.argument("artifact", type=ARTIFACT)
@click.argument("cell", required=False)
@TARGET
@click.option(
    "--by",
    type=click.Choice(["operation-kind", "layer", "part", "operation"]),
    default="operation-kind",
    show_default=True,
    help="Rows of a layer kind.",
)
@PORTABLE
@JSON
@click.option("--folded", is_flag=True, help="Print collapsed stacks for a flame graph.")
@PROFILE
def summary(
    artifact: Path,
    cell: str | None,
    target: str | None,
    by: str,
    portable: bool,
    as_json: bool,
    folded: bool,
    profile: Path | None,
) -> None:
    """Show where the FLOPs, bytes and seconds of CELL go, by layer kind; of all cells without CELL.

    `ling3export verify ARTIFACT --time --trace FOLDER` records a trace of each cell for --profile.
    """
    from ling3export.graph import summary as tables

    if profile is not None and portable:
        raise click.UsageError("--profile: a portable program has no measured times.")
    graphs = read(artifact, cell, target, portable)
    if profile is not None:
        graphs = [measured(one, profile, artifact) for one in graphs]
    key = tables.BY[by]
    if as_json:
        click.echo(json.dumps(tables.document(graphs, key), indent=1))
        return
    shown: Callable[[Any], list[str]] = tables.folded if folded else lambda one: [*tables.table(one, key), ""]
    click.echo("\n".join(line for one in graphs for line in shown(one)).rstrip())


@graph.command()
@click.argument("before", type=ARTIFACT)
@click.argument("after", type=ARTIFACT)
@click.argument("cell", required=False)
@click.argument("cell_after", required=False)
@TARGET
@click.option("--target-after", metavar="TARGET", help="The target of AFTER.  [default: that of --target]")
@PORTABLE
@JSON
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request.")
@OUTPUT
def diff(
    before: Path,
    after: Path,
    cell: str | None,
    cell_after: str | None,
    target: str | None,
    target_after: str | None,
    portable: bool,
    as_json: bool,
    markdown: bool,
    output: Path | None,
) -> None:
    """Compare CELL of two artifacts, or every cell: what changed, and what it costs. Exits with 3 if they differ.

    BEFORE may be a file of `summary --json`; rows of the summary are then compared. CELL_AFTER names another cell of
    AFTER: `diff A A decode@16 decode@64` shows what does not scale.
    """
    from ling3export.foundation.tables import footnotes
    from ling3export.graph import diff as tables
    from ling3export.report.compared import pairs_of

    pairs = pairs_of((before, target, cell), (after, target_after or target, cell_after or cell), portable)
    differences = {name: tables.compare(*pair.graphs) for name, pair in pairs.items()}
    notes = {name: pair.notes for name, pair in pairs.items()}
    if as_json:
        text = json.dumps(tables.document(differences, notes), indent=1)
    else:
        lines = [
            line
            for name, difference in differences.items()
            for line in (
                *tables.table(difference, markdown=markdown),
                *(notes[name] if markdown else footnotes(notes[name])),
                "",
            )
        ]
        text = "\n".join(lines).rstrip()
    write(text, output)
    if not all(difference.equal for difference in differences.values()):
        raise SystemExit(DIFFERENT)


@graph.command()
@click.argument("artifact", type=ARTIFACT)
@click.argument("cell", required=False)
@TARGET
@click.option("--budgets", "budgets_file", type=PATH, help="Limits of the rules and of each cell, a TOML file.")
@JSON
def audit(artifact: Path, cell: str | None, target: str | None, budgets_file: Path | None, as_json: bool) -> None:
    """Check CELL, or every cell, by rules and budgets. Exits with 3 if a rule is broken or a limit exceeded.

    The rules find copies of weights in fp32 or another layout, large copies and constants, callbacks, unlisted custom
    calls and dynamic shapes. They also find state that is not donated, and more collectives or FLOPs than needed.
    """
    from ling3export.foundation.reading import read_bytes
    from ling3export.graph import audit as rules
    from ling3export.report.cells import expected_of, graph_of

    limits = rules.Budgets()
    if budgets_file is not None:
        data = read_bytes(budgets_file.parent, budgets_file.name, LARGEST_BUDGETS, links=True)
        limits = rules.budgets(data.decode(errors="replace"), str(budgets_file))
    manifest, name, cells = chosen(artifact, cell, target)
    findings = {
        one: rules.audit(graph_of(artifact, manifest, name, one), expected_of(manifest, name, one), limits)
        for one in cells
    }
    click.echo(json.dumps(rules.document(findings), indent=1) if as_json else "\n".join(rules.table(findings)))
    if any(findings.values()):
        raise SystemExit(DIFFERENT)


@graph.command()
@click.argument("artifact", type=ARTIFACT)
@click.argument("cell")
@TARGET
@JSON
def memory(artifact: Path, cell: str, target: str | None, as_json: bool) -> None:
    """Show which tensors are alive at the memory peak of CELL, by name; --json adds memory over program order."""
    from ling3export.graph import memory as tables
    from ling3export.report.cells import memory_of

    manifest, name, (cell,) = chosen(artifact, cell, target)
    alive = memory_of(artifact, manifest, name, cell)
    click.echo(json.dumps(tables.document(alive), indent=1) if as_json else "\n".join(tables.table(alive)))


@graph.command()
@click.argument("artifact", type=ARTIFACT)
@click.argument("cell", required=False)
@click.option("--against", type=ARTIFACT, help="Also show what changed since this artifact.")
@click.option("--against-cell", metavar="CELL", help="The cell of --against.  [default: CELL]")
@TARGET
@PORTABLE
@PROFILE
@click.option("--model-explorer", "explorer", type=PATH, help="Write files for Model Explorer instead, from this one.")
@OUTPUT
def view(
    artifact: Path,
    cell: str | None,
    against: Path | None,
    against_cell: str | None,
    target: str | None,
    portable: bool,
    profile: Path | None,
    explorer: Path | None,
    output: Path | None,
) -> None:
    """Draw CELL, or every cell, as one HTML page: layers, time, memory, roofline. The page loads nothing else.

    --model-explorer FILE.json writes the graph there, the overlays FILE.time.json, FILE.bytes.json and FILE.flops.json,
    and with --against FILE.before.json and FILE.sync.json.
    """
    from ling3export.graph import explorer as files
    from ling3export.graph.view import page
    from ling3export.report.cells import shown_of

    if against is None and against_cell:
        raise click.UsageError("--against-cell needs --against.")
    if profile is not None and (portable or against):
        raise click.UsageError("--profile goes with neither --portable nor --against: they have no measured times.")
    if cell is None and (against_cell or explorer):
        raise click.UsageError("--against-cell and --model-explorer need CELL.")
    manifest, name, cells = chosen(artifact, cell, target)
    shown = []
    for one in cells:
        (graph,) = read(artifact, one, name, portable)
        if profile is not None:
            graph = measured(graph, profile, artifact)
        before = None
        if against is not None:
            (before,) = read(against, against_cell or one, target, portable)
        shown.append(shown_of(artifact, manifest, name, graph, before))
    if explorer is None:
        write(page(shown), output)
        return
    for path, document in files.documents(explorer, shown[0].graph, shown[0].difference).items():
        write(json.dumps(document), path)


@graph.command()
@click.argument("artifact", type=ARTIFACT)
@click.argument("cell")
@click.argument("pattern", default="")
@TARGET
@PORTABLE
@JSON
@click.option("--text", "as_text", is_flag=True, help="Print the program's text: optimized HLO, or StableHLO.")
def show(
    artifact: Path, cell: str, pattern: str, target: str | None, portable: bool, as_json: bool, as_text: bool
) -> None:
    """Show the operations of CELL that contain PATTERN, a few of them with everything that is known.

    PATTERN is a part of a name, opcode, kind of work, layer kind, scope, weight or type, or "layer 7".
    """
    from ling3export.graph import show as tables
    from ling3export.opened import Program

    if as_text and (pattern or as_json):
        raise click.UsageError("--text prints the whole program, without PATTERN and --json.")
    manifest, name, (cell,) = chosen(artifact, cell, target)
    if as_text:
        click.echo(Program(artifact, manifest, name, cell).text(portable=portable))
        return
    (graph,) = read(artifact, cell, name, portable)
    operations = tables.matching(graph, pattern)
    if as_json:
        click.echo(json.dumps(tables.document(graph, operations), indent=1))
    else:
        click.echo("\n".join(tables.table(graph, operations)))
