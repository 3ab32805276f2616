"""Objects over TCP: whoever has them listens, whoever wants them pulls a transfer, once, by its id.

Both ends prove to each other that they know the secret (``hosts.rendezvous``) before either says more. Then:

    puller to holder  ASK     transfer, part, parts, names
    holder to puller  OBJECT  header and payload, for each name in order; or REFUSED
    puller to holder  TAKEN

An ASK for part 0 of 0 and for no names renews the transfer's lease; the holder answers RENEWED, or REFUSED. Each part
of a transfer is pulled once, however that ends. The transfer ends with the last of them, when a puller asks
for no names, and when its lease is over. What follows the proofs is neither signed nor encrypted.
"""

import re
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from ling3export.machine.service import is_loopback
from ling3export.runners.hosts.hosts import SHARE
from ling3export.runners.hosts.rendezvous import (
    CALLERS,
    GREETING,
    HEAD,
    REFUSED,
    challenge,
    hear,
    prove,
    receive,
    send,
    tell,
)
from ling3export.runners.hosts.rendezvous import HostsError as SecretError
from ling3export.runners.transfer.backend import PAUSE, Presence, Source, TransferError, Writer
from ling3export.runners.transfer.objects import HEADER, Header, Key, Layout, State

ROLES = ("puller", "holder")
ASK, OBJECT, TAKEN, RENEWED = b"A", b"B", b"K", b"N"
MOST_PARTS = 1024
LARGEST_ASK = 1 << 20  # bytes of what a puller asks, 30,000 names
TRANSFER = re.compile("[0-9a-f]{32}")
TICK = 0.5  # seconds between two looks for leases that are over


class _Offer:
    """A transfer's objects until somebody pulls it, or its lease is over."""

    def __init__(self, objects: dict[str, np.ndarray], until: float) -> None:
        self.objects, self.until = objects, until
        self.parts = 0  # of the first pull, and so of all
        self.pulled: set[int] = set()


@dataclass
class _Fresh:
    """An object that transfers will offer which are being saved: it stays until they have, whoever else lets go."""

    memory: np.ndarray
    until: float  # a save that failed offers nothing
    saves: int = 0


class RefusedError(Exception):
    """The holder does not know a transfer, or has given it away."""


class Tcp:
    """Objects over TCP.

    Args:
        layout: What objects hold.
        limit: Bytes of objects that are kept for others.
        deadline: Seconds that one pull may take at this end.
        address: Where to listen: host and port, port 0 for any that is free.
        secret: What both ends know; needed where other machines reach the address.
        lease: Seconds that a transfer is kept for its puller.
        clock: Gives the seconds by which leases end.

    Attributes:
        port: Where this end listens.

    Raises:
        TransferError: The port is taken, or there is no secret where other machines reach it.
    """

    def __init__(
        self,
        layout: Layout,
        limit: int,
        deadline: float,
        address: tuple[str, int],
        secret: str,
        lease: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host, port = address
        if not (secret or is_loopback(host)):
            raise TransferError(f"tcp {host}: expected a secret where other machines reach it, found none", SHARE)
        self._layout, self._limit, self._deadline, self._secret, self._lease = layout, limit, deadline, secret, lease
        self._clock = clock
        self.counts: Counter[str] = Counter()
        self.removed: list[str] = []
        self._lock = threading.Lock()
        self._objects: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()
        self._fresh: dict[str, _Fresh] = {}
        self._offers: dict[str, _Offer] = {}
        self._sent: set[str] = set()
        self._closed = threading.Event()
        self._room = threading.BoundedSemaphore(CALLERS)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=CALLERS)
        except OSError as error:
            raise TransferError(
                f"tcp: expected a free port of this machine, found {error.strerror}, at {host} port {port}",
                "choose another base port: rank r listens at base + 2 r + 1",
            ) from error
        self.port = int(self._listener.getsockname()[1])
        self._listener.settimeout(TICK)
        self._listening = threading.Thread(target=self._listen, name="ling3-transfer", daemon=True)
        self._listening.start()

    def create(self, key: Key) -> Writer | None:
        """An object in memory."""
        with self._lock:
            if (there := self._objects.get(key.name)) is not None:
                self.counts["exists"] += 1
                self._keep_fresh(key.name, there)
                return None
            size = HEADER.size + self._layout.nbytes(key)
            if sum(each.nbytes for each in self._objects.values()) + size > self._limit:
                self.counts["full"] += 1
                return None
            self._objects[key.name] = memory = np.empty(size, np.uint8)

        def done(whole: bool) -> bool:
            self.counts["stored" if whole else "abandoned"] += 1
            with self._lock:
                if whole:
                    self._keep_fresh(key.name, memory)
                else:
                    self._objects.pop(key.name, None)
                    self._fresh.pop(key.name, None)
            return whole

        return Writer(key, self._layout, memory, done)

    def offer(self, transfer: str, keys: Sequence[Key]) -> None:
        """Keeps objects for whoever pulls ``transfer`` until the lease is over. Those not written are left out."""
        with self._lock:
            found = {key.name: memory for key in keys if (memory := self._objects.get(key.name)) is not None}
            self._offers[transfer] = _Offer(found, self._clock() + self._lease)
            for name in found.keys() & self._fresh.keys():
                self._fresh[name].saves -= 1
                if not self._fresh[name].saves:
                    del self._fresh[name]

    def _keep_fresh(self, name: str, memory: np.ndarray) -> None:
        fresh = self._fresh.setdefault(name, _Fresh(memory, 0.0))
        fresh.saves, fresh.until = fresh.saves + 1, self._clock() + self._lease

    def look(self, key: Key) -> Presence:
        """Never ready: without a transfer's id nothing can be pulled."""
        return Presence.ABSENT

    def fetch(self, keys: Sequence[Key], source: Source | None, until: float) -> list[np.ndarray | None]:
        """Pulls a transfer; what arrived whole before the other end broke off counts."""
        found: list[np.ndarray | None] = []
        reasons: list[str] = []
        try:
            if source is None:
                raise FileNotFoundError
            with self._asking(source, [key.name for key in keys], until) as peer:
                for key in keys:
                    payload, reason = self._pull(peer, key, until)
                    found.append(payload)
                    reasons.append(reason)
                send(peer, TAKEN, b"")
            last = ""
        except FileNotFoundError:
            last = "miss"
        except TimeoutError:
            last = "timeout"
        except (RefusedError, SecretError):
            last = "refused"
        except (OSError, ValueError):
            last = "peer_gone"
        self.counts.update([*reasons, *[last] * (len(keys) - len(reasons))])
        return found + [None] * (len(keys) - len(found))

    def renew(self, source: Source, until: float) -> str:
        """Asks the holder."""
        try:
            with self._asking(source._replace(part=0, parts=0), [], until) as peer:
                return "renewed" if receive(peer, 0, until)[0] == RENEWED else "refused"
        except SecretError:
            return "refused"
        except (OSError, ValueError):
            return "peer_gone"

    def sent(self) -> set[str]:
        """Transfers that were pulled, broken off, or whose lease is over."""
        with self._lock:
            found, self._sent = self._sent, set()
        return found

    def close(self) -> None:
        """Closes the port; pulls that run are not waited for."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._listening.join()
        with self._lock:
            self._offers.clear()
            self._fresh.clear()

    @contextmanager
    def _asking(self, source: Source, names: list[str], until: float) -> Iterator[socket.socket]:
        """A connection on which a holder was asked."""
        with socket.create_connection(source[:2], max(0.001, until - time.monotonic())) as peer:
            prove(peer, self._secret, 0, until, ROLES)
            tell(peer, ASK, transfer=source.transfer, part=source.part, parts=source.parts, names=names)
            yield peer

    def _pull(self, peer: socket.socket, key: Key, until: float) -> tuple[np.ndarray | None, str]:
        """The next object and ``hit``, or the reason why there is none."""
        memory = self._arrived(peer, key, until)
        if memory is None:
            return None, "miss"
        try:
            header = Header.parse(memory[: HEADER.size].tobytes())
        except ValueError:
            return None, "corrupt"
        payload = memory[HEADER.size :]
        fault = header.fault(key, self._layout)
        if fault is None and (header.state != State.READY or header.crc(payload) != header.crc32):
            fault = "corrupt"
        return (payload, "hit") if fault is None else (None, fault)

    def _arrived(self, peer: socket.socket, key: Key, until: float) -> np.ndarray | None:
        """The bytes of the next object, None where the holder does not have it."""
        head = np.empty(HEAD.size, np.uint8)
        _into(peer, head, until)
        kind, length = HEAD.unpack(head.tobytes())
        if kind == REFUSED:
            raise RefusedError
        if (kind, length) == (OBJECT, 0):
            return None
        if kind != OBJECT or length != HEADER.size + self._layout.nbytes(key):
            raise ConnectionError("another message than an object")
        memory = np.empty(length, np.uint8)
        _into(peer, memory, until)
        return memory

    def _hand(self, caller: socket.socket, memory: np.ndarray) -> object:
        """Sends an object; gives what has to stay until the puller has it."""
        caller.sendall(HEAD.pack(OBJECT, memory.nbytes))
        caller.sendall(memory.data)
        return memory

    def _listen(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                self._expire()
                try:
                    caller, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:
                    if self._closed.is_set():
                        return
                    time.sleep(PAUSE)  # the system lacks something now; callers call again
                    continue
                if self._room.acquire(blocking=False):
                    threading.Thread(target=self._serve, args=(caller,), name="ling3-holder", daemon=True).start()
                else:
                    caller.close()
                    self._note("stranger")

    def _expire(self) -> None:
        """Gives up transfers whose lease is over, and what none will offer any more."""
        with self._lock:
            for name in [name for name, fresh in self._fresh.items() if fresh.until < self._clock()]:
                del self._fresh[name]
            for transfer in [name for name, offer in self._offers.items() if offer.until < self._clock()]:
                del self._offers[transfer]
                self._sent.add(transfer)
                self.counts["expired"] += 1

    def _serve(self, caller: socket.socket) -> None:
        with caller:
            try:
                until = time.monotonic() + min(GREETING, self._deadline)
                caller.settimeout(GREETING)
                challenge(caller, self._secret, until, ROLES)
                asked = hear(caller, ASK, until, LARGEST_ASK, transfer=str, part=int, parts=int, names=list)
                part, parts, names = asked["part"], asked["parts"], asked["names"]
                renews = (part, parts, names) == (0, 0, [])
                if not TRANSFER.fullmatch(asked["transfer"]) or not (renews or 0 <= part < parts <= MOST_PARTS):
                    raise ConnectionError("no transfer")
                if not all(isinstance(name, str) for name in names):
                    raise ConnectionError("no names")
            except (OSError, ValueError):
                return self._note("stranger")
            finally:
                self._room.release()
            if renews:
                return self._keep(caller, asked["transfer"])
            self._give(caller, **asked)

    def _keep(self, caller: socket.socket, transfer: str) -> None:
        """Begins a transfer's lease anew, if it is not over."""
        with self._lock:
            offer = self._offers.get(transfer)
            if offer is not None:
                offer.until = self._clock() + self._lease
            self.counts["unknown" if offer is None else "renewed"] += 1
        with suppress(OSError):
            send(caller, REFUSED if offer is None else RENEWED, b"")

    def _take(self, transfer: str, part: int, parts: int, names: list[str]) -> _Offer | None:
        """The offer that a puller may have a part of; with the last part it ends. None where there is none."""
        with self._lock:
            offer = self._offers.get(transfer)
            if offer is None or part in offer.pulled or offer.parts not in (0, parts):
                return None
            offer.parts = parts
            offer.pulled.add(part)
            if len(offer.pulled) == parts or not names:
                del self._offers[transfer]
            return offer

    def _give(self, caller: socket.socket, transfer: str, part: int, parts: int, names: list[str]) -> None:
        """Sends what a transfer has under these names."""
        until = time.monotonic() + self._deadline
        offer = self._take(transfer, part, parts, names)
        if offer is None:
            self._note("unknown")
            with suppress(OSError):
                send(caller, REFUSED, b"")
            return
        outcome, kept = "broken_off", []
        try:
            for name in names:
                caller.settimeout(max(0.001, until - time.monotonic()))
                if (memory := offer.objects.get(name)) is None:
                    send(caller, OBJECT, b"")
                else:
                    kept.append(self._hand(caller, memory))
            if receive(caller, 0, until)[0] == TAKEN:
                outcome = "pulled" if names else "given_back"
        except OSError:
            pass  # the puller is gone, and so is the transfer
        with self._lock:
            self.counts[outcome] += 1
            if self._offers.get(transfer) is not offer:
                self._sent.add(transfer)

    def _note(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _into(peer: socket.socket, memory: np.ndarray, until: float) -> None:
    """Fills an array [bytes] uint8 from a connection.

    Raises:
        OSError: The other end is gone, or too slow.
    """
    view = memory.data
    while view.nbytes:
        peer.settimeout(max(0.001, until - time.monotonic()))
        count = peer.recv_into(view, min(view.nbytes, 1 << 20))
        if not count:
            raise ConnectionError("its connection was closed")
        view = view[count:]
