"""``ling3-runner profile``: a trace of some steps, and where their time goes."""

from functools import partial
from pathlib import Path

import click

from ling3export.foundation.errors import Ling3Error
from ling3export.runners import flight
from ling3export.runners.cli.command import Command
from ling3export.runners.cli.options import PATH, engine_options
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.engine.config import EngineConfig


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT)
@click.option("--steps", type=click.IntRange(1), default=20, help="Decode steps.")
@click.option("--requests", type=click.IntRange(1), default=1, help="Answered at once.")
@click.option("--prompt-len", type=click.IntRange(1), default=16, help="Tokens of each random prompt.")
@click.option("--top", type=click.IntRange(1), default=10, help="Operations that are shown.")
@click.option(
    "--to", "folder", type=PATH, metavar="FOLDER", help="Where the trace is written.  [default: NAME.profile]"
)
@engine_options("target", "programs", "check", "step_timeout")
def profile(
    artifact: Path, steps: int, requests: int, prompt_len: int, top: int, folder: Path | None, engine: EngineConfig
) -> None:
    """Trace steps of ARTIFACT, and print the dearest operations.

    The trace is for xprof, and perfetto_trace.json.gz beside it for Perfetto.
    """
    folder = folder or Path(f"{artifact.resolve().name.removesuffix('.ling3')}.profile")
    if folder.exists():
        raise Ling3Error(f"profile `{folder}`: expected no such folder, found one", "name another with --to")
    import numpy as np

    from ling3export.runners.engine.engine import Engine
    from ling3export.runners.load.profile import traced

    with flight.watched(), Engine(artifact, engine) as running:
        prompts = np.random.default_rng(0).integers(0, running.manifest.vocab_size, (requests, prompt_len)).tolist()
        answer = partial(running.generate, prompts, max_tokens=steps + 1, ignore_eos=True)
        answer()
        found = traced(answer, folder, perfetto=True)
    called = ", ".join(f"{name} {count} times" for name, count in sorted(found.calls.items()))
    click.echo(f"called: {called}")
    click.echo(f"operations: {found.seconds * 1e3:.1f} ms over all devices and threads")
    click.echo(f"{'ms':>8} {'share':>6} {'calls':>7}  {'program':<14} operation")
    for each in found.operations[:top]:
        share = f"{100 * each.seconds / found.seconds:.1f}%"
        named = f"{each.name}  {each.source}".rstrip()
        click.echo(f"{each.seconds * 1e3:8.2f} {share:>6} {each.calls:7,}  {each.program:<14} {named}")
    click.echo(f"trace: {found.file}")
