"""Joins this process's jax with that of the other hosts.

Beside ``pjrt.py`` this is the only file that uses jax's internals. After ``jax.distributed.initialize`` every process
would end itself with a stack trace of C++ the moment that process 0 is gone, since the service by which they find each
other dies with it. Here that service is a process of its own. It outlives host 0 for long enough that the others see
host 0 missing (``channel.py``), say so, and end.
"""

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
import time
from typing import Any

from ling3export.foundation.errors import Ling3Error

HEARTBEAT = 120  # seconds of silence after which jax gives a host up; the channel gives it up sooner
GRACE = 15  # seconds: long enough for every host to see that host 0 is gone
READY = "ready\n"


class Service:
    """jax's coordination service in a process of its own, on host 0's machine.

    Args:
        host: Host 0's address, as the others reach it.
        port: A free port of this machine.
        grace: Seconds that the service goes on without host 0.

    Raises:
        Ling3Error: It did not start.
    """

    def __init__(self, host: str, port: int, count: int, grace: int = GRACE) -> None:
        bind = _joined(own_address(host) or "::", port)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ling3export.machine.service", bind, str(count), str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # no Ctrl-C for it
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line != READY:
            self.end()
            raise Ling3Error(f"jax's service: expected it to start at {bind}, found {line.strip() or 'that it ended'}")

    def end(self) -> None:
        """Ends the process at once; may be called again."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def serve(bind: str, count: int, grace: int) -> None:
    """Runs the service until ``grace`` seconds after stdin has ended."""
    from jax._src.lib import _jax

    try:
        service = _jax.get_distributed_runtime_service(bind, count, heartbeat_timeout=HEARTBEAT)
    except RuntimeError as error:
        print(" ".join(str(error).split()))
        return
    print(READY, end="", flush=True)
    sys.stdin.read()
    time.sleep(grace)
    del service
    os._exit(0)


def join(host: str, port: int, count: int, number: int, timeout: float) -> None:
    """Makes the devices of all hosts visible to ``jax.devices()``; returns when all have joined.

    Call it before jax's backend starts. On CPU the hosts exchange arrays over gloo.

    Args:
        host: Host 0's address.
        port: The service's.
        timeout: Seconds to wait for the others.
    """
    import jax
    from jax._src import distributed
    from jax._src.lib import _jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    state: Any = distributed.global_state
    state.process_id, state.num_processes = number, count
    state.coordinator_address = _joined(host, port)
    state.client = _jax.get_distributed_runtime_client(
        state.coordinator_address,
        number,
        init_timeout=max(1, round(timeout)),
        heartbeat_timeout=HEARTBEAT,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    state.client.connect()


def leave() -> None:
    """Ends the connection to the service; returns when all hosts have called it."""
    from jax._src import distributed

    state: Any = distributed.global_state
    if state.client is not None:
        state.client.shutdown()
        state.client = None


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def own_address(host: str) -> str:
    """The one address of host 0's machine at which it listens for the others; empty for all of them.

    Where the coordinator is a name, host 0 listens at the IPv4 address that the name has there. Only where that is the
    machine's own name for itself (127.0.1.1 in many a /etc/hosts), which no other machine reaches, it listens at all.

    Args:
        host: The coordinator's, without its port.

    Raises:
        OSError: The name is not known here.
    """
    if ":" in host or is_loopback(host):
        return host
    address = socket.gethostbyname(host)
    return "" if is_loopback(address) else address


def launched(count: int | None, number: int | None, timeout: float) -> tuple[str | None, int | None, int | None]:
    """Coordinator, number of hosts and this host's number from the cluster's launcher; None for each that it lacks.

    jax knows Slurm, Open MPI, Kubernetes and Cloud TPU.
    """
    from jax._src.clusters import ClusterEnv

    place = ClusterEnv.auto_detect_unset_distributed_params(None, count, number, None, None, round(timeout))
    return place[0], place[1], place[2]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
