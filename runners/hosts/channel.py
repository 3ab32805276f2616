"""The connection between hosts that run together: inputs of steps, parts of arrays, and a watch over every host.

A host that is gone leaves the others in a collective that never ends, which nothing can interrupt. So a thread watches
each connection, and ends this process with a message when the connection is closed or silent: at once if the other
process died, after ``host_timeout`` seconds if it is stopped, or its machine or the network is gone. Host 0 also counts
the messages that another host has not taken. It gives up a host that takes none for so long, or gives no part of a
step.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue

from ling3export.foundation.errors import Ling3Error, RankDivergence
from ling3export.foundation.threads import GuardedThread
from ling3export.machine.service import Service, join, leave
from ling3export.runners.hosts.handshake import receive, send
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.hosts.rendezvous import FAILED, Identity, free_port, meet, refuse, welcome

BEATS = 6  # signs of life that are sent in the time after which silence counts as a lost host
SETTLE = 5.0  # seconds that a failed step waits for the watch to find its cause on another host
PORTS = 3  # at which jax's service is started, one after the other, until it does
SAYING = 60.0  # seconds that the watch gets to print its finding and to end the process
PART, STEP, END, DONE, RELEASE, ALIVE = b"P", b"T", b"E", b"D", b"R", b"A"
GONE, DIVERGED = b"G", b"V"  # kinds of messages to all: a host is lost, or it read other tokens
MORE, PIECE = b"M", 64 << 20  # before the last piece of a long message; bytes of a piece


def _code(kind: bytes) -> int:
    return RankDivergence.exit_code if kind == DIVERGED else Ling3Error.exit_code


def end_process(text: str, code: int) -> None:
    """Says why, and ends this process: nothing else ends a collective that waits for a host that is gone."""
    print(f"error: {text}\nhint: hosts live and die together: start the command on all of them again", file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)


def end_anyway(seconds: float) -> None:
    """Ends this process silently with 1 after ``seconds``, even if Python does not run any more by then.

    A process that is already ending may wait for the threads of a collective and run no other thread.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=os.open(os.devnull, os.O_WRONLY))


class Channel:
    """The connection of this host to host 0, or those of host 0 to all others. Making one waits for all hosts.

    Args:
        identity: Values that must be the same on all hosts, by name.
        lost: Called with the reason and the exit code when another host is gone; by default it ends the process.

    Attributes:
        service_port: Where jax's own service listens, at host 0's address.

    Raises:
        HostsError: Not all hosts are there in time, or they do not fit together.
    """

    def __init__(self, hosts: Hosts, identity: Identity, lost: Callable[[str, int], None] = end_process) -> None:
        self.hosts = hosts
        self._peers, self.service_port = meet(hosts, identity)
        self._service: Service | None = None
        if hosts.number == 0:
            try:
                self._service = self._serve()
                welcome(self._peers, self.service_port)
            except (Ling3Error, OSError) as error:
                refuse(self._peers, str(error))
                raise
        self._lost = lost
        self._closing = False  # hosts that leave from now on are expected to
        self._losing: threading.Event | None = None  # another host is gone; set once that was told
        self._over = threading.Event()  # no more beats
        self._lock = threading.Lock()  # one sender at a time
        self._sent = self._taken = 0  # messages for the other hosts, or of host 0; signs of life do not count
        self._stepping = False  # before the first step hosts load, each as long as it takes
        self._awaited: int | None = None  # the host whose part host 0 waits for
        self._inbox: dict[int, SimpleQueue[tuple[bytes, bytes]]] = {number: SimpleQueue() for number in self._peers}
        self._watches: list[GuardedThread] = []
        for number, peer in self._peers.items():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(hosts.host_timeout)
            watch = partial(self._watch, number, peer)
            self._watches.append(GuardedThread(f"ling3-host-{number}", watch, partial(self._thread_failed, number)))
        self._beats = GuardedThread("ling3-beat", self._beat, partial(self._thread_failed, hosts.number))

    def _serve(self) -> Service:
        """jax's service, at another port where a process has taken the one that was free a moment ago."""
        for _ in range(PORTS - 1):
            with contextlib.suppress(Ling3Error):
                return Service(self.hosts.address[0], self.service_port, self.hosts.count)
            self.service_port = free_port(self.hosts)
        return Service(self.hosts.address[0], self.service_port, self.hosts.count)

    @property
    def leads(self) -> bool:
        """Whether this is host 0."""
        return self.hosts.number == 0

    def join(self) -> None:
        """Joins jax with that of the other hosts: from then on ``jax.devices()`` are the devices of all hosts."""
        hosts = self.hosts
        join(hosts.address[0], self.service_port, hosts.count, hosts.number, hosts.start_timeout)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Sends a message to host 0, or from host 0 to all others; a long one in pieces, with signs of life between."""
        for at in range(0, len(payload) - PIECE, PIECE):
            self._send(MORE, payload[at : at + PIECE])
        self._sent += kind != ALIVE
        self._stepping |= kind == STEP
        self._send(kind, payload[max(0, -(-len(payload) // PIECE) - 1) * PIECE :])

    def _send(self, kind: bytes, payload: bytes) -> None:
        for peer in self._peers.values():
            # The watch of a lost host reports it.
            with self._lock, contextlib.suppress(OSError):
                send(peer, kind, payload)

    def take(self, number: int = 0) -> tuple[bytes, bytes]:
        """Waits for a host's next message; returns its kind and payload. If the host is gone, this process ends."""
        message = self._inbox[number].get()
        self._taken += 1
        return message

    def parts(self, payload: bytes) -> list[bytes]:
        """Collects all hosts' payloads on host 0, by host; returns nothing on the others. Every host calls this."""
        if not self.leads:
            self.send(PART, payload)
            return []
        parts = [payload]
        for number in sorted(self._peers):
            self._awaited = number
            parts.append(self.take(number)[1])
        self._awaited = None
        return parts

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Collects all hosts' payloads, of one length, on every host, by host. Every host calls this."""
        parts = self.parts(payload)
        if self.leads:
            self.send(PART, b"".join(parts))
            return tuple(parts)
        whole = self.take()[1]
        return tuple(whole[at : at + len(payload)] for at in range(0, len(whole), len(payload)))

    def shared(self, payload: bytes = b"") -> bytes:
        """Host 0's payload, on every host. Every host calls this."""
        if not self.leads:
            return self.take()[1]
        self.send(PART, payload)
        return payload

    def finish(self) -> None:
        """Leaves the other hosts once all have called this; nothing may be running on the devices.

        No host leaves before all are done: a collective of another host might still read from this one.
        """
        if self.leads:
            for number in self._peers:
                self.take(number)
            self._closing = True
            self.send(RELEASE)
        else:
            self.send(DONE)
            self.take()  # host 0 may be gone even now: then the watch ends this process
            self._closing = True
        # From here on connections may be closed, so a host that ends too early is missed only by jax, minutes later.
        text = f"hosts: expected all to leave within {self.hosts.host_timeout:g} s, found one that did not"
        stuck = threading.Timer(self.hosts.host_timeout, self._lost, (text, Ling3Error.exit_code))
        stuck.daemon = True
        stuck.start()
        leave()
        stuck.cancel()
        if self.leads:  # jax's service has to live until the others have left it: then they close their connections
            for watch in self._watches:
                watch.join(self.hosts.host_timeout)
        self.close()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """An error inside ends every host, after the watch had time to see whether a lost host caused it."""
        try:
            yield
        except BaseException as error:
            if not self._closing:
                time.sleep(SETTLE)
            if self._losing is not None:  # the watch ends this process; the error only follows from what it says
                self._losing.wait(SAYING)
            self.fail(f"a step failed: {error}")
            raise

    def fail(self, text: str, kind: bytes = FAILED) -> None:
        """Tells the other hosts that this one ends (FAILED, or DIVERGED), and ends it within SETTLE seconds.

        Only the first call counts.
        """
        if self._closing:
            return
        self._closing = True
        self.send(kind, text.encode())  # and jax's service goes on, or the others would end before they say why
        stuck = threading.Timer(SETTLE, end_process, (text, _code(kind)))  # threads of a collective never end
        stuck.daemon = True
        stuck.start()
        end_anyway(2 * SETTLE)

    def outlive(self, told: Callable[[str], None], seconds: float) -> None:
        """When another host is gone, calls ``told`` with the reason, and ends this process ``seconds`` later."""
        end = self._lost

        def lost(text: str, code: int) -> None:
            told(text)
            time.sleep(seconds)
            end(text, code)

        self._lost = lost

    def close(self) -> None:
        self._closing = True
        self._over.set()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)
        for peer, watch in zip(self._peers.values(), self._watches, strict=True):
            if not watch.running:
                watch.join()
                peer.close()
        if not self._beats.running:
            self._beats.join()
        if self._service is not None:
            self._service.end()
            self._service = None

    def _watch(self, number: int, peer: socket.socket) -> None:
        silence = self.hosts.host_timeout
        taken, since, pieces = 0, time.monotonic(), list[bytes]()
        try:
            while True:
                kind, payload = receive(peer)
                if kind != ALIVE:
                    since = time.monotonic()
                if kind == MORE:
                    pieces.append(payload)
                    continue
                text = payload.decode(errors="replace") if kind in (FAILED, GONE, DIVERGED) else ""
                if kind == FAILED:
                    return self._gone(f"host {number} ended: {text}")
                if kind in (GONE, DIVERGED):
                    return self._gone(text, kind)
                if kind != ALIVE:
                    self._inbox[number].put((kind, b"".join([*pieces, payload])))
                    pieces.clear()
                    continue
                before, taken = taken, int.from_bytes(payload)
                behind, owing = taken < self._sent, self._stepping and self._awaited == number
                if not self.leads or taken != before or not (behind or owing):
                    since = time.monotonic()
                elif time.monotonic() - since > silence:
                    lacks = "took none of its steps" if behind else "gave no part of a step"
                    return self._gone(f"host {number}: {lacks} for {silence:g} s")
        except TimeoutError:
            self._gone(f"host {number}: no sign of life for {silence:g} s")
        except OSError:
            self._gone(f"host {number}: expected its process to run, found that it ended")
        finally:
            peer.close()

    def _thread_failed(self, number: int, error: BaseException) -> None:
        self._gone(f"host {number}: its thread ended: {type(error).__name__}: {error}")

    def _gone(self, text: str, kind: bytes = GONE) -> None:
        if self._closing:
            return
        self._losing, self._closing = threading.Event(), True
        for peer in self._peers.values():  # the lost one as well: it may go on later, and then says why it ends
            if self._lock.acquire(timeout=1):
                try:
                    with contextlib.suppress(OSError):
                        peer.settimeout(1)
                        send(peer, kind, text.encode())
                finally:
                    self._lock.release()
        self._lost(text, _code(kind))
        self._losing.set()

    def _beat(self) -> None:
        while not self._over.wait(self.hosts.host_timeout / BEATS):
            self.send(ALIVE, self._taken.to_bytes(8))
