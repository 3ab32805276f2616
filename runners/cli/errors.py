"""Errors of a command as a message and a hint on stderr, and its exit code: the error's own, or one of those below."""

import errno
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from ling3export.errors import Ling3Error

NOT_DETERMINISTIC = 3
INVALID = 4  # too many infrastructure errors for the score to count
REGRESSION = 6


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Prints a Ling3Error as message and hint on stderr and exits with its code, without a traceback.

    So too for what the system refuses (a full disk behind stdout, a name that is too long).
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
            click.echo(
                f"error: {where}: expected to be readable or writable, found {error.strerror or error}", err=True
            )
        sys.exit(1)

    return run
