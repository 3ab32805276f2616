"""The command line of the runner. stdout carries data only, and nothing heavy is imported before it is needed."""

import sys

import click

from ling3export.foundation.extras import require
from ling3export.runners import stacks
from ling3export.runners.cli.batch import batch
from ling3export.runners.cli.bench import bench
from ling3export.runners.cli.chat import chat
from ling3export.runners.cli.command import Group
from ling3export.runners.cli.doctor import doctor
from ling3export.runners.cli.eval import evaluate
from ling3export.runners.cli.generate import generate
from ling3export.runners.cli.references import pull
from ling3export.runners.cli.serve import ffn_worker, route, serve

# Everything after lm-eval's first word is lm-eval's, its --help included.
VERBATIM = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(
    cls=Group,
    sections={
        "Run": ("pull", "generate", "chat", "batch", "serve", "route", "ffn-worker"),
        "Evaluate": ("eval", "lm-eval"),
        "Measure": ("bench", "doctor"),
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
