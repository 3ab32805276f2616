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
    """This process's place among several hosts, None where it is alone. Returns on host 0 only: the others follow it.

    Args:
        artifact: Its folder.
        config: How host 0 runs its engine; the others are given the same.
        grace: Seconds that host 0 goes on after SIGTERM, so the others do, too; None where the signal ends it at once.
        settings: Fields of ``EngineConfig`` that replace those of ``config``.

    Raises:
        Ling3Error: The environment names no host (``find_hosts``), or the settings are none for several hosts; on the
            other hosts, what ended them.
        SystemExit: On the other hosts, once host 0 has ended.
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
    """Leaves stdout to this program's own data: what libraries in C++ print there (gloo does) goes to stderr."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
