"""click's commands and groups as both command lines use them: no option twice, errors printed, Ctrl-C as such."""

import sys
from typing import Any

import click

from ling3export.runners.guard import guarded

INTERRUPTED = 130  # as shells say of SIGINT


class Command(click.Command):
    """Refuses an option that is given twice and would count once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, after a look at what was given.

        Raises:
            click.UsageError: Names the option.
        """
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for param in order:
            if isinstance(param, click.Option) and not (param.multiple or param.is_flag) and order.count(param) > 1:
                raise click.UsageError(f"{param.opts[0]}: expected it once, found it {order.count(param)} times.", ctx)
        return super().parse_args(ctx, args)


class Group(click.Group):
    """Prints errors of parsing, too, as those of commands; a command that is interrupted ends with 130."""

    command_class = Command

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
