"""Where a command takes an artifact's folder it takes a reference to a version in a catalogue, too.

What is pulled the other parameters decide, so it is pulled when all of them are known.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from ling3export.runners.cli.command import Command
from ling3export.runners.cli.hosts import HOST_NAMES
from ling3export.runners.cli.options import FOLDER, trust_option
from ling3export.runners.hosts.hosts import find_hosts
from ling3export.runners.load.references import STORE, folder_of, is_reference, pulled, pulled_manifest


@dataclass(frozen=True)
class Artifact(click.ParamType):
    """A folder, or a reference, which is pulled into the folder that LING3_STORE names.

    Of an artifact that is pulled for the command's ``--target`` the programs of other targets are left out. One of
    several hosts then pulls its share of the weights alone.

    Args:
        elsewhere: Take what this machine cannot run, too.
        manifest: Pull the manifest alone, into a folder that is removed when the command ends.
        out: The parameter that says what is written; by default that is the folder itself, or beside it.
        beside: The parameter without which no artifact is meant, and no reference is taken.
    """

    elsewhere: bool = False
    manifest: bool = False
    out: str | None = None
    beside: str | None = None
    name = "artifact"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The folder, or what becomes one."""
        if isinstance(value, str) and is_reference(value):
            return _Reference(value, self)
        return Path(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class _Reference:
    """A reference in the place of a folder."""

    text: str
    kind: Artifact

    def decided(self, context: click.Context) -> Path:
        """The folder that it is pulled into.

        Raises:
            Ling3Error: It cannot be pulled.
        """
        given, kind = context.params, self.kind
        if kind.out is not None and given[kind.out] is None:
            raise click.UsageError(f"expected {kind.out.upper()} beside the reference {self.text}, found none.")
        if kind.beside is not None:
            if given[kind.beside] is None:
                raise click.UsageError(f"expected a folder, or --{kind.beside} beside the reference {self.text}.")
            return folder_of(self.text, elsewhere=kind.elsewhere)
        if kind.manifest:
            folder = context.with_resource(TemporaryDirectory(prefix="ling3-"))
            return pulled_manifest(self.text, Path(folder))
        target, hosts = given.get("target"), None
        if target is not None and HOST_NAMES[0] in given:
            hosts = find_hosts(**{name: given[name] for name in HOST_NAMES})
        number = None if hosts is None else hosts.number
        return folder_of(self.text, target, host=number, elsewhere=kind.elsewhere)


ARTIFACT = Artifact()


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
    """Pull STORE/ID or STORE/ID@VERSION.

    Every byte is checked; a pull that was interrupted continues. With LING3_STORE set, files that an earlier pull has
    brought are not pulled again. Prints the folder.
    """
    kept = os.environ.get(STORE)
    if to is None and not kept:
        raise click.UsageError(f"expected --to FOLDER, or a folder in {STORE}.")
    if host_id is not None and target is None:
        raise click.UsageError("expected --target NAME with --host-id.")
    click.echo(pulled(reference, to, kept, target, host=host_id, force=force, elsewhere=elsewhere, strict=strict))
