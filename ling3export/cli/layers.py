"""``ling3export graph bisect`` and ``extract``: programs layer by layer. These commands run and build programs."""

import json
from pathlib import Path

import click

from ling3export.cli.options import JSON
from ling3export.runners.cli.command import NOT_DETERMINISTIC as DIFFERENT
from ling3export.runners.cli.command import Command
from ling3export.runners.cli.options import FOLDER
from ling3export.runners.cli.references import ARTIFACT


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT)
@click.argument("other", required=False)
@click.argument("cell", required=False)
@click.option("--target", metavar="TARGET", help="The target of ARTIFACT, if it has several.")
@click.option("--target-other", metavar="TARGET", help="The target of OTHER.  [default: that of --target]")
@click.option("--portable", is_flag=True, help="Compile and run the portable programs, on the processor.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    help="Relative error of a layer.  [default: 1e-5 of the largest in fp32, else 0.15 of the median]",
)
@JSON
def bisect(
    artifact: Path, other: str | None, cell: str | None, target: str | None, target_other: str | None,
    portable: bool, tolerance: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Find the first layer of ARTIFACT that differs from OTHER. Exits with 3 if there is one.

    Runs the vectors through both and compares the residual stream after each attention and each MLP, and the state of
    each layer. Without OTHER the numpy reference is compared, with the weights of ARTIFACT. CELL is a prefill, score or
    decode cell; by default the smallest decode, which also prefills. Targets of other machines run as portable programs
    on the processor.
    """
    from ling3export.verify.bisect import bisect as compare

    if other is not None and cell is None and "@" in other and not Path(other).exists():
        other, cell = None, other
    against = None if other is None else ARTIFACT.convert(other, None, None)
    result = compare(artifact, against, cell, target, target_other or target, portable=portable, tolerance=tolerance)
    click.echo(json.dumps(result.document, indent=1) if as_json else result.table())
    if result.first is not None:
        raise SystemExit(DIFFERENT)


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT)
@click.argument("cell")
@click.argument("out", type=FOLDER)
@click.option("--layers", required=True, metavar="N[-M]", help="The layer, or a range of layers; the first is 0.")
@click.option("--target", metavar="TARGET", help="The target of ARTIFACT, if it has several.")
@click.option("--dummy-weights", type=int, metavar="SEED", help="Random weights, for an artifact of programs only.")
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def extract(
    artifact: Path, cell: str, out: Path, layers: str, target: str | None, dummy_weights: int | None, force: bool
) -> None:
    """Build OUT, an artifact of some layers of ARTIFACT: their programs, weights, inputs and expected outputs.

    Every command takes OUT: `ling3export verify OUT` compares it with the numpy reference, and `verify OUT --time`
    times CELL. Its inputs are those that the vectors of ARTIFACT bring to the first layer.
    """
    from ling3export.cli.progress import Console
    from ling3export.compile.extract import extract as build

    with Console() as console:
        manifest = build(artifact, target, cell, layers, out, console, dummy=dummy_weights, force=force)
        console.summary(out, manifest)
