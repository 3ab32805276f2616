"""Exit codes of the commands ``ling3-runner eval``: 0 done, 1 an error with its message, 2 usage, and those below."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from ling3export.runners.eval_objects import RankDivergence
from ling3export.runners.guard import guarded

NOT_DETERMINISTIC = 3
INVALID = 4  # too many infrastructure errors for the score to count
DIVERGED = 5  # processes sampled different tokens
REGRESSION = 6


def coded(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `guarded`, and a RankDivergence exits with 5."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except RankDivergence as error:
            click.echo(f"error: {error.message}\nhint: {error.hint}", err=True)
            sys.exit(DIVERGED)

    return guarded(run)
