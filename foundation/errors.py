"""Errors a user can act on. The command line prints the message and the hint, and exits with ``exit_code``."""

import json
from itertools import islice


def printable(text: str) -> str:
    """``text`` with all unprintable characters escaped but line ends: a terminal could obey them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


class Ling3Error(Exception):
    """A failure that the user can act on; unprintable characters of its texts are escaped.

    Args:
        message: The problem and its place: ``what `name`: expected …, found …, where``.
        hint: An action for the user, printed on a line of its own.

    Attributes:
        exit_code: Exit code of a command that raises it.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(printable(message))
        self.message = printable(message)
        self.hint = None if hint is None else printable(hint)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class ConfigError(Ling3Error):
    """config.json is not one that we model exactly."""


class CheckpointError(Ling3Error):
    """A checkpoint's files, names, shapes or dtypes are not the published layout."""


class PlanError(Ling3Error):
    """A build is impossible: its paddings, TP, pools or targets."""


class ArtifactError(Ling3Error):
    """An artifact is missing, damaged, of another version, or not for this machine."""


class MisfitError(ArtifactError):
    """A target's programs were compiled for another machine than this one, or for another jaxlib."""


class TrustError(ArtifactError):
    """An artifact is not signed by a key that is trusted, or the keys cannot be read."""


class CatalogError(Ling3Error):
    """A store has no such version, or it is damaged."""


class VersionExists(CatalogError):
    """This version exists already, with other content: a published version never changes."""


class UnsafePath(CatalogError):
    """A path would leave its folder, or two paths would meet."""


class RequestError(Ling3Error):
    """A generation request that can never be served."""


class RankDivergence(Ling3Error):
    """Hosts that take the same steps sampled different tokens."""

    exit_code = 5

    def __init__(
        self, message: str, hint: str | None = "every process must load the same artifact and see the same environment"
    ) -> None:
        super().__init__(message, hint)


def listed(items: list[str], limit: int = 5) -> str:
    """Joins names for a message: at most ``limit`` of them, "and 12 more" for the rest."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def shown(value: object, limit: int = 60) -> str:
    """A wrong value for a message: as JSON, else as Python writes it, else its type; cut after ``limit`` characters."""
    try:
        pieces = json.JSONEncoder(ensure_ascii=False).iterencode(value[:limit] if isinstance(value, str) else value)
        text = "".join(islice(pieces, limit + 1))  # not more of a large value than the message shows
        text += "…" * (isinstance(value, str) and len(value) > limit)
    except (TypeError, ValueError, RecursionError):
        try:
            text = repr(value)
        except Exception:  # whatever the value's own class raises; a whole number of too many digits does, too
            text = type(value).__name__
    return printable(text if len(text) <= limit else f"{text[:limit]}…")
