"""What every backend does: it takes objects that are written layer by layer, and gives whole ones that were checked.

A reader never gets bytes whose header or crc32 is wrong, and never waits longer than until its deadline. Whatever goes
wrong is a miss with a reason, which is counted.
"""

import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.transfer.objects import HEADER, Header, Key, Layout, State

DEADLINE = 30.0  # seconds that a reader waits for an object that is being written
PAUSE = 0.002  # seconds between two looks at it


class TransferError(Ling3Error):
    """A backend cannot start, or an object was written wrongly."""


class Presence(Enum):
    """Whether an object is there."""

    ABSENT = "absent"
    WRITING = "writing"
    READY = "ready"


class Source(NamedTuple):
    """Where a part of a transfer can be pulled from, once.

    Attributes:
        host: Name or address of the machine.
        port: Its port.
        transfer: The transfer's id, 32 hexadecimal digits.
        part: Which of its pulls this is: each of several ranks pulls once.
        parts: How many there are.
    """

    host: str
    port: int
    transfer: str
    part: int = 0
    parts: int = 1


class Backend(Protocol):
    """A way for objects from one process to another.

    Attributes:
        counts: What happened how often, by name.
        removed: Names of objects that were evicted since somebody emptied the list.
    """

    counts: Counter[str]
    removed: list[str]

    def create(self, key: Key) -> "Writer | None":
        """Begins an object; None where it is there already, or where it finds no room (``exists``, ``full``)."""

    def offer(self, transfer: str, keys: Sequence[Key]) -> None:
        """Lets another process take written objects under a transfer's id."""

    def look(self, key: Key) -> Presence:
        """Whether an object is there without a transfer's id; nothing changes."""

    def fetch(self, keys: Sequence[Key], source: Source | None, until: float) -> list[np.ndarray | None]:
        """The payloads [bytes] uint8 of whole objects, None for each that is missed; by ``until`` at the latest.

        Args:
            keys: What is wanted; none where a transfer is refused, which frees it at once.
            source: Where from; where objects are found by their names, it counts for nothing.
            until: On the monotonic clock.
        """

    def renew(self, source: Source, until: float) -> str:
        """Has whoever offers a transfer keep it for another lease from now on: ``renewed``, or why it does not."""

    def sent(self) -> set[str]:
        """The transfers that nobody will ask for any more, since the last call."""

    def close(self) -> None:
        """Ends what this process offers."""


class Leases:
    """What was promised under which transfer's id, and for how long, where objects are found by their names.

    Each lease has an empty file: its time is when the lease began, so whoever waits for the transfer renews it by
    setting the time, and gives it up by removing the file. The lock of those who offer it tells a file of a process
    that runs from one that was left behind.

    Args:
        seconds: How long; None where objects stay, promised or not.
        file: Where the file of a transfer is.
        clock: Seconds since 1970.
    """

    def __init__(
        self, seconds: float | None, file: Callable[[str], Path], clock: Callable[[], float] = time.time
    ) -> None:
        self._seconds, self._file, self._clock = seconds, file, clock
        self._held: dict[str, tuple[int | None, frozenset[str]]] = {}  # descriptors and names

    def add(self, transfer: str, names: Iterable[str]) -> None:
        """Promises objects.

        Raises:
            OSError: The file cannot be made.
        """
        place = None
        if self._seconds is not None:
            place = os.open(self._file(transfer), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(place, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.utime(place, (self._clock(),) * 2)
        self._held[transfer] = place, frozenset(names)

    def renew(self, transfer: str) -> str:
        """Keeps another process's promise alive; ``refused`` where there is none any more."""
        try:
            os.utime(self._file(transfer), (self._clock(),) * 2, follow_symlinks=False)
        except OSError:
            return "refused"
        return "renewed"

    def give_back(self, transfer: str) -> None:
        """Says that nobody wants what another process promised."""
        self._file(transfer).unlink(missing_ok=True)

    def take_over(self) -> tuple[set[str], set[str]]:
        """The transfers that are over since the last call, and the names that none is left for."""
        over = {transfer for transfer, (place, _) in self._held.items() if self._end_of(place) <= self._clock()}
        named = {name for transfer in over for name in self._end(transfer)}
        free = named.difference(*(names for _, names in self._held.values()))
        return over, free if self._seconds is not None else set()

    def close(self) -> None:
        """Ends every promise."""
        for transfer in [*self._held]:
            self._end(transfer)

    def _end_of(self, place: int | None) -> float:
        if place is None or self._seconds is None or not (status := os.fstat(place)).st_nlink:
            return 0.0
        return status.st_mtime + self._seconds

    def _end(self, transfer: str) -> frozenset[str]:
        place, names = self._held.pop(transfer)
        if place is not None:
            self._file(transfer).unlink(missing_ok=True)
            os.close(place)
        return names


class Writer:
    """An object that is being written into ``memory``, by one process.

    Args:
        key: Its name.
        layout: What it holds.
        memory: [128 + payload bytes] uint8.
        done: Called once, with whether the object is whole; tells whether others can have it.
    """

    def __init__(self, key: Key, layout: Layout, memory: np.ndarray, done: Callable[[bool], bool]) -> None:
        self.key, self._done = key, done
        self._memory, self._payload = memory, memory[HEADER.size :]
        self._arrays = layout.arrays(key, self._payload)
        self._header = Header.of(key, self._payload.nbytes)
        self._all = (1 << layout.layers[key.kind]) - 1
        self._put(self._header)

    def write(self, layer: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies one layer's arrays into their places.

        Raises:
            TransferError: The arrays are not those of the layout, or the layer is there already.
        """
        if {*arrays} != {*self._arrays} or self._header.layers >> layer & 1:
            names = ", ".join(sorted(self._arrays))
            raise TransferError(
                f"object {self.key.name}: expected {names} of a new layer, found layer {layer} of "
                f"{', '.join(sorted(arrays))}"
            )
        for name, array in arrays.items():
            self._arrays[name][layer] = array
        self._header = replace(self._header, layers=self._header.layers | 1 << layer)
        self._put(self._header)

    def finish(self) -> bool:
        """Makes the object ready, if all of its layers are there; else it is dead. Whether others can have it."""
        whole = self._header.layers == self._all
        if whole:
            self._header = replace(self._header, crc32=self._header.crc(self._payload))
            self._put(self._header)
        self._put(replace(self._header, state=State.READY if whole else State.DEAD))
        return self._release()(whole)

    def abandon(self) -> None:
        """Gives the object up."""
        self._put(replace(self._header, state=State.DEAD))
        self._release()(False)

    def _put(self, header: Header) -> None:
        self._memory[: HEADER.size] = np.frombuffer(header.pack(), np.uint8)

    def _release(self) -> Callable[[bool], bool]:
        """Lets go of the memory: a mapping cannot be closed while arrays lie in it."""
        self._arrays.clear()
        self._memory = self._payload = np.empty(0, np.uint8)
        return self._done
