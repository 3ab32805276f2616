"""Workers in a Ray cluster: pieces go out as workers are free, and their results come back in order.

A worker that dies is replaced and its pieces are done again. Ray carries Python objects between its processes by
pickle: whoever reaches a cluster's ports can run code on it.
"""

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ling3export.foundation.errors import Ling3Error, listed
from ling3export.runners.fleet.crew import (
    Cluster,
    ClusterError,
    PoolWorker,
    WorkerGroup,
    check_room,
    free_slice,
    spread,
)

TRIES = 3  # attempts at a piece, or starts of a worker, before it is declared bad
AHEAD = 4  # pieces for each worker that may be done before the one whose turn it is
CONNECT = 5.0  # seconds
ANSWERED = "what was answered is kept: the same command goes on from there"


class WorkerLost(Ling3Error):
    """Raised by a worker's piece: the worker is of no more use, and another one is to do the piece."""


@dataclass
class _Job:
    number: int
    piece: Any
    tries: int = 0


class WorkerPool(AbstractContextManager["WorkerPool"]):
    """Workers in a cluster.

    Args:
        cluster: Which one.
        make: Makes a worker in its process; goes there by pickle.
        at_once: Pieces that a worker gets at a time.
        start_timeout: Seconds to wait for a worker while there is none.
        report: Told where the workers are.

    Attributes:
        about: What the workers' ``start`` returned, which all agree in.

    Raises:
        ClusterError: There is no such cluster, it has no room, or no worker starts in time.
        Ling3Error: What a worker's ``start`` raised.
    """

    def __init__(
        self,
        cluster: Cluster,
        make: Callable[[], PoolWorker],
        *,
        at_once: int = 1,
        start_timeout: float = 600,
        report: Callable[[str], None],
    ) -> None:
        import ray

        self._ray, self._cluster, self._at_once, self._start_timeout = ray, cluster, at_once, start_timeout
        self._make, self._report = make, report
        self._crews: list[WorkerGroup] = []  # those that start or are alive
        self._starting: dict[Any, WorkerGroup] = {}  # by the reference of the start's result
        self._following: dict[Any, WorkerGroup] = {}  # by those of hosts other than 0, each of which ends its crew
        self._idle: deque[WorkerGroup] = deque()
        self._alive: list[WorkerGroup] = []
        self._running: dict[Any, tuple[_Job, WorkerGroup]] = {}
        self._again: deque[_Job] = deque()
        self._deaths = 0  # workers that died since one last did something
        self.about: dict[str, Any] = {}
        dashboard = _connect(ray, cluster)
        try:
            nodes = ray.nodes()
            check_room(nodes, ray.available_resources(), cluster)
            strict = spread(nodes, cluster)
            for _ in range(cluster.replicas):
                self._start()
            while not self._alive:
                self._wait()
        except BaseException:
            self.__exit__()
            raise
        several = f" of {cluster.each} hosts{'' if strict else ', some on one node'}" if cluster.hosts else ""
        report(f"ray: {cluster.replicas} workers{several}{f', http://{dashboard}' if dashboard else ''}")

    def __exit__(self, *_: object) -> None:
        for crew in self._crews:
            crew.end()
        self._ray.shutdown()

    def map(self, pieces: Iterable[Any]) -> Iterator[Any]:
        """The results of pieces, in order; pieces are taken as workers are free.

        Raises:
            ClusterError: Workers die again and again, or none is left and none starts in time.
            Ling3Error: What a worker raised.
        """
        source, following, taken = iter(pieces), 0, 0
        done: dict[int, Any] = {}
        more = True
        while True:
            while following in done:
                yield done.pop(following)
                following += 1
            while self._idle and (self._again or more):
                if self._again:
                    job = self._again.popleft()
                elif taken - following >= AHEAD * self._cluster.replicas * self._at_once:
                    break
                else:
                    try:
                        job, taken = _Job(taken, next(source)), taken + 1
                    except StopIteration:
                        more = False
                        break
                crew = self._idle.popleft()
                self._running[crew.work(job.piece)] = job, crew
            if not self._running and not self._again and not more:
                return
            for job, result in self._wait():
                done[job.number] = result

    def _start(self) -> None:
        nodes, cluster = self._ray.nodes(), self._cluster  # one may be gone, or be there, since the last start
        on = free_slice(nodes, cluster, [crew.slice_name for crew in self._crews])
        crew = WorkerGroup(self._ray, cluster, self._make, self._at_once, strict=spread(nodes, cluster), slice_name=on)
        self._crews.append(crew)
        self._starting[crew.started] = crew
        self._following |= dict.fromkeys(crew.others, crew)

    def _wait(self) -> list[tuple[_Job, Any]]:
        """Waits until something happens to a worker; what pieces gave."""
        timeout = None if self._alive else self._start_timeout
        waiting = [*self._running, *self._starting, *self._following]
        ready, _ = self._ray.wait(waiting, num_returns=1, timeout=timeout)
        if not ready:
            free = self._ray.available_resources()
            found = listed([f"{name} {free.get(name, 0):g}" for name in self._cluster.resources])
            raise ClusterError(
                f"ray: expected a worker within {self._start_timeout:g} s, found none; free now: {found}", ANSWERED
            )
        done = []
        for reference in ready:
            follows = self._following.pop(reference, None)
            job, crew = self._running.pop(reference, None) or (None, follows or self._starting.pop(reference))
            try:
                result = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                cause = error.cause
                if not isinstance(cause, WorkerLost):
                    raise (cause if isinstance(cause, Ling3Error) else ClusterError(f"ray: worker: {error}")) from None
                self._replace(crew, job, cause.message)
                continue
            except self._ray.exceptions.RayError as error:
                self._replace(crew, job, type(error).__name__)
                continue
            if follows is not None:
                self._replace(crew, job, "a host of it has ended")
                continue
            self._deaths = 0
            if job is None:
                self._admit(crew, result)
            else:
                if crew in self._alive:
                    self._idle.append(crew)
                done.append((job, result))
        return done

    def _admit(self, crew: WorkerGroup, about: dict[str, Any]) -> None:
        """Takes a worker that has started."""
        node = about.pop("node")
        if not self.about:
            self.about = about
        if differing := [name for name in sorted({*about, *self.about}) if about.get(name) != self.about.get(name)]:
            raise ClusterError(
                f"ray: expected nodes that are alike, found another {listed(differing)}, on {node}",
                "all nodes need the same artifact and the same versions of Python's packages",
            )
        self._alive.append(crew)
        self._idle.extend([crew] * self._at_once)

    def _replace(self, crew: WorkerGroup, job: _Job | None, why: str) -> None:
        """Starts another worker in the place of one that died, once; its piece is to be done again."""
        if job is not None:
            job.tries += 1
            if job.tries == TRIES:
                raise ClusterError(
                    f"ray: expected piece {job.number} done, found {TRIES} dead workers: {why}", ANSWERED
                )
            self._again.append(job)
        if crew not in self._crews:
            return
        self._crews.remove(crew)
        crew.end()
        self._deaths += 1
        if self._deaths > TRIES * self._cluster.replicas:
            raise ClusterError(f"ray: expected workers that live, found {self._deaths} dead ones: {why}", ANSWERED)
        self._alive = [each for each in self._alive if each is not crew]
        self._idle = deque(each for each in self._idle if each is not crew)
        for references in (self._starting, self._following):
            for reference in [reference for reference, each in references.items() if each is crew]:
                del references[reference]
        self._report(f"ray: a worker is gone ({why}); another one starts")
        self._start()


def _connect(ray: Any, cluster: Cluster) -> str:
    """Joins the cluster; returns the address of its dashboard, if it has one."""
    hint = "start one with `ray start --head`, and run this command on one of its nodes"
    where = cluster.address or "this machine"
    try:
        if cluster.address:
            host, _, port = cluster.address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT).close()
        context = ray.init(
            address=cluster.address or "auto", log_to_driver=False, logging_level=logging.ERROR, configure_logging=False
        )
    except (OSError, ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ClusterError(f"ray: expected a cluster at {where}, found {said}", hint) from error
    return str(context.dashboard_url or "")
