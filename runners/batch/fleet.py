"""A batch on a cluster: each worker has an engine, and answers pieces of a few lines."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ling3export.runners.batch.run import WINDOW, Answer, Answered, BatchRecord, Numbered, answers
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.follower import follow
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.fleet.crew import versions
from ling3export.runners.fleet.pool import WorkerLost, WorkerPool
from ling3export.runners.hosts.hosts import Hosts

PIECE = 32  # lines


@dataclass
class BatchWorker:
    """An engine on a node, or on several, for ``WorkerPool``.

    Args:
        options: The engine's arguments; ``artifact`` is a path that every node sees.
        step_timeout: Seconds after which a call of the devices that did not return stops the engine.
    """

    options: dict[str, Any]
    step_timeout: float | None = None
    engine: Engine = field(init=False)

    def start(self, hosts: Hosts | None) -> dict[str, Any]:
        """Loads the artifact."""
        if hosts is not None and hosts.number:
            follow(**self.options, hosts=hosts)
            return {}
        self.engine = Engine(**self.options, hosts=hosts, step_timeout=self.step_timeout)
        return {"artifact": self.engine.manifest.sha256, "target": self.engine.target, "versions": versions()}

    def work(self, piece: tuple[BatchRecord, list[Numbered]]) -> list[Answer]:
        """The answers to some lines of a run."""
        most = WINDOW * self.engine.manifest.targets[self.engine.target].state.slots
        try:
            return [*answers(self.engine, most, *piece)]
        except EngineStopped as error:
            raise WorkerLost(error.message) from None


def answered_by(pool: WorkerPool) -> Answered:
    """What ``answer_file`` asks for, by the workers of a pool of BatchWorker."""

    def answered(asked: BatchRecord, lines: Iterator[Numbered]) -> Iterator[Answer]:
        pieces = iter(lambda: [*islice(lines, PIECE)], [])
        for some in pool.map((asked, piece) for piece in pieces):
            yield from some

    return answered
