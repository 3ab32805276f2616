"""``ling3export graph view`` and ``show``: a program as a page for a browser, its operations and its text."""

import json
from pathlib import Path

import click

from ling3export.cli.graph import OUTPUT, PORTABLE, PROFILE, TARGET, chosen, measured, read, write
from ling3export.cli.options import JSON
from ling3export.runners.cli.options import PATH
from ling3export.runners.cli.references import ARTIFACT


@click.command()
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
    manifest, name, cells = chosen(artifact, () if cell is None else (cell,), target)
    shown = []
    for one in cells:
        (graph,) = read(artifact, (one,), name, portable)
        if profile is not None:
            graph = measured(graph, profile, artifact)
        before = None
        if against is not None:
            (before,) = read(against, (against_cell or one,), target, portable)
        shown.append(shown_of(artifact, manifest, name, graph, before))
    if explorer is None:
        write(page(shown), output)
        return
    for path, document in files.documents(explorer, shown[0].graph, shown[0].difference).items():
        write(json.dumps(document), path)


@click.command()
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
    manifest, name, (cell,) = chosen(artifact, (cell,), target)
    if as_text:
        click.echo(Program(artifact, manifest, name, cell).text(portable=portable))
        return
    (graph,) = read(artifact, (cell,), name, portable)
    operations = tables.matching(graph, pattern)
    if as_json:
        click.echo(json.dumps(tables.document(graph, operations), indent=1))
    else:
        click.echo("\n".join(tables.table(graph, operations)))
