"""Which of several hosts this process is: from the command line, from the environment, or from the cluster's launcher.

A host is a process with devices of its own; the same command runs on every one. Imports no jax but to ask a launcher.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ling3export.errors import Ling3Error

DETECT = "auto"  # as a coordinator: ask the cluster's launcher
FIXES = "give --coordinator HOST:PORT --num-hosts N --host-id I, or set DIST_INIT_ADDR, NNODES and NODE_RANK"


@dataclass(frozen=True)
class Hosts:
    """This process's place among those that run a target together.

    Attributes:
        coordinator: ``HOST:PORT`` where host 0 listens for the others.
        count: How many hosts there are.
        number: Which one this is; host 0 leads.
        start_timeout: Seconds to wait until all are there.
    """

    coordinator: str
    count: int
    number: int
    start_timeout: float = 300.0

    def __post_init__(self) -> None:
        _, colon, port = self.coordinator.rpartition(":")
        if not colon or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise Ling3Error(f"coordinator: expected HOST:PORT, found {self.coordinator}", "e.g. 10.0.0.1:6379")
        if not 0 <= self.number < self.count:
            raise Ling3Error(f"host id: expected 0 to {self.count - 1} of {self.count} hosts, found {self.number}")
        if self.start_timeout <= 0:
            raise Ling3Error(f"start timeout: expected seconds above 0, found {self.start_timeout:g}")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator; an IPv6 address without its brackets."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find_hosts(
    coordinator: str | None, num_hosts: int | None, host_id: int | None, start_timeout: float = Hosts.start_timeout,
    environment: Mapping[str, str] = os.environ,
) -> Hosts | None:  # fmt: skip
    """This process's place among several hosts; None where it runs alone.

    What is None is taken from DIST_INIT_ADDR, NNODES and NODE_RANK. NODE_RANK alone says nothing.

    Args:
        coordinator: ``HOST:PORT`` of host 0, or ``auto``: a cluster's launcher knows all three.
        num_hosts: How many hosts there are.
        host_id: Which one this is.
        start_timeout: Seconds to wait until all are there.
        environment: Where the variables are looked up.

    Raises:
        Ling3Error: Only a part of the three is known, they contradict each other, or the launcher is not known.
    """
    coordinator = coordinator or environment.get("DIST_INIT_ADDR") or None
    if coordinator == DETECT:
        from ling3export.runners.hosts.service import launched

        coordinator, count, number = launched(num_hosts, host_id, start_timeout)
        if coordinator is None or count is None or number is None:
            raise Ling3Error("--coordinator auto: expected a cluster's launcher that jax knows, found none", FIXES)
        return Hosts(coordinator, count, number, start_timeout) if count > 1 else None
    count = _number("NNODES", environment) if num_hosts is None else num_hosts
    if coordinator is None and host_id is None and count in (None, 1):
        return None
    number = _number("NODE_RANK", environment) if host_id is None else host_id
    given = {
        "--coordinator (DIST_INIT_ADDR)": coordinator, "--num-hosts (NNODES)": count, "--host-id (NODE_RANK)": number,
    }  # fmt: skip
    if missing := [name for name, value in given.items() if value is None]:
        raise Ling3Error(f"hosts: expected coordinator, number of hosts and host id, found no {missing[0]}", FIXES)
    assert coordinator is not None and count is not None and number is not None
    hosts = Hosts(coordinator, count, number, start_timeout)
    return hosts if count > 1 else None


def _number(name: str, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name) or None
    if text is None:
        return None
    if not text.isdigit():
        raise Ling3Error(f"{name}: expected a whole number, found {text}")
    return int(text)
