"""Errors a user can act on. The command line prints the message and the hint, and exits with ``exit_code``."""


def printable(text: str) -> str:
    """``text`` as a terminal may print it: characters that it could take for commands are escaped, line ends apart."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


class Ling3Error(Exception):
    """A clear failure: ``what `name`: expected …, found …, where``, and an optional hint.

    What a terminal would obey instead of showing it, such as an escape sequence in a name that was read, is written as
    Python writes it in a literal.

    Args:
        message: What was expected, what was found, and where.
        hint: What the user can do about it, printed on a line of its own.

    Attributes:
        exit_code: How a command ends that raises it.
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
    """What was asked to be built cannot be: paddings, TP, pools, targets."""


class ArtifactError(Ling3Error):
    """An artifact is missing, damaged, of another version, or not for this machine."""


class MisfitError(ArtifactError):
    """A target's programs were compiled for another machine than this one, or for another jaxlib."""


class TrustError(ArtifactError):
    """An artifact is not signed by a key that is trusted, or the keys cannot be read."""


class CatalogError(Ling3Error):
    """A catalogue has no such version, or what it says of one is damaged."""


class VersionExists(CatalogError):
    """A version is there already, with other content: what was published never changes."""


class UnsafePath(CatalogError):
    """A path would leave the folder that it belongs to, or two would meet there."""


class RequestError(Ling3Error):
    """A generation request that can never be served."""


class RankDivergence(Ling3Error):
    """Hosts that take the same steps sampled different tokens.

    Args:
        message: Which hosts read other tokens than host 0.
        hint: What must be the same on all hosts, unless told otherwise.
    """

    exit_code = 5

    def __init__(
        self, message: str, hint: str | None = "every process must load the same artifact and see the same environment"
    ) -> None:
        super().__init__(message, hint)


def listed(items: list[str], limit: int = 5) -> str:
    """Joins names for a message: at most ``limit`` of them, "and 12 more" for the rest."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
