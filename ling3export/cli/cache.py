"""``ling3export cache``: what is in the cache, and making room."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from ling3export.cache.store import CacheUse, cache_folder
from ling3export.cli.options import BYTES, JSON
from ling3export.runners.cli.command import Group
from ling3export.runners.cli.options import PATH

cache_dir = click.option(
    "--cache-dir", type=PATH, help="The cache.  [default: $LING3_CACHE, or ling3export in the user's cache folder]"
)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


@click.group(cls=Group)
def cache() -> None:
    """Show and clean up the programs that earlier builds compiled."""


@cache.command()
@cache_dir
@JSON
def status(cache_dir: Path | None, as_json: bool) -> None:
    """Show how much the cache holds."""
    from ling3export.cache.cleanup import status as read

    contents = read(cache_folder(CacheUse(folder=cache_dir)))
    if as_json:
        click.echo(json.dumps(asdict(contents)))
        return
    click.echo(f"folder    {contents.folder}")
    click.echo(f"entries   {contents.cells} cells, {contents.programs} programs")
    if contents.recompiled:
        click.echo(f"runners   {contents.recompiled} programs compiled on this machine")
    click.echo(f"size      {_megabytes(contents.bytes)}")


@cache.command()
@click.option("--max-size", type=BYTES, help="Remove the least recently used until the rest is no larger: 10GiB.")
@click.option("--all", "everything", is_flag=True, help="Remove all entries.")
@cache_dir
def cleanup(max_size: int | None, everything: bool, cache_dir: Path | None) -> None:
    """Remove entries."""
    from ling3export.cache.cleanup import clean_up

    if max_size is None and not everything:
        raise click.UsageError("expected --max-size or --all.")
    done = clean_up(cache_folder(CacheUse(folder=cache_dir)), None if everything else max_size)
    click.echo(
        f"removed {done.removed} entries ({_megabytes(done.freed)}); "
        f"{done.kept} entries ({_megabytes(done.bytes)}) are left"
    )
