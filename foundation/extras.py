"""Extras of pyproject.toml: the packages that some parts of the product need, and the command that installs them."""

from importlib import metadata
from importlib.util import find_spec

from ling3export.foundation.errors import Ling3Error, listed


def install(extra: str | None = None) -> str:
    """The command that installs an extra, by default the base.

    It names the checkout, never a project on an index: nobody has registered ours, so anyone may.
    """
    return "in the checkout: pip install ." if extra is None else f"in the checkout: pip install '.[{extra}]'"


def lacking(*packages: str) -> list[str]:
    """The ``packages``, by import name, that are not installed."""
    return [name for name in packages if find_spec(name) is None]


def installed(package: str) -> str | None:
    """The version of a package, by its name on an index; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require(what: str, extra: str, *packages: str, kind: type[Ling3Error] = Ling3Error) -> None:
    """Raises an error of ``kind`` that names the missing packages of an extra, and the command that installs it."""
    if missing := lacking(*packages):
        raise kind(f"{what}: expected the packages of the extra `{extra}`, found no {listed(missing)}", install(extra))
