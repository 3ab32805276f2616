"""``ling3-runner transfer``: what processes that exchanged state have left behind."""

from pathlib import Path

import click

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.cli.options import PATH, Group
from ling3export.runners.transfer import folder as states


@click.group("transfer", cls=Group)
def transfer() -> None:
    """Look after sequence states that are kept for other processes."""


@transfer.command()
@click.option("--folder", type=PATH, help="Also look through this folder of states.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; only say what would go.")
def gc(folder: Path | None, dry_run: bool) -> None:
    """Remove what nobody can use any more, and print it.

    That is what killed processes have left: half-written states, and states that waited for somebody. In a folder
    they go a minute after their lease. Files that are no whole states go, too.
    """
    if folder is not None and not folder.is_dir():
        raise Ling3Error(f"--folder `{folder}`: expected a folder, found none")
    found: list[tuple[str, int, str]] = []
    if states.SHM.is_dir():
        found += states.collect(states.SHM, states.own_prefix(), local=True, dry_run=dry_run)
    if folder is not None:
        found += states.collect(folder, states.PREFIX, local=False, dry_run=dry_run)
    for name, size, reason in found:
        click.echo(f"{name}\t{size:,} bytes\t{reason}")
    what = "would be freed" if dry_run else "freed"
    click.echo(f"{sum(size for _, size, _ in found):,} bytes of {len(found)} states {what}", err=True)
