"""What every command of both command lines does alike: options given twice, Ctrl-C, ``python -m``."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from ling3export import cli
from ling3export.errors import Ling3Error
from ling3export.runners.cli import main as runner
from ling3export.runners.commands import Group


@pytest.mark.parametrize(
    ("command", "arguments", "option", "times"),
    [
        (runner, ["generate", "a", "--prompt", "A", "--max-tokens", "1", "--prompt", "B"], "--prompt", 2),
        (runner, ["generate", "a", *["--max-tokens", "4"] * 3], "--max-tokens", 3),
        (runner, ["eval", "run", "a", "b", "--suite", "demo", "--suite", "gsm8k"], "--suite", 2),
        (runner, ["eval", "diff", "a", "b"], None, 0),
        (runner, ["serve", "a", "--port", "1", "--port", "2"], "--port", 2),
        (cli.main, ["build", "--tp", "2", "--tp", "4"], "--tp", 2),
        (cli.main, ["cache", "status", "--cache-dir", "a", "--cache-dir", "b"], "--cache-dir", 2),
    ],
)
def test_an_option_that_counts_once_is_not_taken_twice(command, arguments, option, times):
    told = CliRunner().invoke(command, arguments)
    if option is None:  # nothing is given twice: another error
        assert told.exit_code == 1
        assert "expected it once" not in told.stderr
        return
    assert told.exit_code == 2
    assert told.stderr.endswith(f"Error: {option}: expected it once, found it {times} times.\n")


def test_options_that_add_up_may_be_repeated():
    told = CliRunner().invoke(
        runner, ["generate", "none", "--prompt-ids", "1", "--max-tokens", "1", *["--stop", "x"] * 2]
    )
    assert told.exit_code == 1
    assert told.stderr.startswith("error: artifact `none`:")


def group_that(raises):
    @click.group(cls=Group)
    def main():
        pass

    @main.command()
    def go():
        raise raises

    return main


def test_an_interrupted_command_says_so_and_ends_with_130():
    told = CliRunner().invoke(group_that(KeyboardInterrupt()), ["go"])
    assert (told.exit_code, told.stdout, told.stderr) == (130, "", "interrupted\n")


def test_an_error_of_a_command_is_printed_with_its_hint():
    told = CliRunner().invoke(group_that(Ling3Error("x: expected y, found z", "try w")), ["go"])
    assert (told.exit_code, told.stdout, told.stderr) == (1, "", "error: x: expected y, found z\nhint: try w\n")


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "ling3export", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ling3export, version ")
