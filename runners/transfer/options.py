"""Which of an engine's sequences' states leave it and come to it, and how. Imports nothing heavy: command lines do."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ling3export.foundation.errors import Ling3Error

ROLES = ("both", "prefill", "decode")
CARRIERS = ("shm", "tcp", "file", "jax")
LISTENING = ("tcp", "jax")  # those that need an address and a secret


@dataclass(frozen=True)
class PrefixFolder:
    """Where a prefix cache keeps what it knows for later processes, and for others.

    Attributes:
        folder: Made if it is not there. Several processes may share it.
        limit: Bytes that its files may have; what was not used for longest goes first.
    """

    folder: Path
    limit: int = 16 << 30


@dataclass(frozen=True)
class Prefillers:
    """Servers that an engine asks to prefill long prompts, where no router does.

    Attributes:
        urls: Their addresses.
        model: The name that they serve the model under.
        key: The bearer token that they want; None for none.
        most_local: Up to so many tokens that the prefix cache does not have, a prompt is prefilled here.
        most_queued: Where so many prompts wait until their servers may be asked, one more is prefilled here.
        deadline: Seconds, from when it could run here, that a prompt waits for its server's answer.

    Raises:
        Ling3Error: There is no address, one is none, or a number is too small.
    """

    urls: tuple[str, ...]
    model: str
    key: str | None = field(default=None, repr=False)
    most_local: int = 1000
    most_queued: int = 16
    deadline: float = 30.0

    def __post_init__(self) -> None:
        hint = "it is what `ling3-runner serve --role prefill` prints"
        if not self.urls:
            raise Ling3Error("--prefill: expected http://HOST:PORT, found none", hint)
        for url in self.urls:
            try:
                parts = urlsplit(url)
                right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:  # a port that is none
                right = False
            if not right:
                raise Ling3Error(f"--prefill: expected http://HOST:PORT, found {url[:100]}", hint)
        for name, least, number in (("--max-local-prefill", 0, self.most_local), ("--max-queue", 1, self.most_queued)):
            if number < least:
                raise Ling3Error(f"{name}: expected {least} or more, found {number}")
        if not self.deadline > 0:
            raise Ling3Error(f"--prefill-timeout: expected more than 0 seconds, found {self.deadline:g}")


@dataclass(frozen=True)
class Transfer:
    """How an engine exchanges states with others.

    Attributes:
        carrier: ``shm``, ``tcp``, ``file`` or ``jax``.
        role: ``prefill`` gives states away, ``decode`` takes them, ``both`` does both.
        host: With ``tcp`` and ``jax``, the address at which others reach this process.
        port: With ``tcp`` and ``jax``, the base port: this process listens at the next one; 0 for any that is free.
        folder: With ``file``, where the states are.
        limit: Bytes that states may take: in shared memory those of all processes of this user, else of this one.
        lease: Seconds that a state is kept for whoever was promised it.
        deadline: Seconds that taking a state may last.
        secret: With ``tcp`` and ``jax``, what both ends know; needed where other machines reach the address.

    Raises:
        Ling3Error: A value is none of these, or ``file`` has no folder.
    """

    carrier: str = "shm"
    role: str = "both"
    host: str = "127.0.0.1"
    port: int = 0
    folder: Path | None = None
    limit: int = 4 << 30
    lease: float = 60.0
    deadline: float = 30.0
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name, value, wanted in (("--transfer", self.carrier, CARRIERS), ("--role", self.role, ROLES)):
            if value not in wanted:
                raise Ling3Error(f"{name}: expected one of {', '.join(wanted)}, found {value[:100]}")
        if (self.carrier == "file") != (self.folder is not None):
            found = "none" if self.folder is None else f"one with --transfer {self.carrier}"
            raise Ling3Error(f"--transfer-folder: expected a folder with --transfer file alone, found {found}")

    @property
    def gives(self) -> bool:
        """Whether states leave this engine."""
        return self.role != "decode"

    @property
    def takes(self) -> bool:
        """Whether states come to this engine."""
        return self.role != "prefill"


def takes_none(role: str | None) -> tuple[str, str]:
    """The message and the hint where servers that prefill are named, and no state comes from them.

    Args:
        role: Of the engine; None where it exchanges no states.
    """
    found = "none" if role is None else f"--role {role}"
    return (
        f"--prefill: expected --transfer with --role decode or both, found {found}",
        "say how states come, as the servers that prefill do: --transfer tcp --role decode",
    )
