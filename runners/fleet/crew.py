"""A worker's processes in a Ray cluster: one actor, or an actor for each host of an engine on several hosts.

Several actors have a placement group, with a bundle for each. Host 0's actor listens for the others and does the
pieces; the others follow it. When one ends, all are ended.
"""

import contextlib
import json
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Protocol, Self

from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.runners.hosts.hosts import Hosts

NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # resources that Ray has options for
SLICE, PLACE = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"  # labels that Ray gives the nodes of a TPU slice
Node = Mapping[str, Any]  # one of ``ray.nodes()``


class ClusterError(Ling3Error):
    """A cluster is not there, has no room, or its nodes are not alike."""


@dataclass(frozen=True)
class Cluster:
    """Which cluster, and how much of it.

    Attributes:
        address: HOST:PORT of its head; None finds the one that this machine is a node of.
        replicas: How many workers.
        resources: What each host of a worker needs, by name.
        hosts: How many hosts a worker has, and how long they wait for each other; where they are is found there. None
            for one host.
    """

    address: str | None
    replicas: int
    resources: Mapping[str, float]
    hosts: Hosts | None = None

    @classmethod
    def parse(cls, on: str, replicas: int, resources: str, hosts: Hosts | None = None) -> Self:
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
        return cls(address or None, replicas, needs, hosts)

    @property
    def each(self) -> int:
        """Hosts of a worker."""
        return 1 if self.hosts is None else self.hosts.count


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
        """The result of a piece; raises WorkerLost where another worker has to do it."""
        ...


def versions() -> dict[str, str]:
    """The versions of the packages that decide what an engine computes."""
    return {name: metadata.version(name) for name in ("ling3export", "jax", "jaxlib", "numpy")}


class _Actor:
    """A worker in its process. What it is made with fails in ``start``, whose error arrives as it is."""

    def __init__(self, make: Callable[[], PoolWorker]) -> None:
        self._make = make

    def listens(self) -> str:
        """Where host 0 listens: this node's address in the cluster, and a port that is its own from now on."""
        import ray

        address = ray.util.get_node_ip_address()
        # Not for reuse: another process could bind the same port until this one listens.
        self._bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._bound.bind((address, 0))
        port = self._bound.getsockname()[1]
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def start(self, coordinator: str | None, hosts: Hosts | None) -> dict[str, Any]:
        node = socket.gethostname()
        try:
            self._worker = self._make()
            place = None
            if hosts is not None and coordinator is not None:
                place = replace(hosts, coordinator=coordinator, bound=None if hosts.number else self._bound)
            return self._worker.start(place) | {"node": node}
        except Ling3Error as error:
            raise ClusterError(f"ray: {error.message}; on node {node}", error.hint) from None

    def work(self, piece: Any) -> Any:
        return self._worker.work(piece)


class WorkerGroup:
    """A worker's actors.

    Args:
        ray: The module.
        cluster: What a worker needs.
        make: Makes the worker in each process.
        at_once: Pieces that the worker gets at a time.
        strict: Whether each host has a node of its own.
        slice_name: The TPU slice that all hosts have to be of; None where nodes are of none.

    Attributes:
        slice_name: That slice.
        started: The reference of what ``start`` returns on host 0.
        others: Those of the other hosts, which are there only when something has ended the worker.
    """

    def __init__(
        self,
        ray: Any,
        cluster: Cluster,
        make: Callable[[], PoolWorker],
        at_once: int,
        *,
        strict: bool = True,
        slice_name: str | None = None,
    ) -> None:
        self._ray, self.slice_name, self._group = ray, slice_name, None
        options: dict[str, Any] = {"num_cpus": 0, "resources": {}, "max_concurrency": at_once}
        for name, number in cluster.resources.items():
            if name in NAMED:
                options[NAMED[name]] = number
            else:
                options["resources"][name] = number
        actor = ray.remote(_Actor)
        if cluster.hosts is None:
            self._actors = [actor.options(**options).remote(make)]
            self.started, *self.others = [self._actors[0].start.remote(None, None)]
            return
        bundles = [dict(cluster.resources)] * cluster.each
        labels = [{SLICE: slice_name, PLACE: str(number)} for number in range(cluster.each)]
        self._group = ray.util.placement_group(
            bundles,
            strategy="STRICT_SPREAD" if strict else "SPREAD",
            bundle_label_selector=None if slice_name is None else labels,
        )
        in_bundle = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        self._actors = [
            actor.options(**options, scheduling_strategy=in_bundle(self._group, number)).remote(make)
            for number in range(cluster.each)
        ]
        coordinator = self._actors[0].listens.remote()
        secret = secrets.token_urlsafe()
        self.started, *self.others = [
            each.start.remote(coordinator, replace(cluster.hosts, number=number, secret=secret))
            for number, each in enumerate(self._actors)
        ]

    def work(self, piece: Any) -> Any:
        """The reference of a piece's result."""
        return self._actors[0].work.remote(piece)

    def end(self) -> None:
        """Ends all processes."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            for actor in self._actors:
                self._ray.kill(actor)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)


def slices(nodes: Iterable[Node], cluster: Cluster) -> dict[str | None, list[Node]]:
    """The nodes that live, by what the hosts of one worker have to share.

    Returns:
        Nodes by their TPU slice; those of none, and all where a worker has one host, under None.
    """
    found: defaultdict[str | None, list[Node]] = defaultdict(list)
    for node in nodes:
        if node["Alive"]:
            found[node.get("Labels", {}).get(SLICE) if cluster.each > 1 else None].append(node)
    return found


def room(nodes: Iterable[Node], cluster: Cluster, names: Iterable[str]) -> list[int]:
    """How many hosts of workers each node has room for, going by some of the resources."""
    each = [node["Resources"] for node in nodes]
    return [min(int(has.get(name, 0) // cluster.resources[name]) for name in names) for has in each]


def check_room(nodes: Iterable[Node], free: Mapping[str, float], cluster: Cluster) -> None:
    """Passes where the workers fit now; Ray itself would wait for ever.

    Args:
        nodes: ``ray.nodes()``.
        free: ``ray.available_resources()``.
        cluster: What is wanted.

    Raises:
        ClusterError: Names the resource that there is too little of.
    """
    groups = slices(nodes, cluster)
    alive = [node["Resources"] for group in groups.values() for node in group]
    for name, number in cluster.resources.items():
        fits = sum(sum(room(group, cluster, [name])) // cluster.each for group in groups.values())
        total, left = sum(node.get(name, 0) for node in alive), free.get(name, 0)
        each = f"{name} {number:g}" if cluster.each == 1 else f"{cluster.each} hosts with {name} {number:g} each"
        wanted = f"room for {cluster.replicas} workers of {each}"
        if fits < cluster.replicas:
            found = f"room for {fits}: {name} {total:g} in all, on {len(alive)} nodes"
            raise ClusterError(
                f"ray: expected {wanted}, found {found}", "lower --replicas or --resources, or add nodes"
            )
        if left < cluster.replicas * cluster.each * number:
            raise ClusterError(
                f"ray: expected {wanted}, found {name} {left:g} free of {total:g}",
                "lower --replicas, or wait until others are done",
            )


def spread(nodes: Iterable[Node], cluster: Cluster) -> bool:
    """Whether there are nodes enough for each host of a worker to have one of its own."""
    fits = [each for group in slices(nodes, cluster).values() for each in room(group, cluster, cluster.resources)]
    return sum(min(each, cluster.replicas) for each in fits) >= cluster.replicas * cluster.each


def free_slice(nodes: Iterable[Node], cluster: Cluster, taken: Iterable[str | None]) -> str | None:
    """The TPU slice with most room for another worker; None where nodes are of none.

    Args:
        nodes: ``ray.nodes()``.
        cluster: What a worker needs.
        taken: The slices of the workers that there are.
    """
    left = {
        name: sum(room(group, cluster, cluster.resources)) // cluster.each
        for name, group in slices(nodes, cluster).items()
    }
    for name in taken:
        if name in left:
            left[name] -= 1
    return max(left, key=lambda name: (left[name], name is None, name or ""), default=None)
