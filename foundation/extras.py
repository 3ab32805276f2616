"""Extras of pyproject.toml: the packages that some parts of the product need, and the command that installs them."""

from importlib import metadata
from importlib.util import find_spec

from ling3export.foundation.errors import Ling3Error, listed


def install(extra: str | None = None) -> str:
    """What to type where an extra, or without one what all need, is not installed.

    It names the checkout, never a project on an index: nobody has registered ours there, so anyone may.
    """
    return "in the checkout: pip install ." if extra is None else f"in the checkout: pip install '.[{extra}]'"


def lacking(*packages: str) -> list[str]:
    """Those of ``packages``, by their names in an import, that are not installed."""
    return [name for name in packages if find_spec(name) is None]


def installed(package: str) -> str | None:
    """The version of a package, by its name on an index; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require(what: str, extra: str, *packages: str, kind: type[Ling3Error] = Ling3Error) -> None:
    """Refuses ``what`` where packages of its extra are not installed.

    Raises:
        Ling3Error: Of ``kind``; it names the packages that are missing, and the command that installs the extra.
    """
    if missing := lacking(*packages):
        raise kind(f"{what}: expected the packages of the extra `{extra}`, found no {listed(missing)}", install(extra))
