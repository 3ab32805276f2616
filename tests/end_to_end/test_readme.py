"""README commands do what the README shows.

A fenced ``console`` block below a line ``<!-- test -->`` is run: its ``$`` lines in order, all blocks in one temporary
folder, with this environment's commands first on PATH. The other lines of the block are what is printed, in order;
``…`` stands for any text within a line, and a line that is only ``…`` for any lines.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from console_blocks import commands, matches

README = Path(__file__).parents[2] / "README.md"


def test_marked_commands_print_what_is_shown(tmp_path):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command, shown in commands(README.read_text()):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stderr}"
        assert matches(shown, done.stdout), f"$ {command}\n{done.stdout}"


def test_blocks_are_read_as_described():
    text = "<!-- test -->\n```console\n$ a \\\n  b\none\n…\n$ c\n```\n\n```console\n$ not this\n```\n"
    assert commands(text) == [("a   b", ["one", "…"]), ("c", [])]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ([], "", True),
        ([], "x\n", False),
        (["took … ms"], "took 12 ms\n", True),
        (["took … ms"], "took 12 s\n", False),
        (["a", "…", "z"], "a\nb\nc\nz\n", True),
        (["a", "z"], "a\nb\nz\n", False),
    ],
)
def test_shown_lines_match_as_described(shown, printed, same):
    assert matches(shown, printed) is same
