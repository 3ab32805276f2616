"""How two processes begin to talk: framed messages, the proof that both know a secret, and the port where one listens.

A message is a letter for its kind, its length in four bytes, and JSON or an array's bytes; never pickle. Both ends
prove to each other that they know the secret (HMAC-SHA256 over a nonce of each) before either says more:

    listener to caller  CHALLENGE  protocol, nonce
    caller to listener  HELLO      host, nonce, proof
    listener to caller  PROVEN     proof; or REFUSED

Without a secret every caller proves the empty one. What follows the proofs is neither signed nor encrypted.
"""

import hmac
import json
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.strict_json import parse_json
from ling3export.foundation.threads import GuardedThread, attempt
from ling3export.runners.hosts.hosts import SHARE

HEAD = struct.Struct("!cI")
LARGEST = 1 << 30  # bytes of a message
SMALL = 4096  # bytes of a message before both ends have met
PROTOCOL = 2
CHALLENGE, HELLO, PROVEN, REFUSED = b"C", b"L", b"O", b"X"
NONCE = re.compile("[0-9a-f]{32}")
GREETING = 5.0  # seconds that a caller has for everything up to what it wants
CALLERS = 64  # that have not proven the secret yet; while there are more, the first of them is dropped
PAUSE = 0.1  # seconds until the next caller is taken where the system lacks something


class SecretError(Ling3Error):
    """The other end has another secret, or speaks another version of the protocol."""


def listening(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address of this machine; port 0 is any that is free.

    Raises:
        OSError: The port is taken, or the address is another machine's.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


class Listener:
    """Answers every caller of a port in a thread of its own, so that a slow one delays nobody.

    While there are ``CALLERS`` that were not admitted, the next caller takes the place of the first of them, so that
    silent callers keep nobody out.

    Args:
        answer: Speaks with a caller, and closes the connection unless it is kept; calls what it gets beside once the
            caller has proven the secret, which is then dropped for nobody.
        bound: The socket, which this closes.
    """

    def __init__(self, answer: Callable[[socket.socket, Callable[[], None]], None], bound: socket.socket) -> None:
        self._answer, self._bound, self._closed = answer, bound, False
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}  # not admitted yet, the first one first
        bound.listen(2 * CALLERS)
        self._thread = GuardedThread("ling3-listener", self._listen)

    def close(self) -> None:
        """Closes the port; callers that are being answered are not waited for."""
        self._closed = True
        with suppress(OSError):
            self._bound.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._thread.join()
        self._bound.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                caller, _ = self._bound.accept()
            except OSError:
                time.sleep(0 if self._closed else PAUSE)  # the system lacks something now; callers call again
                continue
            with self._lock:
                if len(self._waiting) >= CALLERS:
                    first = next(iter(self._waiting))
                    del self._waiting[first]
                    with suppress(OSError):
                        first.shutdown(socket.SHUT_RDWR)
                self._waiting[caller] = None
            with suppress(RuntimeError):  # no thread more can start: the caller is dropped
                GuardedThread("ling3-caller", partial(self._run, caller))
                continue
            caller.close()
            self._admit(caller)

    def _run(self, caller: socket.socket) -> None:
        admit = partial(self._admit, caller)
        attempt("answer a caller", lambda: self._answer(caller, admit), lambda error: caller.close(), lambda text: None)
        admit()

    def _admit(self, caller: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(caller, None)


def send(peer: socket.socket, kind: bytes, payload: bytes) -> None:
    """Sends a message of ``kind``."""
    peer.sendall(HEAD.pack(kind, len(payload)) + payload)


def receive(peer: socket.socket, largest: int = LARGEST, until: float | None = None) -> tuple[bytes, bytes]:
    """Waits for the next message; returns its kind and payload.

    Args:
        peer: The other end.
        largest: Bytes that the payload may have.
        until: When the whole message has to be here, on the monotonic clock; by default the socket's timeout counts
            for each of its parts.

    Raises:
        ConnectionError: The other end is gone, or does not speak this protocol.
        TimeoutError: It has been silent for the socket's timeout, or is too slow.
    """
    head = bytearray(HEAD.size)
    receive_into(peer, head, until)
    kind, length = HEAD.unpack(head)
    if length > largest:
        raise ConnectionError(f"a message of {length:,} bytes")
    payload = bytearray(length)
    receive_into(peer, payload, until)
    return kind, bytes(payload)


def receive_into(peer: socket.socket, buffer: Any, until: float | None) -> None:
    """Fills all of a buffer; the arguments and errors are those of :func:`receive`."""
    view = memoryview(buffer).cast("B")
    while view.nbytes:
        if until is not None:
            peer.settimeout(max(0.001, until - time.monotonic()))
        count = peer.recv_into(view, min(view.nbytes, 1 << 20))
        if not count:
            raise ConnectionError("its connection was closed")
        view = view[count:]


def tell(peer: socket.socket, kind: bytes, **members: object) -> None:
    """Sends a message of ``kind``, a JSON object."""
    send(peer, kind, json.dumps(members).encode())


def hear(peer: socket.socket, kind: bytes, until: float, largest: int = SMALL, **types: type) -> dict[str, Any]:
    """The members of the next message, a JSON object of these names and types.

    Raises:
        OSError, ValueError: It does not come, or it is another one.
    """
    kind_read, payload = receive(peer, largest, until)
    members = parse_json(payload, largest) if kind_read == kind else None
    if not isinstance(members, dict) or {name: type(value) for name, value in members.items()} != types:
        raise ConnectionError("another message than the one expected")
    return members


def proof_of(secret: str, role: str, nonces: tuple[str, str], host: int) -> str:
    """The proof that the side ``role`` knows the secret: HMAC-SHA256, in hexadecimal.

    Args:
        secret: The key.
        role: The side that proves it, so that neither side can send the other's proof back.
        nonces: That of the listener and that of the caller.
        host: Number of the caller.
    """
    text = " ".join(("ling3", str(PROTOCOL), role, *nonces, str(host)))
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def challenge(caller: socket.socket, secret: str, until: float, roles: tuple[str, str]) -> int:
    """Proves to a caller that this end knows the secret, once the caller has; returns the caller's number.

    Args:
        caller: The connection.
        secret: What both ends know.
        until: When both have to be done, on the monotonic clock.
        roles: Names of the caller and of the listener: a proof for one purpose serves no other.

    Raises:
        OSError, ValueError: The caller does not know the secret, or is too slow.
    """
    mine = secrets.token_hex(16)
    tell(caller, CHALLENGE, protocol=PROTOCOL, nonce=mine)
    greeting = hear(caller, HELLO, until, host=int, nonce=str, proof=str)
    if not NONCE.fullmatch(greeting["nonce"]):
        raise ConnectionError("no nonce")
    nonces, number = (mine, greeting["nonce"]), greeting["host"]
    if not hmac.compare_digest(greeting["proof"].encode(), proof_of(secret, roles[0], nonces, number).encode()):
        send(caller, REFUSED, b"")
        raise ConnectionError("no proof")
    send(caller, PROVEN, proof_of(secret, roles[1], nonces, number).encode())
    return number


def prove(peer: socket.socket, secret: str, number: int, until: float, roles: tuple[str, str]) -> None:
    """The caller's side of :func:`challenge`.

    Raises:
        SecretError: The other end does not know the secret, or speaks another protocol.
        OSError, ValueError: It ended, or is none that challenges.
    """
    mine = secrets.token_hex(16)
    challenge_fields = hear(peer, CHALLENGE, until, protocol=int, nonce=str)
    if challenge_fields["protocol"] != PROTOCOL or not NONCE.fullmatch(challenge_fields["nonce"]):
        raise SecretError(
            f"{roles[1]}: expected protocol {PROTOCOL}, found {str(challenge_fields['protocol'])[:100]}",
            "install the same version of ling3export on every host",
        )
    nonces = (challenge_fields["nonce"], mine)
    tell(peer, HELLO, host=number, nonce=mine, proof=proof_of(secret, roles[0], nonces, number))
    kind, payload = receive(peer, SMALL, until)
    if kind not in (PROVEN, REFUSED):
        raise ConnectionError("another message than a proof")
    wanted = proof_of(secret, roles[1], nonces, number).encode()
    if kind == REFUSED or not hmac.compare_digest(payload, wanted):
        raise SecretError(f"{roles[1]}: expected it to have this host's secret, found that it has another one", SHARE)
