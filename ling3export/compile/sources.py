"""The sources that decide a program, found by following imports, so that no list can forget one."""

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import ling3export

ROOT = Path(ling3export.__file__).parent
# What traces, lowers and compiles a cell. `worker.py`, which calls them, decides nothing.
STARTS = ("compile/lower.py", "compile/accelerators.py")


@functools.cache
def digests() -> dict[str, dict[str, str]]:
    """sha256 of every source that decides a program, by its path below the package.

    Returns:
        ``model``: all of ``model/``. ``lowering``: what STARTS import of ours, and what that imports, besides.
    """
    model = {_name(file): _digest(file) for file in sorted((ROOT / "model").rglob("*.py"))}
    found = {_name(file): _digest(file) for file in _followed([ROOT / name for name in STARTS])}
    lowering = {name: digest for name, digest in sorted(found.items()) if name not in model}
    return {"model": model, "lowering": lowering}


def _name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _followed(files: list[Path]) -> set[Path]:
    """``files``, and every file of this package that they import, at any depth and inside of functions too."""
    found: set[Path] = set()
    while files:
        file = files.pop()
        if file not in found:
            found.add(file)
            files += [path for name in _imports(ast.parse(file.read_bytes())) if (path := _file(name))]
    return found


def _imports(node: ast.AST) -> Iterator[str]:
    """Dotted names; ``from a import b`` may mean the module ``a.b``. What only a type checker reads is left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield str(child.module)
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from _imports(child)


def _file(name: str) -> Path | None:
    """The source of a module of ours."""
    package, *parts = name.split(".")
    path = ROOT.joinpath(*parts).with_suffix(".py")
    return path if package == ROOT.name and parts and path.is_file() else None
