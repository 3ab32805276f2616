"""Errors of a command as a message and a hint on stderr, and its exit code: the error's own, or one of those below."""

import errno
import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import click

from ling3export.foundation.errors import Ling3Error, listed, printable

NOT_DETERMINISTIC = 3
INVALID = 4  # too many infrastructure errors for the score to count
REGRESSION = 6


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a command print a Ling3Error as message and hint on stderr, without a traceback, and exit with its code.

    What the system refuses (a full disk behind stdout, a name that is too long) is printed, too, and exits with 1.
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


def require(command: str, extra: str, *packages: str) -> None:
    """Refuses a command whose packages are not installed; they are optional for all other commands.

    Raises:
        Ling3Error: Packages are missing; it names them, and the extra that brings them.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        raise Ling3Error(
            f"{command}: expected the packages of the extra `{extra}`, found no {listed(missing)}",
            f'pip install "ling3export[{extra}]", or in a checkout: pip install ".[{extra}]"',
        )
