"""Commands of both command lines, run in this process: what they say where they succeed, and where they refuse."""

import click
from click.testing import CliRunner, Result


def refusal(command: click.Command, *arguments: object, code: int = 1) -> str:
    """What ``command`` says on stderr as it refuses ``arguments``."""
    done = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert isinstance(done.exception, SystemExit), done.exception
    assert (done.exit_code, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def succeeded(command: click.Command, *arguments: object) -> Result:
    """What ``command`` gives as it succeeds."""
    done = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done


def said(command: click.Command, *arguments: object) -> str:
    """What it says on stdout then."""
    return succeeded(command, *arguments).stdout
