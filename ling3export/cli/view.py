"""``ling3export graph view``: an artifact's programs as a page for a browser, or as files for Model Explorer."""

import json
from pathlib import Path

import click

from ling3export.cli.graph import OUTPUT, PORTABLE, TARGET, chosen, read, write
from ling3export.runners.cli.options import PATH
from ling3export.runners.cli.references import ARTIFACT


@click.command()
@click.argument("artifact", type=ARTIFACT)
@click.argument("cell", required=False)
@click.option("--against", type=ARTIFACT, help="Also show what changed since this artifact.")
@click.option("--against-cell", metavar="CELL", help="The cell of --against.  [default: CELL]")
@TARGET
@click.option("--against-target", metavar="TARGET", help="The target of --against.  [default: that of --target]")
@PORTABLE
@click.option("--model-explorer", "explorer", type=PATH, help="Write files for Model Explorer instead, from this one.")
@OUTPUT
def view(
    artifact: Path,
    cell: str | None,
    against: Path | None,
    against_cell: str | None,
    target: str | None,
    against_target: str | None,
    portable: bool,
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

    if against is None and (against_cell or against_target):
        raise click.UsageError("--against-cell and --against-target need --against.")
    if cell is None and (against_cell or explorer):
        raise click.UsageError("--against-cell and --model-explorer need CELL.")
    manifest, name, cells = chosen(artifact, () if cell is None else (cell,), target)
    shown = []
    for one in cells:
        (graph,) = read(artifact, (one,), name, portable)
        before = None
        if against is not None:
            (before,) = read(against, (against_cell or one,), against_target or target, portable)
        shown.append(shown_of(artifact, manifest, name, graph, before))
    if explorer is None:
        write(page(shown), output)
        return
    for path, document in files.documents(explorer, shown[0].graph, shown[0].difference).items():
        write(json.dumps(document), path)
