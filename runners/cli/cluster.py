"""The options of commands that can use a Ray cluster."""

import json
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from ling3export.foundation.errors import RequestError
from ling3export.foundation.extras import require
from ling3export.runners.cli.command import section
from ling3export.runners.cli.options import POSITIVE
from ling3export.runners.hosts.hosts import find_hosts

if TYPE_CHECKING:
    from ling3export.runners.fleet.cluster import Cluster

_cluster_section = section(
    "Ray cluster",
    click.option("--ray", metavar="ADDRESS", help="Use a Ray cluster: auto, local, or HOST:PORT of its head."),
    click.option("--replicas", type=POSITIVE, default=1, show_default=True, help="Number of engines there."),
    click.option(
        "--resources",
        default='{"CPU": 1}',
        show_default=True,
        metavar="JSON",
        help='Resources of each engine, such as {"TPU": 4}.',
    ),
)


def cluster_options(command: Callable[..., Any]) -> Any:
    """The options of a Ray cluster; a command gets ``cluster``: a ``Cluster``, or None without ``--ray``."""

    @wraps(command)
    def clustered(ray: str | None, replicas: int, resources: str, **options: Any) -> Any:
        cluster = None if ray is None else _cluster(ray, replicas, resources)
        if cluster and find_hosts() is not None:
            raise RequestError("--ray: each engine runs on one host, but NNODES is set", "use --shard I/N instead")
        return command(cluster=cluster, **options)

    return _cluster_section(clustered)


def _cluster(address: str, replicas: int, resources: str) -> "Cluster":
    require("--ray", "ray", "ray", "pyarrow")
    from ling3export.runners.fleet.cluster import Cluster

    try:
        needs = json.loads(resources)
    except ValueError:
        needs = None
    numbers = needs.values() if isinstance(needs, dict) else ()
    if not numbers or not all(type(number) in (int, float) and 0 < number < 1e9 for number in numbers):
        example = 'give an object with a number above 0 for each resource, such as {"TPU": 4}'
        raise RequestError(f"--resources: `{resources[:60]}` names no resources", example)
    return Cluster(address, replicas, needs)
