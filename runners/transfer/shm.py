"""Objects in shared memory, for processes of one user on one machine.

A POSIX segment is a file in /dev/shm on Linux, and is opened here as one: so a lock goes with it, and no version of
Python's resource tracker removes it early. ``multiprocessing.shared_memory`` attaches to the same segments. A writer
holds an exclusive lock on its segment until it is ready, and a reader a shared one while it copies. The system drops
the locks of a process that is killed, so one look tells a writer at work from one that is gone, in other containers
too. What the lock of somebody else is on is never evicted.
"""

import fcntl
import math
import mmap
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ling3export.runners.transfer.backend import PAUSE, Leases, Presence, Source, TransferError, Writer
from ling3export.runners.transfer.objects import HEADER, PREFIX, Header, Key, Layout, State, start_of

FOLDER = Path("/dev/shm")
STATE_AT = 7  # byte of the header
RECENT = 0.01  # seconds for which a list of all segments serves, where much room is left
YOUNG = 60.0  # seconds that a segment may be without a header: its writer is about to lock it
OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def own_prefix() -> str:
    """What the names of this user's segments begin with."""
    return f"u{os.geteuid()}_{PREFIX}"


class Shm:
    """Objects in shared memory.

    Args:
        layout: What objects hold.
        limit: Bytes that all segments of this user may have; the least recently used ready ones go first.
        deadline: Seconds that a reader waits at most for an object that is being written.
        lease: Seconds that what this process offers stays for its reader; None for as long as there is room.
        clock: Seconds since 1970.

    Raises:
        TransferError: This machine has no shared memory.
    """

    def __init__(
        self,
        layout: Layout,
        limit: int,
        deadline: float,
        lease: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not FOLDER.is_dir() or limit < HEADER.size:
            raise TransferError(
                f"shm: expected {FOLDER} and room for an object, found "
                f"{'no such folder' if not FOLDER.is_dir() else f'--shm-bytes {limit:,}'}"
            )
        self._layout, self._limit, self._deadline = layout, limit, deadline
        self.counts: Counter[str] = Counter()
        self.removed: list[str] = []
        self._written: dict[str, tuple[int, int]] = {}  # our segments' inodes and times by name
        self._known = -math.inf, 0  # when all segments were listed, and their bytes with those of ours since then
        self._leases = Leases(lease, lambda transfer: FOLDER / f"{own_prefix()}{transfer}.lease", clock)

    def create(self, key: Key) -> Writer | None:
        """A segment for an object; its bytes are reserved, so that writing cannot meet a full memory."""
        path, size = _path(key), HEADER.size + self._layout.nbytes(key)
        if self.look(key) is Presence.READY:
            self.counts["exists"] += 1
            return None
        _sweep(path)  # dead, or its writer is
        try:
            place = os.open(path, OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            self.counts["exists"] += 1
            return None
        try:
            fcntl.flock(place, fcntl.LOCK_EX)
            os.truncate(place, size)  # from now on others see what it takes
            if size > self._limit or not self._make_room(size):
                raise OSError("over the limit")
            os.posix_fallocate(place, 0, size)
            memory = mmap.mmap(place, size)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(place)
            self.counts["full"] += 1
            return None

        def done(whole: bool) -> bool:
            memory.close()
            if whole:
                self.counts["stored"] += 1
                os.utime(place)
                status = os.fstat(place)
                self._written[key.name] = status.st_ino, status.st_mtime_ns
            else:
                self.counts["abandoned"] += 1
                path.unlink(missing_ok=True)
            os.close(place)  # and with it the lock
            return whole

        return Writer(key, self._layout, np.frombuffer(memory, np.uint8), done)

    def offer(self, transfer: str, keys: Sequence[Key]) -> None:
        """Promises that they stay for the lease; nobody has to ask, since objects are found by their names."""
        self._leases.add(transfer, (key.name for key in keys))

    def renew(self, source: Source, until: float) -> str:
        """Sets the time of the lease's file."""
        return self._leases.renew(source.transfer)

    def sent(self) -> set[str]:
        """The transfers whose leases are over, or all without one; what this process wrote for them alone is removed.

        What a reader has taken counts as ``pulled``, the rest as ``expired``.
        """
        over, names = self._leases.take_over()
        for name in names & self._written.keys():
            (inode, at), path = self._written.pop(name), FOLDER / f"u{os.geteuid()}_{name}"
            with suppress(FileNotFoundError):
                status = path.stat()
                if status.st_ino == inode:
                    self.counts["pulled" if status.st_mtime_ns > at else "expired"] += 1
                    path.unlink()
        return over

    def look(self, key: Key) -> Presence:
        """Whether a segment is ready, or its writer at work, for no longer than the deadline."""
        with _opened(_path(key)) as place:
            if place is None:
                return Presence.ABSENT
            header = _header(place)
            if header is not None and header.state == State.READY:
                return Presence.READY
            if header is not None and header.state == State.DEAD:
                return Presence.ABSENT
            young = header is None or time.time_ns() - header.created < self._deadline * 1e9
            return Presence.WRITING if young and not _locked(place, fcntl.LOCK_SH) else Presence.ABSENT

    def fetch(self, keys: Sequence[Key], source: Source | None, until: float) -> list[np.ndarray | None]:
        """Copies of the objects; one that is being written is waited for, until the deadline."""
        until = min(until, time.monotonic() + self._deadline)
        if not keys and source is not None:
            self._leases.give_back(source.transfer)
        found = []
        for key in keys:
            payload, reason = self._read(key, until)
            self.counts[reason] += 1
            found.append(payload)
        return found

    def close(self) -> None:
        """Removes the segments that this process wrote, unless others took their names."""
        for name, (inode, _) in self._written.items():
            path = FOLDER / f"u{os.geteuid()}_{name}"
            with suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()
        self._written.clear()
        self._leases.close()

    def _read(self, key: Key, until: float) -> tuple[np.ndarray | None, str]:
        while True:
            with _opened(_path(key)) as place:
                if place is None:
                    return None, "miss"
                if _locked(place, fcntl.LOCK_SH) and not _untouched(place):
                    return self._copy(place, key)
            if time.monotonic() >= until:
                return None, "timeout"
            time.sleep(PAUSE)

    def _copy(self, place: int, key: Key) -> tuple[np.ndarray | None, str]:
        """The payload of a segment that nobody writes; or the reason why there is none."""
        header = _header(place)
        if header is None or header.state == State.DEAD:
            reason = "corrupt" if header is None else "miss"
        elif header.state == State.WRITING:
            reason = "writer_gone"
        else:
            reason = header.fault(key, self._layout) or "corrupt"
            if reason == "corrupt" and (payload := _payload(place, key, header, self._layout)) is not None:
                os.utime(place)  # used last
                return payload, "hit"
        if reason != "other_state" and _same(place, _path(key)):
            os.pwrite(place, bytes([State.DEAD]), STATE_AT)  # for those who have it open
            _path(key).unlink(missing_ok=True)
        return None, reason

    def _make_room(self, size: int) -> bool:
        """Evicts what nobody uses until all segments fit; whether they do.

        Segments are listed once for all objects of a state, not for each: there may be thousands. Where half of the
        limit is free, others cannot fill it in the meantime.
        """
        at, total = self._known
        self._known = at, total + size
        if time.monotonic() - at < RECENT and total + size <= self._limit // 2:
            return True
        while True:
            found = _segments()
            self._known = time.monotonic(), sum(status.st_size for _, status in found)
            if self._known[1] <= self._limit:
                return True
            for path, _ in sorted(found, key=lambda each: each[1].st_mtime_ns):
                if _evict(path):
                    self.counts["evicted"] += 1
                    self.removed.append(path.name.removeprefix(f"u{os.geteuid()}_"))
                    break
            else:
                return False


def collect(*, dry_run: bool) -> Iterator[tuple[str, int, str]]:
    """Removes this user's segments that are dead or orphaned; gives name, bytes and reason of each.

    Orphaned is one whose writer is gone: what it wrote ends with it. What a process reads at the moment stays.
    """
    for path, status in _segments():
        with _opened(path) as place:
            if place is None or not _locked(place, fcntl.LOCK_EX):
                continue
            header = _header(place)
            if header is None:
                if _untouched(place) and time.time() - status.st_mtime < YOUNG:
                    continue
                reason = "no header"
            elif header.state == State.DEAD:
                reason = "dead"
            elif header.state == State.WRITING or start_of(header.pid) != header.started:
                reason = f"its writer, process {header.pid}, is gone"
            else:
                continue
            if not dry_run and _same(place, path):
                path.unlink(missing_ok=True)
            yield path.name, status.st_size, reason


def _path(key: Key) -> Path:
    return FOLDER / f"u{os.geteuid()}_{key.name}"


def _segments() -> list[tuple[Path, os.stat_result]]:
    found, prefix, user = [], own_prefix(), os.geteuid()
    with os.scandir(FOLDER) as entries:  # a tenth of the time of paths
        for entry in entries:
            with suppress(FileNotFoundError):
                if not entry.name.startswith(prefix):
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == user:
                    found.append((Path(entry.path), status))
    return found


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A descriptor of a segment; None where there is none, or where another user made it."""
    try:
        place = os.open(path, OPEN)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(place)
        yield place if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else None
    finally:
        os.close(place)


def _header(place: int) -> Header | None:
    try:
        return Header.parse(os.pread(place, HEADER.size, 0))
    except ValueError:
        return None


def _payload(place: int, key: Key, header: Header, layout: Layout) -> np.ndarray | None:
    """A copy of the payload, if it is whole: the header's length counts, not the segment's."""
    if header.fault(key, layout) is not None:
        return None
    payload = np.empty(header.length, np.uint8)
    at = 0
    while at < header.length:
        count = os.preadv(place, [payload[at:]], HEADER.size + at)
        if not count:
            return None
        at += count
    return payload if header.crc(payload) == header.crc32 else None


def _untouched(place: int) -> bool:
    """Whether the writer has not written its header yet."""
    return not any(os.pread(place, HEADER.size, 0))


def _locked(place: int, how: int) -> bool:
    """Takes a lock until the descriptor is closed, if nobody's lock is in the way."""
    try:
        fcntl.flock(place, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(place: int, path: Path) -> bool:
    """Whether the name still is that of the open segment."""
    try:
        return os.fstat(place).st_ino == path.lstat().st_ino
    except FileNotFoundError:
        return False


def _sweep(path: Path) -> None:
    """Removes a segment that is dead or whose writer is gone."""
    with _opened(path) as place:
        if place is None or not _locked(place, fcntl.LOCK_EX) or _untouched(place) or not _same(place, path):
            return
        header = _header(place)
        if header is None or header.state != State.READY:  # it may have become ready a moment ago
            path.unlink(missing_ok=True)


def _evict(path: Path) -> bool:
    """Removes a segment that nobody writes or reads."""
    with _opened(path) as place:
        if place is None or not _locked(place, fcntl.LOCK_EX) or _untouched(place) or not _same(place, path):
            return False
        path.unlink(missing_ok=True)
        return True
