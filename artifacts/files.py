"""Files on disk: errors a user can act on, paths that stay inside a folder, durability."""

import errno
import fcntl
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom, BufferedReader
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.reading import folder_of, opened

REBUILD = "copy the artifact again, or build it again"
PARTIAL = r"partial-\d+-[0-9a-f]{8}"
RECOMPILED = "recompiled"  # in the user's cache, what runners compiled
TRUST = "LING3_TRUST"  # names the folder of the keys that are trusted
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def stays_inside(relative: object) -> bool:
    """Whether a path is printable, with ``/``, relative, in its shortest form, and never climbs out of its folder."""
    if not isinstance(relative, str) or not relative.isprintable():
        return False
    path = PurePosixPath(relative)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == relative


def inside(folder: Path, relative: str) -> Path:
    """The file that ``relative`` names below ``folder``, without touching the disk.

    Raises:
        ArtifactError: The path leaves the folder, or is not in its shortest form.
    """
    if not stays_inside(relative):
        raise ArtifactError(
            f"file path {relative!r}: expected a path below the artifact's folder, found one that leaves it, "
            f"in {folder}",
            "do not load this artifact: no build writes such a path",
        )
    return folder / relative


def refuse_links(folder: Path, relatives: Iterable[str]) -> None:
    """Passes where no symbolic link stands on the way from ``folder`` to its files; missing files are passed over.

    Raises:
        ArtifactError: There is a link: whatever is written or removed there could lie outside of the folder.
    """
    seen = {PurePosixPath(".")}
    for relative in relatives:
        path = PurePosixPath(relative)
        for part in (*reversed(path.parents), path):
            if part not in seen and (folder / part).is_symlink():
                raise ArtifactError(
                    f"file `{relative}`: expected no symbolic link on the way to it, found one at `{part}`, "
                    f"in {folder}",
                    "put what the link names in its place: an artifact and a cache hold their files themselves",
                )
            seen.add(part)


@contextmanager
def open_regular(folder: Path, relative: str, what: str) -> Iterator[BufferedReader]:
    """A regular file below ``folder``, open for reading. No link below ``folder`` is followed, nothing is waited for.

    Raises:
        ArtifactError: The path leaves the folder, the file is missing or cannot be read, or it is something else: a
            link, a folder, a pipe, a device.
    """
    inside(folder, relative)
    try:
        with opened(folder, relative) as file:
            yield file
    except OSError as error:
        message = f"{what}: expected a readable file, found {error.strerror}, in {folder}"
        raise ArtifactError(message, REBUILD) from error


def write_error(error: OSError, path: Path, needed: int | None = None) -> ArtifactError:
    """The ArtifactError for a failed write.

    Args:
        needed: Its full size in bytes, where known.
    """
    room, hint = "room" if needed is None else f"room for {needed:,} bytes", None
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        problem = f"a file-size limit of {limit:,} bytes"
        if limit == resource.RLIM_INFINITY:
            problem = "a file larger than its volume takes"
        hint = "raise the limit (ulimit -f) or write to another volume"
    elif error.errno in DISK_FULL:
        volume = next(folder for folder in path.absolute().parents if folder.is_dir())
        free = shutil.disk_usage(volume).free
        problem, hint = f"a full disk ({free:,} bytes free)", "free some space or write to another volume"
    else:
        room, problem = "a writable file", "a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
    return ArtifactError(f"write `{path.name}`: expected {room}, found {problem}, in {path.parent}", hint)


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turns the OSErrors of a block that writes ``path`` into ArtifactErrors."""
    try:
        yield
    except OSError as error:
        raise write_error(error, path, needed) from error


def user_cache() -> Path:
    """The folder that LING3_CACHE names, else ``ling3export`` in XDG_CACHE_HOME or in ``~/.cache``.

    An XDG_CACHE_HOME that is not absolute does not count, as its specification says.
    """
    if folder := os.environ.get("LING3_CACHE"):
        return Path(folder)
    home = os.environ.get("XDG_CACHE_HOME", "")
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache")) / "ling3export"


def try_writing(folder: Path) -> None:
    """Makes a file in ``folder`` and removes it: only the attempt shows whether the system allows it.

    Where the file system allows it, the file has no name, which a kill could leave.

    Raises:
        OSError: It cannot.
    """
    with suppress(OSError):
        os.close(create_unnamed(folder))
        return
    path = partial_path(folder / "trial")
    os.close(create(path, 0o600))
    remove(path)  # a clean-up may have been faster


def create_unnamed(folder: Path) -> int:
    """A descriptor of a new file of this user alone, which goes with its last descriptor unless it is named."""
    return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)


def create(path: Path, mode: int = 0o666) -> int:
    """A descriptor of a new file, to read and to write. Nothing that has the name, a link least of all, is opened.

    Args:
        mode: Its permissions, less those of the umask: 0o600 where it holds keys or states.

    Raises:
        OSError: It cannot be made, or something has the name.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def open_own(path: Path, *, append: bool = False) -> BufferedRandom:
    """A file of this user's that grows over several runs, open to read and to write; a missing one is made.

    The folder's owner may own the file as well: he could put another one in its place, and on some shared file
    systems all files have one owner.

    Args:
        path: The file. It is not truncated.
        append: Whether every write goes to the end.

    Raises:
        ArtifactError: It cannot be opened or made; or it is a link, no regular file, one with several names, or another
            user's. It is not written.
    """
    descriptor = open_lock(path, os.O_RDWR | os.O_CREAT | os.O_APPEND * append)
    owner, owners = os.fstat(descriptor).st_uid, {os.geteuid(), path.parent.stat().st_uid}
    if owner in owners:
        return os.fdopen(descriptor, "r+b")
    os.close(descriptor)
    raise ArtifactError(
        f"write `{path.name}`: expected a file of this user's, found one of user {owner}, in {path.parent}"
    )


def open_lock(path: Path, flags: int) -> int:
    """A descriptor of a lock file, which may be another user's: a regular file with one name, and no link to one.

    Args:
        path: The file. A missing one is made if ``flags`` has O_CREAT.
        flags: How it is opened.

    Raises:
        ArtifactError: It cannot be opened or made, or it is something else. It is not written.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with writing(path):
        descriptor = os.open(path, flags, 0o666)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:  # 0: its last holder has removed it since
        return descriptor
    os.close(descriptor)
    problem = f"one with {status.st_nlink} names" if stat.S_ISREG(status.st_mode) else "something else"
    raise ArtifactError(
        f"write `{path.name}`: expected a regular file with one name, found {problem}, in {path.parent}",
        "this program makes no such file: look at who did, and remove it",
    )


@contextmanager
def locked(path: Path, kind: int = fcntl.LOCK_EX, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    """Waits for a lock file, as ``open_lock`` opens it; the system drops the lock with the process."""
    descriptor = open_lock(path, flags)
    try:
        fcntl.flock(descriptor, kind)
        yield descriptor
    finally:
        os.close(descriptor)


def partial_path(path: Path) -> Path:
    """A name next to ``path`` that nobody can guess, for what is to take its name."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")


def leftovers(path: Path) -> list[Path]:
    """Files next to ``path`` under a name that :func:`partial_path` gave, by a writer that was killed."""
    name = re.compile(rf"\.{re.escape(path.name)}\.{PARTIAL}")
    return [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]


def write_new(path: Path, data: bytes) -> None:
    """Writes a new file into a folder that is to become durable as a whole.

    An existing file of this name is removed first: nothing is written through a link.

    Raises:
        ArtifactError: It cannot be written.
    """
    with writing(path, len(data)):
        remove(path)
        with open(create(path), "wb") as file:
            file.write(data)


def link_or_copy(source: Path, path: Path) -> None:
    """Gives a file a second name, in a folder that is made if need be, or a copy where that cannot be.

    Raises:
        ArtifactError: Neither can be made, or something has the name.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, path)
        except OSError:
            with opened(source.parent, source.name) as original, open(create(path), "wb") as file:
                shutil.copyfileobj(original, file)


def remove(path: Path, within: Path | None = None, *, held: int | None = None) -> bool:
    """Removes the name of a file, if it is there. A link itself goes, never its target.

    Args:
        within: A folder above it, below which no link on the way is followed.
        held: A descriptor: the name goes only if it is still this file's.

    Returns:
        Whether this call removed it.

    Raises:
        OSError: It cannot be removed, is a folder, or a link is on the way.
    """
    folder = within or path.parent
    with suppress(FileNotFoundError), folder_of(folder, str(path.relative_to(folder))) as (place, name):
        if held is None or os.path.samestat(os.lstat(name, dir_fd=place), os.fstat(held)):
            os.unlink(name, dir_fd=place)
            return True
    return False


def remove_tree(path: Path, within: Path | None = None) -> None:
    """Removes a folder with all that is in it, as far as that can be; a link stays, and so does what it leads to."""
    folder = within or path.parent
    with suppress(OSError), folder_of(folder, str(path.relative_to(folder))) as (place, name):
        shutil.rmtree(name, ignore_errors=True, dir_fd=place)


def rename(old: Path, new: Path) -> None:
    """Gives a file or a folder another name at once, which a file there loses; a link under either is not followed."""
    os.replace(old, new)


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file at once, as :func:`replacing` does."""
    with replacing(path, len(data)) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, needed: int | None = None) -> Iterator[BinaryIO]:
    """A file to write. When the block ends well it is whole and durable; until then it has a new name next to it.

    A symbolic link under either name is not followed: one at ``path`` is replaced.

    Args:
        needed: Its size in bytes, where known, for the message.

    Raises:
        ArtifactError: It cannot be written; what was there before is as it was.
    """
    partial = partial_path(path)
    try:
        with writing(path, needed):
            with open(create(partial), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            rename(partial, path)
            sync_folder(path.parent)
    finally:
        remove(partial)


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Makes every file below ``folder``, and every name, survive a power cut."""
    for parent, _, files in os.walk(folder):
        for name in files:
            sync_folder(Path(parent, name))  # fsync takes a file as well as a folder
        sync_folder(Path(parent))
