"""Options from a file: every option of the commands that take one, what is refused, and what wins."""

import dataclasses
import json

import click
import pytest
from click.testing import CliRunner

from ling3export.foundation.errors import RequestError
from ling3export.runners.cli import options
from ling3export.runners.cli.command import Once
from ling3export.runners.cli.main import main
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.serve.config import ServerConfig

ARGUMENTS: dict[str, list[str]] = {"serve": ["none"], "route": []}
COMMANDS = {name: main.commands[name] for name in ARGUMENTS}
REQUIRED = {"route": {"decode": ["http://127.0.0.1:1"]}}


def long_names(command: click.Command) -> dict[str, click.Option]:
    """The options that a file may give."""
    found = [param for param in command.params if isinstance(param, click.Option)]
    return {option.opts[0].removeprefix("--"): option for option in found if option.name not in ("config", "help_all")}


def toml(path, settings):
    """Writes a file; JSON's texts, numbers, truth values and lists are TOML's, too."""
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    return path


def other(option: click.Option) -> object:
    """A value of an option that is not its default."""
    kind = option.type
    if option.is_flag or kind.name == "switch":
        value: object = option.default is not True
    elif isinstance(kind, click.Choice):
        value = kind.choices[-1]
    else:
        value = {"integer": 7, "float": 0.75}.get(kind.name.split()[0], "some text")
    return [value] if option.multiple and not isinstance(option, Once) else value


def values(name: str, *options: object) -> dict[str, object]:
    """What a command would be called with."""
    words = [*ARGUMENTS[name], *map(str, options)]
    with COMMANDS[name].make_context(name, words, parent=click.Context(main, **main.context_settings)) as context:
        return dict(context.params)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_gives_every_option_of_a_command(name, tmp_path, monkeypatch):
    """What the command is called with is what the same values give on the command line."""
    monkeypatch.setenv("LING3_TRUST", "")
    known = long_names(COMMANDS[name])
    settings, line = {key: other(option) for key, option in known.items()}, []
    for key, value in settings.items():
        for each in value if isinstance(value, list) else [value]:
            written = "on" if known[key].type.name == "switch" else each
            flag = f"--{key}" if value else f"--no-{key}"
            line += [flag] if known[key].is_flag else [f"--{key}", written]
    found = values(name, "--config", toml(tmp_path / "c.toml", settings))
    assert found == values(name, *line)
    plain = values(name, "--config", toml(tmp_path / "d.toml", REQUIRED.get(name, {})))
    assert {key for key in found if found[key] == plain[key]} <= {"artifact"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_wins_over_the_file(name, tmp_path):
    key = {"serve": "max-requests", "route": "max-queue"}[name]
    path, field = toml(tmp_path / "c.toml", REQUIRED.get(name, {}) | {key: 5}), key.replace("-", "_")
    assert values(name, "--config", path)[field] == 5
    assert values(name, "--config", path, f"--{key}", 9)[field] == 9
    assert values(name, f"--{key}", 9, "--config", path)[field] == 9


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step-timeout = ", "expected a TOML file, found Invalid value (at end of document)"),
        ("force-all = 1", "expected options of ling3-runner {name}, found `force-all`"),
        ("config = 'x'", "expected options of ling3-runner {name}, found `config`"),
    ],
)
def test_a_file_that_says_anything_else_is_refused(name, text, said, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(text)
    told = CliRunner().invoke(main, [name, *ARGUMENTS[name], "--config", str(path)], prog_name="ling3-runner")
    assert told.exit_code == 1
    assert told.stderr.startswith(f"error: --config `{path}`: {said.format(name=name)}"), told.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("serve", "max-request = 8", "found `max-request`\nhint: did you mean max-requests?"),
        ("serve", "qqqqqqqqqqqqq = 8", "found `qqqqqqqqqqqqq`\nhint: see ling3-runner serve --help"),
        ("serve", "max-requests = 8.5", "`max-requests`: '8.5' is not a valid integer range"),
        ("serve", "max-requests = true", "`max-requests`: 'True' is not a valid integer range"),
        ("serve", "max-requests = 0", "`max-requests`: 0 is not in the range x>=1"),
        ("serve", "[max-requests]\na = 1", "`max-requests`: \"{'a': 1}\" is not a valid integer range"),
        ("serve", "port = 65536", "`port`: 65536 is not in the range 0<=x<=65535"),
        ("serve", "step-timeout = 0.0", "`step-timeout`: 0.0 is not in the range x>0"),
        ("serve", "check = 'none'", "`check`: 'none' is not one of 'all', 'programs', 'copy'"),
        ("serve", "prefix-cache = 1", "`prefix-cache`: expected on or off, found 1"),
        ("serve", "ffn = ['a']", "`ffn`: expected one value, found a list"),
        ("serve", "target = ['a', 'b']", "`target`: expected one value, found a list"),
        ("route", "decode = 'a'", "`decode`: expected a list, found one value"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_refused(name, text, said, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(text)
    told = CliRunner().invoke(main, [name, *ARGUMENTS[name], "--config", str(path)], prog_name="ling3-runner")
    assert (told.exit_code, told.stdout) == (1, "")
    assert said in told.stderr


def test_a_file_that_is_not_there_is_named():
    told = CliRunner().invoke(main, ["serve", "none", "--config", "no-such.toml"])
    assert (told.exit_code, told.stderr) == (
        1,
        "error: file `no-such.toml`: expected to be readable or writable, found No such file or directory\n",
    )


def test_every_setting_of_an_engine_and_of_a_server_has_an_option():
    """Or stands in the list of those that have none."""
    composed = ("prefix_store", "transfer")
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields == {*options.ENGINE, *composed, *options.PYTHON_ONLY}
    serving = {option.name for option in long_names(main.commands["serve"]).values()}
    assert serving >= {*options.ENGINE} | {field.name for field in dataclasses.fields(ServerConfig)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"evict": "fifo"}, "evict: expected one of lru, flops, found fifo"),
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
