"""An FFN worker: computes the experts of what attention processes publish, until all of them have left."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from ling3export.foundation.dtypes import MASK
from ling3export.foundation.errors import ArtifactError, Ling3Error
from ling3export.foundation.shards import Shard
from ling3export.runners.ffn import FFN, WAIT
from ling3export.runners.ffn.connector import FfnConnector, owners
from ling3export.runners.ffn.context import ContextError
from ling3export.runners.ffn.segment import Segment, WorkerInfo, layout, path_of
from ling3export.runners.ffn.split import ExpertPrograms, Sizes
from ling3export.runners.load.loader import load, say

if TYPE_CHECKING:
    from ling3export.runners.ffn.connector import Phases

WHOLE_SHARE = Shard()


class FfnWorker:
    """A worker that is ready: its programs are loaded and its segment has its name.

    Args:
        artifact: Its folder.
        context: The segment's name.
        sessions: Attention processes that publish to it.
        micro_batches: Micro batches of each that may be in flight.
        tokens: Tokens of a micro batch; None takes the largest that its programs hold of so many sessions.
        share: Which of how many workers this one is.
        synchronous: Whether to take a micro batch from all sessions at once, each micro batch in turn, or from those
            that have it ready.
        target: Which target; None takes the only one that fits this machine.
        programs: ``prebuilt-only``, or ``allow-compile``.
        check: Whose digests are checked.
        wait: Seconds in which all sessions have to come.
        quiet: Seconds without work after which sessions that are there have to have left; None for any time.
        report: Told what was chosen and why.

    Raises:
        ArtifactError: The artifact cannot be loaded here, or has no programs for these sizes.
        ContextError: Another worker has the name, or it could be another file's.
    """

    def __init__(
        self,
        artifact: str | Path,
        context: str,
        *,
        sessions: int = 1,
        micro_batches: int = 2,
        tokens: int | None = None,
        share: Shard = WHOLE_SHARE,
        synchronous: bool = False,
        target: str | None = None,
        programs: str = "prebuilt-only",
        check: str = "all",
        wait: float = WAIT,
        quiet: float | None = None,
        report: Callable[[str], None] = say,
    ) -> None:
        path_of(context)  # a name that cannot be is refused before anything is loaded
        loaded = load(artifact, target=target, programs=programs, check=check, report=report, phases=FFN)
        sizes = Sizes(loaded.manifest, loaded.record)
        micro, pairs = loaded.record.paddings("attend"), loaded.record.paddings("dispatch")
        fitting = [each for each in micro if sessions * each * sizes.chosen <= pairs[-1]]
        tokens = fitting[-1] if tokens is None and fitting else tokens
        if tokens not in fitting:
            raise ArtifactError(
                f"micro batches of {tokens or micro[0]} tokens of {sessions} sessions: expected programs for them, "
                f"found attend at {list(micro)} tokens and experts at {list(pairs)} pairs of a token and an expert",
                "build with --afd and as many sessions, or start the worker with fewer --sessions",
            )
        rows = sizes.there, sizes.back
        shape = layout(sessions, micro_batches, tokens, sizes.chosen, sizes.experts, *rows)
        digest = loaded.manifest.sha256 or ""
        self.segment = Segment.create(context, shape, WorkerInfo(share.index, share.count, digest, synchronous), *rows)
        self._link = FfnConnector(
            self.segment,
            experts=sizes.experts,
            layers=sizes.layers - sizes.dense,
            there=sizes.there,
            wait=wait,
            quiet=quiet,
        )
        self._own = owners(sizes.experts, share.count) == share.index
        self._programs = ExpertPrograms(loaded.runner, sizes, pairs, self._link.phases)
        report(
            f"{context}: {sessions} sessions, {micro_batches} micro batches of {tokens} tokens in flight, "
            f"share {share} of {sizes.experts} experts"
        )

    @property
    def phases(self) -> "Phases":
        """What was done."""
        return self._link.phases

    def run(self) -> None:
        """Works until all sessions left or the run flag is 0. However it ends, the segment's name is gone then.

        Raises:
            FfnGone: A session died.
            ScheduleTimeout: Sessions did not come, or published nothing for too long.
            ContextError: An expert or a layer that does not exist was published, or an expert of another worker.
        """
        try:
            while (taken := self._link.recv_attn_output()) is not None:
                (found, data), ids = taken, taken[0].expert_ids
                live = ids[(ids >= 0) & (ids < MASK)]
                if (foreign := live[~self._own[live]]).size:
                    index = self.segment.worker.index
                    raise ContextError(f"expert ids: expected those of share {index}, found {foreign[0]}")
                layers = np.repeat(found.layer_ids, ids[0].size)
                done = self._programs(data.reshape(-1, data.shape[-1]), ids.reshape(-1), layers)
                self._link.send_ffn_output(found, done.reshape(*ids.shape, -1))
        except BaseException as error:
            self.segment.say(error.message if isinstance(error, Ling3Error) else type(error).__name__)
            raise
        finally:
            self.segment.buffers.stop()
            self.segment.drop_name()
            self.segment.close()


@contextlib.contextmanager
def stopping(worker: FfnWorker) -> Iterator[None]:
    """SIGTERM and SIGINT clear the run flag: the worker ends in order, and sessions that wait are told."""

    def stop(number: int, frame: FrameType | None) -> None:
        worker.segment.say(f"{signal.Signals(number).name} came")
        worker.segment.buffers.stop()

    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
