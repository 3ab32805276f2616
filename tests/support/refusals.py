"""Runs commands of both command lines in this process, and returns their stdout or their errors."""

import click
from click.testing import CliRunner, Result


def refusal(command: click.Command, *arguments: object, code: int = 1) -> str:
    """Runs ``command`` with bad ``arguments``, checks that it fails, and returns its stderr."""
    done = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert isinstance(done.exception, SystemExit), done.exception
    assert (done.exit_code, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def succeeded(command: click.Command, *arguments: object) -> Result:
    """Runs ``command``, checks that it succeeds, and returns the result."""
    done = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done


def said(command: click.Command, *arguments: object) -> str:
    """The stdout of a successful run."""
    return succeeded(command, *arguments).stdout
