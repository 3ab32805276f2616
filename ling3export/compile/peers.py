"""The other processes of a cpu target of several hosts, while one of them compiles for all.

An executable holds the ids of the devices and which process has which, so it has to be compiled where they are so. The
others have nothing to do but to be there.
"""

import contextlib
import os
import socket
import subprocess
import sys

from ling3export.plan.targets import Target
from ling3export.processes import command, environment
from ling3export.runners.hosts.service import Service, join
from ling3export.runners.load.environment import prepare_cpu

HOST = "127.0.0.1"
TIMEOUT = 120.0  # seconds for all processes to start, on a busy machine
FIRST = 0


def become_first(target: Target) -> None:
    """Makes this process the first of the target's; the others end when it does. Call it before jax starts."""
    prepare_cpu(target.tp // target.processes)
    port = free_port()
    service = Service(HOST, port, target.processes, grace=1)
    arguments = [str(port), str(target.processes), str(target.tp // target.processes)]
    peers = [
        subprocess.Popen(
            command("ling3export.compile.peers", *arguments, str(number)), stdin=subprocess.PIPE, env=environment(),
            stdout=subprocess.DEVNULL,
        )
        for number in range(1, target.processes)
    ]  # fmt: skip
    _alive.extend([service, *peers])  # their stdin closes when this process ends
    join(HOST, port, target.processes, FIRST, TIMEOUT)
    import jax

    jax.devices()


_alive: list[object] = []


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with contextlib.closing(socket.create_server((HOST, 0))) as server:
        return int(server.getsockname()[1])


def main() -> None:
    """Is there until stdin ends."""
    port, count, devices, number = (int(argument) for argument in sys.argv[1:5])
    prepare_cpu(devices)
    join(HOST, port, count, number, TIMEOUT)
    import jax

    jax.devices()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
