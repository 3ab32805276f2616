"""Commands as click draws them: nothing given is lost, help in sections, options from a file, errors by name.

Errors are a message and a hint on stderr, and an exit code: the error's own, or one of those below.
"""

import atexit
import difflib
import errno
import gc
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from ling3export.foundation.errors import Ling3Error, printable

NOT_DETERMINISTIC = 3
INVALID = 4  # too many infrastructure errors for the score to count
REGRESSION = 6
INTERRUPTED = 130  # the exit code that shells give after SIGINT
Decorator = Callable[[Any], Any]
_EVERYTHING = f"{__name__}.everything"  # in a context's meta: help shows the options for experts, too


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


class Once(click.Option):
    """An option that may not be given twice: where click takes the last value, a user may have meant both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"multiple": True}))

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """The one value, or None.

        Raises:
            click.UsageError: The option was given more than once.
        """
        values = super().process_value(ctx, value) or ()
        if len(values) > 1:
            raise click.UsageError(f"{self.opts[0]}: expected it once, found it {len(values)} times.", ctx)
        return values[0] if values else None


class Command(click.Command):
    """A command whose help shows its options in the sections that ``section`` gave them.

    Args:
        common: Names of the options that most people need. ``-h`` shows only these; ``--help`` shows all.
        from_file: Whether ``--config FILE`` gives the options that the command line does not.
    """

    def __init__(
        self, *args: Any, common: Sequence[str] | None = None, from_file: bool = False, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.common = common
        if from_file:
            text = "TOML file of options by their long names: name = value. What the command line says wins."
            self.params.append(_eager("--config", _read_config, text, type=click.Path(path_type=Path), metavar="FILE"))
        if common is not None:
            for option in _options(self):
                option.hidden = option.name not in (*common, "config")
            if hidden := sum(option.hidden for option in _options(self)):
                self.epilog = f"--help shows {hidden} more options."

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the arguments; ``--help`` shows more than ``-h``."""
        if "--help" in args:
            ctx.meta[_EVERYTHING] = True
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes that there are more options, where they are not shown."""
        if _EVERYTHING not in ctx.meta:
            super().format_epilog(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list of options for each section, what most people need first, and the other options last."""
        rows: dict[str, list[tuple[str, str]]] = {}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for option in sorted(options, key=lambda option: (not hasattr(option, "section"), option.hidden)):
            hidden = option.hidden
            option.hidden = hidden and _EVERYTHING not in ctx.meta
            row = option.get_help_record(ctx)
            option.hidden = hidden
            if row is not None:
                rows.setdefault(getattr(option, "section", "Options"), []).append(row)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(click.Group):
    """A group whose help shows its commands in sections. Errors are printed; an interrupted command ends with 130.

    Args:
        sections: The names of the commands by the section's title; all commands in one section by default.
    """

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
        """Runs the command line as all that this process does."""
        atexit.register(gc.freeze)  # it ends then: looking for cycles in all of jax's objects takes as long as a step
        return super().__call__(*args, **kwargs)

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
    """Names of the parameters that the command line gives, or the file of ``--config``."""
    sources = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.DEFAULT_MAP)
    return {name for name in context.params if context.get_parameter_source(name) in sources}


def _options(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option)]


def _eager(name: str, callback: Callable[..., None], text: str, **settings: Any) -> click.Option:
    return click.Option([name], callback=callback, help=text, is_eager=True, expose_value=False, **settings)


def _read_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Makes the options that a file gives the defaults of this command.

    Raises:
        Ling3Error: The file is no TOML, names an option that the command does not have, or gives one of a wrong type
            or out of its bounds.
        OSError: It cannot be read.
    """
    if path is None:
        return
    where = f"--config `{path}`"
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise Ling3Error(f"{where}: expected a TOML file, found {error}") from error
    known = {name.removeprefix("--"): option for option in _options(ctx.command) for name in option.opts}
    del known["config"]
    defaults = {}
    for name, value in settings.items():
        if name not in known:
            close = difflib.get_close_matches(name, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"see {ctx.command_path} --help"
            raise Ling3Error(f"{where}: expected options of {ctx.command_path}, found `{name}`", hint)
        option = known[name]
        repeated = option.multiple and not isinstance(option, Once)
        if repeated != isinstance(value, list):
            wanted, actual = ("a list", "one value") if repeated else ("one value", "a list")
            raise Ling3Error(f"{where}: `{name}`: expected {wanted}, found {actual}")
        switches = option.is_flag or option.type.name == "switch"
        # The value as the command line writes it: click would take 8.5 and true for whole numbers.
        values = [part if switches else str(part) for part in (value if repeated else [value])]
        defaults[str(option.name)] = values if option.multiple else values[0]
        try:
            option.type_cast_value(ctx, defaults[str(option.name)])
        except click.BadParameter as error:
            raise Ling3Error(f"{where}: `{name}`: {error.message.rstrip('.')}") from error
    ctx.default_map = defaults
