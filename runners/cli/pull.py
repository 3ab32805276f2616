"""``ling3-runner pull``: an artifact from a catalogue, checked and whole, or nothing."""

import os
from pathlib import Path

import click

from ling3export.runners.cli.options import FOLDER, Command, trust_option
from ling3export.runners.load.references import STORE, pulled


@click.command(cls=Command)
@click.argument("reference")
@click.option("--to", type=FOLDER, metavar="FOLDER", help=f"Where to.  [default: a folder in ${STORE}]")
@click.option("--target", help="Leave out the programs of all other targets.")
@click.option("--host-id", type=click.IntRange(0), metavar="N", help="Of the weights only what host N of it holds.")
@click.option("--force", is_flag=True, help="Replace FOLDER if it is there.")
@click.option("--elsewhere", is_flag=True, help="Pull also what this machine cannot run.")
@click.option("--strict", is_flag=True, help="Refuse a record with fields that this version does not know.")
@trust_option
def pull(
    reference: str, to: Path | None, target: str | None, host_id: int | None, force: bool, elsewhere: bool, strict: bool
) -> None:
    """Pull STORE/ID or STORE/ID@VERSION, and what it depends on.

    Every byte is checked; a pull that was interrupted continues. With LING3_STORE set, files that an earlier pull has
    brought are not pulled again. Prints the folder.
    """
    kept = os.environ.get(STORE)
    if to is None and not kept:
        raise click.UsageError(f"expected --to FOLDER, or a folder in {STORE}.")
    if host_id is not None and target is None:
        raise click.UsageError("expected --target NAME with --host-id.")
    click.echo(pulled(reference, to, kept, target, host=host_id, force=force, elsewhere=elsewhere, strict=strict))
