"""Which Ray cluster, how much of it, and where in it workers have room."""

import json
import logging
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.runners.hosts.hosts import Hosts

NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # resources that Ray has options for
SLICE, PLACE = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"  # labels that Ray gives the nodes of a TPU slice
CONNECT = 5.0  # seconds


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

    @property
    def options(self) -> dict[str, Any]:
        """The resources of a host as Ray's options of an actor."""
        others = {name: number for name, number in self.resources.items() if name not in NAMED}
        named = {NAMED[name]: number for name, number in self.resources.items() if name in NAMED}
        return {"num_cpus": 0, "resources": others, **named}


def connect(ray: Any, cluster: Cluster) -> str:
    """Joins the cluster; returns the address of its dashboard, if it has one.

    Raises:
        ClusterError: It is not there.
    """
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


def worker_slices(nodes: Iterable[Mapping[str, Any]], free: Mapping[str, float], cluster: Cluster) -> list[str | None]:
    """The TPU slice of each worker, all of whose hosts are of one; None where nodes are of none, or for one host.

    Args:
        nodes: ``ray.nodes()``.
        free: ``ray.available_resources()``.
        cluster: What is wanted.

    Raises:
        ClusterError: Workers do not fit now, and Ray itself would wait for ever. Names the resource that is short.
    """
    alive = [node for node in nodes if node["Alive"]]
    slices: defaultdict[str | None, list[Mapping[str, float]]] = defaultdict(list)
    for node in alive:
        slices[node.get("Labels", {}).get(SLICE) if cluster.each > 1 else None].append(node["Resources"])

    def fits(names: Iterable[str]) -> list[str | None]:
        """A slice as often as it has room for a worker, going by some of the resources."""
        found: list[str | None] = []
        for slice_name, group in slices.items():
            hosts = sum(min(int(has.get(name, 0) // cluster.resources[name]) for name in names) for has in group)
            found += [slice_name] * (hosts // cluster.each)
        return found

    for name, number in cluster.resources.items():
        total, left = sum(node["Resources"].get(name, 0) for node in alive), free.get(name, 0)
        each = f"{name} {number:g}" if cluster.each == 1 else f"{cluster.each} hosts with {name} {number:g} each"
        wanted = f"room for {cluster.replicas} workers of {each}"
        if len(fits([name])) < cluster.replicas:
            room = f"room for {len(fits([name]))}: {name} {total:g} in all, on {len(alive)} nodes"
            raise ClusterError(f"ray: expected {wanted}, found {room}", "lower --replicas or --resources, or add nodes")
        if left < cluster.replicas * cluster.each * number:
            raise ClusterError(
                f"ray: expected {wanted}, found {name} {left:g} free of {total:g}",
                "lower --replicas, or wait until others are done",
            )
    if len(found := fits(cluster.resources)) < cluster.replicas:
        wanted = f"room for {cluster.replicas} workers of {cluster.each} hosts with all of {dict(cluster.resources)}"
        raise ClusterError(f"ray: expected {wanted}, found room for {len(found)}")
    return found[: cluster.replicas]
