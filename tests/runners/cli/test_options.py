"""What every command of both command lines does alike: options given twice, Ctrl-C, ``python -m``."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.cli.command import Group
from ling3export.runners.cli.main import main as runner


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--prompt", ("A", "B")),
        ("--prompt-ids", ("1", "2,3", "4")),
        ("--prompt-file", ("a", "a")),
        ("--target", ("cpu", "cpu@2")),
    ],
)
def test_an_option_that_might_be_meant_twice_is_not_taken_once(option, values):
    given = [part for value in values for part in (option, value)]
    told = CliRunner().invoke(runner, ["generate", "none", "--max-tokens", "1", *given])
    assert told.exit_code == 2
    assert told.stderr.endswith(f"Error: {option}: expected it once, found it {len(values)} times.\n")


def test_options_that_add_up_may_be_repeated():
    told = CliRunner().invoke(
        runner, ["generate", "none", "--prompt-ids", "1", "--max-tokens", "1", *["--stop", "x"] * 2]
    )
    assert told.exit_code == 1
    assert told.stderr.startswith("error: artifact `none`:")


@pytest.mark.parametrize("host", ["0", "1"])
@pytest.mark.parametrize("command", [["generate", "--prompt-ids", "1", "--max-tokens", "1"], ["serve"]])
def test_each_of_several_hosts_refuses_ffn_workers_at_once(command: list[str], host: str):
    """A follower took no notice of them, and waited for host 0, which had refused them alone."""
    several = ["--coordinator", "127.0.0.1:1", "--num-hosts", "2", "--host-id", host, "--ffn", "any"]
    told = CliRunner().invoke(runner, [command[0], "none", *command[1:], *several])
    assert told.exit_code == 1
    assert told.stderr == (
        "error: --ffn: expected none on several hosts, found some\nhint: run one process a session\n"
    )


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--context", "../up"], 1, "--context: expected a name of letters, digits, `.`, `_` and `-`, found `../up`"),
        (["--context", "a", "--micro-batches", "0"], 2, "Invalid value for '--micro-batches': 0 is not in the range"),
        (["--context", "a", "--sessions", "1025"], 2, "Invalid value for '--sessions': 1025 is not in the range"),
        (["--context", "a", "--share", "2/2"], 2, "expected a share I/N, found '2/2'"),
        (["--context", "a", "--schedule", "any"], 2, "Invalid value for '--schedule': 'any' is not one of"),
        ([], 2, "Missing option '--context'"),
    ],
)
def test_what_an_ffn_worker_cannot_be_is_refused_before_anything_is_loaded(options: list[str], code: int, said: str):
    told = CliRunner().invoke(runner, ["ffn-worker", "none", *options])
    assert (told.exit_code, said in told.stderr) == (code, True), told.stderr


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


def test_no_error_sends_an_escape_sequence_to_the_terminal():
    """Names that were read from a checkpoint once did, and half a character could not be printed everywhere."""
    error = Ling3Error("tensor `\x1b[31m\u202eé 正\ud800`: expected y,\nfound z", "try \x07w")
    told = CliRunner().invoke(group_that(error), ["go"])
    assert told.stderr == "error: tensor `\\x1b[31m\\u202eé 正\\ud800`: expected y,\nfound z\nhint: try \\x07w\n"


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "ling3export", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ling3export, version ")


def test_the_end_of_a_command_looks_for_no_cycles() -> None:
    """Of 0.35 processor seconds that a command took to end, the collector had taken 0.25."""
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "from ling3export.runners.cli.main import main\n"
        "print(gc.get_freeze_count())\n"
        "main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    before, _, after = done.stdout.splitlines()
    assert (done.returncode, before, after) == (0, "0", "True"), done.stderr
