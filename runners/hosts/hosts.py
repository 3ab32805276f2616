"""Which of several hosts this process is: from the environment, or from the cluster's launcher.

A host is a process with devices of its own; the same command runs on every one. Imports no jax but to ask a launcher.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.reading import opened
from ling3export.machine.service import is_loopback, launched

DETECT = "auto"  # as a coordinator: ask the cluster's launcher
FIXES = "set DIST_INIT_ADDR=HOST:PORT, NNODES=N and NODE_RANK=I"
SECRET, SECRET_FILE = "LING3_SECRET", "LING3_SECRET_FILE"
SHORTEST, LONGEST = 16, 1024  # characters of a secret
SHARE = "give every host the same secret in LING3_SECRET_FILE=FILE or LING3_SECRET: head -c 24 /dev/urandom | base64"


@dataclass(frozen=True)
class Hosts:
    """This process's place among those that run a target together.

    Attributes:
        coordinator: ``HOST:PORT`` where host 0 listens for the others.
        number: Which one this is; host 0 leads.
        start_timeout: Seconds to wait until all are there.
        host_timeout: Seconds that another host may be silent or late, before it counts as gone.
        secret: Known to every host of this start, and to nobody else.
        trust_network: Without a secret, accept every caller at the coordinator's address as a host.

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
                f"coordinator {self.coordinator}: other machines reach host 0, and there is no secret",
                f"{SHARE}; or trust the whole network with LING3_TRUST_NETWORK=1",
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator; an IPv6 address without its brackets."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find_hosts(environment: Mapping[str, str] = os.environ) -> Hosts | None:
    """This process's place among several hosts, from environment variables; None where it runs alone.

    ``DIST_INIT_ADDR`` is ``HOST:PORT`` of host 0, ``NNODES`` the number of hosts and ``NODE_RANK`` this host's number;
    ``NODE_RANK`` without the others is ignored. With ``DIST_INIT_ADDR=auto`` a cluster's launcher gives all three.
    ``LING3_START_TIMEOUT``, ``LING3_HOST_TIMEOUT``, ``LING3_SECRET``, ``LING3_SECRET_FILE`` and
    ``LING3_TRUST_NETWORK=1`` give the other fields of ``Hosts``.
    """
    coordinator = environment.get("DIST_INIT_ADDR") or None
    count, number = _number("NNODES", environment), _number("NODE_RANK", environment)
    start_timeout = _seconds("LING3_START_TIMEOUT", Hosts.start_timeout, environment)
    host_timeout = _seconds("LING3_HOST_TIMEOUT", Hosts.host_timeout, environment)
    if coordinator == DETECT:
        coordinator, count, number = launched(count, number, start_timeout)
        if coordinator is None or count is None or number is None:
            raise Ling3Error("DIST_INIT_ADDR=auto: jax knows no launcher of this cluster", FIXES)
    elif coordinator is None and count in (None, 1):
        return None
    variables = {"DIST_INIT_ADDR": coordinator, "NNODES": count, "NODE_RANK": number}
    if missing := [name for name, value in variables.items() if value is None]:
        raise Ling3Error(f"hosts: expected {', '.join(variables)}, found no {missing[0]}", FIXES)
    assert coordinator is not None and count is not None and number is not None
    secret = read_secret(environment) if count > 1 else ""
    trust_network = environment.get("LING3_TRUST_NETWORK") == "1"
    hosts = Hosts(coordinator, count, number, start_timeout, host_timeout, secret, trust_network)
    return hosts if count > 1 else None


def read_secret(environment: Mapping[str, str] = os.environ) -> str:
    """The secret in the file that ``LING3_SECRET_FILE`` names, else the one in ``LING3_SECRET``, else an empty one.

    Raises:
        Ling3Error: The file is not this user's alone, or its text is no secret.
    """
    if file := environment.get(SECRET_FILE):
        where, secret = f"`{SECRET_FILE}={file}`", _private(Path(file))
    elif SECRET in environment:
        where, secret = f"`{SECRET}`", environment[SECRET]
    else:
        return ""
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
        with opened(file.parent, file.name) as secret_file:
            status, text = os.fstat(secret_file.fileno()), secret_file.read(2 * LONGEST)
    except OSError as error:
        raise Ling3Error(f"{SECRET_FILE} `{file}`: expected a regular file, found {error.strerror}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise Ling3Error(
            f"{SECRET_FILE} `{file}`: expected a file of this user alone (0600), found mode "
            f"{stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}",
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


def _seconds(name: str, default: float, environment: Mapping[str, str]) -> float:
    text = environment.get(name) or str(default)
    try:
        return float(text)
    except ValueError:
        raise Ling3Error(f"{name}: expected seconds, found {text}") from None
