"""Rules for all tests: each asserts something, and none reads or replaces a private field of another class."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("*.py"))
CHECKING = {"raises", "fail", "refusal"}
# Names with an underscore that their libraries document.
PUBLIC = {
    "_asdict",
    "_fields",
    "_make",
    "_replace",
    "os._exit",
    "config._attn_implementation",  # transformers
    "config._experts_implementation",
}


@functools.cache
def parsed(file: Path) -> ast.AST:
    return ast.parse(file.read_text())


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef))


@functools.cache
def called(function: ast.FunctionDef) -> set[str]:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {each.id if isinstance(each, ast.Name) else getattr(each, "attr", "") for each in calls}


def test_every_test_asserts_something():
    """The assertion may be in a function of the tests that it calls."""
    found = [(file, function) for file in FILES for function in functions(file)]
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


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def private_names(tree: ast.AST) -> list[str]:
    """``object._name`` of any object but a method's own, ``setattr`` of such a name, and its import."""
    methods = {child for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            own = ast.unparse(node.value) in ("self", "cls", "super()") and node in methods
            if not own and not {node.attr, ast.unparse(node)} & PUBLIC:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "getattr", "delattr")):
            names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            found += [ast.unparse(node) for name in names if any(map(private, name.split(".")))]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names if private(alias.name)]
    return found


def test_no_test_reads_a_private_field_of_another_class():
    found = {file.relative_to(ROOT).as_posix(): private_names(parsed(file)) for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}


def test_private_names_are_found():
    text = """
from a import _b, b
a._b
self._b
a._replace()
os._exit(1)
m.setattr(a, '_b', 1)
m.setattr('a._b.c', 1)
a.__class__
class A:
    def f(self): return self._b, self.a._b
"""
    expected = ["a._b", "a._b", "self._b", "m.setattr(a, '_b', 1)", "m.setattr('a._b.c', 1)", "self.a._b"]
    assert sorted(private_names(ast.parse(text))) == sorted(expected)
