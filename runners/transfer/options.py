"""How states leave an engine and come to it, and where they are kept. Imports nothing heavy: command lines read it."""

from dataclasses import dataclass, field
from pathlib import Path

from ling3export.foundation.errors import Ling3Error

ROLES = ("both", "prefill", "decode")
CARRIERS = ("shm", "http", "file")


@dataclass(frozen=True)
class PrefixFolder:
    """Where a prefix cache keeps its entries for later processes, and for others.

    Attributes:
        folder: Made if it is not there. Several processes may share it.
        limit: Bytes that its files may have; the least recently used goes first.
    """

    folder: Path
    limit: int = 16 << 30


@dataclass(frozen=True)
class Transfer:
    """How an engine exchanges states with others.

    Attributes:
        carrier: ``shm``, ``http`` or ``file``.
        role: ``prefill`` gives states away, ``decode`` takes them, ``both`` does both.
        host: With ``http``, the address at which other servers reach this one.
        port: With ``http``, the port of this process's server; ``serve`` sets it.
        peers: With ``http``, ``HOST:PORT`` of the servers from which states are taken; none takes any of this machine.
        folder: With ``file``, where the states are.
        limit: Bytes that states may take: in shared memory those of all processes of this user, else of this one.
        lease: Seconds that a state is kept for its reader.
        deadline: Seconds that taking a state may last.
        secret: With ``http``, shared by both ends; needed where other machines take part.

    Raises:
        Ling3Error: A value is none of these, or ``file`` has no folder.
    """

    carrier: str = "shm"
    role: str = "both"
    host: str = "127.0.0.1"
    port: int = 0
    peers: tuple[str, ...] = ()
    folder: Path | None = None
    limit: int = 4 << 30
    lease: float = 60.0
    deadline: float = 30.0
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name, value, choices in (("--transfer", self.carrier, CARRIERS), ("--role", self.role, ROLES)):
            if value not in choices:
                raise Ling3Error(f"{name}: expected one of {', '.join(choices)}, found {value[:100]}")
        if (self.carrier == "file") != (self.folder is not None):
            folder = "none" if self.folder is None else f"one with --transfer {self.carrier}"
            raise Ling3Error(f"--transfer-folder: expected a folder with --transfer file only, found {folder}")

    @property
    def gives(self) -> bool:
        """Whether states leave this engine."""
        return self.role != "decode"

    @property
    def takes(self) -> bool:
        """Whether states come to this engine."""
        return self.role != "prefill"
