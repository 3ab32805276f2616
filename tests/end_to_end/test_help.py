"""The help of every command of both command lines: each option has a description, its values and its default."""

import click
import pytest
from click.testing import CliRunner

from ling3export.cli.main import main as build
from ling3export.runners.cli.main import main as run

ROOTS = {"ling3export": build, "ling3-runner": run}


def commands(group: click.Group, *words: str) -> list[tuple[str, ...]]:
    """Words of a group and of every command in it."""
    found = [words]
    for name, command in group.commands.items():
        found += commands(command, *words, name) if isinstance(command, click.Group) else [(*words, name)]
    return found


CASES = [(program, words) for program, root in ROOTS.items() for words in commands(root)]
NAMES = [" ".join((program, *words)) for program, words in CASES]


def found(program: str, words: tuple[str, ...]) -> click.Command:
    command: click.Command = ROOTS[program]
    for word in words:
        command = command.commands[word]
    return command


def asked(program: str, *words: str) -> str:
    done = CliRunner().invoke(ROOTS[program], words, prog_name=program, terminal_width=80)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(("program", "words"), CASES, ids=NAMES)
def test_help_names_every_command_argument_and_option(program, words):
    if words == ("lm-eval",):  # lm-eval reads all words after these two, including --help
        return
    text, command = asked(program, *words, "-h"), found(program, words)
    assert text.startswith(f"Usage: {' '.join((program, *words))} ")
    assert [line for line in text.splitlines() if len(line) > 80 and "|" not in line] == []  # choices are on one line
    for name in getattr(command, "commands", {}):
        assert f"\n  {name} " in text
    assert asked(program, *words, "--help") == text
    for param in command.params:
        shown = param.opts[0] if isinstance(param, click.Option) else param.make_metavar(click.Context(command))
        assert shown in text, f"{shown} is in no help"


def options(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option)]


@pytest.mark.parametrize(("program", "words"), CASES, ids=NAMES)
def test_every_option_says_what_it_does_in_a_sentence(program, words):
    command = found(program, words)
    assert command.help and command.help[0].isupper() and command.help.rstrip().endswith((".", ":", "!")), command.help
    names = [name for option in options(command) for name in (*option.opts, *option.secondary_opts)]
    assert len(names) == len(set(names))
    for option in options(command):
        said = (option.help or "").partition("  [default")[0]
        assert said.endswith((".", ":")), f"{option.opts[0]}: expected a sentence, found {said!r}"
