"""States in this process's memory, which other servers fetch with ``GET /v1/states/ID`` from the server of this one.

Both ends prove the secret that they share: the reader with an HMAC of the method and the ID in ``Authorization``, the
holder with one of the ID in ``X-Ling3-Proof``. An ID is random and a state can be taken once, so a proof that somebody
saw is of no use later.
"""

import hmac
import http.client
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
from ling3export.runners.hosts.hosts import SHARE
from ling3export.runners.state.layout import StateLayout, StateMismatch
from ling3export.runners.state.sequence_state import SequenceState, StateBytes, read_state
from ling3export.runners.transfer.options import Transfer
from ling3export.runners.transfer.store import Fill, StateAddress, TransferError

STATES = "/v1/states/"
SCHEME, PROOF = "LING3-HMAC", "X-Ling3-Proof"
LARGEST_HEAD = 1 << 20  # bytes of a state before its arrays


@dataclass
class _Leased:
    memory: np.ndarray
    until: float


class _RefusedError(Exception):
    """The holder does not have a state, has given it away, or does not share the secret."""


class HttpStore:
    """States over HTTP. Raises TransferError: there is no secret although other machines take part."""

    def __init__(
        self,
        layout: StateLayout,
        description: Mapping[str, Any],
        options: Transfer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for host in (options.host, *(peer.rpartition(":")[0] for peer in options.peers)):
            if not (options.secret or is_loopback(host)):
                raise TransferError(f"--transfer http: {host} is another machine's, and there is no secret", SHARE)
        self._layout, self._description, self._limit = layout, description, options.limit
        self._secret, self._lease, self._peers, self._clock = options.secret, options.lease, options.peers, clock
        self.address = options.host, options.port
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._bytes = 0  # of all states, those that are written or sent, too
        self._leased: dict[str, _Leased] = {}

    def put(self, name: str, descriptor: Mapping[str, Any], tokens: np.ndarray, fill: Fill, first: int = 0) -> bool:
        data = StateBytes(self._layout, descriptor, tokens, first)
        size, outcome = data.memory.nbytes, "abandoned"
        with self._lock:
            if self._bytes + size > self._limit:
                self.counts["full"] += 1
                return False
            self._bytes += size
        try:
            fill(data.state)
            data.seal()
            outcome = "stored"
        finally:
            with self._lock:
                self.counts[outcome] += 1
                if outcome == "stored":
                    self._leased[name] = _Leased(data.memory, self._clock() + self._lease)
                else:
                    self._bytes -= size
        return True

    def get(self, address: StateAddress, until: float) -> SequenceState | None:
        state, reason = None, "hit"
        try:
            with self._asking("GET", address, until) as response:
                size = int(response.headers.get("Content-Length", 0))
                if size > self._layout.nbytes(address.tokens) + 4 * address.tokens + LARGEST_HEAD:
                    raise ValueError("a state of another size")
                try:
                    state = read_state(response, size, self._layout, self._description)
                except ValueError:
                    if response.length and not response.read(1):
                        raise ConnectionError("the answer broke off") from None
                    raise
        except _RefusedError:
            reason = "refused"
        except StateMismatch:
            reason = "other_state"
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = "corrupt" if isinstance(error, ValueError) else "peer_gone"
            reason = "timeout" if time.monotonic() >= until else reason
        with self._lock:
            self.counts[reason] += 1
        return state

    def release(self, address: StateAddress, until: float) -> None:
        errors = OSError, http.client.HTTPException, ValueError, _RefusedError
        with suppress(*errors), self._asking("DELETE", address, until):
            pass

    def expire(self) -> None:
        with self._lock:
            for name in [name for name, leased in self._leased.items() if leased.until < self._clock()]:
                self._end(self._leased.pop(name), "expired")

    def close(self) -> None:
        with self._lock:
            self._leased.clear()

    # For the server of this process.

    def holds(self, name: str, method: str, authorization: str) -> bool:
        """Whether a caller proved the secret; strangers are counted."""
        scheme, _, proof = authorization.partition(" ")
        right = hmac.compare_digest(proof.encode(), self.proof(f"{method} {name}").encode())
        if scheme != SCHEME or not right:
            with self._lock:
                self.counts["stranger"] += 1
            return False
        return True

    def take(self, name: str) -> tuple[np.ndarray, Callable[[bool], None]] | None:
        """The bytes of a state, and a call that ends it, with whether they were sent whole. Nobody else can have it."""
        with self._lock:
            leased = self._leased.pop(name, None)
            if leased is None:
                self.counts["unknown"] += 1
                return None

        def sent(whole: bool) -> None:
            with self._lock:
                self._end(leased, "pulled" if whole else "broken_off")

        return leased.memory, sent

    def give_back(self, name: str) -> bool:
        """Frees a state; whether it was there."""
        with self._lock:
            leased = self._leased.pop(name, None)
            if leased is not None:
                self._end(leased, "given_back")
        return leased is not None

    def proof(self, text: str) -> str:
        return hmac.digest(self._secret.encode(), text.encode(), "sha256").hex()

    def _end(self, leased: _Leased, reason: str) -> None:
        self._bytes -= leased.memory.nbytes
        self.counts[reason] += 1

    @contextmanager
    def _asking(self, method: str, address: StateAddress, until: float) -> Iterator[http.client.HTTPResponse]:
        """A holder's answer of status 200.

        Raises:
            _RefusedError: It has another status or no proof, or the address is none of the peers.
        """
        place = f"{address.host}:{address.port}"
        if place not in self._peers if self._peers else not is_loopback(address.host):
            raise _RefusedError
        seconds = max(0.001, until - time.monotonic())
        connection = http.client.HTTPConnection(address.host, address.port, timeout=seconds)
        connection.connect()

        def late() -> None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

        overdue = threading.Timer(max(0.0, until - time.monotonic()), late)  # one deadline for all bytes of the answer
        overdue.daemon = True
        overdue.start()
        try:
            headers = {"Authorization": f"{SCHEME} {self.proof(f'{method} {address.name}')}"}
            connection.request(method, STATES + address.name, headers=headers)
            response = connection.getresponse()
            proof = response.headers.get(PROOF, "")
            if response.status != 200 or not hmac.compare_digest(
                proof.encode("latin-1", "replace"), self.proof(address.name).encode()
            ):
                raise _RefusedError
            yield response
        finally:
            overdue.cancel()
            connection.close()
