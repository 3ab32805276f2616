"""``ling3-runner doctor``: works without jax, too, whose start is tried in a process of its own."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from ling3export.artifacts.files import REBUILD
from ling3export.artifacts.manifest import named_target
from ling3export.artifacts.schema import Manifest
from ling3export.artifacts.signing import read_trusted
from ling3export.foundation.errors import ArtifactError
from ling3export.machine.promise import promise, today
from ling3export.machine.targets import choose_target, platforms_here
from ling3export.runners import doctor as checks
from ling3export.runners.cli.command import Command
from ling3export.runners.cli.options import target_option
from ling3export.runners.cli.references import ARTIFACT

WORDS = {  # by exit code
    0: "fits this machine",
    1: "does not run here",
    3: "runs with --programs allow-compile, which compiles the portable programs here once",
}


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT, required=False)
@target_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor(artifact: Path | None, target: str | None, as_json: bool) -> None:
    """Say what this machine is, and whether ARTIFACT runs on it.

    Names everything that does not fit, with the command that mends it. Exits with 0 where ARTIFACT fits, 3 where it
    runs with --programs allow-compile, 1 where it does not run. Digests are not read; ling3export verify does that.
    """
    manifest, name, faults = _wanted(artifact, target)
    devices = 1
    if manifest is not None and name is not None and (record := manifest.targets[name]).platform == "cpu":
        devices = max(record.mesh.devices) + 1 if record.processes == 1 else record.mesh.hosts.count(0)
    here = checks.look(devices)
    faults += checks.of_machine(here)
    if artifact is not None and manifest is not None and name is not None:
        faults += [*checks.of_files(manifest, name, artifact), *checks.of_target(manifest, name, here, artifact)]
    code = checks.exit_code(faults)
    if as_json:
        told = [{"weight": each.severity.value, "what": each.what, "mend": each.mend} for each in faults]
        click.echo(json.dumps({"machine": asdict(here), "target": name, "faults": told, "exit_code": code}))
        sys.exit(code)
    for what, how in checks.facts(here):
        click.echo(f"{what + ':':12}{how}")
    if manifest is not None and name is not None:
        click.echo(promise(manifest.targets[name]).told(today()))
    for fault in faults:
        click.echo(f"{fault.severity.value}: {fault.what}\n  mend: {fault.mend}")
    if artifact is None:
        click.echo(f"this machine: {'jax does not run here' if code else 'jax runs here'}")
    else:
        click.echo(f"{artifact}{f', target {name}' if name else ''}: {WORDS[code]}")
    sys.exit(code)


def _wanted(artifact: Path | None, target: str | None) -> tuple[Manifest | None, str | None, list[checks.Fault]]:
    """The manifest, the target that is looked at, and what is wrong with either."""
    if artifact is None:
        return None, None, []
    manifest = None
    try:
        manifest = read_trusted(artifact, lambda text: click.echo(text, err=True))
        if target is not None:
            return manifest, named_target(manifest.targets, target), []
        if len(manifest.targets) == 1:
            return manifest, next(iter(manifest.targets)), []
        return manifest, choose_target(manifest.targets, None, platforms_here()), []
    except ArtifactError as error:
        return manifest, None, [checks.Fault(checks.Severity.FAULT, error.message, error.hint or REBUILD)]
