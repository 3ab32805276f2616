"""An engine as a worker of a cluster: it answers pieces of a batch or of an evaluation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.follower import follow
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.fleet.pool import WorkerLost
from ling3export.runners.hosts.hosts import Hosts


@dataclass
class EngineWorker:
    """An engine on a node of a cluster, or on several, for ``WorkerPool``.

    Args:
        artifact: A path that every node sees.
        config: How it runs.
        answer: Gives the answers to a piece.
        about: What has to be the same on all nodes.
    """

    artifact: Path
    config: EngineConfig
    answer: Callable[[Engine, Any], Any]
    about: Callable[[Engine], dict[str, Any]]
    engine: Engine = field(init=False)

    def start(self, hosts: Hosts | None) -> dict[str, Any]:
        """Loads the artifact; what ``about`` says of it."""
        if hosts is not None and hosts.number:
            follow(self.artifact, hosts, self.config)
            return {}
        self.engine = Engine(self.artifact, self.config, hosts=hosts)
        return self.about(self.engine)

    def work(self, piece: Any) -> Any:
        """The answers to a piece."""
        try:
            return self.answer(self.engine, piece)
        except EngineStopped as error:
            raise WorkerLost(error.message) from None
