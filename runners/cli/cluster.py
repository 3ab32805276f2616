"""Commands that work on a cluster: what ``--on``, ``--replicas`` and ``--resources`` name."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING

import click

from ling3export.errors import RequestError
from ling3export.runners.cli.errors import require
from ling3export.runners.hosts.hosts import Hosts

if TYPE_CHECKING:
    from ling3export.runners.fleet.pool import Pool, Worker


@contextmanager
def on_cluster(
    command: str, hosts: Hosts | None, on: str, replicas: int, resources: str, make: "Callable[[], Worker]", *,
    at_once: int = 1,
) -> "Iterator[Pool]":  # fmt: skip
    """A pool of workers on the cluster that ``on`` names. Within the block stdout is stderr: Ray prints there.

    Args:
        command: What messages call it.
        hosts: This process's place among several hosts, which has to be none: each worker is one host.
        on: The option, and the next two.
        replicas: How many workers.
        resources: What each needs, as JSON.
        make: Makes a worker.
        at_once: Pieces that a worker gets at a time.

    Raises:
        Ling3Error: The options name none, Ray is not installed, or the cluster is not there or has no room.
    """
    from ling3export.runners.fleet.pool import Cluster, Pool

    if hosts is not None:
        raise RequestError("--on: expected one host, found the options of several hosts", "each worker is one host")
    cluster = Cluster.parse(on, replicas, resources)
    require(f"{command} --on", "ray", "ray")
    report = partial(click.echo, err=True)
    with redirect_stdout(sys.stderr), Pool(cluster, make, at_once=at_once, report=report) as pool:
        yield pool
