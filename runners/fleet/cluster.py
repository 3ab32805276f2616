"""Engines on a Ray cluster. Ray Data gives them work, starts an actor again that has ended, and repeats its piece.

Ray sends Python objects by pickle: anyone who reaches the ports of a cluster can run code on it.
"""

import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.processes import Failure
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import EngineStopped

NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # resources that Ray has options for
TRIES = 3  # restarts of an actor, and repeats of a piece
KEPT = "finished answers are kept: the same command continues from them"


class ClusterError(Ling3Error):
    """A cluster cannot be reached, has no room, or loses its workers; or its nodes differ."""


@dataclass(frozen=True)
class Work:
    """The work of each engine: ``answer`` gives the result of a piece. Pieces and results go through pickle."""

    artifact: Path  # that every node can read
    config: EngineConfig
    answer: Callable[[Engine, Any], Any]


class EngineActor:
    """An engine in an actor of Ray Data, for blocks of one piece."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._engine: Engine | None = None

    def __call__(self, block: Any) -> Any:
        import pyarrow

        try:
            self._engine = self._engine or Engine(self._work.artifact, self._work.config)
            result = self._work.answer(self._engine, pickle.loads(block["piece"][0].as_py()))
        except EngineStopped:
            os._exit(1)  # Ray starts this actor again, and repeats the piece
        except Exception as error:
            result = Failure.of(error)
        return pyarrow.table({"result": [pickle.dumps(result)]})


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, and the share of it that is used."""

    address: str  # ``auto`` for the cluster of this machine, ``local`` to start one here, or HOST:PORT of its head
    replicas: int  # number of engines
    resources: Mapping[str, float]  # needs of each engine, by Ray's names

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Joins the cluster, and leaves it. Within the block stdout is stderr, because Ray prints there.

        Raises:
            ClusterError: It cannot be reached, or has too few resources.
        """
        import ray

        with redirect_stdout(sys.stderr):
            try:
                ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
            except (OSError, RuntimeError, ValueError, AssertionError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
                hint = "start one with `ray start --head`, or use --ray local"
                raise ClusterError(f"--ray {self.address}: no cluster can be reached: {reason}", hint) from error
            try:
                total = ray.cluster_resources()
                for name, number in self.resources.items():
                    if total.get(name, 0) < (needed := number * self.replicas):
                        shortage = f"{self.replicas} engines need {name} {needed:g}, there is {total.get(name, 0):g}"
                        raise ClusterError(f"ray: {shortage}", "lower --replicas or --resources, or add nodes")
                yield
            finally:
                ray.shutdown()

    def results(self, work: Work, pieces: Iterable[Any]) -> Iterator[Any]:
        """The results of pieces, in order. All pieces are read before the first result is given.

        Raises:
            ClusterError: An engine cannot be loaded, ``answer`` failed, or a piece ended several workers.
        """
        rows = [{"piece": pickle.dumps(piece)} for piece in pieces]
        if not rows:
            return
        from ray import data
        from ray.exceptions import RayError

        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        others = {name: number for name, number in self.resources.items() if name not in NAMED}
        answered = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            EngineActor,
            fn_constructor_args=[work],
            batch_size=1,
            batch_format="pyarrow",
            compute=data.ActorPoolStrategy(size=min(self.replicas, len(rows)), max_tasks_in_flight_per_actor=2),
            **{"num_cpus": 0} | {NAMED[name]: number for name, number in self.resources.items() if name in NAMED},
            **({"resources": others} if others else {}),
            max_restarts=TRIES,
            max_task_retries=TRIES,
        )
        try:
            for row in answered.iter_rows():
                result = pickle.loads(row["result"])
                if isinstance(result, Failure):
                    raise ClusterError(f"ray: {result.error}", result.hint)
                yield result
        except RayError as error:
            raise ClusterError(f"ray: {' '.join(str(error).split())[:300]}", KEPT) from None
