"""How hosts find each other before anything is loaded: host 0 listens, the others call until it answers.

Host 0 and a caller prove to each other that they know the secret of this start (:mod:`handshake
<ling3export.runners.hosts.handshake>`) before either says what it loads:

    caller to host 0  IDENTITY   hosts, identity
    host 0 to caller  WELCOME    port, once all are there; or REFUSED or FAILED, with the reason

A caller that fails is dropped and counted, and nothing waits for it. Without a secret every caller proves the
empty one. What hosts send each other afterwards is neither signed nor encrypted.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ling3export.foundation.errors import Ling3Error
from ling3export.machine.service import own_address
from ling3export.runners.hosts.handshake import (
    GREETING,
    REFUSED,
    SMALL,
    Listener,
    challenge,
    hear,
    listening,
    prove,
    receive,
    send,
    tell,
)
from ling3export.runners.hosts.hosts import Hosts

IDENTITY, WELCOME, FAILED = b"I", b"W", b"F"
ROLES = ("caller", "host 0")  # names of both sides in their proofs
ANSWERING = 10.0  # seconds that host 0 stays to say why it ends before it has met the others
PAUSE = 0.1  # seconds between two calls

Identity = dict[str, object]  # what must be the same on all hosts, by name


class HostsError(Ling3Error):
    """Hosts do not find each other, or do not fit together."""


class Greeting(NamedTuple):
    """What a host says of itself when it calls host 0."""

    host: int
    hosts: int
    identity: Identity


class Refusal(NamedTuple):
    """Why a host cannot take part: the reason, and the one sent to that host, without host 0's own values."""

    reason: str
    sent: str
    kind: bytes = REFUSED


def meet(hosts: Hosts, identity: Identity) -> tuple[dict[int, socket.socket], int]:
    """Connects host 0 with every other host. Every host calls this.

    Args:
        hosts: This process's place.
        identity: What must be the same on all hosts, such as the artifact's digest and the target.

    Returns:
        Connections by the number of the host at their other end: on host 0 one to each of the others, on the others one
        to host 0. And a port for jax's own service, which was free on host 0's machine.

    Raises:
        HostsError: Not all hosts are there in time, or this one does not fit to host 0.
    """
    return _gather(hosts, identity) if hosts.number == 0 else _call(hosts, identity)


class _Door:
    """Host 0's listener, until every host is there.

    Args:
        hosts: Host 0's place.
        refusal: Why a host that proved the secret cannot take part; None if it can.

    Attributes:
        peers: The connection of each host that is there. One that calls again takes the place of its old connection.
        refused: Why a host could not take part the last time it called.
        dropped: How many callers were no hosts of this start.

    Raises:
        OSError: The coordinator's port is taken, or its address is another machine's.
    """

    def __init__(self, hosts: Hosts, refusal: Callable[[Greeting], Refusal | None]) -> None:
        self.peers: dict[int, socket.socket] = {}
        self.refused: dict[int, str] = {}
        self.dropped = 0
        self._hosts, self._refusal = hosts, refusal
        self._changed = threading.Condition()
        self._closed = False
        address = own_address(hosts.address[0]), hosts.address[1]
        self._listener = Listener(self._answer, hosts.bound or listening(*address))

    def __enter__(self) -> "_Door":
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
        self._listener.close()

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Waits until ``done``, which is asked after each caller; whether it was in time. Then nobody is let in."""
        with self._changed:
            reached = self._changed.wait_for(done, seconds)
            self._closed = True
        return reached

    def all_there(self) -> bool:
        """Whether every host is there; those that ended meanwhile are forgotten."""
        for number, peer in list(self.peers.items()):
            if _ended(peer):
                self.peers.pop(number).close()
        return len(self.peers) == self._hosts.count - 1

    def _answer(self, caller: socket.socket, admit: Callable[[], None]) -> None:
        try:
            greeting = _greeting(caller, self._hosts)
        except (OSError, ValueError):
            with self._changed:
                self.dropped += 1
            return caller.close()  # after the count: a caller that sees this close may already find all hosts connected
        admit()
        refusal = self._refusal(greeting)
        with self._changed:
            if self._closed:
                return caller.close()
            if refusal is None:
                old = self.peers.get(greeting.host)
                self.peers[greeting.host] = caller
                self.refused.pop(greeting.host, None)
            else:
                self.refused[greeting.host] = refusal.reason
            self._changed.notify_all()
        if refusal is not None:
            _part({greeting.host: caller}, refusal.kind, refusal.sent)
        elif old is not None:
            _part({greeting.host: old}, REFUSED, f"another process called as host {greeting.host} and took its place")


def _ended(peer: socket.socket) -> bool:
    """Whether a host from which no message is expected closed its connection."""
    peer.settimeout(0)
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        peer.settimeout(GREETING)


def _greeting(caller: socket.socket, hosts: Hosts) -> Greeting:
    """What the host that called says of itself, within GREETING seconds and once both have proven the secret.

    Raises:
        OSError, ValueError: The caller is no host of this start.
    """
    until = time.monotonic() + GREETING
    caller.settimeout(GREETING)
    number = challenge(caller, hosts.secret, until, ROLES)
    members = hear(caller, IDENTITY, until, hosts=int, identity=dict)
    caller.settimeout(GREETING)
    return Greeting(number, members["hosts"], members["identity"])


def _gather(hosts: Hosts, identity: Identity) -> tuple[dict[int, socket.socket], int]:
    def refusal(greeting: Greeting) -> Refusal | None:
        refused = _refusal(greeting, hosts, identity)
        if refused is not None:
            print(f"host 0: refused a host and waits on: {refused.reason}", file=sys.stderr, flush=True)
        return refused

    try:
        with _Door(hosts, refusal) as door:
            complete = door.wait(door.all_there, hosts.start_timeout)
            chosen = free_port(hosts)
    except OSError as error:
        raise HostsError(
            f"coordinator {hosts.coordinator}: expected a free port on this machine, found {_system(error)}"
        ) from error
    strangers = f"callers dropped that were no hosts of this start: {door.dropped}"
    if not complete:
        door.all_there()
        missing = ", ".join(str(number) for number in range(1, hosts.count) if number not in door.peers)
        reasons = [f"no word of host {missing}", *(f"refused: {why}" for why in door.refused.values())]
        reasons += [strangers] if door.dropped else []
        text = f"hosts: expected {hosts.count} within {hosts.start_timeout:g} s, found {'; '.join(reasons)}"
        refuse(door.peers, text)
        raise HostsError(text, "start the same command on every host; LING3_START_TIMEOUT=SECONDS waits longer")
    if door.dropped:
        print(f"hosts: all {hosts.count} are there; {strangers}", file=sys.stderr, flush=True)
    return door.peers, chosen


def free_port(hosts: Hosts) -> int:
    """A port for jax's service, which listens at the same address as host 0; it was free a moment ago."""
    with listening(own_address(hosts.address[0]), 0) as free:
        return int(free.getsockname()[1])


def _refusal(greeting: Greeting, hosts: Hosts, identity: Identity) -> Refusal | None:
    number, count, theirs = greeting
    if count != hosts.count:
        what = f"hosts: expected {hosts.count} as on host 0, found {str(count)[:100]} on host {str(number)[:100]}"
        return Refusal(what, what)
    if not 0 < number < hosts.count:
        what = f"hosts: expected ids from 1 to {hosts.count - 1} of those that call, found {str(number)[:100]}"
        return Refusal(what, what)
    for name, mine in identity.items():
        if (other := theirs.get(name)) != mine:
            where, what = f"host {number}: expected {name}", f"as on host 0, found {str(other)[:100]}"
            return Refusal(f"{where} {mine} {what}", f"{where} {what}")
    return None


def welcome(peers: dict[int, socket.socket], port: int) -> None:
    """Tells the other hosts that all are there, and where jax's own service listens."""
    for peer in peers.values():
        with contextlib.suppress(OSError):  # a host that is lost again is found by its watch
            send(peer, WELCOME, str(port).encode())


def refuse(peers: dict[int, socket.socket], text: str) -> None:
    """Tells hosts why host 0 ends, and closes their connections."""
    _part(peers, FAILED, text)


def _part(peers: dict[int, socket.socket], kind: bytes, text: str) -> None:
    for peer in peers.values():
        with contextlib.suppress(OSError), peer:
            send(peer, kind, text.encode(errors="replace")[:SMALL])


@contextlib.contextmanager
def announced(hosts: Hosts | None) -> Iterator[None]:
    """Covers what host 0 does before it meets the others: if that fails, they are told why, and none waits for it.

    It answers them for ANSWERING seconds at most; a host that calls later finds nobody.

    Args:
        hosts: This process's place. Only host 0 tells; the others may be started again until all are there.
    """
    try:
        yield
    except Exception as error:
        if hosts is not None and hosts.number == 0:
            with contextlib.suppress(OSError):
                _turn_away(hosts, str(getattr(error, "message", error)))
        raise


def _turn_away(hosts: Hosts, text: str) -> None:
    print(f"host 0: telling the others that it ends, for at most {ANSWERING:g} s", file=sys.stderr, flush=True)
    with _Door(hosts, lambda _: Refusal(text, text, FAILED)) as door:
        door.wait(lambda: len(door.refused) == hosts.count - 1, min(ANSWERING, hosts.start_timeout))


def _call(hosts: Hosts, identity: Identity) -> tuple[dict[int, socket.socket], int]:
    """Calls host 0 until it answers. One that ends before all are there may be started again, too."""
    until, obstacle = time.monotonic() + hosts.start_timeout, "nobody"
    while (left := until - time.monotonic()) > 0:
        try:
            peer = socket.create_connection(hosts.address, timeout=max(0.1, min(GREETING, left)))
        except OSError as error:
            obstacle = _system(error)
        else:
            try:
                return {0: peer}, _introduce(peer, hosts, identity)
            except BaseException as error:
                peer.close()
                if not isinstance(error, (OSError, ValueError)):
                    raise
                obstacle = "that it is silent" if isinstance(error, TimeoutError) else _system(error)
        time.sleep(PAUSE)
    raise HostsError(
        f"host 0: expected it at {hosts.coordinator} within {hosts.start_timeout:g} s, found {obstacle}",
        "start the same command on every host; LING3_START_TIMEOUT=SECONDS waits longer",
    )


def _introduce(peer: socket.socket, hosts: Hosts, identity: Identity) -> int:
    """The caller's side of :func:`_greeting`; returns the port of jax's service once all hosts are there.

    Raises:
        HostsError: It refuses this host.
        SecretError: It does not know the secret.
        OSError, ValueError: It ended, or is no host 0.
    """
    prove(peer, hosts.secret, hosts.number, time.monotonic() + GREETING, ROLES)
    tell(peer, IDENTITY, hosts=hosts.count, identity=identity)
    # Host 0 waits for the others, and tells us if it gives up; so we wait a little longer than it does.
    peer.settimeout(hosts.start_timeout + GREETING)
    kind, payload = receive(peer, SMALL)
    if kind == WELCOME:
        return int(payload)
    verb = "gave up" if kind == FAILED else "refused this host"
    raise HostsError(f"host 0 {verb}: {payload.decode(errors='replace')[:SMALL]}")


def _system(error: Exception) -> str:
    """The system's own words for an error, without what Python adds to them."""
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(getattr(error, "strerror", None) or error)
