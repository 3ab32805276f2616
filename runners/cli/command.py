"""Commands with help in sections, and errors by name.

Errors are a message and a hint on stderr, and an exit code: the error's own, or one of those below.
"""

import errno
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import click

from ling3export.foundation.errors import Ling3Error, printable
from ling3export.foundation.processes import leave

NOT_DETERMINISTIC = 3
INVALID = 4  # too many infrastructure errors for the score to count
REGRESSION = 6
INTERRUPTED = 130  # the exit code that shells give after SIGINT
Decorator = Callable[[Any], Any]


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a command print a Ling3Error as message and hint on stderr, without a traceback, and exit with its code.

    Errors of the system (a full disk, a name that is too long) are printed, too, and exit with 1.
    """

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except Ling3Error as error:
            click.echo(f"error: {error.message}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            sys.exit(error.exit_code)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of stdout is gone; click ends in silence
                raise
            where = "output" if error.filename is None else f"file `{str(error.filename)[:200]}`"
            message = f"error: {where}: expected to be readable or writable, found {error.strerror or error}"
            click.echo(printable(message), err=True)
        sys.exit(1)

    return run


class Command(click.Command):
    """A command whose help shows its options in the sections that ``section`` gave them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list of options for each section, the other options last."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for option in sorted(self.get_params(ctx), key=lambda option: not hasattr(option, "section")):
            if isinstance(option, click.Option) and (row := option.get_help_record(ctx)) is not None:
                rows.setdefault(getattr(option, "section", "Options"), []).append(row)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(click.Group):
    """A group whose help shows its commands in sections. Errors are printed; an interrupted command ends with 130."""

    command_class = Command

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])
        self._sections = sections or {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list of commands for each section."""
        if not self._sections:
            return super().format_commands(ctx, formatter)
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the command line as all that this process does, and ends the process."""
        try:
            return super().__call__(*args, **kwargs)
        except SystemExit as ended:
            leave(ended.code)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the command line. Errors of parsing are printed like those of commands."""
        return guarded(super().main)(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; when an interruption arrives here, the command has tidied up what it has to."""
        try:
            return super().invoke(ctx)
        except BaseException as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, KeyboardInterrupt):
                cause = cause.__cause__ or cause.__context__  # extension modules make an ImportError of it
            if cause is None:
                raise
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)


def section(title: str, *options: Decorator) -> Decorator:
    """Gives a command options, and shows them under a title of their own in its help."""

    def add(command: Any) -> Any:
        before = list(getattr(command, "__click_params__", ()))
        for option in reversed(options):
            command = option(command)
        for param in command.__click_params__:
            if param not in before:
                param.section = title
        return command

    return add


def given(context: click.Context) -> set[str]:
    """Names of the parameters that the command line gives."""
    source = click.core.ParameterSource.COMMANDLINE
    return {name for name in context.params if context.get_parameter_source(name) is source}
