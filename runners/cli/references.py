"""Artifacts as parameters: a folder, or a reference to a version in a store; and the command that pulls one."""

import os
from pathlib import Path
from typing import Any

import click

from ling3export.runners.cli.command import Command
from ling3export.runners.cli.options import FOLDER
from ling3export.runners.load.references import STORE, folder_of, pulled


class _Artifact(click.ParamType):
    """A folder, or a reference, which is pulled into the folder that LING3_STORE names."""

    name = "artifact"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The folder."""
        return folder_of(value)


ARTIFACT = _Artifact()


@click.command(cls=Command)
@click.argument("reference")
@click.option("--to", type=FOLDER, metavar="FOLDER", help=f"The folder to make.  [default: a folder in ${STORE}]")
@click.option("--force", is_flag=True, help="Replace FOLDER if it is there.")
def pull(reference: str, to: Path | None, force: bool) -> None:
    """Pull oci:FOLDER/ID or oci:FOLDER/ID@VERSION, and print the folder.

    Every byte is checked. Where the file system allows it, files are not copied: they get a second name.
    """
    if to is None and not os.environ.get(STORE):
        raise click.UsageError(f"expected --to FOLDER, or a folder in {STORE}.")
    click.echo(pulled(reference, to, force=force))
