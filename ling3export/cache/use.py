"""Who uses the cache, how, and for how long: the policies, the lock, and the leases of running builds."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

POLICIES = ("on", "off", "redo", "readonly")
SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
VARIABLE = "LING3_CACHE"
LOCK, LEASES = "lock", "builds"


@dataclass(frozen=True)
class CacheUse:
    """How a build uses the cache; the one place where these defaults live.

    Attributes:
        policy: ``on``; ``off``: neither read nor written; ``redo``: everything is made again and replaces what is
            there; ``readonly``: what is there is used, nothing in the folder is changed.
        folder: Where it is; None is ``default_folder()``.
        explain: Whether the build says why each cell was not in the cache.
    """

    policy: str = "on"
    folder: Path | None = None
    explain: bool = False

    @property
    def reads(self) -> bool:
        """Whether entries are looked up."""
        return self.policy in ("on", "readonly")

    @property
    def writes(self) -> bool:
        """Whether anything in the folder is changed."""
        return self.policy in ("on", "redo")

    @property
    def where(self) -> Path:
        """The folder, absolute."""
        return (default_folder() if self.folder is None else self.folder).absolute()

    def record(self) -> dict[str, str]:
        """The policy and the folder as JSON, for a compiling process."""
        return {"policy": self.policy, "folder": str(self.where)}

    @classmethod
    def read(cls, record: dict[str, str]) -> "CacheUse":
        """What :meth:`record` wrote."""
        return cls(record["policy"], Path(record["folder"]))


DEFAULT_USE = CacheUse()


def default_folder() -> Path:
    """LING3_CACHE, else ``ling3export`` in the user's cache folder (XDG_CACHE_HOME, which must be absolute, or
    ``~/.cache``)."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "ling3export"


@contextlib.contextmanager
def locked(folder: Path, how: int, *, create: bool = True) -> Iterator[None]:
    """Holds the folder's lock: shared by those that use entries, exclusive for those that remove what is unused.

    Args:
        folder: The cache's.
        how: SHARED or EXCLUSIVE.
        create: Make folder and lock where there is none; otherwise such a folder is used without.

    Raises:
        OSError: The lock cannot be made or opened.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if not create:
            yield
            return
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lease(folder: Path) -> Iterator[None]:
    """Marks a running build: what it uses from here on is not removed. The system drops the mark with the process.

    A folder that cannot be written is left without: nobody can remove anything from it.
    """
    path = folder / LEASES / f"{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, SHARED):  # a clean-up must not find it before it is held
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def oldest_build(folder: Path) -> float | None:
    """When the oldest build that runs now began, in the clock of the folder's file times; None if none runs.

    Marks that nobody holds any more are removed. Call it while the folder's lock is held.
    """
    began = []
    for path in (folder / LEASES).glob("*-*"):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                began.append(os.fstat(descriptor).st_mtime)
            finally:
                os.close(descriptor)
    return min(began, default=None)
