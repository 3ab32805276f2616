"""The command line of the build side. Nothing heavy is imported before it is needed."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import click

from ling3export.cache.use import POLICIES, CacheUse
from ling3export.cli.cache import cache
from ling3export.cli.options import build_options, given
from ling3export.errors import Ling3Error, listed
from ling3export.plan.options import Options
from ling3export.runners.cli.options import Group


def _require(command: str, packages: tuple[str, ...]) -> None:
    """Refuses a command whose packages are not installed: those who only run artifacts do without.

    Raises:
        Ling3Error: Names them, and the extra that brings them.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise Ling3Error(
            f"{command}: expected the packages of the extra `build`, found no {listed(missing)}",
            'pip install "ling3export[build]", or in a checkout: pip install ".[build]"',
        )


def _refuse_given(what: str, names: tuple[str, ...]) -> None:
    """Refuses options that were given and would mean nothing.

    Raises:
        Ling3Error: Names the first.
    """
    context = click.get_current_context()
    options = {param.name: param.opts[0] for param in context.command.params}
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            hint = "nothing is compiled: TensorFlow does that when it loads"
            raise Ling3Error(f"{what}: expected no {options[name]}, found it", hint)


@click.group(cls=Group)
@click.version_option(package_name="ling3export")
def main() -> None:
    """Compile Ling3-Tiny ahead of time."""


@main.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.argument("artifact", required=False, type=click.Path(path_type=Path))
@build_options
@click.option("--jobs", type=click.IntRange(1), help="Cells compiled at a time.  [default: one a core]")
@click.option(
    "--ignore-config-field", "ignore", multiple=True, metavar="NAME", help="A field of config.json to ignore."
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    metavar="ARTIFACT",
    help="Add the targets to this one instead. It has what they share, so CHECKPOINT is only compared.",
)
@click.option(
    "--replay",
    metavar="[TARGET/]CELL",
    help="Build one cell of ARTIFACT again, or of its build that failed, and show all that its compiler says.",
)
@click.option("--force", is_flag=True, help="Replace ARTIFACT, or targets of --into, if they are there.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["artifact", "savedmodel"]),
    default="artifact",
    show_default=True,
    help="savedmodel: TensorFlow signatures of the TP=1 steps (extra savedmodel).",
)
@click.option(
    "--cache",
    "policy",
    type=click.Choice(POLICIES),
    default=CacheUse.policy,
    show_default=True,
    help="Use programs of earlier builds; redo makes all anew, readonly adds none.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Where they are.  [default: $LING3_CACHE, or ling3export in the user's cache folder]",
)
@click.option("--explain", is_flag=True, help="Say of each cell why it was not in the cache.")
def build(
    checkpoint: Path | None, artifact: Path | None, ignore: tuple[str, ...], into: Path | None, replay: str | None,
    force: bool, kind: str, policy: str, cache_dir: Path | None, explain: bool, **options: Any,
) -> None:  # fmt: skip
    """Build ARTIFACT from CHECKPOINT.

    Without CHECKPOINT the packaged demo checkpoint is built into ./demo.ling3; ARTIFACT defaults to
    ./<checkpoint folder name>.ling3, or .savedmodel.
    """
    _require("build", ("flax", "rich"))
    from ling3export.cli.progress import Console
    from ling3export.processes import unwinding

    if into is not None and (artifact is not None or replay is not None):
        raise click.UsageError(f"--into names the artifact: no {'--replay' if replay else 'ARTIFACT'} beside it")
    with unwinding(), Console() as console:
        if kind == "savedmodel":
            from ling3export.savedmodel.export import build_savedmodel

            _refuse_given("--format savedmodel", ("policy", "cache_dir", "explain", "jobs", "into", "replay"))
            source, destination = _named(checkpoint, artifact, "savedmodel")
            build_savedmodel(source, destination, Options(**options), console, force=force, ignore=ignore)
            console.note(f"wrote {destination}")
            return
        use = CacheUse(policy, cache_dir, explain)
        if replay is not None:
            _replay(checkpoint, artifact, replay, use)
        elif into is not None:
            from ling3export.compile.into import add_targets

            chosen = given(click.get_current_context())
            manifest, names = add_targets(
                into, Options(**options), chosen, console, checkpoint=checkpoint, force=force, ignore=ignore, cache=use
            )
            console.summary(into, manifest, names)
        else:
            from ling3export.compile.build import build as run

            source, destination = _named(checkpoint, artifact)
            manifest = run(source, destination, Options(**options), console, force=force, ignore=ignore, cache=use)
            console.summary(destination, manifest)


def _named(checkpoint: Path | None, artifact: Path | None, suffix: str = "ling3") -> tuple[Path, Path]:
    """Source and destination of a build."""
    from ling3export.compile.build import DEMO

    source = checkpoint or DEMO
    return source, artifact or Path(f"{source.resolve().name}.{suffix}")


def _replay(checkpoint: Path | None, artifact: Path | None, cell: str, cache: CacheUse) -> None:
    from ling3export.compile.replay import replay, replayable

    # The one path may be the artifact, too: no checkpoint is needed.
    alone = checkpoint is not None and artifact is None and replayable(checkpoint)
    found = replay(checkpoint if alone and checkpoint else _named(checkpoint, artifact)[1], cell, cache)
    click.echo("\n".join(found.lines))
    if not found.passed:
        sys.exit(1)


@main.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@build_options
@click.option(
    "--lengths", type=click.Path(path_type=Path), metavar="FILE", help="A histogram of requests, as JSON lines."
)
@click.option(
    "--from",
    "artifact",
    type=click.Path(path_type=Path),
    metavar="ARTIFACT",
    help="Compiled for the same plan: gives temporaries and estimates.",
)
@click.option(
    "--ignore-config-field", "ignore", multiple=True, metavar="NAME", help="A field of config.json to ignore."
)
@click.option("--wide", is_flag=True, help="All columns, also where a terminal is narrower.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan(
    checkpoint: Path | None,
    lengths: Path | None,
    artifact: Path | None,
    ignore: tuple[str, ...],
    wide: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what a build would make, without compiling.

    CHECKPOINT is a folder or a config.json; without it, the packaged demo. Shows the pools, what each device holds
    against its memory, and each cell's roofline bound: the time in which its bytes and FLOPs can be done
    at all.

    A line of --lengths is {"prompt_tokens": 317, "output_tokens": 50, "count": 3}, count 1 if left out. Shown is what
    these requests pad at each padding, and as many paddings that pad less.
    """
    _require("plan", ("flax",))
    from ling3export.compile.build import DEMO
    from ling3export.plan.paddings import read_lengths
    from ling3export.pricing.pricing import config_of, priced
    from ling3export.pricing.text import described

    config = config_of(checkpoint or DEMO, ignore)
    requests = [] if lengths is None else read_lengths(lengths)
    found = priced(config, Options(**options), requests, artifact, ignore)
    click.echo(json.dumps(found.record()) if as_json else described(found, wide=wide))


main.add_command(cache)


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--preset", type=click.Choice(["micro", "small", "aligned", "full"]), required=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Layers instead of the preset's.")
@click.option("--force", is_flag=True, help="Replace DIRECTORY if it is there.")
def synth(directory: Path, preset: str, seed: int, layers: int | None, force: bool) -> None:
    """Write a seeded checkpoint in the published layout into DIRECTORY."""
    from ling3export.checkpoint.synth import synthesize
    from ling3export.processes import unwinding

    with unwinding():
        synthesize(directory, preset, seed, layers=layers, force=force)
    click.echo(f"wrote {directory}", err=True)


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The manifest, as JSON.")
def inspect(artifact: Path, as_json: bool) -> None:
    """Show what ARTIFACT holds: plan, cells, sizes, costs, state."""
    from ling3export.artifacts.manifest import read_manifest
    from ling3export.report.inspect import describe

    manifest = read_manifest(artifact)
    click.echo(json.dumps(manifest, indent=2, ensure_ascii=False) if as_json else describe(manifest))


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def report(artifact: Path, out: Path | None, force: bool) -> None:
    """Write a page about ARTIFACT: its cells, and what they cost.

    Memory, rooflines, estimated times, bytes and collectives of every target, in one HTML file without references to
    anything outside. OUT defaults to NAME.report.html beside NAME.ling3.
    """
    from ling3export.report.page import write_report

    click.echo(f"wrote {write_report(artifact, out, force=force)}", err=True)


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--target", help="Only this target.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def verify(artifact: Path, target: str | None, as_json: bool) -> None:
    """Check ARTIFACT: every digest, then every vector in every cell.

    Cells of machines unlike this one are not run. The worst error comes first. Exits with 1 when a cell is outside its
    tolerance.
    """
    from ling3export.verify.verify import verify_artifact

    result = verify_artifact(artifact, target)
    if as_json:
        click.echo(json.dumps(result.record))
    else:
        click.echo(result.table())
    if not result.passed:
        sys.exit(1)
