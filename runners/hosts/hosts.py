"""Which of several hosts this process is: from the command line, from the environment, or from the cluster's launcher.

A host is a process with devices of its own; the same command runs on every one. Imports no jax but to ask a launcher.
"""

import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.reading import opened
from ling3export.machine.service import is_loopback, launched

DETECT = "auto"  # as a coordinator: ask the cluster's launcher
FIXES = "give --coordinator HOST:PORT --num-hosts N --host-id I, or set DIST_INIT_ADDR, NNODES and NODE_RANK"
SECRET = "LING3_SECRET"
SHORTEST, LONGEST = 16, 1024  # characters of a secret
SHARE = "give every host the same secret with --secret-file FILE or LING3_SECRET: head -c 24 /dev/urandom | base64"


@dataclass(frozen=True)
class Hosts:
    """This process's place among those that run a target together.

    Attributes:
        coordinator: ``HOST:PORT`` where host 0 listens for the others.
        count: How many hosts there are.
        number: Which one this is; host 0 leads.
        start_timeout: Seconds to wait until all are there.
        host_timeout: Seconds that another host may be silent or behind, before it counts as gone.
        secret: What every host of this start knows, and nobody else.
        trust_network: Without a secret, accept every caller at the coordinator's address as a host.
        bound: On host 0, a socket that is bound to the coordinator's address already; by default it binds one itself.

    Raises:
        Ling3Error: A value is out of its bounds. Or other machines reach the coordinator, and there is no secret.
    """

    coordinator: str
    count: int
    number: int
    start_timeout: float = 300.0
    host_timeout: float = 30.0
    secret: str = field(default="", repr=False)
    trust_network: bool = False
    bound: socket.socket | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _, colon, port = self.coordinator.rpartition(":")
        if not colon or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise Ling3Error(f"coordinator: expected HOST:PORT, found {self.coordinator}", "e.g. 10.0.0.1:6379")
        if not 0 <= self.number < self.count:
            raise Ling3Error(f"host id: expected 0 to {self.count - 1} of {self.count} hosts, found {self.number}")
        for name, seconds in (("start", self.start_timeout), ("host", self.host_timeout)):
            if seconds <= 0:
                raise Ling3Error(f"{name} timeout: expected seconds above 0, found {seconds:g}")
        alone = self.count == 1 or is_loopback(self.address[0])
        if not (alone or self.secret or self.trust_network):
            raise Ling3Error(
                f"coordinator {self.coordinator}: expected a secret where other machines reach host 0, found none",
                f"{SHARE}; or trust the whole network with --trust-network",
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator; an IPv6 address without its brackets."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find_hosts(
    coordinator: str | None,
    num_hosts: int | None,
    host_id: int | None,
    start_timeout: float = Hosts.start_timeout,
    *,
    host_timeout: float = Hosts.host_timeout,
    secret_file: Path | None = None,
    trust_network: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Hosts | None:
    """This process's place among several hosts; None where it runs alone.

    Arguments that are None come from DIST_INIT_ADDR, NNODES and NODE_RANK. NODE_RANK alone is ignored.

    Args:
        coordinator: ``HOST:PORT`` of host 0, or ``auto``: a cluster's launcher knows all three.
        num_hosts: How many hosts there are.
        host_id: Which one this is.
        start_timeout: Seconds to wait until all are there.
        host_timeout: Seconds that another host may be silent or behind.
        secret_file: Holds the secret; by default LING3_SECRET does.
        trust_network: Whether other machines may take part without a secret.
        environment: Where the variables are looked up.

    Raises:
        Ling3Error: Only a part of the three is known, they contradict each other, or the launcher is not known. Or
            the secret is missing, no secret, or readable by others.
    """

    def placed(coordinator: str, count: int, number: int) -> Hosts | None:
        secret = read_secret(secret_file, environment) if count > 1 else ""
        hosts = Hosts(coordinator, count, number, start_timeout, host_timeout, secret, trust_network)
        return hosts if count > 1 else None

    coordinator = coordinator or environment.get("DIST_INIT_ADDR") or None
    if coordinator == DETECT:
        coordinator, count, number = launched(num_hosts, host_id, start_timeout)
        if coordinator is None or count is None or number is None:
            raise Ling3Error("--coordinator auto: expected a cluster's launcher that jax knows, found none", FIXES)
        return placed(coordinator, count, number)
    count = _number("NNODES", environment) if num_hosts is None else num_hosts
    if coordinator is None and host_id is None and count in (None, 1):
        return None
    number = _number("NODE_RANK", environment) if host_id is None else host_id
    given = {
        "--coordinator (DIST_INIT_ADDR)": coordinator,
        "--num-hosts (NNODES)": count,
        "--host-id (NODE_RANK)": number,
    }
    if missing := [name for name, value in given.items() if value is None]:
        raise Ling3Error(f"hosts: expected coordinator, number of hosts and host id, found no {missing[0]}", FIXES)
    assert coordinator is not None and count is not None and number is not None
    return placed(coordinator, count, number)


def read_secret(file: Path | None, environment: Mapping[str, str] = os.environ) -> str:
    """The secret in ``file``, else the one in LING3_SECRET, else an empty one.

    Raises:
        Ling3Error: The file is not this user's alone, or what was found is no secret.
    """
    if file is None:
        where, secret = f"`{SECRET}`", environment.get(SECRET)
        if secret is None:
            return ""
    else:
        where, secret = f"--secret-file `{file}`", _private(file)
    secret = secret.strip()
    if not SHORTEST <= len(secret) <= LONGEST or not all("!" <= character <= "~" for character in secret):
        raise Ling3Error(
            f"{where}: expected {SHORTEST} to {LONGEST:,} characters of printable ASCII without blanks, found no such "
            "text",
            SHARE,
        )
    return secret


def _private(file: Path) -> str:
    """The text of a file that nobody but this user may read or write; a pipe or a device is not waited for."""
    file = file.resolve()
    try:
        with opened(file.parent, file.name) as there:
            found, text = os.fstat(there.fileno()), there.read(2 * LONGEST)
    except OSError as error:
        raise Ling3Error(f"--secret-file `{file}`: expected a regular file, found {error.strerror}") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise Ling3Error(
            f"--secret-file `{file}`: expected a file of this user alone (0600), found mode "
            f"{stat.S_IMODE(found.st_mode):04o} of user {found.st_uid}",
            f"chmod 600 {file}",
        )
    return text.decode("ascii", "replace")


def _number(name: str, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name) or None
    if text is None:
        return None
    if not text.isdigit():
        raise Ling3Error(f"{name}: expected a whole number, found {text}")
    return int(text)
