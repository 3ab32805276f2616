"""The command line of the build side. Nothing heavy is imported before it is needed."""

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ling3export.cache.store import POLICIES, CacheUse
from ling3export.cli.cache import cache, cache_dir
from ling3export.cli.catalog import catalog, keygen, sign
from ling3export.cli.graph import graph
from ling3export.cli.options import IGNORE, JSON, ROUNDING, WIDE, build_options
from ling3export.foundation.extras import require
from ling3export.plan.options import Options
from ling3export.runners.cli.command import Group, given, section
from ling3export.runners.cli.hosts import keep_stdout
from ling3export.runners.cli.options import FOLDER, PATH
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.hosts.hosts import find_hosts

if TYPE_CHECKING:
    from ling3export.model.config import Config

# Options of `build` that make something else than a whole artifact, and the options that each of them excludes.
APART = {
    "into": ("artifact", "checkpoint", "ignore", "allow_rounding"),
    "no_weights": ("into", "kind", "allow_rounding"),
    "kind": ("into", "cache", "cache_dir", "jobs"),
}


@contextmanager
def _unwinding() -> Iterator[None]:
    """In the block SIGTERM and SIGHUP end this process as an exception does: children end, folders are removed.

    A signal that is ignored (nohup) stays ignored. A second one is ignored, since ``timeout`` sends each twice. Exits
    with 128 + the signal's number.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.group(
    cls=Group,
    sections={
        "Build": ("plan", "build", "attach", "cache", "synth"),
        "Look": ("inspect", "verify", "graph"),
        "Share": ("catalog", "keygen", "sign"),
    },
)
@click.version_option(package_name="ling3export")
def main() -> None:
    """Compile Ling3-Tiny ahead of time: one artifact, any machine.

    CHECKPOINT is a Hugging Face folder. ARTIFACT is the folder NAME.ling3 that a build makes of it; ling3-runner runs
    it. Commands that only read an artifact also take oci:FOLDER/ID[@VERSION], a version of the catalogue.
    """


@main.command()
@click.argument("checkpoint", required=False, type=PATH)
@click.argument("artifact", required=False, type=FOLDER)
@build_options
@section(
    "Output",
    click.option("--into", type=FOLDER, metavar="ARTIFACT", help="Add the targets to this artifact instead."),
    click.option("--force", is_flag=True, help="Replace ARTIFACT, or targets of --into, if they are there."),
    click.option("--no-weights", is_flag=True, help="Build only programs; CHECKPOINT may be a config.json."),
    click.option("--dummy-weights", type=int, metavar="SEED", help="Run them with random weights, which are not kept."),
    click.option(
        "--format",
        "kind",
        type=click.Choice(["artifact", "savedmodel"]),
        default="artifact",
        show_default=True,
        help="savedmodel: TensorFlow signatures of the TP=1 steps (extra savedmodel).",
    ),
    click.option(
        "--graphs",
        type=click.Choice(["keep", "drop"]),
        default="keep",
        show_default=True,
        help="Keep each compiled program as text for ling3export graph; to run, none is needed.",
    ),
    ROUNDING,
    IGNORE,
)
@section(
    "Compiling",
    click.option("--jobs", type=click.IntRange(1), metavar="N", help="Cells built at a time.  [default: one a core]"),
    click.option(
        "--cache",
        type=click.Choice(POLICIES),
        default=CacheUse.policy,
        show_default=True,
        help="Use programs of earlier builds; redo makes all anew, readonly adds none.",
    ),
    cache_dir,
)
def build(
    checkpoint: Path | None, artifact: Path | None, ignore: tuple[str, ...], into: Path | None,
    force: bool, kind: str, cache: str, cache_dir: Path | None, no_weights: bool, dummy_weights: int | None,
    allow_rounding: bool, **options: Any,
) -> None:  # fmt: skip
    """Build ARTIFACT from CHECKPOINT.

    For cpu, sizes that are not given follow from this machine's memory; --tp is 1.
    Without CHECKPOINT the packaged demo checkpoint is built into ./demo.ling3, at --tp 16; ARTIFACT defaults to
    ./<checkpoint folder name>.ling3, or .savedmodel. --into takes config and weights from its artifact.
    Programs of --no-weights get weights from ling3export attach.
    """
    require("build", "build", "flax", "rich")
    from ling3export.cli.progress import Console
    from ling3export.compile import build as building
    from ling3export.model.config import Config
    from ling3export.plan.plan import as_stored

    chosen, what, use = given(click.get_current_context()), Options(**options), CacheUse(cache, cache_dir)
    _check_alone(chosen if kind != "artifact" else chosen - {"kind"})
    source = checkpoint or building.DEMO
    fits = checkpoint is not None and "tp" not in chosen and kind == "artifact"
    ending = "ling3" if kind == "artifact" else kind
    destination = artifact or Path(f"{source.resolve().name.removesuffix('.json')}.{ending}")
    with _unwinding(), Console() as console:
        if fits:
            what, sizes = _fitted(Config.from_path(source, ignore), as_stored(what, source), chosen)
            if sizes is not None:
                console.note(": ".join(sizes))
        if kind == "savedmodel":
            from ling3export.savedmodel.export import build_savedmodel

            build_savedmodel(
                source, destination, what, console, force=force, ignore=ignore, allow_rounding=allow_rounding
            )
            console.note(f"wrote {destination}")
        elif into is not None:
            from ling3export.compile.into import add_targets

            console.summary(into, *add_targets(into, what, chosen, console, force=force, cache=use))
        else:
            manifest = building.build(
                source, destination, what, console, no_weights=no_weights, dummy=dummy_weights, force=force,
                ignore=ignore, cache=use, allow_rounding=allow_rounding,
            )  # fmt: skip
            console.summary(destination, manifest)


def _fitted(config: "Config", options: Options, chosen: set[str]) -> tuple[Options, tuple[str, str] | None]:
    """The options of a checkpoint's build, with sizes that follow from this machine; those sizes, and their sum."""
    from ling3export.machine.environment import usable_memory
    from ling3export.plan.here import fitted

    return fitted(config, options, chosen, usable_memory()[0])


def _check_alone(chosen: set[str]) -> None:
    """Refuses options of ``build`` that exclude each other; "kind" means another format than an artifact."""
    flags = {"artifact": "ARTIFACT", "checkpoint": "CHECKPOINT", "ignore": "--ignore-config-field", "kind": "--format"}
    for name, others in APART.items():
        for other in others if name in chosen else ():
            if other in chosen:
                first, second = (flags.get(option) or f"--{option.replace('_', '-')}" for option in (name, other))
                raise click.UsageError(f"{first}: expected no {second} with it, found one.")
    if "dummy_weights" in chosen and "no_weights" not in chosen:
        raise click.UsageError("--dummy-weights needs --no-weights.")


@main.command()
@click.argument("checkpoint", required=False, type=PATH)
@build_options
@click.option(
    "--tokens", type=click.IntRange(1), metavar="N", help="Tokens cached by each decoding sequence.  [default: 1024]"
)
@IGNORE
@WIDE
@JSON
def plan(
    checkpoint: Path | None, tokens: int | None, ignore: tuple[str, ...], wide: bool, as_json: bool, **options: Any
) -> None:
    """Show what a build would make, without compiling.

    CHECKPOINT is a folder or a config.json; without it, the packaged demo. Shows the pools, the bytes on each device
    next to its memory (on cpu: the machine's), and each cell's roofline bound: the least time for its bytes and FLOPs.
    Sizes for cpu that are not given are those of a build.
    """
    require("plan", "build", "flax")
    from ling3export.artifacts.records import to_json
    from ling3export.compile.build import DEMO
    from ling3export.cost.roofline import TOKENS
    from ling3export.model.config import Config
    from ling3export.plan.plan import as_stored
    from ling3export.plan.pricing import described, priced

    config = Config.from_path(checkpoint or DEMO, ignore)
    what = as_stored(Options(**options), checkpoint or DEMO)
    if checkpoint is not None:
        chosen = given(click.get_current_context())
        what, sizes = _fitted(config, what, chosen)
        if sizes is not None and not as_json:
            click.echo(sizes[0])  # the sum is shown with the target
    prices = priced(config, what, tokens or TOKENS)
    click.echo(json.dumps(to_json(prices)) if as_json else described(prices, wide=wide))


main.add_command(cache)
main.add_command(graph)
main.add_command(catalog)
main.add_command(keygen)
main.add_command(sign)


@main.command()
@click.argument("artifact", type=FOLDER)
@click.argument("checkpoint", type=PATH)
@click.argument("out", required=False, type=FOLDER)
@click.option("--force", is_flag=True, help="Replace OUT, or the weights that ARTIFACT has.")
@click.option("--no-run", is_flag=True, help="Write no receipts: nothing of ARTIFACT is executed.")
@ROUNDING
@IGNORE
def attach(artifact: Path, checkpoint: Path, out: Path | None, no_run: bool, **choices: Any) -> None:
    """Give the programs of ARTIFACT the weights of CHECKPOINT.

    Nothing is compiled: CHECKPOINT must have the config that the programs were built for. With OUT, ARTIFACT stays as
    it is and OUT is a whole artifact.
    """
    require("attach", "build", "flax", "rich")
    from ling3export.cli.progress import Console
    from ling3export.compile.attach import attach as attaching

    with _unwinding(), Console() as console:
        manifest = attaching(artifact, checkpoint, out, console, run=not no_run, **choices)
        if no_run:
            console.note(f"wrote {out or artifact} ({manifest.weights.nbytes / 1e6:.1f} MB of weights), not run")
        else:
            console.summary(out or artifact, manifest)


@main.command()
@click.argument("directory", type=PATH)
@click.option(
    "--preset", type=click.Choice(["micro", "small", "aligned", "full", "flash"]), required=True, help="Its size."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of its weights.")
@click.option("--layers", type=click.IntRange(1), help="Layers instead of the preset's.")
@click.option(
    "--form",
    type=click.Choice(["bf16", "fp8", "int4"]),
    default="bf16",
    show_default=True,
    help="Quantize the weights that the public FP8 or INT4 checkpoint quantizes.",
)
@click.option("--force", is_flag=True, help="Replace DIRECTORY if it is there.")
def synth(directory: Path, preset: str, seed: int, layers: int | None, form: str, force: bool) -> None:
    """Write a seeded checkpoint in the published layout into DIRECTORY."""
    from ling3export.checkpoint.synth import synthesize

    with _unwinding():
        synthesize(directory, preset, seed, layers=layers, form=form, force=force)
    click.echo(f"wrote {directory}", err=True)


@main.command()
@click.argument("artifact", type=ARTIFACT)
@WIDE
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
@click.option("--load-plan", is_flag=True, help="Print the source of each stored tensor, as JSON.")
def inspect(artifact: Path, wide: bool, as_json: bool, load_plan: bool) -> None:
    """Show the contents of ARTIFACT: plan, cells, sizes, costs, state."""
    from ling3export.artifacts.calibration import found_beside
    from ling3export.artifacts.manifest import read_manifest
    from ling3export.artifacts.records import to_json
    from ling3export.report.inspect import describe

    manifest = read_manifest(artifact)
    if load_plan:
        from ling3export.checkpoint.load_plan import load_plan as planned
        from ling3export.plan.recorded import config_of

        plan, source = manifest.plan, manifest.source
        sources = planned(config_of(manifest), plan.dtype, plan.forms, source.form, source.quantized or {})
        click.echo(json.dumps(sources, indent=2))
        return
    if as_json:
        click.echo(json.dumps(to_json(manifest), indent=2, ensure_ascii=False))
        return
    calibration, note = found_beside(artifact, manifest)
    click.echo(describe(manifest, wide=wide, calibration=calibration, note=note or ""))


@main.command()
@click.argument("artifact", type=ARTIFACT)
@click.option("--target", help="Only this target; programs of others need not be there.")
@click.option("--no-run", is_flag=True, help="Only check digests: nothing of ARTIFACT is executed.")
@click.option("--portable", is_flag=True, help="Run the portable programs of every target, on the processor.")
@click.option("--time", is_flag=True, help="Time every cell of one target, too, and record it next to ARTIFACT.")
@click.option("--trace", type=FOLDER, metavar="FOLDER", help="With --time: write a profiler's trace of each cell.")
@click.option(
    "--engine/--no-engine",
    default=None,
    help="Also compare the whole engine's answers with the numpy reference.  [default: up to 100 MB of weights]",
)
@JSON
def verify(
    artifact: Path, target: str | None, no_run: bool, portable: bool, time: bool, trace: Path | None,
    engine: bool | None, as_json: bool,
) -> None:  # fmt: skip
    """Check ARTIFACT: every digest, then every vector in every cell.

    This executes native code of ARTIFACT, except with --no-run. Cells of other machines are not run; --portable
    compiles and runs the portable programs of all targets. The worst error comes first. Exits with 1 if a cell is
    outside its tolerance. A few prompts also run through the whole engine: in parts, in batches, again with the prefix
    cache, and with their states moved from prefill to decode.

    --time writes NAME.calibration.json, or replaces it. Later starts on this machine and inspect read it.
    A target of several hosts is verified by verify --time on each of them; host 0 writes. `graph summary --profile`
    reads the traces of --trace.
    """
    if no_run + portable + time > 1:
        raise click.UsageError("--no-run, --portable and --time exclude each other.")
    if trace is not None and not time:
        raise click.UsageError("--trace needs --time.")
    if engine and no_run + portable + time:
        raise click.UsageError("--engine excludes --no-run, --portable and --time.")
    from ling3export.verify.verify import time_artifact, verify_artifact

    notes: list[str] = []
    if time:
        hosts = find_hosts()
        if hosts is not None:
            keep_stdout()
        result = time_artifact(artifact, target, hosts, notes.append, traces=trace)
        if hosts is not None and hosts.number:
            return
    else:
        result = verify_artifact(
            artifact, target, run=not no_run, portable=portable, engine=engine, report=notes.append
        )
    click.echo("\n".join(notes), err=True)
    click.echo(json.dumps(result.record) if as_json else result.table())
    if not result.passed:
        sys.exit(1)
