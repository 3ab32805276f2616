"""Workers in a Ray cluster: pieces go out as workers are free, and their results come back in order.

A worker is an actor, or one for each host of an engine on several hosts, in a placement group of its own. Ray starts an
actor again whose process or node has ended, and repeats what it was doing. Of several hosts, host 0 listens for the
others and does the pieces; when one ends, the others end themselves, and all find each other again.

Ray carries Python objects between its processes by pickle: whoever reaches a cluster's ports can run code on it.
"""

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any, Protocol

from ling3export.foundation.errors import Ling3Error, listed
from ling3export.runners.fleet.cluster import PLACE, SLICE, Cluster, ClusterError, connect, worker_slices
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.hosts.rendezvous import HostsError

TRIES = 3  # attempts at a piece before it is declared bad
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
        """Gets ready once; what the worker's start returned, and the name of this process."""
        with self._lock:
            if self._worker is None:
                worker = self._make()
                with _node_named():
                    self._about = worker.start(self._hosts)
                self._worker = worker
        return self._about, f"{socket.gethostname()}:{os.getpid()}"

    def follow(self, first: Any) -> None:
        """Follows host 0 until that ends; then this process ends, too, and Ray starts it and this call again."""
        import ray

        assert self._hosts is not None
        place = replace(self._hosts, coordinator=ray.get(first.coordinator.remote(self._hosts.number)))
        with _node_named(), contextlib.suppress(HostsError):  # host 0 has ended, or tells the same error
            self._make().start(place)
        os._exit(1)

    def work(self, number: int, piece: Any, alike: dict[str, Any]) -> tuple[int, Any, str]:
        """A piece's number, its result and the name of the process that did it."""
        about, process = self.start()
        check_alike(about, alike, process)
        assert self._worker is not None
        try:
            return number, self._worker.work(piece), process
        except WorkerLost:
            os._exit(1)


@contextlib.contextmanager
def _node_named() -> Iterator[None]:
    """An error of a start names the node."""
    try:
        yield
    except Ling3Error as error:
        raise ClusterError(f"ray: {error.message}; on node {socket.gethostname()}", error.hint) from None


def check_alike(about: dict[str, Any], alike: dict[str, Any], process: str) -> None:
    """Refuses a worker whose ``start`` returned something else than those of the others.

    Raises:
        ClusterError: Names what differs.
    """
    if differing := [name for name in sorted({*about, *alike}) if about.get(name) != alike.get(name)]:
        raise ClusterError(
            f"ray: expected nodes that are alike, found another {listed(differing)}, on {process}",
            "all nodes need the same artifact and the same versions of Python's packages",
        )


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
                "max_restarts": -1,
                "max_task_retries": -1 if number else TRIES - 1,
                "max_concurrency": 1 if number else at_once + cluster.each,  # beside pieces, other hosts ask host 0
                "scheduling_strategy": in_bundle(self.group, number),
            }
            return ray.remote(_Host).options(**options).remote(make, hosts)

        self.first, *self._actors = map(actor, range(cluster.each))
        self.started = self.first.start.remote()
        self.others = [each.follow.remote(self.first) for each in self._actors]


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
        self._processes: set[str] = set()
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

    def map(self, pieces: Iterable[Any]) -> Iterator[Any]:
        """The results of pieces, in order; pieces are taken as workers are free.

        Raises:
            ClusterError: A piece ends one worker after the other, or workers are gone and have no room to start again.
            Ling3Error: What a worker raised.
        """
        from ray.util import ActorPool

        pool = ActorPool([each.first for each in self._groups for _ in range(self._at_once)])
        ahead = AHEAD * len(self._groups) * self._at_once
        source, taken, following, more = enumerate(pieces), 0, 0, True
        done: dict[int, Any] = {}
        while more or pool.has_next():
            while more and pool.has_free() and taken - following < ahead:
                if more := (piece := next(source, None)) is not None:
                    pool.submit(lambda host, numbered: host.work.remote(*numbered, self.about), piece)
                    taken += 1
            if pool.has_next():
                number, result = self._next(pool)
                done[number] = result
            while following in done:
                yield done.pop(following)
                following += 1

    def _start(self) -> None:
        """Waits until all workers have started, and compares them."""
        starting = [each.started for each in self._groups]
        others = [reference for each in self._groups for reference in each.others]
        while starting:
            ready, _ = self._ray.wait([*starting, *others], timeout=self._start_timeout)
            if not ready:
                free = self._ray.available_resources()
                found = listed([f"{name} {free.get(name, 0):g}" for name in self._cluster.resources])
                wanted = f"{len(self._groups)} workers within {self._start_timeout:g} s"
                raise ClusterError(
                    f"ray: expected {wanted}, found {len(starting)} that did not start; free now: {found}", ANSWERED
                )
            with self._clear_errors():
                about, process = self._ray.get(ready[0])
            starting.remove(ready[0])
            self._processes.add(process)
            self.about = self.about or about
            check_alike(about, self.about, process)

    def _next(self, pool: Any) -> tuple[int, Any]:
        """The number and the result of a piece that is done."""
        while True:
            with self._clear_errors():
                try:
                    number, result, process = pool.get_next_unordered(timeout=self._start_timeout)
                    break
                except TimeoutError:  # a piece may take long; a worker that has no room to start again takes for ever
                    if not all(each.group.wait(1) for each in self._groups):
                        raise ClusterError(
                            "ray: expected room for the workers that are gone, found none", ANSWERED
                        ) from None
        if process not in self._processes:
            self._processes.add(process)
            self._report(f"ray: a worker is gone; another one is in its place, {process}")
        return number, result

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """What Ray raises, as an error of ours."""
        errors = self._ray.exceptions
        try:
            yield
        except errors.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, Ling3Error) else ClusterError(f"ray: worker: {cause}")) from None
        except errors.RayError as error:
            said = " ".join(str(error).split())[:300]
            raise ClusterError(
                f"ray: expected a piece done, found that {TRIES} workers ended at it: {said}", ANSWERED
            ) from None
