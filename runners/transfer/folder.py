"""States in a folder, one safetensors file each; in shared memory, too, which is a folder on Linux.

A file is there whole or not at all: it is written under another name. The time of a leased file is the end of its
lease, which tells everybody what is left over, and its reader takes the state by removing the file. The time of another
file is that of its last use.
"""

import mmap
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ling3export.artifacts.files import create, remove, rename
from ling3export.foundation.reading import opened, shared_with
from ling3export.runners.state.layout import StateLayout, StateMismatch
from ling3export.runners.state.sequence_state import SequenceState, StateBytes, read_state
from ling3export.runners.transfer.store import Fill, StateAddress, TransferError

SHM = Path("/dev/shm")
PREFIX, SUFFIX, PARTIAL, LEASED = "l3s_", ".safetensors", ".partial", ".leased"
YOUNG = 600.0  # seconds that a file may take to be written; one that is older was left by a writer that was killed


def prefix_of(folder: Path) -> str:
    """Prefix of the names of states in a folder; in shared memory each user has a prefix."""
    return f"u{os.geteuid()}_{PREFIX}" if folder == SHM else PREFIX


class FolderStore:
    """States in a folder.

    Args:
        folder: Made for this user alone if it is not there; None for shared memory.
        lease: Seconds that what is written here stays for its reader; None for ever.
        limit: Bytes that all states of this user in the folder may have; None for any number.

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
        self._leased: dict[str, float] = {}  # the ends of the leases of states written here, by name
        if folder is not None:
            _make_private(folder)
        elif not SHM.is_dir():
            raise TransferError(f"shm: this machine has no {SHM}")
        self.sweep()

    def put(self, name: str, descriptor: Mapping[str, Any], tokens: np.ndarray, fill: Fill, first: int = 0) -> bool:
        """Writes a file; its bytes are reserved first, so that ``fill`` cannot fail for want of disk or memory."""
        path, place, outcome = self._path(name), -1, "full"
        if path.exists():
            self.counts["exists"] += 1
            return False
        partial = path.with_name(f"{self._prefix}{name}.{secrets.token_hex(4)}{PARTIAL}")

        def allocate(size: int) -> np.ndarray:
            nonlocal place
            place = create(partial, 0o600)
            os.truncate(place, size)  # from now on others see what it takes
            if not self._has_room():
                raise OSError("over the limit")
            os.posix_fallocate(place, 0, size)
            return np.frombuffer(mmap.mmap(place, size), np.uint8)

        try:
            data = StateBytes(self._layout, descriptor, tokens, first, allocate)
            outcome = "abandoned"
            fill(data.state)
            data.seal()
            if self._lease is not None:
                self._leased[name] = end = self._clock() + self._lease
                os.utime(place, (end, end))
            rename(partial, path)
            outcome = "stored"
        except OSError:
            if outcome != "full":
                raise
        finally:
            self.counts[outcome] += 1
            if outcome != "stored":
                self._leased.pop(name, None)
                remove(partial)
            if place >= 0:
                os.close(place)
        return outcome == "stored"

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
        return self._path(name).is_file()

    def remove(self, name: str) -> None:
        remove(self._path(name))

    def release(self, address: StateAddress, until: float) -> None:
        """Removes a leased file."""
        self.remove(address.name)

    def expire(self) -> None:
        """Removes what is leased here and is over, and now and then what killed processes have left."""
        for name, end in [*self._leased.items()]:
            taken = not self.has(name)
            if taken or end <= self._clock():
                self.counts["pulled" if taken else "expired"] += 1
                self._end(name)
        if self._clock() > self._swept + (YOUNG if self._lease is None else min(self._lease, YOUNG)):
            self.sweep()

    def touch(self, names: list[str]) -> set[str]:
        """Sets the times of files to now, that of the first one last; returns the names of absent ones."""
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
        """Removes what killed processes have left: files that were not ended, and states whose lease is over."""
        self._swept = now = self._clock()
        for path, status in _files(self._folder, self._prefix):
            leased, partial = path.name.endswith(LEASED + SUFFIX), path.name.endswith(PARTIAL)
            if (leased and status.st_mtime <= now) or (partial and status.st_mtime <= now - YOUNG):
                remove(path)
                self.counts["swept"] += 1

    def close(self) -> None:
        """Removes what is leased; other files stay."""
        for name in [*self._leased]:
            self._end(name)

    def _end(self, name: str) -> None:
        """Gives a leased file up. One that cannot be removed now goes with the next ``sweep``."""
        del self._leased[name]
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


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = shared_with(folder)
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise TransferError(
            f"file: expected a folder that only this user can write, found {problem}, at {folder}",
            "who can write there decides answers: take a folder of your own, or `chmod 700` it",
        )


def _files(folder: Path, prefix: str) -> list[tuple[Path, os.stat_result]]:
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
