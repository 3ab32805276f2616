"""``ling3-runner lm-eval``: lm-eval's own command line, with an artifact as a model of it."""

import sys

import click

from ling3export.runners.cli.errors import require

# Everything behind lm-eval's first word is lm-eval's, its --help included.
VERBATIM = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("lm-eval", context_settings=VERBATIM)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run lm-eval's command line with the model ling3.

    ARGUMENTS are lm-eval's own: run --model ling3 --model_args artifact=ARTIFACT --tasks NAME; run --help shows them
    all.
    """
    require("lm-eval", "lm-eval", "lm_eval")
    from ling3export.runners.adapters import lm_eval as adapter

    sys.argv = ["ling3-runner lm-eval", *arguments]
    adapter.main()
