"""Commands that work on a cluster: what ``--on``, ``--replicas`` and ``--resources`` name."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ling3export.foundation.errors import RequestError
from ling3export.foundation.extras import require
from ling3export.runners.hosts.hosts import Hosts

if TYPE_CHECKING:
    from ling3export.runners.fleet.pool import PoolWorker, WorkerPool

FOUND_THERE = ("coordinator", "host_id", "secret_file", "trust_network")  # what a cluster knows of a worker's hosts


def hosts_each(place: Mapping[str, Any]) -> Hosts | None:
    """How many hosts each worker has, and how long they wait for each other; None for one host.

    Args:
        place: What ``host_options`` gave. Environment variables say nothing here.

    Raises:
        RequestError: It says more: which host this process is.
    """
    said = [name for name in FOUND_THERE if place[name] is not None and place[name] is not False]
    given = [f"--{name.replace('_', '-')}" for name in said]
    given += ["DIST_INIT_ADDR"] if os.environ.get("DIST_INIT_ADDR") else []
    if given:
        raise RequestError(
            f"--on: expected --num-hosts alone to say what hosts a worker has, found {given[0]}",
            "run the command once; the cluster says which host is which",
        )
    count, waits = place["num_hosts"] or 1, (place["start_timeout"], place["host_timeout"])
    return Hosts("127.0.0.1:1", count, 0, *waits) if count > 1 else None


@contextmanager
def on_cluster(
    command: str,
    on: str,
    replicas: int,
    resources: str,
    make: "Callable[[], PoolWorker]",
    *,
    hosts: Hosts | None = None,
    at_once: int = 1,
) -> "Iterator[WorkerPool]":
    """A pool of workers on the cluster that ``on`` names. Within the block stdout is stderr: Ray prints there.

    Args:
        command: What messages call it.
        on: The option, and the next two.
        replicas: How many workers.
        resources: What each needs, as JSON.
        make: Makes a worker.
        hosts: What ``hosts_each`` gave.
        at_once: Pieces that a worker gets at a time.

    Raises:
        Ling3Error: The options name none, Ray is not installed, or the cluster is not there or has no room.
    """
    from ling3export.runners.fleet.cluster import Cluster
    from ling3export.runners.fleet.pool import WorkerPool

    cluster = Cluster.parse(on, replicas, resources, hosts)
    require(f"{command} --on", "ray", "ray")
    report = partial(click.echo, err=True)
    with redirect_stdout(sys.stderr), WorkerPool(cluster, make, at_once=at_once, report=report) as pool:
        yield pool
