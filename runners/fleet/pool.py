"""Workers in a Ray cluster: pieces go out as workers are free, and their results come back in order.

A worker that dies is replaced and its pieces are done again. Ray carries Python objects between its processes by
pickle: whoever reaches a cluster's ports can run code on it.
"""

import contextlib
import json
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol, Self

from ling3export.errors import Ling3Error, RequestError, listed

TRIES = 3  # how often a piece is given out, and a worker started, before a death is taken to be its own fault
AHEAD = 4  # pieces for each worker that may be done before the one whose turn it is
CONNECT = 5.0  # seconds
NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # resources that Ray has options for
ANSWERED = "what was answered is kept: the same command goes on from there"


class ClusterError(Ling3Error):
    """A cluster is not there, has no room, or its nodes are not alike."""


class Gone(Ling3Error):
    """Raised by a worker's piece: the worker is of no more use, and another one is to do the piece."""


class Worker(Protocol):
    """What does pieces of work in a process of a node."""

    def start(self) -> dict[str, Any]:
        """Gets ready; returns what has to be the same on all nodes."""
        ...

    def work(self, piece: Any) -> Any:
        """The result of a piece; raises Gone where another worker has to do it."""
        ...


@dataclass(frozen=True)
class Cluster:
    """Which cluster, and how much of it.

    Attributes:
        address: HOST:PORT of its head; None finds the one that this machine is a node of.
        replicas: How many workers.
        resources: What each needs, by name.
    """

    address: str | None
    replicas: int
    resources: Mapping[str, float]

    @classmethod
    def parse(cls, on: str, replicas: int, resources: str) -> Self:
        """From ``ray`` or ``ray://HOST:PORT``, and resources as JSON.

        Raises:
            RequestError: They are something else.
        """
        engine, _, address = on.partition("://")
        if engine != "ray" or (address and not address.rpartition(":")[2].isdecimal()) or on.endswith("://"):
            raise RequestError(f"--on: expected ray or ray://HOST:PORT, found `{on[:60]}`")
        try:
            needs = json.loads(resources)
        except ValueError:
            needs = None
        numbers = needs.values() if isinstance(needs, dict) else ()
        if not numbers or not all(type(number) in (int, float) and 0 < number < 1e9 for number in numbers):
            wanted = 'an object with a number above 0 for each resource, such as {"TPU": 4}'
            raise RequestError(f"--resources: expected {wanted}, found `{resources[:60]}`")
        return cls(address or None, replicas, needs)


def versions() -> dict[str, str]:
    """The versions of the packages that decide what an engine computes."""
    return {name: metadata.version(name) for name in ("ling3export", "jax", "jaxlib", "numpy")}


class _Actor:
    """A worker in its process. What it is made with fails in ``start``, whose error arrives as it is."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self._make = make

    def start(self) -> dict[str, Any]:
        node = socket.gethostname()
        try:
            self._worker = self._make()
            return self._worker.start() | {"node": node}
        except Ling3Error as error:
            raise ClusterError(f"ray: {error.message}; on node {node}", error.hint) from None

    def work(self, piece: Any) -> Any:
        return self._worker.work(piece)


@dataclass
class _Job:
    number: int
    piece: Any
    tries: int = 0


class Pool(AbstractContextManager["Pool"]):
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
        self, cluster: Cluster, make: Callable[[], Worker], *, at_once: int = 1, start_timeout: float = 600,
        report: Callable[[str], None],
    ) -> None:  # fmt: skip
        import ray

        self._ray, self._cluster, self._at_once, self._start_timeout = ray, cluster, at_once, start_timeout
        self._make, self._report = make, report
        self._starting: dict[Any, Any] = {}  # by the reference of the start's result, the actor
        self._idle: deque[Any] = deque()
        self._alive: list[Any] = []
        self._running: dict[Any, tuple[_Job, Any]] = {}
        self._again: deque[_Job] = deque()
        self._deaths = 0  # workers that died since one last did something
        self.about: dict[str, Any] = {}
        dashboard = _connect(ray, cluster)
        try:
            check_room(ray.nodes(), ray.available_resources(), cluster)
            for _ in range(cluster.replicas):
                self._start()
            while not self._alive:
                self._wait()
        except BaseException:
            self.__exit__()
            raise
        report(f"ray: {cluster.replicas} workers{f', http://{dashboard}' if dashboard else ''}")

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            for actor in (*self._alive, *self._starting.values()):
                self._ray.kill(actor)
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
                actor = self._idle.popleft()
                self._running[actor.work.remote(job.piece)] = job, actor
            if not self._running and not self._again and not more:
                return
            for job, result in self._wait():
                done[job.number] = result

    def _start(self) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "resources": {}, "max_concurrency": self._at_once}
        for name, number in self._cluster.resources.items():
            if name in NAMED:
                options[NAMED[name]] = number
            else:
                options["resources"][name] = number
        actor_class: Any = self._ray.remote(_Actor)
        actor = actor_class.options(**options).remote(self._make)
        self._starting[actor.start.remote()] = actor

    def _wait(self) -> list[tuple[_Job, Any]]:
        """Waits until something happens to a worker; what pieces gave."""
        timeout = None if self._alive else self._start_timeout
        ready, _ = self._ray.wait([*self._running, *self._starting], num_returns=1, timeout=timeout)
        if not ready:
            free = self._ray.available_resources()
            found = listed([f"{name} {free.get(name, 0):g}" for name in self._cluster.resources])
            raise ClusterError(
                f"ray: expected a worker within {self._start_timeout:g} s, found none; free now: {found}", ANSWERED
            )
        done = []
        for reference in ready:
            job, actor = self._running.pop(reference, None) or (None, self._starting.pop(reference))
            try:
                result = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                cause = error.cause
                if not isinstance(cause, Gone):
                    raise (cause if isinstance(cause, Ling3Error) else ClusterError(f"ray: worker: {error}")) from None
                self._replace(actor, job, cause.message)
                continue
            except self._ray.exceptions.RayError as error:
                self._replace(actor, job, type(error).__name__)
                continue
            self._deaths = 0
            if job is None:
                self._admit(actor, result)
            else:
                if actor in self._alive:
                    self._idle.append(actor)
                done.append((job, result))
        return done

    def _admit(self, actor: Any, about: dict[str, Any]) -> None:
        """Takes a worker that has started."""
        node = about.pop("node")
        if not self.about:
            self.about = about
        if differing := [name for name in sorted({*about, *self.about}) if about.get(name) != self.about.get(name)]:
            raise ClusterError(
                f"ray: expected nodes that are alike, found another {listed(differing)}, on {node}",
                "all nodes need the same artifact and the same versions of Python's packages",
            )
        self._alive.append(actor)
        self._idle.extend([actor] * self._at_once)

    def _replace(self, actor: Any, job: _Job | None, why: str) -> None:
        """Starts another worker in the place of one that died, once; its piece is to be done again."""
        if job is not None:
            job.tries += 1
            if job.tries == TRIES:
                raise ClusterError(
                    f"ray: expected piece {job.number} done, found {TRIES} dead workers: {why}", ANSWERED
                )
            self._again.append(job)
        if job is None or actor in self._alive:
            self._deaths += 1
            if self._deaths > TRIES * self._cluster.replicas:
                raise ClusterError(f"ray: expected workers that live, found {self._deaths} dead ones: {why}", ANSWERED)
            self._alive = [each for each in self._alive if each is not actor]
            self._idle = deque(each for each in self._idle if each is not actor)
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
            self._report(f"ray: a worker is gone ({why}); another one starts")
            self._start()


def check_room(nodes: Iterable[Mapping[str, Any]], free: Mapping[str, float], cluster: Cluster) -> None:
    """Passes where the workers fit now; Ray itself would wait for ever.

    Args:
        nodes: ``ray.nodes()``.
        free: ``ray.available_resources()``.
        cluster: What is wanted.

    Raises:
        ClusterError: Names the resource that there is too little of.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    for name, number in cluster.resources.items():
        fits = sum(int(node.get(name, 0) // number) for node in alive)
        total, left = sum(node.get(name, 0) for node in alive), free.get(name, 0)
        wanted = f"room for {cluster.replicas} workers of {name} {number:g}"
        if fits < cluster.replicas:
            found = f"room for {fits}: {name} {total:g} in all, on {len(alive)} nodes"
            raise ClusterError(
                f"ray: expected {wanted}, found {found}", "lower --replicas or --resources, or add nodes"
            )
        if left < cluster.replicas * number:
            raise ClusterError(
                f"ray: expected {wanted}, found {name} {left:g} free of {total:g}",
                "lower --replicas, or wait until others are done",
            )


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
