"""How a build uses the cache: the policies, and the lock on its folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ling3export.artifacts import files

POLICIES = ("on", "off", "redo", "readonly")
SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
LOCK = "lock"


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
        return (files.user_cache() if self.folder is None else self.folder).absolute()


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
    with files.locked(folder / LOCK, how, os.O_RDONLY | os.O_CREAT * create):
        yield
