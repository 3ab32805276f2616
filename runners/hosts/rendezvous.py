"""How hosts find each other before anything is loaded: host 0 listens, the others call until it answers.

A message is a letter for its kind, its length in four bytes, and JSON or an array's bytes; never pickle. Hosts trust
each other and the network between them, as jax's own service does.
"""

import contextlib
import json
import os
import socket
import struct
import sys
import time
from typing import NamedTuple

from ling3export.errors import Ling3Error
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.hosts.service import is_loopback
from ling3export.strict_json import parse_json

HEAD = struct.Struct("!cI")
LARGEST = 1 << 30  # bytes of a message
PROTOCOL = 1
HELLO, WELCOME, FAILED = b"L", b"W", b"F"
ANSWERING = 10.0  # seconds that host 0 stays to say why it ends before it has met the others
GREETING = 5.0  # seconds that a caller has to say who it is
PAUSE = 0.1  # seconds between two calls


Identity = dict[str, object]  # what must be the same on all hosts, by name


class HostsError(Ling3Error):
    """Hosts do not find each other, or do not fit together."""


class Greeting(NamedTuple):
    """What a host says of itself when it calls host 0."""

    host: int
    hosts: int
    identity: Identity


def send(peer: socket.socket, kind: bytes, payload: bytes) -> None:
    """Sends a message of ``kind``."""
    peer.sendall(HEAD.pack(kind, len(payload)) + payload)


def receive(peer: socket.socket) -> tuple[bytes, bytes]:
    """Waits for the next message; returns its kind and payload.

    Raises:
        ConnectionError: The other end is gone, or does not speak this protocol.
        TimeoutError: It has been silent for the socket's timeout.
    """
    kind, length = HEAD.unpack(_exactly(peer, HEAD.size))
    if length > LARGEST:
        raise ConnectionError(f"a message of {length:,} bytes")
    return kind, _exactly(peer, length)


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = peer.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionError("its connection was closed")
        data += part
    return bytes(data)


def meet(hosts: Hosts, identity: Identity) -> tuple[dict[int, socket.socket], int]:
    """Connects host 0 with every other host. Every host calls this.

    Args:
        hosts: This process's place.
        identity: What must be the same on all hosts, such as the artifact's digest and the target.

    Returns:
        Connections by the number of the host at their other end: on host 0 one to each of the others, on the others one
        to host 0. And a port for jax's own service, which was free on host 0's machine.

    Raises:
        HostsError: Not all hosts are there in time, or they do not fit together; every host that is there gets it.
    """
    return _gather(hosts, identity) if hosts.number == 0 else _call(hosts, identity)


def _gather(hosts: Hosts, identity: Identity) -> tuple[dict[int, socket.socket], int]:
    peers: dict[int, socket.socket] = {}
    until = time.monotonic() + hosts.start_timeout
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(_listening(hosts))
        except OSError as error:
            raise HostsError(
                f"coordinator {hosts.coordinator}: expected a free port on this machine, found {_system(error)}"
            ) from error
        try:
            while len(peers) < hosts.count - 1:
                listener.settimeout(max(0.001, until - time.monotonic()))
                caller, _ = listener.accept()
                caller.settimeout(GREETING)
                number = _admitted(caller, hosts, identity, peers)
                if number is not None:
                    peers[number] = caller
        except TimeoutError:
            missing = ", ".join(str(number) for number in range(1, hosts.count) if number not in peers)
            text = f"hosts: expected {hosts.count} within {hosts.start_timeout:g} s, found no word of host {missing}"
            refuse(peers, text)
            raise HostsError(text, "start the same command on every host; --start-timeout waits longer") from None
        except HostsError as error:
            refuse(peers, error.message)
            raise
    with socket.create_server(("", 0)) as free:
        chosen = int(free.getsockname()[1])
    return peers, chosen


def welcome(peers: dict[int, socket.socket], port: int) -> None:
    """Tells the other hosts that all are there, and where jax's own service listens."""
    for peer in peers.values():
        send(peer, WELCOME, json.dumps({"port": port}).encode())


def _admitted(caller: socket.socket, hosts: Hosts, identity: Identity, peers: dict[int, socket.socket]) -> int | None:
    """The number of the host that called; None if the caller is no host."""
    greeting = _greeting(caller)
    if greeting is None:
        return None
    number, count, theirs = greeting
    other = next((name for name, expected in identity.items() if theirs.get(name) != expected), None)
    if count != hosts.count:
        what = f"hosts: expected {hosts.count} as on host 0, found {count} on host {number}"
    elif number in peers or not 0 < number < hosts.count:
        what = f"hosts: expected each id from 1 to {hosts.count - 1} once, found another {number}"
    elif other is not None:
        what = f"host {number}: expected {other} {identity[other]} as on host 0, found {theirs.get(other)}"
    else:
        return number
    refuse({number: caller}, what)
    raise HostsError(what, "start the same command with the same artifact on every host")


def _greeting(caller: socket.socket) -> Greeting | None:
    """What the host that called says of itself; None, and the connection closed, if the caller is no host."""
    try:
        kind, payload = receive(caller)
        said = parse_json(payload)
        if kind != HELLO or said["protocol"] != PROTOCOL:
            raise ValueError
        return Greeting(int(said["host"]), int(said["hosts"]), dict(said["identity"]))
    except (OSError, ValueError, KeyError, TypeError):
        caller.close()
        return None


def refuse(peers: dict[int, socket.socket], text: str) -> None:
    """Tells hosts why they end, and closes their connections."""
    for peer in peers.values():
        with contextlib.suppress(OSError), peer:
            send(peer, FAILED, text.encode())


def turn_away(hosts: Hosts, text: str) -> None:
    """Tells every host that calls why host 0 ends before it meets them, so that none waits for it in vain.

    It answers for ANSWERING seconds at most; a host that calls later finds nobody.

    Raises:
        OSError: The coordinator's port is taken, or not all hosts called in time.
    """
    print(f"host 0: telling the others that it ends, for at most {ANSWERING:g} s", file=sys.stderr, flush=True)
    until = time.monotonic() + min(ANSWERING, hosts.start_timeout)
    told: set[int] = set()
    with _listening(hosts) as listener:
        while len(told) < hosts.count - 1:
            listener.settimeout(max(0.001, until - time.monotonic()))
            caller, _ = listener.accept()
            caller.settimeout(GREETING)
            greeting = _greeting(caller)
            if greeting is not None:
                refuse({greeting.host: caller}, text)
                told.add(greeting.host)


def _listening(hosts: Hosts) -> socket.socket:
    """The socket at which host 0 waits for the others; on loopback it is open to this machine alone."""
    host, port = hosts.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host if is_loopback(host) else "", port), family=family, backlog=hosts.count)


def _call(hosts: Hosts, identity: Identity) -> tuple[dict[int, socket.socket], int]:
    until = time.monotonic() + hosts.start_timeout
    hello = {"protocol": PROTOCOL, **Greeting(hosts.number, hosts.count, identity)._asdict()}
    while True:
        left = until - time.monotonic()
        try:
            peer = socket.create_connection(hosts.address, timeout=max(0.1, min(5.0, left)))
            break
        except OSError as error:
            if left <= 0:
                raise HostsError(
                    f"host 0: expected it at {hosts.coordinator} within {hosts.start_timeout:g} s, "
                    f"found {_system(error)}",
                    "start the same command on every host; --start-timeout waits longer",
                ) from error
            time.sleep(PAUSE)
    # Host 0 waits for the others, and tells us if it gives up; so we wait a little longer than it does.
    peer.settimeout(hosts.start_timeout + 2 * GREETING)
    try:
        send(peer, HELLO, json.dumps(hello).encode())
        kind, payload = receive(peer)
    except OSError as error:
        peer.close()
        found = "that it is silent" if isinstance(error, TimeoutError) else f"that {error}"
        raise HostsError(f"host 0: expected it to wait for all hosts, found {found}") from error
    if kind != WELCOME:
        peer.close()
        raise HostsError(f"host 0 gave up: {payload.decode()}")
    return {0: peer}, int(parse_json(payload)["port"])


def _system(error: OSError) -> str:
    """The system's own words for an error, without what Python adds to them."""
    return os.strerror(error.errno) if error.errno else str(error)
