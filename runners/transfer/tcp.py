"""States over TCP: their holder listens, and a taker gets a state by its name, once.

Both ends prove to each other that they know the secret (:mod:`handshake <ling3export.runners.hosts.handshake>`) before
either says more. Then:

    taker to holder   ASK     what is wanted (take, renew or release), and the state's name
    holder to taker   STATE   its bytes, for take; DONE for the others; or REFUSED
    taker to holder   DONE    once it has all bytes

A state is taken once, however that ends. What follows the proofs is neither signed nor encrypted.
"""

import io
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ling3export.machine.service import is_loopback
from ling3export.runners.hosts.handshake import (
    GREETING,
    HEAD,
    REFUSED,
    Listener,
    SecretError,
    challenge,
    hear,
    listening,
    prove,
    receive,
    receive_into,
    send,
    tell,
)
from ling3export.runners.hosts.hosts import SHARE
from ling3export.runners.state.layout import StateLayout, StateMismatch
from ling3export.runners.state.sequence_state import SequenceState, StateBytes, read_state
from ling3export.runners.transfer.options import Transfer
from ling3export.runners.transfer.store import NAME, PendingWrite, StateAddress, TransferError

ROLES = ("taker", "holder")
ASK, STATE, DONE = b"A", b"B", b"K"
TAKE, RENEW, RELEASE = "take", "renew", "release"
LARGEST_HEAD = 1 << 20  # bytes that a state has beside its arrays


@dataclass
class _Leased:
    memory: np.ndarray
    until: float


class _RefusedError(Exception):
    """The holder does not know a state, or has given it away."""


class TcpStore:
    """States over TCP.

    Args:
        layout: What states hold.
        description: What decides whether one fits (``description_of``).
        how: Limit, deadline, address, secret and lease.
        clock: Gives the seconds by which leases end.

    Raises:
        TransferError: The port is taken, or there is no secret where other machines reach it.
    """

    def __init__(
        self,
        layout: StateLayout,
        description: Mapping[str, Any],
        how: Transfer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (how.secret or is_loopback(how.host)):
            raise TransferError(f"tcp {how.host}: expected a secret where other machines reach it, found none", SHARE)
        self._layout, self._description, self._limit, self._deadline = layout, description, how.limit, how.deadline
        self._secret, self._lease, self._clock = how.secret, how.lease, clock
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._bytes = 0  # of all states, those that are written or sent, too
        self._leased: dict[str, _Leased] = {}
        self._ended: set[str] = set()
        try:
            bound = listening(how.host, how.port)
        except OSError as error:
            raise TransferError(
                f"tcp: expected a free port of this machine, found {error.strerror}, at {how.host} port {how.port}",
                "choose another one: --transfer-port",
            ) from error
        self.address = how.host, int(bound.getsockname()[1])
        self._listener = Listener(self._serve, bound)

    def create(
        self, name: str, descriptor: Mapping[str, Any], tokens: np.ndarray, first: int = 0
    ) -> PendingWrite | None:
        """Makes a state in memory."""
        data = StateBytes(self._layout, descriptor, tokens, first)
        size = data.memory.nbytes
        with self._lock:
            if self._bytes + size > self._limit:
                self.counts["full"] += 1
                return None
            self._bytes += size

        def done(whole: bool) -> bool:
            with self._lock:
                self.counts["stored" if whole else "abandoned"] += 1
                if whole:
                    self._leased[name] = _Leased(data.memory, self._clock() + self._lease)
                else:
                    self._bytes -= size
            return whole

        return PendingWrite(data, done)

    def get(self, address: StateAddress, until: float) -> SequenceState | None:
        """Takes a state from its holder."""
        state, reason = None, "hit"
        try:
            with self._asking(address, TAKE, until) as peer:
                coming = _Coming(peer, until)
                kind, size = HEAD.unpack(coming.read(HEAD.size))
                if kind == REFUSED:
                    raise _RefusedError
                if kind != STATE or size > self._layout.nbytes(address.tokens) + 4 * address.tokens + LARGEST_HEAD:
                    raise ConnectionError("another message than a state")
                state = read_state(coming, size, self._layout, self._description)
                with suppress(OSError):  # all is here, whatever becomes of the holder
                    send(peer, DONE, b"")
        except TimeoutError:
            reason = "timeout"
        except (_RefusedError, SecretError):
            reason = "refused"
        except StateMismatch:
            reason = "other_state"
        except OSError:
            reason = "peer_gone"
        except ValueError:
            reason = "corrupt"
        self.counts[reason] += 1
        return state

    def release(self, address: StateAddress, until: float) -> None:
        """Tells the holder that no reader wants a state."""
        with suppress(OSError, ValueError, SecretError), self._asking(address, RELEASE, until) as peer:
            receive(peer, 0, until)

    def renew(self, address: StateAddress, until: float) -> str:
        """Asks the holder to begin a lease again."""
        try:
            with self._asking(address, RENEW, until) as peer:
                return "renewed" if receive(peer, 0, until)[0] == DONE else "refused"
        except SecretError:
            return "refused"
        except (OSError, ValueError):
            return "peer_gone"

    def ended(self) -> set[str]:
        """States that were taken, given back or broken off, or whose lease is over."""
        with self._lock:
            for name in [name for name, each in self._leased.items() if each.until < self._clock()]:
                self._end(name, self._leased.pop(name), "expired")
            found, self._ended = self._ended, set()
        return found

    def close(self) -> None:
        """Closes the port; what is being sent is not waited for."""
        self._listener.close()
        self._leased.clear()

    @contextmanager
    def _asking(self, address: StateAddress, what: str, until: float) -> Iterator[socket.socket]:
        """A connection on which a holder was asked."""
        with socket.create_connection((address.host, address.port), max(0.001, until - time.monotonic())) as peer:
            prove(peer, self._secret, 0, until, ROLES)
            tell(peer, ASK, what=what, name=address.name)
            yield peer

    def _serve(self, caller: socket.socket, admit: Callable[[], None]) -> None:
        with caller:
            try:
                until = time.monotonic() + min(GREETING, self._deadline)
                caller.settimeout(GREETING)
                challenge(caller, self._secret, until, ROLES)
                asked = hear(caller, ASK, until, what=str, name=str)
                if asked["what"] not in (TAKE, RENEW, RELEASE) or not NAME.fullmatch(asked["name"]):
                    raise ConnectionError("no state")
            except (OSError, ValueError):
                with self._lock:
                    self.counts["stranger"] += 1
                return
            admit()
            with suppress(OSError):
                self._answer(caller, **asked)

    def _answer(self, caller: socket.socket, what: str, name: str) -> None:
        with self._lock:
            leased = self._leased.get(name)
            if leased is not None and leased.until < self._clock():
                leased = None  # which ``ended`` counts
            elif leased is not None and what == RENEW:
                leased.until = self._clock() + self._lease
                self.counts["renewed"] += 1
            elif leased is not None and what == RELEASE:
                self._end(name, self._leased.pop(name), "given_back")
            elif leased is not None:
                del self._leased[name]
            else:
                self.counts["unknown"] += 1
        if leased is None:
            send(caller, REFUSED, b"")
        elif what == TAKE:
            self._send(caller, name, leased)
        else:
            send(caller, DONE, b"")

    def _send(self, caller: socket.socket, name: str, leased: _Leased) -> None:
        """Sends a state; nobody else can have it any more, however this ends."""
        until, outcome = time.monotonic() + self._deadline, "broken_off"
        try:
            caller.settimeout(self._deadline)
            caller.sendall(HEAD.pack(STATE, leased.memory.nbytes))
            caller.sendall(leased.memory.data)
            if receive(caller, 0, until)[0] == DONE:
                outcome = "pulled"
        finally:
            with self._lock:
                self._end(name, leased, outcome)

    def _end(self, name: str, leased: _Leased, how: str) -> None:
        self._bytes -= leased.memory.nbytes
        self._ended.add(name)
        self.counts[how] += 1


class _Coming(io.RawIOBase):
    """The bytes that come from a connection.

    Args:
        peer: The connection.
        until: When all has to be here, on the monotonic clock.

    Raises:
        OSError: In any call: the other end is gone, or too slow.
    """

    def __init__(self, peer: socket.socket, until: float) -> None:
        self._peer, self._until = peer, until

    def read(self, size: int = -1) -> bytes:
        """So many bytes."""
        data = bytearray(size)
        self.readinto(data)
        return bytes(data)

    def readinto(self, buffer: Any) -> int:
        """Fills all of a buffer."""
        receive_into(self._peer, buffer, self._until)
        return memoryview(buffer).nbytes
