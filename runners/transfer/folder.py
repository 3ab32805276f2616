"""States in a folder, one safetensors file each; in shared memory, too, which is a folder on Linux.

A file is there whole or not at all: it is written under another name. Its writer holds a lock on it for as long as it
writes, and on a leased one until the lease has ended; the system drops the locks of a process that is killed. So one
look tells files that a process waits for from files that were left after. The time of a leased file is when its lease
began: the reader takes the state by removing the file.
"""

import fcntl
import mmap
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ling3export.artifacts.files import create, remove, rename
from ling3export.foundation.reading import opened, shared_with
from ling3export.runners.state.layout import StateLayout, StateMismatch
from ling3export.runners.state.sequence_state import SequenceState, StateBytes, read_record, read_state
from ling3export.runners.transfer.store import PendingWrite, StateAddress, TransferError

SHM = Path("/dev/shm")
PREFIX, SUFFIX, PARTIAL, LEASED = "l3s_", ".safetensors", ".partial", ".leased"
YOUNG = 60.0  # seconds that what nobody holds a lock on may stay: its writer is about to lock it, or on another machine


def prefix_of(folder: Path) -> str:
    """What the names of states in a folder begin with; in shared memory each user has a prefix."""
    return f"u{os.geteuid()}_{PREFIX}" if folder == SHM else PREFIX


class FolderStore:
    """States in a folder.

    Args:
        layout: What states hold.
        description: What decides whether one fits (``description_of``).
        folder: Made for this user alone if it is not there; None for shared memory.
        lease: Seconds that what is written here stays for its reader; None for ever.
        limit: Bytes that all states of this user in the folder may have; None for any number.
        clock: Seconds since 1970.

    Raises:
        TransferError: The folder cannot be made, is something else, or others can write to it; or this machine has no
            shared memory.
    """

    address = ("127.0.0.1", 0)

    def __init__(
        self,
        layout: StateLayout,
        description: Mapping[str, Any],
        folder: Path | None,
        lease: float | None = None,
        limit: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._layout, self._description = layout, description
        self._folder = SHM if folder is None else folder
        self._prefix = prefix_of(self._folder)
        self._lease, self._limit, self._clock = lease, limit, clock
        self._suffix = SUFFIX if lease is None else LEASED + SUFFIX
        self.counts: Counter[str] = Counter()
        self._held: dict[str, int] = {}  # descriptors of leased files, by the state's name
        if folder is not None:
            _make_private(folder)
        elif not SHM.is_dir():
            raise TransferError(f"shm: expected {SHM}, found none")
        self.sweep()

    def create(
        self, name: str, descriptor: Mapping[str, Any], tokens: np.ndarray, first: int = 0
    ) -> PendingWrite | None:
        """Makes the file of a state; its bytes are reserved, so that writing cannot fail for want of disk or memory."""
        path, place = self._path(name), -1
        if path.exists():
            self.counts["exists"] += 1
            return None
        partial = path.with_name(f"{self._prefix}{name}.{secrets.token_hex(4)}{PARTIAL}")

        def allocate(size: int) -> np.ndarray:
            nonlocal place
            place = create(partial, 0o600)
            fcntl.flock(place, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.truncate(place, size)  # from now on others see what it takes
            if not self._has_room():
                raise OSError("over the limit")
            os.posix_fallocate(place, 0, size)
            return np.frombuffer(mmap.mmap(place, size), np.uint8)

        lease = {} if self._lease is None else {"lease": self._lease}
        try:
            if self._lease is not None and self._clock() > self._swept + self._lease + YOUNG:
                self.sweep()  # what was leased when this process began
            data = StateBytes(self._layout, {**descriptor, **lease}, tokens, first, allocate)
        except OSError:
            remove(partial)
            if place >= 0:
                os.close(place)
            self.counts["full"] += 1
            return None

        def done(whole: bool) -> bool:
            try:
                if whole:
                    os.utime(place, (self._clock(),) * 2)
                    rename(partial, path)
            except OSError:
                whole = False
            self.counts["stored" if whole else "abandoned"] += 1
            if whole and self._lease is not None:
                self._held[name] = place
            else:
                remove(partial)
                os.close(place)
            return whole

        return PendingWrite(data, done)

    def get(self, address: StateAddress, until: float) -> SequenceState | None:
        """Reads a state; a file of wrong content is removed, and so is one that was leased."""
        return self.read(address.name)[0] if time.monotonic() < until else None

    def read(self, name: str) -> tuple[SequenceState | None, str]:
        """Reads a state as ``get`` does; returns also the outcome that is counted.

        It is ``hit``; ``miss`` without a file; ``unreadable`` where the system could not read the file, which may be
        whole; ``corrupt`` or ``other_state`` for wrong content.
        """
        state, reason = self._read(name)
        self.counts[reason] += 1
        if reason == "corrupt" or (self._lease is not None and state is not None):
            with suppress(OSError):
                self.remove(name)
        return state, reason

    def has(self, name: str) -> bool:
        """Whether there is a file of a name."""
        return self._path(name).is_file()

    def remove(self, name: str) -> None:
        """Removes a state, if it is there."""
        remove(self._path(name))

    def release(self, address: StateAddress, until: float) -> None:
        """Removes a leased file."""
        self.remove(address.name)

    def ended(self) -> set[str]:
        """Names of leased states whose files are gone, or whose leases are over."""
        assert self._lease is not None
        names = set()
        for name, place in [*self._held.items()]:
            status = os.fstat(place)
            if status.st_nlink and status.st_mtime + self._lease > self._clock():
                continue
            self.counts["expired" if status.st_nlink else "pulled"] += 1
            names.add(name)
            self._end(name)
        return names

    def touch(self, names: list[str]) -> set[str]:
        """Sets the times of files to now, that of the first one last; returns the names of those that are not there."""
        gone = set()
        for name in reversed(names):
            try:
                os.utime(self._path(name))
            except OSError:
                gone.add(name)
        return gone

    def trim(self, most: int) -> set[str]:
        """Removes the files that were not used for longest until the others have ``most`` bytes; their names.

        A process that reads one of them meanwhile still gets all of it, because it has the file open.
        """
        files = sorted(
            (status.st_mtime_ns, path, status.st_size) for path, status in _files(self._folder, self._prefix)
        )
        total, gone = sum(size for *_, size in files), set()
        for _, path, size in files:
            if total <= most:
                break
            remove(path)
            total -= size
            self.counts["evicted"] += 1
            gone.add(path.name.removeprefix(self._prefix).removesuffix(self._suffix))
        return gone

    def sweep(self) -> None:
        """Removes what killed processes have left."""
        self._swept = self._clock()
        for _ in collect(self._folder, clock=self._clock):
            self.counts["swept"] += 1

    def close(self) -> None:
        """Removes what is leased; other files stay."""
        for name in [*self._held]:
            self._end(name)

    def _end(self, name: str) -> None:
        """Gives a leased file up. One that cannot be removed now is removed by the next ``sweep``: it has no lock."""
        os.close(self._held.pop(name))
        try:
            self.remove(name)
        except OSError:
            self.counts["not_removed"] += 1

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._prefix}{name}{self._suffix}"

    def _read(self, name: str) -> tuple[SequenceState | None, str]:
        path = self._path(name)
        try:
            with opened(self._folder, path.name) as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid():
                    return None, "miss"
                return read_state(file, status.st_size, self._layout, self._description), "hit"
        except FileNotFoundError:
            return None, "miss"
        except StateMismatch:
            return None, "other_state"
        except OSError:
            return None, "unreadable"
        except ValueError:
            return None, "corrupt"

    def _has_room(self) -> bool:
        if self._limit is None or self._bytes() <= self._limit:
            return True
        self.sweep()
        return self._bytes() <= self._limit

    def _bytes(self) -> int:
        return sum(status.st_size for _, status in _files(self._folder, self._prefix))


def collect(
    folder: Path, *, dry_run: bool = False, clock: Callable[[], float] = time.time
) -> Iterator[tuple[str, int, str]]:
    """Removes files that no process can use any more; gives name, bytes and reason of each.

    That is what a killed writer did not end, what is no state, and leased states whose process is gone. In shared
    memory a state without a lock is one without a process. In a folder, where processes of other machines may write,
    its lease has to be over, too.

    Args:
        dry_run: Remove nothing.
        clock: Seconds since 1970.
    """
    local, prefix = folder == SHM, prefix_of(folder)
    for path, status in _files(folder, prefix):
        age, reason = clock() - status.st_mtime, ""
        with suppress(OSError), opened(folder, path.name) as file:
            if path.name.endswith(PARTIAL):
                reason = "its writer is gone" if age > YOUNG and _unlocked(file.fileno()) else ""
            else:
                try:
                    lease = read_record(file).get("lease")
                except ValueError as error:
                    reason = f"no state: {error}"
                else:
                    over = local or not isinstance(lease, (int, float)) or age > lease + YOUNG
                    leased = path.name.endswith(LEASED + SUFFIX)
                    reason = "its process is gone" if leased and over and _unlocked(file.fileno()) else ""
        if reason:
            if not dry_run:
                remove(path)
            yield path.name, status.st_size, reason


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = shared_with(folder)
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise TransferError(
            f"file: expected a folder that this user alone can write, found {problem}, at {folder}",
            "whoever can write there decides answers: take a folder of your own, or `chmod 700` it",
        )


def _files(folder: Path, prefix: str) -> list[tuple[Path, os.stat_result]]:
    """The states of this user."""
    files, user = [], os.geteuid()
    with os.scandir(folder) as entries:  # a tenth of the time of paths
        for entry in entries:
            with suppress(FileNotFoundError):
                if not entry.name.startswith(prefix):
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == user:
                    files.append((Path(entry.path), status))
    return sorted(files)


def _unlocked(place: int) -> bool:
    """Whether no process has a lock on a file. On a file system without locks it counts as locked."""
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
