"""How two processes begin to talk: framed messages, and the proof that both know a secret.

A message is a letter for its kind, its length in four bytes, and JSON or an array's bytes; never pickle. Both ends
prove to each other that they know the secret (HMAC-SHA256 over a nonce of each) before either says more:

    host 0 to caller  CHALLENGE  protocol, nonce
    caller to host 0  HELLO      host, nonce, proof
    host 0 to caller  PROVEN     proof; or REFUSED

Without a secret every caller proves the empty one. The messages after the proofs are neither signed nor encrypted.
"""

import hmac
import json
import re
import secrets
import socket
import struct
import time
from typing import Any

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.hosts.hosts import SHARE

HEAD = struct.Struct("!cI")
LARGEST = 1 << 30  # bytes of a message
SMALL = 4096  # bytes of a message before both ends have met
PROTOCOL = 2
CHALLENGE, HELLO, PROVEN, REFUSED = b"C", b"L", b"O", b"X"
ROLES = ("caller", "host 0")  # names of both sides in their proofs: neither can send the other's proof back
NONCE = re.compile("[0-9a-f]{32}")


class SecretError(Ling3Error):
    """The other end has another secret, or speaks another version of the protocol."""


def send(peer: socket.socket, kind: bytes, payload: bytes) -> None:
    """Sends a message of ``kind``."""
    peer.sendall(HEAD.pack(kind, len(payload)) + payload)


def receive(peer: socket.socket, largest: int = LARGEST, until: float | None = None) -> tuple[bytes, bytes]:
    """Waits for the next message; returns its kind and its payload of at most ``largest`` bytes.

    Args:
        until: When the whole message has to be here, on the monotonic clock; by default the socket's timeout counts
            for each of its parts.

    Raises:
        ConnectionError: The other end is gone, or does not speak this protocol.
        TimeoutError: It has been silent for the socket's timeout, or is too slow.
    """
    kind, length = HEAD.unpack(_bytes(peer, HEAD.size, until))
    if length > largest:
        raise ConnectionError(f"a message of {length:,} bytes")
    return kind, _bytes(peer, length, until)


def _bytes(peer: socket.socket, count: int, until: float | None) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view.nbytes:
        if until is not None:
            peer.settimeout(max(0.001, until - time.monotonic()))
        size = peer.recv_into(view, min(view.nbytes, 1 << 20))
        if not size:
            raise ConnectionError("its connection was closed")
        view = view[size:]
    return bytes(buffer)


def tell(peer: socket.socket, kind: bytes, **members: object) -> None:
    """Sends a message of ``kind``, a JSON object."""
    send(peer, kind, json.dumps(members).encode())


def hear(peer: socket.socket, kind: bytes, until: float, **types: type) -> dict[str, Any]:
    """The members of the next message, a JSON object of these names and types.

    Raises:
        OSError, ValueError: It does not come, or it is another one.
    """
    kind_read, payload = receive(peer, SMALL, until)
    members = parse_json(payload, SMALL) if kind_read == kind else None
    if not isinstance(members, dict) or {name: type(value) for name, value in members.items()} != types:
        raise ConnectionError("another message than the one expected")
    return members


def proof_of(secret: str, role: str, nonces: tuple[str, str], host: int) -> str:
    """The proof that the side ``role`` knows the secret: HMAC-SHA256 of both nonces, host 0's first, in hexadecimal."""
    text = " ".join(("ling3", str(PROTOCOL), role, *nonces, str(host)))
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def challenge(caller: socket.socket, secret: str, until: float) -> int:
    """Proves to a caller that this end knows the secret, once the caller has; returns the caller's number.

    Raises:
        OSError, ValueError: The caller does not know the secret, or is not done at ``until`` on the monotonic clock.
    """
    mine = secrets.token_hex(16)
    tell(caller, CHALLENGE, protocol=PROTOCOL, nonce=mine)
    greeting = hear(caller, HELLO, until, host=int, nonce=str, proof=str)
    if not NONCE.fullmatch(greeting["nonce"]):
        raise ConnectionError("no nonce")
    nonces, number = (mine, greeting["nonce"]), greeting["host"]
    if not hmac.compare_digest(greeting["proof"].encode(), proof_of(secret, ROLES[0], nonces, number).encode()):
        send(caller, REFUSED, b"")
        raise ConnectionError("no proof")
    send(caller, PROVEN, proof_of(secret, ROLES[1], nonces, number).encode())
    return number


def prove(peer: socket.socket, secret: str, number: int, until: float) -> None:
    """The caller's side of :func:`challenge`.

    Raises:
        SecretError: The other end does not know the secret, or speaks another protocol.
        OSError, ValueError: It ended, or is none that challenges.
    """
    mine = secrets.token_hex(16)
    challenge_fields = hear(peer, CHALLENGE, until, protocol=int, nonce=str)
    if challenge_fields["protocol"] != PROTOCOL or not NONCE.fullmatch(challenge_fields["nonce"]):
        raise SecretError(
            f"{ROLES[1]}: expected protocol {PROTOCOL}, found {str(challenge_fields['protocol'])[:100]}",
            "install the same version of ling3export on every host",
        )
    nonces = (challenge_fields["nonce"], mine)
    tell(peer, HELLO, host=number, nonce=mine, proof=proof_of(secret, ROLES[0], nonces, number))
    kind, payload = receive(peer, SMALL, until)
    if kind not in (PROVEN, REFUSED):
        raise ConnectionError("another message than a proof")
    wanted = proof_of(secret, ROLES[1], nonces, number).encode()
    if kind == REFUSED or not hmac.compare_digest(payload, wanted):
        raise SecretError(f"{ROLES[1]}: expected it to have this host's secret, found that it has another one", SHARE)
