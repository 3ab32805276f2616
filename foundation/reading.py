"""Opens files that others may have written: of a checkpoint, an artifact, a cache."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
WORDS = {errno.ELOOP: "a symbolic link", errno.ENXIO: "a socket", errno.ENOTDIR: "no folder on the way to it"}
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextmanager
def folder_of(folder: Path, relative: str) -> Iterator[tuple[int, str]]:
    """A descriptor of the parent folder of a file below ``folder``, and the file's name.

    ``folder`` may be reached through links; below it none is followed.

    Raises:
        OSError: There is no such folder, or the path leads out of ``folder``.
    """
    *parents, name = PurePosixPath(relative).parts or (".",)
    if ".." in parents or os.path.isabs(relative):
        raise OSError(errno.EPERM, "a path that leads out of the folder")
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            place = _replaced(place, os.open(parent, os.O_RDONLY | os.O_DIRECTORY | FLAGS, dir_fd=place))
        yield place, name
    finally:
        os.close(place)


@contextmanager
def opened(folder: Path, relative: str, *, links: bool = False) -> Iterator[BufferedReader]:
    """A regular file below ``folder``, open for reading; opening a pipe does not wait.

    Args:
        folder: May be reached through links.
        relative: The file's path below it, without ``..``.
        links: Whether links below ``folder`` are followed, if they lead to a file below it or, from a snapshot of a
            model hub's cache (``snapshots/REVISION``), to one in its ``blobs``. By default none is followed.

    Raises:
        OSError: The file is missing or cannot be read, or is no regular file; ``strerror`` follows "found".
    """
    whole = str(folder / relative)
    if links:
        folder, relative = _followed(folder, relative)
    place = -1
    try:
        with folder_of(folder, relative) as (parent, name):
            place = os.open(name, os.O_RDONLY | FLAGS, dir_fd=parent)
        mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, KINDS.get(stat.S_IFMT(mode), "no regular file"))
        file, place = os.fdopen(place, "rb"), -1
    except OSError as error:
        reason = WORDS.get(error.errno or 0, error.strerror)
        raise OSError(error.errno, reason, whole) from error
    finally:
        if place >= 0:
            os.close(place)
    with file:
        yield file


def read_bytes(folder: Path, relative: str, largest: int, *, links: bool = False) -> bytes:
    """All bytes of a file; opened by :func:`opened`.

    Raises:
        OSError: It cannot be opened, or has more than ``largest`` bytes.
    """
    with opened(folder, relative, links=links) as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise OSError(errno.EFBIG, f"more than {largest:,} bytes", str(folder / relative))
    return data


def shared_with(folder: Path) -> str:
    """The reason why another user could put files into a folder; empty if only this user can.

    Raises:
        OSError: There is nothing of this name.
    """
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        return "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no folder"
    if status.st_uid != os.geteuid():
        return f"one of user {status.st_uid}"
    return f"mode {stat.S_IMODE(status.st_mode):o}" if status.st_mode & 0o022 else ""


def _replaced(old: int, new: int) -> int:
    os.close(old)
    return new


def _followed(folder: Path, relative: str) -> tuple[Path, str]:
    """The real place of a file: an allowed folder, without links, and the path below it."""
    root, file = (Path(os.path.realpath(path)) for path in (folder, folder / relative))
    blobs = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
    for allowed in (root, *blobs):
        if file.is_relative_to(allowed):
            return allowed, str(file.relative_to(allowed))
    raise OSError(errno.EPERM, f"a symbolic link that leads out of the folder, to {file}", str(folder / relative))
