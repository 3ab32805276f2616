"""Options of commands that load an artifact."""

import click

from ling3export.runners.load.verdict import CHECKS, POLICIES

programs_option = click.option(
    "--programs",
    type=click.Choice(POLICIES),
    default="prebuilt-only",
    show_default=True,
    help="Whether programs that do not fit this machine may be compiled here.",
)
check_option = click.option(
    "--check",
    type=click.Choice(CHECKS),
    default="all",
    show_default=True,
    help="Whose digests to check: programs leaves out the weights.",
)
