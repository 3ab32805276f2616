"""What attention processes and FFN workers send each other, named as in vLLM's AFD connector.

An attention process sends each pair of a token and an expert to the worker that has the expert, and gets back what the
expert made of it: ``send_attn_output`` → ``recv_attn_output`` → the experts → ``send_ffn_output`` →
``recv_ffn_output``. Between the first and the last it computes other micro batches.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ling3export.foundation.dtypes import MASK
from ling3export.runners.ffn import WAIT
from ling3export.runners.ffn.context import ContextError
from ling3export.runners.ffn.schedule import FLAG, LAYER, LONGEST_NAP, Published, ScheduleTimeout
from ling3export.runners.ffn.segment import HERE, LEFT, LOOK, NEVER, FfnGone, Segment


@dataclass
class Phases:
    """Seconds and counts of what one side did.

    Attributes:
        seconds: By phase: ``send_attn_output``, ``recv_ffn_output`` and so on, and the programs by their cells.
        calls: How often.
        sent: Bytes of token data that this side wrote for the other.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    def record(self) -> dict[str, Any]:
        """All of it as JSON."""
        seconds = {name: round(value, 4) for name, value in self.seconds.items()}
        return {"seconds": seconds, "calls": dict(self.calls), "bytes_sent": self.sent}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds a block to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started
            self.calls[phase] += 1


def owners(experts: int, workers: int) -> np.ndarray:
    """The worker that has each expert: int ``[experts]``."""
    return np.arange(experts) * workers // experts


class AttentionConnector:
    """An attention process's side: a session of every worker.

    Args:
        names: The workers' segments, in any order.
        artifact: The digest of the manifest that runs here.
        experts: Experts of a layer.
        there: What is sent of each pair.
        back: What comes back.
        wait: Seconds to wait for a worker to be there, and for each answer.

    Attributes:
        micro_batches: How many may be in flight.
        tokens: Tokens of a micro batch.
        synchronous: Whether the workers take each micro batch in turn, so that none may be left out.
        phases: What was done.

    Raises:
        FfnGone: A worker is not there.
        ContextError: The workers run something else, or are not all shares of the experts.
    """

    def __init__(
        self, names: Sequence[str], *, artifact: str, experts: int, there: np.dtype, back: np.dtype, wait: float = WAIT
    ) -> None:
        self.phases, self._wait, self._back = Phases(), wait, back
        self._segments: list[Segment] = []
        self._taken: list[Segment] = []  # those that this process has a session of
        self.session = -1
        try:
            self._segments = [Segment.attach(name, there, back, wait) for name in names]
            self._segments.sort(key=lambda segment: segment.worker.index)
            self._check(artifact)
            for segment in self._segments:
                self.session = segment.claim(None if self.session < 0 else self.session)
                self._taken.append(segment)
        except BaseException:
            self.close()
            raise
        context = self._segments[0].context
        self.micro_batches, self.tokens = context.micro_batch_num, context.micro_batch_size
        self.synchronous = self._segments[0].worker.synchronous
        self._owner = owners(experts, len(names))
        self._sent: dict[int, tuple[int, np.ndarray]] = {}  # by micro batch: its layer, and the worker of each pair

    def _check(self, artifact: str) -> None:
        found = [(segment.worker.index, segment.worker.count) for segment in self._segments]
        count = len(self._segments)
        if found != [(index, count) for index in range(count)]:
            said = ", ".join(f"{index}/{each}" for index, each in found)
            raise ContextError(
                f"--ffn: expected each share of {count} once, found {said}",
                "name every worker once; ffn-worker --share says which share it has",
            )
        for segment in self._segments:
            if segment.worker.artifact != artifact:
                raise ContextError(f"--ffn `{segment.name}`: expected a worker of this artifact, found one of another")
        kinds = {(each.context.data_shape, each.worker.synchronous) for each in self._segments}
        if len(kinds) > 1:
            raise ContextError(
                f"--ffn: expected workers of one size and schedule, found {len(kinds)}",
                "give them the same --sessions, --micro-batches, --micro-batch-size and --schedule",
            )

    def send_attn_output(self, micro_batch: int, layer: int, tokens: np.ndarray, expert_ids: np.ndarray) -> None:
        """Publishes a micro batch.

        Args:
            micro_batch: Which of those in flight.
            layer: Its layer, among those that have experts.
            tokens: ``[BS, width]``.
            expert_ids: int32 ``[BS, K1]``, MASK for no expert.
        """
        with self.phases.timed("send_attn_output"):
            live = expert_ids < MASK
            owner = np.where(live, self._owner[np.where(live, expert_ids, 0)], -1)
            self._sent[micro_batch] = layer, owner
            raw = np.ascontiguousarray(tokens).view(np.uint8).reshape(len(tokens), -1)
            for number, segment in enumerate(self._segments):
                mine = owner == number
                if self.synchronous or mine.any():
                    row, place = np.nonzero(mine)
                    segment.buffers.data[self.session, micro_batch, row, place, : raw.shape[1]] = raw[row]
                    self.phases.sent += raw.shape[1] * len(row)
                    ids = np.where(mine, expert_ids, MASK)
                    segment.buffers.announce(self.session, micro_batch, layer, ids)

    def recv_ffn_output(self, micro_batch: int) -> np.ndarray:
        """What the experts made of each pair: ``[BS, K1, width]``, zeros where there was none.

        Raises:
            FfnGone: A worker is dead or has ended.
            ScheduleTimeout: One lives and does not answer.
        """
        layer, owner = self._sent.pop(micro_batch)
        results = np.zeros(owner.shape, self._back)
        with self.phases.timed("recv_ffn_output"):
            for number, segment in enumerate(self._segments):
                mine = owner == number
                if self.synchronous or mine.any():
                    info = segment.back_info[self.session, micro_batch]
                    self._await(segment, info, micro_batch, layer)
                    data = segment.back_data[self.session, micro_batch][mine]
                    results[mine] = data[:, : self._back.itemsize].view(self._back.base)
                    info[FLAG] = 0
        return results

    def _await(self, segment: Segment, info: np.ndarray, micro_batch: int, layer: int) -> None:
        started = looked = time.monotonic()
        nap = LONGEST_NAP / 64
        while not info[FLAG]:
            now = time.monotonic()
            if now - looked > LOOK:
                looked = now
                segment.check_worker()
                if now - started > self._wait:
                    raise ScheduleTimeout(
                        f"ffn worker `{segment.name}`: expected micro batch {micro_batch} of layer {layer} within "
                        f"{self._wait:g} s, found no answer",
                        "its process lives: see whether it is stopped, or far too slow",
                    )
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)
        if info[LAYER] != layer:
            raise ContextError(f"ffn worker `{segment.name}`: expected layer {layer}, found {info[LAYER]}")

    def close(self) -> None:
        """Leaves every worker in order; may be called again."""
        while self._taken:
            self._taken.pop().leave(self.session)
        while self._segments:
            self._segments.pop().close()


class FfnConnector:
    """A worker's side.

    Args:
        segment: Its own.
        experts: Experts of a layer.
        layers: Layers that have experts.
        there: What sessions send of each pair.
        wait: Seconds in which all sessions have to come.
        quiet: Seconds without work after which the sessions that are there have to have left; None for any time.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        experts: int,
        layers: int,
        there: np.dtype,
        wait: float = WAIT,
        quiet: float | None = None,
    ) -> None:
        self.phases = Phases()
        self._segment, self._experts, self._layers = segment, experts, layers
        self._there, self._wait, self._quiet = there, wait, quiet
        self._started = self._worked = self._looked = time.monotonic()

    def recv_attn_output(self) -> tuple[Published, np.ndarray] | None:
        """Waits for the next micro batch that any session has published, and takes it from all that have it ready.

        A synchronous worker waits until all that have not left have published the one whose turn it is.

        Returns:
            What was published, and its data ``[n, BS, K1, width]``; None once all sessions left, or the run flag is 0.

        Raises:
            FfnGone: A session died.
            ScheduleTimeout: Sessions did not come in time, or published nothing for longer than they may.
            ContextError: An expert or a layer that does not exist.
        """
        segment, there = self._segment, self._there
        with self.phases.timed("recv_attn_output"):
            while self._look():
                try:
                    among = np.flatnonzero(segment.states != LEFT)
                    found = segment.buffers.take(LOOK, synchronous=segment.worker.synchronous, among=among)
                except ScheduleTimeout:
                    continue
                if found is None:
                    return None
                found.check(self._experts, self._layers)
                self._worked = time.monotonic()
                sent = segment.buffers.data[found.session_ids, found.micro_batch]
                return found, sent[..., : there.itemsize].view(there.base)
        return None

    def _look(self) -> bool:
        """Whether there is still somebody to work for."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return True
        self._looked = now
        states = self._segment.states.copy()
        for session in np.flatnonzero(states == HERE).tolist():
            if not self._segment.held(1 + session) and self._segment.states[session] == HERE:
                raise FfnGone(f"session {session} of `{self._segment.name}`: expected a live process, found none")
        if (states != NEVER).all():
            self._segment.drop_name()  # nobody needs the name any more: whatever dies now, nothing is left behind
        elif now - self._started > self._wait:
            raise ScheduleTimeout(
                f"`{self._segment.name}`: expected sessions {np.flatnonzero(states == NEVER).tolist()} within "
                f"{self._wait:g} s, found them missing",
                "start them with --ffn, or fewer --sessions",
            )
        if self._quiet is not None and now - self._worked > self._quiet and (states == HERE).any():
            late = np.flatnonzero((states == HERE) & ~self._segment.buffers.published()).tolist()
            raise ScheduleTimeout(
                f"`{self._segment.name}`: expected sessions {late} to publish within {self._quiet:g} s, found nothing",
                "see whether their processes are stopped",
            )
        return not (states == LEFT).all()

    def send_ffn_output(self, found: Published, results: np.ndarray) -> None:
        """Gives sessions their results.

        Args:
            found: What was published.
            results: ``[n, BS, K1, width]``; what stands for pairs without an expert is not given back.
        """
        with self.phases.timed("send_ffn_output"):
            size = results.shape[-1] * results.itemsize
            for row, session in enumerate(found.session_ids.tolist()):
                live = found.expert_ids[row] < MASK
                raw = np.ascontiguousarray(results[row][live]).view(np.uint8).reshape(-1, size)
                token, place = np.nonzero(live)
                self._segment.back_data[session, found.micro_batch, token, place, :size] = raw
                self.phases.sent += raw.size
                info = self._segment.back_info[session, found.micro_batch]
                info[LAYER] = found.layer_ids[row]
                info[FLAG] = 1
