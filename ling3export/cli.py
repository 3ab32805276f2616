"""The command line of the build side. Nothing heavy is imported before it is needed."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import click

from ling3export.cache_cli import cache
from ling3export.cache_use import POLICIES, CacheUse
from ling3export.errors import Ling3Error, listed
from ling3export.plan import Options, parse_bytes, parse_paddings
from ling3export.runners.guard import guarded

DEFAULTS = Options()


class _Paddings(click.ParamType):
    """``16,128,512``; what it means is checked with the plan."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The integers between the commas."""
        if isinstance(value, tuple):
            return value
        return parse_paddings(value, *(() if param is None else param.opts[:1]))


class _Bytes(click.ParamType):
    """``4GiB``."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        return value if isinstance(value, int) else parse_bytes(value, *(() if param is None else param.opts[:1]))


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


class _Group(click.Group):
    """Guards parsing too: a padding that is no number is a Ling3Error like any other."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As click's, with errors printed."""
        return guarded(super().main)(*args, **kwargs)


@click.group(cls=_Group)
@click.version_option(package_name="ling3export")
def main() -> None:
    """Compile Ling3-Tiny ahead of time."""


@main.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.argument("artifact", required=False, type=click.Path(path_type=Path))
@click.option(
    "--paddings",
    type=_Paddings(),
    default=DEFAULTS.paddings,
    help="Token slots of the prefill programs.  [default: 16,128,512]",
)
@click.option(
    "--decode-paddings",
    type=_Paddings(),
    help="Sequences of the decode programs.  [default: paddings up to the first that holds --max-running]",
)
@click.option(
    "--tp",
    type=int,
    help="Devices that share the model.  [default: on cpu 16, or as many as the model splits over]",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=DEFAULTS.targets,
    help="PLATFORM[:KIND][:TOPOLOGY]; may be given many times.  [default: cpu]",
)
@click.option(
    "--max-running",
    type=int,
    default=DEFAULTS.max_running,
    show_default=True,
    help="Sequences that hold state at once.",
)
@click.option("--page-size", type=int, default=DEFAULTS.page_size, show_default=True, help="Tokens a latent page.")
@click.option("--context", type=int, help="Longest sequence.  [default: 8192, or the model's limit]")
@click.option(
    "--memory-fraction",
    type=click.FloatRange(0, 1, min_open=True),
    default=DEFAULTS.memory_fraction,
    show_default=True,
    help="Of an accelerator's memory, for weights and pools.",
)
@click.option(
    "--state-memory",
    type=_Bytes(),
    default=DEFAULTS.state_memory,
    help="For the state of all virtual devices of a cpu target.  [default: 4GiB]",
)
@click.option("--pages", type=int, help="Latent pages.  [default: what fits]")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default=DEFAULTS.dtype,
    show_default=True,
    help="float32 means highest matmul precision throughout.",
)
@click.option("--jobs", type=click.IntRange(1), help="Cells compiled at a time.  [default: one a core]")
@click.option(
    "--ignore-config-field", "ignore", multiple=True, metavar="NAME", help="A field of config.json to ignore."
)
@click.option("--force", is_flag=True, help="Replace ARTIFACT if it is there.")
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
    checkpoint: Path | None, artifact: Path | None, ignore: tuple[str, ...], force: bool, kind: str, policy: str,
    cache_dir: Path | None, explain: bool, **knobs: Any,
) -> None:  # fmt: skip
    """Build ARTIFACT from CHECKPOINT.

    Without CHECKPOINT the packaged demo checkpoint is built into ./demo.ling3; ARTIFACT defaults to
    ./<checkpoint folder name>.ling3, or .savedmodel.
    """
    _require("build", ("flax", "rich"))
    from ling3export.build import DEMO
    from ling3export.build import build as run
    from ling3export.processes import unwinding
    from ling3export.progress import Console

    source = checkpoint or DEMO
    destination = artifact or Path(f"{source.resolve().name}.{'ling3' if kind == 'artifact' else kind}")
    with unwinding(), Console() as console:
        if kind == "savedmodel":
            from ling3export.savedmodel import build_savedmodel

            _refuse_given("--format savedmodel", ("policy", "cache_dir", "explain", "jobs"))
            build_savedmodel(source, destination, Options(**knobs), console, force=force, ignore=ignore)
            console.note(f"wrote {destination}")
            return
        use = CacheUse(policy, cache_dir, explain)
        manifest = run(source, destination, Options(**knobs), console, force=force, ignore=ignore, cache=use)
        console.summary(destination, manifest)


main.add_command(cache)


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--preset", type=click.Choice(["micro", "small", "aligned", "full"]), required=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Layers instead of the preset's.")
@click.option("--force", is_flag=True, help="Replace DIRECTORY if it is there.")
def synth(directory: Path, preset: str, seed: int, layers: int | None, force: bool) -> None:
    """Write a seeded checkpoint in the published layout into DIRECTORY."""
    from ling3export.processes import unwinding
    from ling3export.synth import synthesize

    with unwinding():
        synthesize(directory, preset, seed, layers=layers, force=force)
    click.echo(f"wrote {directory}", err=True)


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The manifest, as JSON.")
def inspect(artifact: Path, as_json: bool) -> None:
    """Show what ARTIFACT holds: plan, cells, sizes, costs, state."""
    from ling3export.artifacts.manifest import read_manifest
    from ling3export.inspection import describe

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
    from ling3export.report import write_report

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
    from ling3export.verify import verify_artifact

    result = verify_artifact(artifact, target)
    if as_json:
        click.echo(json.dumps(result.record))
    else:
        click.echo(result.table())
    if not result.passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
