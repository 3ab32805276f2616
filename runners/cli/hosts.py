"""Commands that run on several hosts: host 0 leads, and the others follow it."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.hosts.hosts import Hosts, find_hosts


def leading(
    artifact: Path, config: EngineConfig | None = None, *, grace: float | None = None, **settings: Any
) -> Hosts | None:
    """This process's place among several hosts; None if there are no others. Returns on host 0 only.

    The other hosts follow host 0 inside, with the same configuration, and exit once it has ended.

    Args:
        grace: Seconds that host 0 goes on after SIGTERM, so the others do, too; None where the signal ends it at once.
        settings: Fields of ``EngineConfig`` that replace those of ``config``.
    """
    hosts, config = find_hosts(), replace(config or EngineConfig(), **settings)
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
    """Leaves stdout to this program's own data: lines of libraries in C++ (gloo prints some) go to stderr."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
