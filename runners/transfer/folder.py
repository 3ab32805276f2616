"""Objects in a folder, one safetensors file each: they outlive their processes, and any safetensors reader opens them.

Tensors are called ``kda.recurrent.0`` and so on, after their layers, and lie in the order of the payload; the object's
header stands in the file's metadata, in hexadecimal. A file is there whole or not at all, by rename.
"""

import fcntl
import json
import math
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ling3export.artifacts.files import replacing
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.reading import opened
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.transfer.backend import Leases, Presence, Source, TransferError, Writer
from ling3export.runners.transfer.objects import HEADER, PREFIX, Header, Key, Layout, State, start_of

LENGTH = struct.Struct("<Q")
LARGEST_HEAD = 1 << 20  # bytes of a file before its tensors
YOUNG = 60.0  # seconds that a file may be unfinished though no process of this machine writes it: another one may
SUFFIX, LEASE = ".safetensors", ".lease"
METADATA = "ling3"


class Folder:
    """Objects in a folder, which is made if it is not there, for this user alone.

    Args:
        layout: What objects hold.
        folder: Where.
        lease: Seconds that what this process offers stays for its reader; None for ever.
        clock: Seconds since 1970.

    Raises:
        TransferError: It cannot be made, or is something else.
    """

    def __init__(
        self, layout: Layout, folder: Path, lease: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise TransferError(f"file: expected a folder, found {error.strerror}, at {folder}") from error
        self._layout, self._folder = layout, folder
        self.counts: Counter[str] = Counter()
        self.removed: list[str] = []
        self._written: set[str] = set()
        self._leases = Leases(lease, lambda transfer: folder / f"{PREFIX}{transfer}{LEASE}", clock)

    def create(self, key: Key) -> Writer | None:
        """An object in memory, which becomes a file when it is whole."""
        if self.look(key) is Presence.READY:
            self.counts["exists"] += 1
            return None
        memory = np.empty(HEADER.size + self._layout.nbytes(key), np.uint8)

        def done(whole: bool) -> bool:
            if whole:
                try:
                    self._store(key, memory)
                except ArtifactError:
                    self.counts["full"] += 1
                    return False
                self._written.add(key.name)
            self.counts["stored" if whole else "abandoned"] += 1
            return whole

        return Writer(key, self._layout, memory, done)

    def offer(self, transfer: str, keys: Sequence[Key]) -> None:
        """Promises that they stay for the lease; nobody has to ask, since objects are found by their names."""
        self._leases.add(transfer, (key.name for key in keys))

    def renew(self, source: Source, until: float) -> str:
        """Sets the time of the lease's file."""
        return self._leases.renew(source.transfer)

    def sent(self) -> set[str]:
        """The transfers whose leases are over, or all without one; files written here for them alone are removed."""
        over, names = self._leases.take_over()
        for name in names & self._written:
            self._written.remove(name)
            (self._folder / f"{name}{SUFFIX}").unlink(missing_ok=True)
            self.counts["released"] += 1
        return over

    def touch(self, keys: Sequence[Key]) -> list[Key]:
        """Notes that files were used now, the first one last; gives those that are not there."""
        gone = []
        for key in reversed(keys):
            try:
                os.utime(self._path(key))
            except OSError:
                gone.append(key)
        return gone

    def trim(self, most: int) -> None:
        """Removes the files that were not used for longest until the others have ``most`` bytes; tells ``removed``.

        Who reads one of them meanwhile has all of it: it is open.
        """
        found = []
        for entry in os.scandir(self._folder):
            if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
        total = sum(size for *_, size in found)
        for _, name, size in sorted(found):
            if total <= most:
                return
            (self._folder / name).unlink(missing_ok=True)
            total -= size
            self.counts["evicted"] += 1
            self.removed.append(name.removesuffix(SUFFIX))

    def look(self, key: Key) -> Presence:
        """Whether there is a file of the object's name."""
        return Presence.READY if self._path(key).is_file() else Presence.ABSENT

    def fetch(self, keys: Sequence[Key], source: Source | None, until: float) -> list[np.ndarray | None]:
        """The objects' payloads; a damaged file is removed."""
        if not keys and source is not None:
            self._leases.give_back(source.transfer)
        found = []
        for key in keys:
            payload, reason = self._read(key) if time.monotonic() < until else (None, "timeout")
            self.counts[reason] += 1
            if reason == "corrupt":
                self._path(key).unlink(missing_ok=True)
            found.append(payload)
        return found

    def close(self) -> None:
        """Ends what was promised; files stay."""
        self._leases.close()

    def _path(self, key: Key) -> Path:
        return self._folder / f"{key.name}{SUFFIX}"

    def _store(self, key: Key, memory: np.ndarray) -> None:
        head = _head(self._layout, key, memory[: HEADER.size].tobytes())
        with replacing(self._path(key), len(head) + memory.nbytes) as file:
            file.write(head)
            file.write(memory[HEADER.size :].data)

    def _read(self, key: Key) -> tuple[np.ndarray | None, str]:
        try:
            with opened(self._folder, self._path(key).name) as file:
                header = read_header(file.read(LENGTH.size), file.read)
                fault = header.fault(key, self._layout)
                if fault is not None:
                    return None, fault
                file.seek(0)
                head = _head(self._layout, key, header.pack())
                payload = np.empty(header.length, np.uint8)
                whole = file.read(len(head)) == head and file.readinto(payload.data) == header.length
                whole = whole and header.state == State.READY and not file.read(1)
                return (payload, "hit") if whole and header.crc(payload) == header.crc32 else (None, "corrupt")
        except FileNotFoundError:
            return None, "miss"
        except (OSError, ValueError):
            return None, "corrupt"


def collect(folder: Path, *, dry_run: bool) -> Iterator[tuple[str, int, str]]:
    """Removes files that are no whole objects, and what killed writers left; gives name, bytes and reason of each."""
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
        try:
            with opened(folder, path.name) as file:
                header = read_header(file.read(LENGTH.size), file.read)
                reason = "" if header.state == State.READY else "dead"
        except (OSError, ValueError) as error:
            reason = f"no object: {error.strerror if isinstance(error, OSError) else error}"
        if reason:
            yield from _removed(path, reason, dry_run)
    yield from left_behind(folder, dry_run=dry_run)


def left_behind(folder: Path, *, dry_run: bool) -> Iterator[tuple[str, int, str]]:
    """Removes what killed writers left; gives name, bytes and reason of each."""
    for path in sorted(folder.glob(f".{PREFIX}*{SUFFIX}.partial-*")):
        pid = path.name.rpartition("partial-")[2].partition("-")[0]
        if pid.isdigit() and start_of(int(pid)) is None and time.time() - path.stat().st_mtime > YOUNG:
            yield from _removed(path, f"its writer, process {pid}, is gone", dry_run)
    for path in sorted(folder.glob(f"{PREFIX}*{LEASE}")):
        with suppress(OSError), opened(folder, path.name) as file:
            old = time.time() - os.fstat(file.fileno()).st_mtime > YOUNG
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who offers it has a lock
            if old:
                yield from _removed(path, "a lease of a process that is gone", dry_run)


def read_header(length: bytes, read: Callable[[int], bytes]) -> Header:
    """The header in a file's metadata.

    Raises:
        ValueError: There is none; the text follows "found".
    """
    found = safetensors_metadata(length, read, LARGEST_HEAD)
    text = found.get(METADATA)
    if not isinstance(text, str):
        raise ValueError("a file without the header of an object")
    return Header.parse(bytes.fromhex(text))


def safetensors_metadata(length: bytes, read: Callable[[int], bytes], largest: int) -> dict[str, Any]:
    """The metadata in the header of a safetensors file: the names that it has are not checked, nor is the rest.

    Args:
        length: The first eight bytes.
        read: Gives the next bytes.
        largest: Most bytes of the header.

    Raises:
        ValueError: There is none; the text follows "found".
    """
    if len(length) != LENGTH.size or (size := LENGTH.unpack(length)[0]) > largest:
        raise ValueError("no safetensors file")
    tree = parse_json(read(size), largest)
    found = tree.get("__metadata__") if isinstance(tree, dict) else None
    return found if isinstance(found, dict) else {}


def safetensors_head(tensors: Iterable[tuple[str, Sequence[int], str]], metadata: Mapping[str, str]) -> bytes:
    """What stands before the tensors of a safetensors file, of a length that is a multiple of 8.

    Args:
        tensors: Name, shape and dtype of each, in the order of their bytes.
        metadata: What else is to stand there.
    """
    tree: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, shape, dtype in tensors:
        size = BY_NAME[dtype].nbytes * math.prod(shape)
        tree[name] = {"dtype": BY_NAME[dtype].code, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return LENGTH.pack(len(text)) + text


def _head(layout: Layout, key: Key, header: bytes) -> bytes:
    """What stands before an object's payload."""
    tensors = (
        (f"{piece.name}.{layer}", layout.shape(piece, key.heads, key.tokens), piece.dtype)
        for layer in range(layout.layers[key.kind])
        for piece in layout.of(key.kind)
    )
    return safetensors_head(tensors, {METADATA: header.hex()})


def _removed(path: Path, reason: str, dry_run: bool) -> Iterator[tuple[str, int, str]]:
    size = path.lstat().st_size
    if not dry_run:
        path.unlink(missing_ok=True)
    yield path.name, size, reason
