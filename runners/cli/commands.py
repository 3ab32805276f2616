"""click's options and groups as both command lines use them: nothing given is lost, errors printed, Ctrl-C as such."""

import sys
from typing import Any

import click

from ling3export.runners.cli.errors import guarded

INTERRUPTED = 130  # as shells say of SIGINT


class Once(click.Option):
    """An option that may not be given twice: where click takes the last, a user may have meant both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"multiple": True}))

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """The one value, or None.

        Raises:
            click.UsageError: It was given more than once.
        """
        values = super().process_value(ctx, value) or ()
        if len(values) > 1:
            raise click.UsageError(f"{self.opts[0]}: expected it once, found it {len(values)} times.", ctx)
        return values[0] if values else None


class Group(click.Group):
    """Prints errors of parsing, too, as those of commands; a command that is interrupted ends with 130."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As click's, with errors printed."""
        return guarded(super().main)(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """As click's; what a command has to tidy up has been tidied up when it comes to this."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)
