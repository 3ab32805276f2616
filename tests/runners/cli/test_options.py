"""Rules for every command of both command lines: Ctrl-C, ``python -m``, the options of settings."""

import dataclasses
import signal
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.runners.cli import options
from ling3export.runners.cli.command import Group
from ling3export.runners.cli.main import main as runner
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.serve.config import ServerConfig
from tests.support.refusals import refusal


@pytest.mark.parametrize("host", ["0", "1"])
@pytest.mark.parametrize("command", [["generate", "--prompt-ids", "1", "--max-tokens", "1"], ["serve"]])
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--ffn", "error: --ffn: expected none on several hosts, found some\nhint: run one process a session\n"),
        ("--prefix-store", "error: --prefix-store: it does not work on several hosts\nhint: leave it out\n"),
    ],
)
def test_each_of_several_hosts_refuses_what_works_on_one(
    command: list[str], host: str, option: str, text: str, monkeypatch: pytest.MonkeyPatch
):
    """Regression: a follower ignored these options, and waited for host 0, which had refused them."""
    for name, value in (("DIST_INIT_ADDR", "127.0.0.1:1"), ("NNODES", "2"), ("NODE_RANK", host)):
        monkeypatch.setenv(name, value)
    assert refusal(runner, command[0], "none", *command[1:], option, "any") == text


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--context", "../up"], 1, "--context: expected a name of letters, digits, `.`, `_` and `-`, found `../up`"),
        ([], 2, "Missing option '--context'"),
    ],
)
def test_bad_options_of_an_ffn_worker_are_refused_before_anything_is_loaded(options: list[str], code: int, said: str):
    told = CliRunner().invoke(runner, ["ffn-worker", "none", *options])
    assert (told.exit_code, said in told.stderr) == (code, True), told.stderr


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (Ling3Error("x: expected y, found z", "try w"), 1, "error: x: expected y, found z\nhint: try w\n"),
        (
            Ling3Error("tensor `\x1b[31m\u202eé 正\ud800`: expected y,\nfound z", "try \x07w"),
            1,
            "error: tensor `\\x1b[31m\\u202eé 正\\ud800`: expected y,\nfound z\nhint: try \\x07w\n",
        ),
    ],
    ids=["interrupted", "an error", "escape sequences"],
)
def test_errors_that_end_a_command_are_printed_on_stderr(raised: BaseException, code: int, said: str):
    """Regression: names from a checkpoint sent escape sequences to the terminal; half a character failed to print."""

    def go():
        raise raised

    told = CliRunner().invoke(Group(commands={"go": click.Command("go", callback=go)}), ["go"])
    assert (told.exit_code, told.stdout, told.stderr) == (code, "", said)


def test_an_interrupted_import_is_no_traceback():
    """numpy's extension modules raise ImportError if Ctrl-C comes while they are loaded."""

    def go():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("numpy") from error

    told = CliRunner().invoke(Group(commands={"go": click.Command("go", callback=go)}), ["go"])
    assert (told.exit_code, told.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("module", ["ling3export.cli.main", "ling3export.runners.cli.main"])
def test_ctrl_c_at_any_time_of_the_start_is_no_traceback(module: str):
    """Regression: within the first 0.3 s, Ctrl-C printed a traceback of an import."""
    code = f"from ling3export.foundation import starting; print(flush=True); starting.start({module!r})"
    for seconds in (0.02, 0.1, 0.2, 0.3):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        # 2: the command shows its help
        assert process.returncode == 2 or (process.returncode, stderr) == (130, b"interrupted\n")


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "ling3export", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ling3export, version ")


def test_a_command_ends_after_its_exit_functions_without_destructors() -> None:
    """Regression: a command took 0.35 processor seconds to end, 0.25 of them for garbage collection."""
    code = (
        "import atexit\n"
        "from ling3export.runners.cli.main import main\n"
        "class Kept:\n"
        "    def __del__(self): print('destroyed', flush=True)\n"
        "kept = Kept()\n"
        "atexit.register(print, 'exit function')\n"
        "main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["exit function"]), done.stderr


def test_every_setting_of_an_engine_and_of_a_server_has_an_option():
    """PYTHON_ONLY lists the other settings."""
    composed = ("prefix_store", "transfer")
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields == {*options.ENGINE, *composed, *options.PYTHON_ONLY}
    serving = {param.name for param in runner.commands["serve"].params}
    assert serving >= {*options.ENGINE} | {field.name for field in dataclasses.fields(ServerConfig)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"check": "none"}, "check: expected one of all, programs, copy, found none"),
        ({"programs": "any"}, "programs: expected one of prebuilt-only, allow-compile, found any"),
        ({"max_requests": -1}, "max_requests: expected a whole number from 0 to 2147483647, found -1"),
        ({"linger": -1}, "linger: expected a number from 0 to"),
        ({"ffn_timeout": 0}, "ffn_timeout: expected a number above 0"),
    ],
)
def test_a_setting_that_an_engine_cannot_have_is_refused(settings, said):
    with pytest.raises(RequestError, match=f"^{said}"):
        EngineConfig(**settings)
