"""Where a command takes an artifact's folder it takes a reference to a version in a catalogue, too.

What is pulled the other parameters decide, so it is pulled when all of them are known.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from ling3export.runners.cli.hosts import HOST_NAMES
from ling3export.runners.hosts.hosts import find_hosts
from ling3export.runners.load.references import folder_of, is_reference, pulled_manifest


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
