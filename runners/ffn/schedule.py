"""What attention sessions publish in shared memory, and which of it an FFN worker computes next.

A session writes its data, then layer and expert ids, then the flag 1. The worker takes rows whose flag is set, then
masks the ids and clears the flag, so that a row is taken once. A row has one writer and one reader and its flag is
written last, which needs no lock where stores become visible in order (x86-64).
"""

import time
from dataclasses import dataclass

import numpy as np

from ling3export.foundation.dtypes import MASK
from ling3export.foundation.errors import Ling3Error
from ling3export.runners.ffn.context import HEAD, ContextError, ScheduleContext, get, put

FLAG, LAYER = 0, 1  # places in a row of the token info
LONGEST_NAP = 0.001  # seconds between two looks


class ScheduleTimeout(Ling3Error):
    """Sessions did not publish in time."""


@dataclass(frozen=True)
class Published:
    """One micro batch of the sessions that published it, to be computed: ``n`` rows.

    Attributes:
        micro_batch: Its number.
        session_ids: int ``[n]``.
        layer_ids: int32 ``[n]``.
        expert_ids: int32 ``[n, BS, K1]``.
    """

    micro_batch: int
    session_ids: np.ndarray
    layer_ids: np.ndarray
    expert_ids: np.ndarray

    def check(self, experts: int, layers: int) -> None:
        """Refuses layers that do not exist, and expert ids that are neither masked nor one of a layer's ``experts``.

        Raises:
            ContextError: Names the first.
        """
        for layer in self.layer_ids.tolist():
            if not 0 <= layer < layers:
                raise ContextError(f"layer ids: expected them below {layers}, found {layer}")
        for row, token, place in np.argwhere((self.expert_ids >= experts) & (self.expert_ids < MASK)):
            found = f"{self.expert_ids[row, token, place]} for token {token} of session {self.session_ids[row]}"
            raise ContextError(f"expert ids: expected them below {experts}, found {found}")


class TokenBuffers:
    """The buffers of one segment, which begins with its context.

    Args:
        memory: The segment, writable.
        row_bytes: Bytes of one pair's data, with its scale.

    Attributes:
        context: The context at the time when the buffers were opened.
        data: uint8 ``[A, M, BS, K1, HS]``, a view.

    Raises:
        ContextError: The context does not fit the segment.
    """

    def __init__(self, memory: memoryview, row_bytes: int = 1) -> None:
        self.context = context = ScheduleContext.parse(memory)
        context.check(row_bytes, len(memory))
        self._memory = memory
        self._info = self.view(context.ffn_token_info_buf, np.int32, context.info_shape)
        self.data = self.view(context.ffn_token_data_buf, np.uint8, context.data_shape)

    def view(self, start: int, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
        """An array of the segment.

        Raises:
            ContextError: It does not lie within.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if start % 4 or start + size > len(self._memory):
            where = f"within the {len(self._memory)} bytes of the segment"
            raise ContextError(f"context buffer: expected {size} bytes {where}, found them at {start}")
        return np.frombuffer(self._memory[start : start + size], dtype).reshape(shape)

    def clear(self) -> None:
        """Nothing is published: no flag is set, every expert id is masked."""
        self._info[:] = 0
        self._info[..., HEAD:] = MASK

    def published(self) -> np.ndarray:
        """Whether each session has published the micro batch whose turn it is: bool ``[A]``."""
        turn = get(self._memory, "polling_index") % self.context.micro_batch_num
        return np.asarray(self._info[:, turn, FLAG] == 1)

    @property
    def running(self) -> bool:
        """Whether the run flag is set."""
        return get(self._memory, "run_flag") != 0

    def stop(self) -> None:
        """Clears the run flag: the worker ends when it looks next."""
        put(self._memory, "run_flag", 0)

    def announce(self, session: int, micro_batch: int, layer: int, expert_ids: np.ndarray) -> None:
        """Publishes a micro batch whose data is in its place.

        Args:
            session: Its session.
            micro_batch: Which one.
            layer: The layer that the tokens are in.
            expert_ids: int32 ``[BS, K1]``.

        Raises:
            ContextError: What was published there before has not been taken.
        """
        info = self._info[session, micro_batch]
        if info[FLAG]:
            text = f"session {session}: expected micro batch {micro_batch} to be free, found it published"
            raise ContextError(text)
        info[LAYER] = layer
        info[HEAD:] = expert_ids.reshape(-1)
        info[FLAG] = 1

    def take(self, timeout: float, *, synchronous: bool = True, among: np.ndarray | None = None) -> Published | None:
        """Waits for a micro batch and takes it.

        Args:
            timeout: Seconds.
            synchronous: Whether all sessions are waited for, at the micro batch whose turn it is; otherwise the first
                micro batch from there on for which any session is ready is taken, with the sessions that are.
            among: The sessions that are waited for; all by default.

        Returns:
            What was published; None once the run flag is 0.

        Raises:
            ScheduleTimeout: Names the micro batch and the sessions that did not come.
        """
        deadline, nap = time.monotonic() + timeout, LONGEST_NAP / 64
        sessions, count = self._info.shape[:2]
        among = np.arange(sessions) if among is None else among
        while self.running:
            first = get(self._memory, "polling_index") % count
            for step in range(1 if synchronous else count):
                micro_batch = (first + step) % count
                ready = np.flatnonzero(self._info[:, micro_batch, FLAG] == 1)
                if len(ready) and (not synchronous or np.isin(among, ready).all()):
                    return self._taken(ready, micro_batch)
            if time.monotonic() > deadline:
                missing = among[~self.published()[among]].tolist()
                raise ScheduleTimeout(
                    f"micro batch {first}: expected sessions {missing} within {timeout:g} s, found nothing published",
                    "see whether their processes live; run_flag 0 ends a worker without an error",
                )
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)
        return None

    def _taken(self, ready: np.ndarray, micro_batch: int) -> Published:
        info = self._info[ready, micro_batch]
        self._info[ready, micro_batch, HEAD:] = MASK
        self._info[ready, micro_batch, FLAG] = 0
        put(self._memory, "polling_index", (micro_batch + 1) % self._info.shape[1])
        return Published(micro_batch, ready, info[:, LAYER], info[:, HEAD:].reshape(-1, *self.data.shape[2:4]))
