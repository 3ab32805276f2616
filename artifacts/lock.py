"""One build at a time into one folder."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ling3export.artifacts.files import writing
from ling3export.errors import ArtifactError


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds the right to write ``folder``, which need not exist, until the block ends or the process does.

    The lock is a file beside the folder, ``.NAME.lock``; the system drops it with the process, so what a killed
    build leaves of it stops nobody.

    Raises:
        ArtifactError: Another build holds it (a second one in this process too), or the parent cannot be written.
    """
    folder = Path(folder).resolve()
    path = folder.parent / f".{folder.name}.lock"
    descriptor = _acquired(path, folder)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever waits at the old file sees that it is gone
        os.close(descriptor)


def _acquired(path: Path, folder: Path) -> int:
    """A descriptor that holds the lock on the file now named ``path``."""
    while True:
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with writing(path):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
                    raise ArtifactError(
                        f"artifact `{folder.name}`: expected no other build, found process {holder} writing it, "
                        f"in {folder.parent}",
                        "wait until it ends, or choose another folder",
                    ) from error
                if _names(path, descriptor):
                    _refuse_foreign(path, descriptor)
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the holder before us removed it between our open and our lock


def _names(path: Path, descriptor: int) -> bool:
    """Whether ``path`` still is the file of ``descriptor``."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _refuse_foreign(path: Path, descriptor: int) -> None:
    """Raises for a file that no build made, before it is written: one with a second name, a pipe or a device."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        found = f"one with {status.st_nlink} names" if stat.S_ISREG(status.st_mode) else "something else"
        raise ArtifactError(
            f"write `{path.name}`: expected a regular file with one name, found {found}, in {path.parent}",
            "no build makes such a lock: look at who did, and remove it",
        )
