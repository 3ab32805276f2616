"""How hosts find each other before anything is loaded: host 0 listens, the others call until it answers.

Host 0 and a caller prove to each other that they know the secret of this start (:mod:`handshake
<ling3export.runners.hosts.handshake>`) before either says what it loads:

    caller to host 0  IDENTITY   hosts, identity
    host 0 to caller  WELCOME    port, once all are there; or REFUSED or FAILED, with the reason

A caller that fails is dropped and counted, and nothing waits for it.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.threads import GuardedThread, attempt
from ling3export.machine.service import own_address
from ling3export.runners.hosts.handshake import REFUSED, SMALL, challenge, hear, prove, receive, send, tell
from ling3export.runners.hosts.hosts import Hosts

IDENTITY, WELCOME, FAILED = b"I", b"W", b"F"
GREETING = 5.0  # seconds that a caller has for everything up to its identity
CALLERS = 64  # that have not proven the secret yet; while there are more, the first of them is dropped
ANSWERING = 10.0  # seconds that host 0 stays to say why it ends before it has met the others
PAUSE = 0.1  # seconds between two calls, and until host 0 takes the next caller where the system lacks something

Identity = dict[str, object]  # what must be the same on all hosts, by name


class HostsError(Ling3Error):
    """Hosts do not find each other, or do not fit together."""


class Greeting(NamedTuple):
    """A host's words when it calls host 0."""

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

    Returns:
        Connections by the number of the host at their other end: on host 0 one to each of the others, on the others one
        to host 0. And a port for jax's own service, which was free on host 0's machine.

    Raises:
        HostsError: Not all hosts are there in time, or this one does not fit to host 0.
    """
    return _gather(hosts, identity) if hosts.number == 0 else _call(hosts, identity)


class _Door:
    """Host 0's listener, until every host is there. A thread for each caller: a slow one delays nobody.

    While there are CALLERS that have not proven the secret, the next one takes the place of the first of them, so that
    silent callers keep nobody out.

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
        self._unproven: dict[socket.socket, None] = {}  # callers, the first one first
        self._closed = self._left = False  # nobody is let in; nobody is heard
        self._socket = listening(own_address(hosts.address[0]), hosts.address[1])
        self._socket.listen(2 * CALLERS)
        self._thread = GuardedThread("ling3-listener", self._listen)

    def __enter__(self) -> "_Door":
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the port; callers that are being answered are not waited for."""
        with self._changed:
            self._closed = self._left = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._thread.join()
        self._socket.close()

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

    def _listen(self) -> None:
        while not self._left:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                time.sleep(0 if self._left else PAUSE)  # the system lacks something now; callers call again
                continue
            with self._changed:
                if len(self._unproven) >= CALLERS:
                    first = next(iter(self._unproven))
                    del self._unproven[first]
                    with contextlib.suppress(OSError):
                        first.shutdown(socket.SHUT_RDWR)
                self._unproven[caller] = None
            with contextlib.suppress(RuntimeError):  # no thread more can start: the caller is dropped
                GuardedThread("ling3-caller", partial(self._run, caller))
                continue
            self._drop(caller)

    def _run(self, caller: socket.socket) -> None:
        attempt("answer a caller", lambda: self._answer(caller), lambda error: self._drop(caller), lambda text: None)

    def _drop(self, caller: socket.socket) -> None:
        with self._changed:
            self._unproven.pop(caller, None)
            self.dropped += 1
        caller.close()  # after the count: a caller that sees this close may already find all hosts connected

    def _answer(self, caller: socket.socket) -> None:
        try:
            greeting = _greeting(caller, self._hosts)
        except (OSError, ValueError):
            return self._drop(caller)
        refusal = self._refusal(greeting)
        with self._changed:
            self._unproven.pop(caller, None)
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


def listening(host: str, port: int) -> socket.socket:
    """A socket at an address of this machine; port 0 is any that is free.

    Raises:
        OSError: The port is taken, or the address is another machine's.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


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
    """The identity of the host that called, within GREETING seconds and once both have proven the secret.

    Raises:
        OSError, ValueError: The caller is no host of this start.
    """
    until = time.monotonic() + GREETING
    caller.settimeout(GREETING)
    number = challenge(caller, hosts.secret, until)
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
    """Covers host 0's work before it meets the others: if that fails, it tells them why, and none waits for it.

    It answers them for ANSWERING seconds at most; a host that calls later finds nobody.
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
    prove(peer, hosts.secret, hosts.number, time.monotonic() + GREETING)
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
