"""Commands that work on a cluster: what ``--on``, ``--replicas`` and ``--resources`` name."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click

from ling3export.foundation.errors import RequestError
from ling3export.foundation.extras import require
from ling3export.runners.cli.command import section
from ling3export.runners.cli.options import POSITIVE
from ling3export.runners.fleet.cluster import Cluster
from ling3export.runners.hosts.hosts import Hosts

if TYPE_CHECKING:
    from ling3export.runners.fleet.pool import PoolWorker, WorkerPool

__all__ = ["Cluster", "cluster_options", "on_cluster"]

FOUND_THERE = ("coordinator", "host_id", "secret_file", "trust_network")  # what a cluster knows of a worker's hosts
_cluster_section = section(
    "Cluster",
    click.option("--on", metavar="ray[://HOST:PORT]", help="Work on a Ray cluster, of which this machine is a node."),
    click.option("--replicas", type=POSITIVE, default=1, show_default=True, help="Workers there."),
    click.option(
        "--resources",
        default='{"CPU": 1}',
        show_default=True,
        metavar="JSON",
        help='What each of them needs, such as {"TPU": 4}.',
    ),
)


def cluster_options(command: Callable[..., Any]) -> Any:
    """Gives a command the options of a cluster: it gets a ``Cluster``, or None without ``--on``."""

    @wraps(command)
    def clustered(on: str | None, replicas: int, resources: str, **given: Any) -> Any:
        cluster = None if on is None else Cluster.parse(on, replicas, resources, _hosts_each(given.get("place")))
        return command(cluster=cluster, **given)

    return _cluster_section(clustered)


def _hosts_each(place: Mapping[str, Any] | None) -> Hosts | None:
    """How many hosts each worker has, and how long they wait for each other; None for one host.

    Args:
        place: What ``host_options`` gave; None for a command without them. Environment variables say nothing here.

    Raises:
        RequestError: It says more: which host this process is.
    """
    if place is None:
        return None
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
    command: str, cluster: Cluster, make: "Callable[[], PoolWorker]", at_once: int = 1
) -> "Iterator[WorkerPool]":
    """A pool of workers on a cluster. Within the block stdout is stderr: Ray prints there.

    Args:
        command: What messages call it.
        cluster: Which cluster, and how much of it.
        make: Makes a worker.
        at_once: Pieces that a worker gets at a time.

    Raises:
        Ling3Error: Ray is not installed, or the cluster is not there or has no room.
    """
    from ling3export.runners.fleet.pool import WorkerPool

    require(f"{command} --on", "ray", "ray")
    report = partial(click.echo, err=True)
    with redirect_stdout(sys.stderr), WorkerPool(cluster, make, at_once=at_once, report=report) as pool:
        yield pool
