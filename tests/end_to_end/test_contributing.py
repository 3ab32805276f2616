"""What CONTRIBUTING.md says of the code is so: its walks; and that each test asserts something."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rooms import below, room

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"`((?:ling3export|foundation|model|artifacts|runners)/[\w/]+\.py):([\w.]+)`")
WALKS = ("A tensor, built", "A tensor, loaded", "A token", "A cell", "A state, given", "A state, taken")
CHECKING = {"raises", "fail", "refusal"}


def steps(walk: str) -> list[tuple[str, str]]:
    """(file, function) of every step of a walk, those in brackets too."""
    return STEP.findall(paragraph(walk))


def paragraph(walk: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text[text.index(f"**{walk}**") :].split("\n\n")[0]


def where(file: str) -> str:
    """The room of a file."""
    return room(f"ling3export.{file.removeprefix('ling3export/').replace('/', '.')}")


def defined(file: Path) -> set[str]:
    """Functions, classes and tables of a file; methods as ``Class.method``."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_functions_that_exist_and_goes_down_only(walk: str):
    found = steps(walk)
    assert len(found) >= 6
    assert [f"{file}:{name}" for file, name in found if name not in defined(ROOT / file)] == []
    here, climbs = where(found[0][0]), []
    for way, aside in re.findall(r"([^()]*)(\([^()]*\))?", paragraph(walk)):
        for file, _ in STEP.findall(way):
            climbs += [(here, file)] if where(file) not in {here, *below(here)} else []
            here = where(file)
        climbs += [(here, file) for file, _ in STEP.findall(aside) if where(file) not in {here, *below(here)}]
    assert climbs == []


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))


@functools.cache
def called(function: ast.FunctionDef) -> set[str]:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {each.id if isinstance(each, ast.Name) else getattr(each, "attr", "") for each in calls}


def test_every_test_asserts_something():
    """By itself, or in a function of the tests that it calls."""
    found = [(file, function) for file in (ROOT / "tests").rglob("*.py") for function in functions(file)]
    checking = set(CHECKING)
    for _, function in found:
        asserts = any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(function))
        if asserts or any(name in CHECKING or name.startswith("assert_") for name in called(function)):
            checking.add(function.name)
    growing = True
    while growing:
        more = {function.name for _, function in found if called(function) & checking} - checking
        checking |= more
        growing = bool(more)
    idle = [
        f"{file.name}:{one.name}" for file, one in found if one.name.startswith("test_") and one.name not in checking
    ]
    assert idle == []
