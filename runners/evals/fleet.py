"""An evaluation on a cluster: each worker has an engine, and answers whole batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ling3export.runners.engine.follower import follow
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.evals.backend import OVERLAP, EngineBackend, EvalBackend, PromptRequest, PromptResult, answered
from ling3export.runners.fleet.pool import WorkerLost, WorkerPool
from ling3export.runners.hosts.hosts import Hosts


@dataclass
class EvalWorker:
    """An engine on a node, or on several, for ``WorkerPool``.

    Args:
        options: The arguments of EngineBackend; ``artifact`` is a path that every node sees.
        step_timeout: Seconds after which a call of the devices that did not return stops the engine.
    """

    options: dict[str, Any]
    step_timeout: float | None = None
    backend: EngineBackend = field(init=False)

    def start(self, hosts: Hosts | None) -> dict[str, Any]:
        """Loads the artifact; the environment of the run."""
        if hosts is not None and hosts.number:
            follow(**self.options, hosts=hosts, overlap=OVERLAP)
            return {}
        self.backend = EngineBackend(**self.options, hosts=hosts, step_timeout=self.step_timeout)
        return self.backend.environment()

    def work(self, piece: tuple[Sequence[PromptRequest], int]) -> list[PromptResult]:
        """The answers to a batch."""
        try:
            return answered(self.backend, *piece)
        except EngineStopped as error:
            raise WorkerLost(error.message) from None


class PoolBackend(EvalBackend):
    """A pool of EvalWorker.

    Args:
        pool: Its workers have one batch each at a time, so that batches are what they are on one engine.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def answers(self, batches: Iterable[Sequence[PromptRequest]], retry: int) -> Iterator[Sequence[PromptResult]]:
        """The answers to each batch, in order."""
        return self._pool.map((batch, retry) for batch in batches)

    def stats(self) -> dict[str, Any]:
        """Nothing: each engine has counters of its own."""
        return {}

    def digests(self) -> Sequence[bytes]:
        """Nothing: each engine runs on one host."""
        return ()

    def environment(self) -> dict[str, Any]:
        """What all workers have."""
        return dict(self._pool.about)
