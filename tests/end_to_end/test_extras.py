"""Extras: the reference lists them all, and one function writes the command that installs one."""

import re
import tomllib
from pathlib import Path

import pytest

from ling3export.foundation import extras
from tests.support.rooms import modules

ROOT = Path(__file__).resolve().parents[2]
# Extras that only work on this repository needs.
OURS = {"test", "dev", "parity", "deploy", "train", "docs", "plot"}
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_the_references_table_has_every_extra():
    """Regression: only pyproject.toml named `structured` and `sign`."""
    section = (ROOT / "docs/reference.md").read_text().partition("\n## Extras\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(EXTRAS - OURS)


def test_one_function_says_how_an_extra_is_installed():
    """Regression: seven modules wrote the hint, six of them with a name that is not registered on the index."""
    found = {
        name
        for name, file in modules().items()
        if re.search(r"ling3export\[|pip install (ling3export|['\"]?\.)", file.read_text())
    }
    assert found == {"ling3export.foundation.extras"}
    used = "".join(file.read_text() for file in modules().values())
    assert set(re.findall(r"\binstall\(['\"]([\w-]+)['\"]\)", used)) <= EXTRAS
    assert extras.install("sign") == "in the checkout: pip install '.[sign]'"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "zmq" else name)
    extras.require("serve", "serve", "uvicorn")
    with pytest.raises(extras.Ling3Error) as caught:
        extras.require("--kv-events", "serve", "uvicorn", "zmq", kind=extras.Ling3Error)
    assert caught.value.message == "--kv-events: expected the packages of the extra `serve`, found no zmq"
    assert caught.value.hint == extras.install("serve")
