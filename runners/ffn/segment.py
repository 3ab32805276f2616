"""One FFN worker's segment of shared memory: its schedule context, who is there, and the buffers both ways.

The segment is a file of ``/dev/shm``. It begins with the context; behind it stand what the worker computes and how it
ended. Each process that takes part holds a lock on a byte of the file, which the kernel takes back when the process
dies: so a death is seen without a heartbeat. The name is removed once all sessions came, or by a process that finds the
worker dead.
"""

import fcntl
import mmap
import os
import re
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ling3export.artifacts.files import create_unnamed, give_name, open_lock, remove
from ling3export.foundation.errors import ArtifactError, Ling3Error
from ling3export.runners.ffn.context import ALIGNMENT, HEAD, SIZE, ContextError, ScheduleContext, get
from ling3export.runners.ffn.schedule import TokenBuffers

FOLDER, PREFIX = Path("/dev/shm"), "ling3-ffn-"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAGIC, VERSION = b"ling3ffn", 2
GREETING = struct.Struct("<8s4I64s")  # magic, version, share, shares, whether synchronous, the artifact's digest
SAID, SAID_BYTES = SIZE + 256, 512  # where the worker says why it ended
SESSIONS = 2 * SIZE  # int32 [A]: whether each session is there
NEVER, HERE, LEFT = range(3)
WORKER = 0  # the worker's byte; session a has the byte 1 + a
LOCK = "hhqqi4x"  # struct flock of 64-bit Linux
LOOK = 0.05  # seconds between two looks at who is there


class FfnGone(Ling3Error):
    """The FFN worker or an attention session ended while the other side needed it."""


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker computes.

    Attributes:
        index: Which share of the experts, from 0: those of number e with ``e * count // experts == index``.
        count: How many workers share them.
        artifact: The digest of the manifest that both sides run.
        synchronous: Whether it takes a micro batch from all sessions at once, each micro batch in turn.
    """

    index: int
    count: int
    artifact: str
    synchronous: bool = False


def path_of(name: str) -> Path:
    """The file of a segment.

    Raises:
        ContextError: The name could be another file's.
    """
    if NAME.fullmatch(name) is None:
        raise ContextError(f"--context: expected a name of letters, digits, `.`, `_` and `-`, found `{name[:40]}`")
    return FOLDER / (PREFIX + name)


def aligned(size: int) -> int:
    """``size`` rounded up, so that every pair's data begins at a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def layout(
    sessions: int, micro_batches: int, tokens: int, experts_a_token: int, experts: int, there: np.dtype, back: np.dtype
) -> ScheduleContext:
    """The context of a segment whose pairs have such rows on their way to the experts, and back."""
    pairs, strides = (
        sessions * micro_batches * tokens * experts_a_token,
        (aligned(there.itemsize), aligned(back.itemsize)),
    )
    info = 4 * sessions * micro_batches * (HEAD + tokens * experts_a_token)
    sizes = [4 * sessions, info, pairs * strides[0], 4 * sessions * micro_batches * HEAD, pairs * strides[1]]
    places = [SESSIONS]
    for size in sizes:
        places.append(places[-1] + aligned(size))
    return ScheduleContext(
        session_num=sessions,
        micro_batch_num=micro_batches,
        micro_batch_size=tokens,
        selected_expert_num=experts_a_token,
        expert_num=experts,
        attn_to_ffn_token_size=strides[0],
        ffn_to_attn_token_size=strides[1],
        run_flag=1,
        attention_micro_batch_id=micro_batches - 1,
        ffn_token_info_buf=places[1],
        ffn_token_info_size=sizes[1],
        ffn_token_data_buf=places[2],
        ffn_token_data_size=sizes[2],
        attention_token_info_buf=places[3],
        attention_token_info_size=sizes[3],
        attention_token_data_buf=places[4],
        attention_token_data_size=sizes[4],
    )


class Segment:
    """A segment that is open, as its worker or as one of its sessions has it.

    Args:
        name: What ``--context`` and ``--ffn`` call it.
        descriptor: Its open file, which this takes over.
        there: The numbers of a pair of a token and an expert on their way to the experts: a dtype with a shape.
        back: Those that come back.

    Attributes:
        buffers: What sessions publish.
        worker: What the worker computes.
        states: int32 ``[A]``: NEVER, HERE or LEFT.
        back_info: int32 ``[A, M, 2]``: flag and layer of what the worker gave back.
        back_data: uint8 ``[A, M, BS, K1, bytes]``.

    Raises:
        ContextError: It is not a segment of this version, or not as large as its context says.
    """

    def __init__(self, name: str, descriptor: int, there: np.dtype, back: np.dtype) -> None:
        self.name, self._descriptor = name, descriptor
        size = os.fstat(descriptor).st_size
        where = f"segment `{name}`"
        if size < SESSIONS:
            raise ContextError(f"{where}: expected at least {SESSIONS} bytes, found {size}")
        self.memory = memoryview(mmap.mmap(descriptor, size))
        magic, version, index, count, synchronous, digest = GREETING.unpack_from(self.memory, SIZE)
        if (magic, version) != (MAGIC, VERSION):
            found = f"version {version}" if magic == MAGIC else "another"
            raise ContextError(f"{where}: expected one of an FFN worker, version {VERSION}, found {found}")
        self.worker = WorkerInfo(index, count, digest.decode("ascii", "replace"), bool(synchronous))
        self.buffers = TokenBuffers(self.memory, there.itemsize)
        context = self.context = self.buffers.context
        if context.ffn_to_attn_token_size % ALIGNMENT or context.ffn_to_attn_token_size < back.itemsize:
            expected = f"a multiple of {ALIGNMENT} of at least {back.itemsize} bytes"
            raise ContextError(
                f"context `ffn_to_attn_token_size`: expected {expected}, found {context.ffn_to_attn_token_size}"
            )
        self.states = self.buffers.view(SESSIONS, np.int32, (context.session_num,))
        self.back_info = self.buffers.view(context.attention_token_info_buf, np.int32, (*context.info_shape[:2], HEAD))
        self.back_data = self.buffers.view(
            context.attention_token_data_buf, np.uint8, (*context.data_shape[:4], context.ffn_to_attn_token_size)
        )

    @classmethod
    def create(
        cls, name: str, context: ScheduleContext, share: WorkerInfo, there: np.dtype, back: np.dtype
    ) -> "Segment":
        """Makes the segment of a worker, which holds its lock. Names of workers that are dead are removed.

        Raises:
            ContextError: Another worker has the name.
        """
        path = path_of(name)
        for other in FOLDER.glob(f"{PREFIX}*"):
            _remove_dead(other)
        size = context.attention_token_data_buf + context.attention_token_data_size
        descriptor = create_unnamed(FOLDER)  # without a name until it is whole
        greeting = GREETING.pack(MAGIC, VERSION, share.index, share.count, share.synchronous, share.artifact.encode())
        try:
            context.check(there.itemsize, size)
            _reserve(descriptor, size)
            os.pwrite(descriptor, context.build() + greeting, 0)
            segment = cls(name, descriptor, there, back)
            segment.buffers.clear()
            segment.lock(WORKER)
            while not give_name(descriptor, path):
                if not _remove_dead(path):
                    raise ContextError(f"--context: expected a free name, found `{name}` taken", "choose another")
        except BaseException:
            os.close(descriptor)
            raise
        return segment

    @classmethod
    def attach(cls, name: str, there: np.dtype, back: np.dtype, wait: float) -> "Segment":
        """Opens the segment of a worker that lives; waits for one.

        Raises:
            FfnGone: None came in time.
            ContextError: What has the name is not such a segment.
        """
        path, deadline = path_of(name), time.monotonic() + wait
        while True:
            if (descriptor := _opened(path)) is not None:
                if _holder(descriptor, WORKER):
                    try:
                        return cls(name, descriptor, there, back)
                    except BaseException:
                        os.close(descriptor)
                        raise
                os.close(descriptor)
                _remove_dead(path)
            if time.monotonic() > deadline:
                raise FfnGone(
                    f"--ffn `{name}`: expected an FFN worker within {wait:g} s, found none",
                    f"start it: ling3-runner ffn-worker ARTIFACT --context {name}",
                )
            time.sleep(LOOK)

    def lock(self, byte: int) -> bool:
        """Takes the lock of a byte; False where another process has it."""
        try:
            _locking(self._descriptor, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, byte: int) -> None:
        """Gives the lock of a byte back."""
        _locking(self._descriptor, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def held(self, byte: int) -> bool:
        """Whether another process holds the lock of a byte, and so lives."""
        return _holder(self._descriptor, byte)

    def claim(self, session: int | None = None) -> int:
        """Takes part as a session, the first free one unless it is named.

        Raises:
            ContextError: All are taken, or that one is.
        """
        count = self.context.session_num
        for number in range(count) if session is None else (session,):
            if number < count and self.states[number] == NEVER and self.lock(1 + number):
                self.states[number] = HERE
                return number
        wanted = "a free session" if session is None else f"session {session} to be free"
        raise ContextError(
            f"--ffn `{self.name}`: expected {wanted} of {count}, found it taken",
            "ffn-worker --sessions says how many there are",
        )

    def leave(self, session: int) -> None:
        """Ends a session in order."""
        self.states[session] = LEFT
        self.unlock(1 + session)

    def say(self, text: str) -> None:
        """Writes down for the sessions why the worker ends."""
        data = text.encode()[: SAID_BYTES - 1]
        self.memory[SAID : SAID + SAID_BYTES] = data.ljust(SAID_BYTES, b"\0")

    def said(self) -> str:
        """The reason that the worker wrote down when it ended; empty for none."""
        return bytes(self.memory[SAID : SAID + SAID_BYTES]).partition(b"\0")[0].decode(errors="replace")

    def check_worker(self) -> None:
        """Passes while the worker lives and runs; sessions that wait call it.

        Raises:
            FfnGone: The worker is dead, or has ended; the name of a dead one's segment is removed.
        """
        if not self.held(WORKER):
            if get(self.memory, "run_flag"):
                self.drop_name()
                raise FfnGone(f"ffn worker `{self.name}`: expected it to answer, found its process gone")
            raise FfnGone(
                f"ffn worker `{self.name}`: expected it to answer, found it ended: {self.said() or 'in order'}"
            )
        if not get(self.memory, "run_flag"):
            raise FfnGone(
                f"ffn worker `{self.name}`: expected it to answer, found it stopped: "
                f"{self.said() or 'its run flag is 0'}"
            )

    def drop_name(self) -> None:
        """Removes the segment's name, if it is still this one's; processes that have it open keep it."""
        remove(path_of(self.name), held=self._descriptor)

    def close(self) -> None:
        """Gives every lock back; the memory goes with the last view of it."""
        _locking(self._descriptor, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, 0)
        os.close(self._descriptor)


def _reserve(descriptor: int, size: int) -> None:
    """Takes the memory of a segment now: where it is short, the first write to it would end the process."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise ContextError(
            f"segment: expected {size:,} bytes of free memory in {FOLDER}, found: {error.strerror}",
            "take fewer --sessions or --micro-batches",
        ) from error


def _opened(path: Path) -> int | None:
    """The open file of a name, None where there is none.

    Raises:
        ContextError: It is no file, or another user's, who would read the tokens and answer what he likes.
    """
    try:
        descriptor = open_lock(path, os.O_RDWR)
    except ArtifactError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise ContextError(f"segment `{path.name}`: expected a file of this user: {error.message}") from error
    if (owner := os.fstat(descriptor).st_uid) != os.geteuid():
        os.close(descriptor)
        raise ContextError(
            f"segment `{path.name}`: expected a file of this user, {os.geteuid()}, found one of user {owner}"
        )
    return descriptor


def _remove_dead(path: Path) -> bool:
    """Removes the name of a segment whose worker is dead; False where it lives, or the file is another user's."""
    try:
        if (descriptor := _opened(path)) is None:
            return True
    except ContextError:
        return False
    try:
        if _holder(descriptor, WORKER):
            return False
        remove(path, held=descriptor)
        return True
    finally:
        os.close(descriptor)


def _holder(descriptor: int, byte: int) -> bool:
    """Whether another open file holds a byte."""
    return _locking(descriptor, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte) != fcntl.F_UNLCK


def _locking(descriptor: int, command: int, kind: int, byte: int, count: int = 1) -> int:
    """Asks the kernel for locks on so many bytes, 0 for all from the first one on; the kind that it gives back."""
    return int(struct.unpack(LOCK, fcntl.fcntl(descriptor, command, struct.pack(LOCK, kind, 0, byte, count, 0)))[0])
