"""How a build uses the cache: the policies, the lock on its folder, and the leases of running builds."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ling3export.artifacts.files import open_lock, user_cache
from ling3export.foundation.errors import ArtifactError

POLICIES = ("on", "off", "redo", "readonly")
SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
LOCK, LEASES = "lock", "builds"


@dataclass(frozen=True)
class CacheUse:
    """How a build uses the cache; the one place where these defaults live.

    Attributes:
        policy: ``on``: entries are read and written. ``off``: neither. ``redo``: everything is made again and replaces
            what is there. ``readonly``: what is there is used, and nothing in the folder is changed.
        folder: The cache's folder; None is ``user_cache()``.
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
        return (user_cache() if self.folder is None else self.folder).absolute()


DEFAULT_USE = CacheUse()


@contextlib.contextmanager
def locked(folder: Path, how: int, *, create: bool = True) -> Iterator[None]:
    """Holds the folder's lock within the block.

    Args:
        folder: The cache's folder.
        how: SHARED for using entries, EXCLUSIVE for removing unused ones.
        create: Whether folder and lock are made where there are none; otherwise the block runs without a lock.

    Raises:
        OSError: The folder cannot be made.
        ArtifactError: The lock cannot be made or opened, or is something that no build made, such as a link.
    """
    if create:
        folder.mkdir(parents=True, exist_ok=True)
    elif not os.path.lexists(folder / LOCK):
        yield
        return
    descriptor = open_lock(folder / LOCK, os.O_RDONLY | os.O_CREAT * create)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lease(folder: Path) -> Iterator[None]:
    """Marks a running build within the block: no clean-up removes what it uses from here on.

    The mark is a locked file, so the system drops it with the process. A folder that cannot be written gets none:
    nobody can remove anything from it.
    """
    path = folder / LEASES / f"{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, SHARED):  # a clean-up must not find it before it is held
            descriptor = open_lock(path, os.O_RDWR | os.O_CREAT)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except (OSError, ArtifactError):
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def oldest_build(folder: Path) -> float | None:
    """When the oldest build that runs now began, as a time of the folder's files; None if no build runs.

    Marks of builds that have ended are removed. The caller holds the folder's lock.
    """
    began = []
    for path in (folder / LEASES).glob("*-*"):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                began.append(os.fstat(descriptor).st_mtime)
            finally:
                os.close(descriptor)
    return min(began, default=None)
