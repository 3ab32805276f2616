"""Commands that run on several hosts: the options that say which host this is, and what each host does with them."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import click

from ling3export.runners.cli.command import section
from ling3export.runners.cli.options import PATH, SECONDS
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.hosts.hosts import Hosts, find_hosts

HOST_NAMES = ("coordinator", "num_hosts", "host_id", "start_timeout", "host_timeout", "secret_file", "trust_network")
_host_section = section(
    "Several hosts",
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Where host 0 listens for the others; auto asks the cluster's launcher.  [default: DIST_INIT_ADDR]",
    ),
    click.option("--num-hosts", type=click.IntRange(1), help="How many run together.  [default: NNODES, or 1]"),
    click.option("--host-id", type=click.IntRange(0), help="Which of several hosts this is.  [default: NODE_RANK]"),
    click.option(
        "--start-timeout",
        type=SECONDS,
        default=Hosts.start_timeout,
        metavar="SECONDS",
        help="How long to wait for the other hosts.",
    ),
    click.option(
        "--host-timeout",
        type=SECONDS,
        default=Hosts.host_timeout,
        metavar="SECONDS",
        help="How long another host may be silent or behind before all end.",
    ),
    click.option(
        "--secret-file", type=PATH, help="File (0600) with what all hosts know.  [default: LING3_SECRET, if set]"
    ),
    click.option("--trust-network", is_flag=True, help="Meet other machines without a secret."),
)


def host_options(command: Callable[..., Any]) -> Any:
    """Gives a command the options that say which host this is; it gets them as ``place``, which ``leading`` takes."""

    @wraps(command)
    def placed(**given: Any) -> Any:
        return command(place={name: given.pop(name) for name in HOST_NAMES}, **given)

    return _host_section(placed)


def leading(
    artifact: Path,
    place: Mapping[str, Any],
    config: EngineConfig | None = None,
    *,
    grace: float | None = None,
    **settings: Any,
) -> Hosts | None:
    """This process's place among several hosts, None where it is alone. Returns on host 0 only: the others follow it.

    Args:
        artifact: Its folder.
        place: What ``host_options`` gave.
        config: How host 0 runs its engine; the others are given the same.
        grace: Seconds that host 0 goes on after SIGTERM, so the others do, too; None where the signal ends it at once.
        settings: Fields of ``EngineConfig`` that replace those of ``config``.

    Raises:
        Ling3Error: ``place`` names no host (``find_hosts``), or the settings are none for several hosts; on the other
            hosts, what ended them.
        SystemExit: On the other hosts, once host 0 has ended.
    """
    hosts, config = find_hosts(**place), replace(config or EngineConfig(), **settings)
    config.check_hosts(hosts)  # on each of them: none has to wait for another to hear it
    if hosts is None:
        return None
    keep_stdout()
    if hosts.number:
        from ling3export.runners.engine.follower import follow

        follow(artifact, hosts, config, grace=grace)
        sys.exit(0)
    return hosts


def keep_stdout() -> None:
    """Leaves stdout to this program's own data: what libraries in C++ print there (gloo does) goes to stderr."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
