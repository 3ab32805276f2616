"""The command line of the runner. stdout carries data only, and nothing heavy is imported before it is needed."""

import sys
from pathlib import Path

import click

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.extras import require
from ling3export.runners import stacks
from ling3export.runners.cli.batch import batch
from ling3export.runners.cli.bench import bench
from ling3export.runners.cli.chat import chat
from ling3export.runners.cli.command import Group
from ling3export.runners.cli.doctor import doctor
from ling3export.runners.cli.eval import evaluate
from ling3export.runners.cli.generate import generate
from ling3export.runners.cli.options import PATH
from ling3export.runners.cli.references import pull
from ling3export.runners.cli.serve import ffn_worker, route, serve
from ling3export.runners.transfer import folder as states

# Everything behind lm-eval's first word is lm-eval's, its --help included.
VERBATIM = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(
    cls=Group,
    sections={
        "Run": ("pull", "generate", "chat", "batch", "serve", "route", "ffn-worker"),
        "Evaluate": ("eval", "lm-eval"),
        "Measure": ("bench", "doctor"),
        "Look after": ("transfer",),
    },
    context_settings={"show_default": True},
)
@click.version_option(package_name="ling3export")
def main() -> None:
    """Run a prebuilt Ling3-Tiny artifact."""
    click.get_current_context().with_resource(stacks.shown())


for command in (pull, generate, chat, batch, serve, route, ffn_worker, evaluate, bench, doctor):
    main.add_command(command)


@main.command("lm-eval", cls=click.Command, context_settings=VERBATIM)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run lm-eval's command line with the model ling3.

    ARGUMENTS are lm-eval's own: run --model ling3 --model_args artifact=ARTIFACT --tasks NAME; run --help shows them
    all. Tasks that score choices need an artifact that was built with --score-paddings.
    """
    require("lm-eval", "lm-eval", "lm_eval")
    from ling3export.runners.adapters import lm_eval as adapter

    sys.argv = ["ling3-runner lm-eval", *arguments]
    adapter.main()


@main.group("transfer", cls=Group)
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
    places = [place for place in (states.SHM, folder) if place is not None and place.is_dir()]
    removed = [state for place in places for state in states.collect(place, dry_run=dry_run)]
    for name, size, reason in removed:
        click.echo(f"{name}\t{size:,} bytes\t{reason}")
    what = "would be freed" if dry_run else "freed"
    click.echo(f"{sum(size for _, size, _ in removed):,} bytes of {len(removed)} states {what}", err=True)
