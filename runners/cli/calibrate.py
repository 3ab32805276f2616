"""``ling3-runner calibrate``: every cell proven and timed on this machine, in one file that can be sent back."""

import sys
from pathlib import Path
from typing import Any

import click

from ling3export.artifacts.calibration import beside, write_calibration
from ling3export.foundation.errors import Ling3Error
from ling3export.runners.cli.command import Command, section
from ling3export.runners.cli.hosts import host_options, keep_stdout
from ling3export.runners.cli.options import PATH, check_option, programs_option, target_option, trust_option
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.hosts.hosts import find_hosts
from ling3export.runners.hosts.rendezvous import announced

OUTSIDE = "an artifact holds what its manifest names, and nothing else: name a place beside it with --to"


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT)
@click.option("--calls", type=click.IntRange(1, 10_000), default=20, help="Timed calls of each cell.")
@click.option("--to", "path", type=PATH, metavar="FILE", help="What to write.  [default: NAME.calibration.json]")
@click.option("--force", is_flag=True, help="Replace what is there.")
@section("Artifact", target_option, programs_option, check_option, trust_option)
@host_options
def calibrate(artifact: Path, place: dict[str, Any], calls: int, path: Path | None, force: bool, **how: Any) -> None:
    """Run every cell of ARTIFACT here, on its vectors, and time it.

    Writes errors and times. Later starts on this machine, ling3export inspect and plan --from take them from beside
    ARTIFACT. Exits with 1 when a cell is outside its tolerance. Run it on each of several hosts; host 0 writes.
    """
    hosts = find_hosts(**place)
    path = beside(artifact) if path is None else path
    with announced(hosts):
        if hosts is None or hosts.number == 0:
            _check(artifact, path, force)
    if hosts is not None:
        keep_stdout()
    from ling3export.artifacts.receipts import executed, table
    from ling3export.runners.calibrate.calibrate import calibrated
    from ling3export.runners.load.loader import load

    loaded = load(artifact, hosts=hosts, agreed={"calls": calls}, **how)
    found = calibrated(loaded, calls)
    if found is None:
        return
    write_calibration(path, found)
    click.echo("\n".join([f"{found.target}:", *table(found, loaded.record), *executed(found)]))
    click.echo(f"wrote {path}", err=True)
    if not found.receipts.passed:
        sys.exit(1)


def _check(artifact: Path, path: Path, force: bool) -> None:
    """Refuses a file that is there, or that would lie in the artifact."""
    if path.resolve().is_relative_to(artifact.resolve()):
        raise Ling3Error(
            f"calibration `{path.name}`: expected a place outside of the artifact, found one in it", OUTSIDE
        )
    if path.exists() and not force:
        raise Ling3Error(
            f"calibration `{path.name}`: expected a free name, found one that exists, in {path.parent}",
            "name another with --to, or replace it with --force",
        )
