"""Workers in a Ray cluster: pieces go out as workers are free, and their results come back in order.

A worker is an actor, or one for each host of an engine on several hosts, in a placement group of its own. Ray starts an
actor again whose process or node has ended. What it was doing is done by whichever worker is free first (Ray's
ActorPool would wait for the same one, whose node may be gone). Of several hosts, host 0 listens for the others and does
the pieces; when one ends, the others end themselves, and all find each other again.

Ray carries Python objects between its processes by pickle: whoever reaches a cluster's ports can run code on it.
"""

import contextlib
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Protocol

from ling3export.foundation.errors import Ling3Error, listed
from ling3export.runners.fleet.cluster import PLACE, SLICE, Cluster, ClusterError, connect, worker_slices
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.hosts.rendezvous import HostsError

TRIES = 3  # attempts at a piece before it is declared bad
RESTARTS = 16  # of a worker's process
FAREWELL = 1.0  # seconds
AHEAD = 4  # pieces for each worker that may be done before the one whose turn it is
ANSWERED = "what was answered is kept: the same command goes on from there"


class WorkerLost(Ling3Error):
    """Raised by a worker's piece: the process is of no more use, and another one is to do the piece."""


class PoolWorker(Protocol):
    """What does pieces of work in a process of a node."""

    def start(self, hosts: Hosts | None) -> dict[str, Any]:
        """Gets ready; returns what has to be the same on all nodes.

        Args:
            hosts: This process's place among those of the worker; None where it is the only one. One that is not host
                0 follows host 0, and returns once that has ended.
        """
        ...

    def work(self, piece: Any) -> Any:
        """The result of a piece; raises WorkerLost where another process has to do it."""
        ...


def versions() -> dict[str, str]:
    """The versions of the packages that decide what an engine computes."""
    return {name: metadata.version(name) for name in ("ling3export", "jax", "jaxlib", "numpy")}


class _Host:
    """One host of a worker, in its process. All but binding a port happens in calls, whose errors arrive as they are.

    Args:
        make: Makes the worker.
        hosts: This process's place among several, without host 0's address; None where it is the only one.
    """

    def __init__(self, make: Callable[[], PoolWorker], hosts: Hosts | None) -> None:
        self._make, self._hosts = make, hosts
        self._lock = threading.Lock()
        self._asked: set[int] = set()
        self._worker: PoolWorker | None = None
        self._lost = False
        self._about: dict[str, Any] = {}
        if hosts is not None and hosts.number == 0:
            import ray

            address = ray.util.get_node_ip_address()
            # Not for reuse: another process could bind the same port until this one listens.
            bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            bound.bind((address, 0))
            host, port = f"[{address}]" if ":" in address else address, bound.getsockname()[1]
            self._hosts = replace(hosts, coordinator=f"{host}:{port}", bound=bound)

    def coordinator(self, number: int) -> str:
        """Where host 0 listens, which is another port in each of its processes. Each other host asks each of them once.

        One that asks again was started again: what it shared with this process is lost.
        """
        if number in self._asked:
            os._exit(1)
        self._asked.add(number)
        assert self._hosts is not None
        return self._hosts.coordinator

    def start(self) -> tuple[dict[str, Any], str]:
        """Gets ready once; what the worker's start returned, and the name of this node."""
        if self._lost:
            threading.Event().wait()  # until this process ends: the next one starts
        with self._lock:
            if self._worker is None:
                worker = self._make()
                with _node_named():
                    self._about = worker.start(self._hosts)
                self._worker = worker
        return self._about, socket.gethostname()

    def follow(self, first: Any) -> None:
        """Follows host 0 until that ends; then this process ends, too, and Ray starts it and this call again."""
        import ray

        assert self._hosts is not None
        place = replace(self._hosts, coordinator=ray.get(first.coordinator.remote(self._hosts.number)))
        with _node_named(), contextlib.suppress(HostsError):  # host 0 has ended, or tells the same error
            self._make().start(place)
        os._exit(1)

    def work(self, piece: Any) -> Any:
        """The result of a piece, by a worker that has started."""
        if self._worker is None:
            raise WorkerLost("its process was started again")
        try:
            return self._worker.work(piece)
        except WorkerLost:
            if not self._lost:
                self._lost = True
                threading.Timer(FAREWELL, os._exit, (1,)).start()  # once the pool was told why
            raise


@contextlib.contextmanager
def _node_named() -> Iterator[None]:
    """An error of a start names the node."""
    try:
        yield
    except Ling3Error as error:
        raise ClusterError(f"ray: {error.message}; on node {socket.gethostname()}", error.hint) from None


@dataclass
class _Job:
    number: int
    piece: Any
    tries: int = 0


class WorkerGroup:
    """The actors of a worker and their placement group, with a bundle for each host.

    Args:
        ray: The module.
        cluster: What a worker needs.
        make: Makes the worker in each process.
        at_once: Pieces that the worker gets at a time.
        slice_name: The TPU slice that all hosts have to be of; None where nodes are of none.

    Attributes:
        first: Host 0's actor, which does the pieces.
        group: The placement group.
        started: The reference of what ``start`` returns on host 0.
        others: Those of the other hosts, which are there only when one of these cannot start.
    """

    def __init__(
        self, ray: Any, cluster: Cluster, make: Callable[[], PoolWorker], at_once: int, slice_name: str | None
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as in_bundle

        labels = [{SLICE: slice_name, PLACE: str(number)} for number in range(cluster.each)]
        self.group = ray.util.placement_group(
            [dict(cluster.resources)] * cluster.each,
            strategy="SPREAD",
            bundle_label_selector=None if slice_name is None else labels,
        )
        secret = secrets.token_urlsafe()

        def actor(number: int) -> Any:
            hosts = cluster.hosts and replace(cluster.hosts, number=number, secret=secret)
            options = cluster.options | {
                "max_restarts": RESTARTS,
                "max_task_retries": -1,  # of starts and of what hosts ask each other; not of pieces
                "max_concurrency": 1 if number else at_once + cluster.each,  # beside pieces, other hosts ask host 0
                "scheduling_strategy": in_bundle(self.group, number),
            }
            return ray.remote(_Host).options(**options).remote(make, hosts)

        self.first, *self._actors = map(actor, range(cluster.each))
        self.started = self.first.start.remote()
        self.others = [each.follow.remote(self.first) for each in self._actors]

    def work(self, piece: Any) -> Any:
        """The reference of a piece's result. The pool repeats it, where it may be with another worker."""
        return self.first.work.options(max_task_retries=0).remote(piece)


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Workers in a cluster, all of which have started.

    Args:
        cluster: Which one.
        make: Makes a worker in its process; goes there by pickle.
        at_once: Pieces that a worker gets at a time.
        start_timeout: Seconds to wait for a worker.
        report: Told where the workers are.

    Attributes:
        about: What the workers' ``start`` returned, which all agree in.

    Raises:
        ClusterError: There is no such cluster, it has no room, or a worker does not start in time.
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
        self._report = report
        self._groups: list[WorkerGroup] = []
        self.about: dict[str, Any] = {}
        dashboard = connect(ray, cluster)
        try:
            slices = worker_slices(ray.nodes(), ray.available_resources(), cluster)
            self._groups = [WorkerGroup(ray, cluster, make, at_once, name) for name in slices]
            self._start()
        except BaseException:
            self.__exit__()
            raise
        where = [ray.util.placement_group_table(each.group)["bundles_to_node_id"].values() for each in self._groups]
        shared = ", some on one node" if any(len({*nodes}) < cluster.each for nodes in where) else ""
        several = f" of {cluster.each} hosts{shared}" if cluster.hosts else ""
        report(f"ray: {cluster.replicas} workers{several}{f', http://{dashboard}' if dashboard else ''}")

    def __exit__(self, *_: object) -> None:
        for each in self._groups:
            self._ray.util.remove_placement_group(each.group)  # and ends what is in it
        self._ray.shutdown()

    def map(self, pieces: Iterable[Any], ended: Callable[[int], None] = lambda number: None) -> Iterator[Any]:
        """The results of pieces, in order; pieces are taken as workers are free.

        Args:
            pieces: What the workers do.
            ended: Called with the number of a piece when its result is there, in whatever order they end.

        Raises:
            ClusterError: A piece ends one worker after the other, or all workers are gone and find no room.
            Ling3Error: What a worker raised.
        """
        source, taken, following, more = enumerate(pieces), 0, 0, True
        ahead = AHEAD * len(self._groups) * self._at_once
        idle = deque(each for _ in range(self._at_once) for each in self._groups)
        running: dict[Any, tuple[_Job, WorkerGroup]] = {}
        starting: dict[Any, WorkerGroup] = {}  # once for each piece that was lost
        again: deque[_Job] = deque()
        done: dict[int, Any] = {}
        while more or again or running:
            while idle and (again or (more and taken - following < ahead)):
                if again:
                    job = again.popleft()
                elif more := (piece := next(source, None)) is not None:
                    job, taken = _Job(*piece), taken + 1
                else:
                    break
                group = idle.popleft()
                running[group.work(job.piece)] = job, group
            for reference in self._ready([*running, *starting], None if running else self._start_timeout):
                if reference in starting:
                    self._admit(reference)
                    idle.append(starting.pop(reference))
                    continue
                job, group = running.pop(reference)
                try:
                    done[job.number] = self._result(reference)
                    ended(job.number)
                    idle.append(group)
                except WorkerLost as error:
                    job.tries += 1
                    if job.tries == TRIES:
                        said = f"expected piece {job.number} done, found {TRIES} dead workers: {error.message}"
                        raise ClusterError(f"ray: {said}", ANSWERED) from None
                    again.append(job)
                    if group not in starting.values():
                        self._report(f"ray: a worker is gone ({error.message}); it starts again where there is room")
                    starting[group.first.start.remote()] = group
            while following in done:
                yield done.pop(following)
                following += 1

    def _start(self) -> None:
        """Waits until all workers have started."""
        starting = [each.started for each in self._groups]
        others = [reference for each in self._groups for reference in each.others]
        while starting:
            for reference in self._ready([*starting, *others], self._start_timeout):
                self._admit(reference)
                starting.remove(reference)

    def _admit(self, reference: Any) -> None:
        """Takes a worker that has started, if what it has is what the others have."""
        try:
            about, node = self._result(reference)
        except WorkerLost as error:
            said = f"expected a worker that lives, found one that ended {RESTARTS} times: {error.message}"
            raise ClusterError(f"ray: {said}", ANSWERED) from None
        self.about = self.about or about
        if differing := [name for name in sorted({*about, *self.about}) if about.get(name) != self.about.get(name)]:
            raise ClusterError(
                f"ray: expected nodes that are alike, found another {listed(differing)}, on {node}",
                "all nodes need the same artifact and the same versions of Python's packages",
            )

    def _ready(self, waiting: list[Any], timeout: float | None) -> list[Any]:
        """What is ready of results and starts: at least one, if there are any."""
        ready = self._ray.wait(waiting, timeout=timeout)[0] if waiting else []
        if waiting and not ready:
            free = self._ray.available_resources()
            found = listed([f"{name} {free.get(name, 0):g}" for name in self._cluster.resources])
            raise ClusterError(f"ray: expected a worker within {timeout:g} s, found none; free now: {found}", ANSWERED)
        return [*ready]

    def _result(self, reference: Any) -> Any:
        """The result of a call; what Ray raises, as an error of ours."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, Ling3Error) else ClusterError(f"ray: worker: {cause}")) from None
        except errors.RayError as error:
            raise WorkerLost(" ".join(str(error).split())[:200]) from None
