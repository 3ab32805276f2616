"""The walks of CONTRIBUTING.md: their functions exist, and they go down through the rooms."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.rooms import below, room

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"`((?:ling3export|foundation|model|artifacts|runners)/[\w/]+\.py):([\w.]+)`")
TENSORS, STATES = ("A tensor, built", "A tensor, loaded"), ("A state, given", "A state, taken")
CHAT = "A chat request with a tool call"
WALKS = (*TENSORS, "A token", CHAT, "A cell", *STATES)
MOST = {CHAT: 16}  # most files of a walk; 11 for any other walk


def steps(walk: str) -> list[tuple[str, str]]:
    """(file, function) of every step of a walk, also of those in brackets."""
    return STEP.findall(paragraph(walk))


def paragraph(walk: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text[text.index(f"**{walk}**") :].split("\n\n**")[0]


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
    assert len({file for file, _ in found}) <= MOST.get(walk, 11)
    assert [f"{file}:{name}" for file, name in found if name not in defined(ROOT / file)] == []
    here, climbs = where(found[0][0]), []
    for way, aside in re.findall(r"([^()]*)(\([^()]*\))?", paragraph(walk)):
        for file, _ in STEP.findall(way):
            climbs += [(here, file)] if where(file) not in {here, *below(here)} else []
            here = where(file)
        climbs += [(here, file) for file, _ in STEP.findall(aside) if where(file) not in {here, *below(here)}]
    assert climbs == []
