"""Damaged bytes on sockets: bodies and whole requests for a server, and handshakes between hosts."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.processes import LOOPBACK, free_port
from ling3export.runners.hosts import handshake
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.hosts.rendezvous import IDENTITY as IDENTITY_OF
from ling3export.runners.hosts.rendezvous import WELCOME, listening, meet, welcome
from tests.fuzz.artifact_cases import toy_copy
from tests.fuzz.harness import MEMORY, Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes
from tests.support.serving import RUNNER, Server

WAIT = 8.0  # seconds to wait for a response: less than the limit of a case
HEARD: dict[Server, int] = {}  # characters of a server's output that earlier cases have checked
PAUSE = 0.2  # seconds of silence after which a client half-closes an incomplete request
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PART = {"type": "text", "text": "x"}
ASKED = {"model": "toy", "max_tokens": 2, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {**ASKED, "prompt": [1, 2, 3]}),
    (COMPLETIONS, {**ASKED, "prompt": [[1, 2], [300]], "seed": 7}),
    (COMPLETIONS, {**ASKED, "prompt": "How many", "stop": ["a"], "top_p": 0.5, "top_k": 3}),
    (COMPLETIONS, {**ASKED, "prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {**ASKED, "messages": [{"role": "system", "content": "Hi"}, {"role": "user", "content": [PART, PART]}]}),
)
IDENTITY: dict[str, object] = {"artifact": "a" * 64, "target": "cpu-tp2", "overlap": True}
NONCE = "0" * 32


@contextmanager
def bodies(folder: Path) -> Iterator[Case]:
    """Damaged JSON bodies in valid requests; the server has to stay alive."""
    with _server(folder) as server:

        def case(rng: Random) -> None:
            path, body = rng.choice(BODIES)
            tree = mutated(rng, body)
            data = json_text(tree)
            data = mutated_bytes(rng, data) if rng.random() < 0.1 else data
            status, found = _response(_exchange(server, _request(path, data)))
            if status is None:
                raise WrongResultError("a right request got no response")
            if status == 200 and isinstance(tree, dict) and tree.get("temperature") == 0:
                _check_choices(found, tree.get("prompt"))
            _check_alive(server, rng)

        yield case


@contextmanager
def requests(folder: Path) -> Iterator[Case]:
    """Whole requests with damaged bytes."""
    with _server(folder) as server:

        def case(rng: Random) -> None:
            path, body = rng.choice(BODIES)
            data = json.dumps(body).encode()
            whole = rng.choice(
                (_request(path, data), _chunked(path, data), _request("/health", b""), _request("/metrics", b""))
            )
            # in half of the cases damage only the head, where most bytes matter
            head = whole.index(b"\r\n\r\n") + 4 if rng.random() < 0.5 else len(whole)
            whole = mutated_bytes(rng, whole[:head]) + whole[head:]
            _response(_exchange(server, whole, PAUSE))
            _check_alive(server, rng)

        yield case


@contextmanager
def greetings(folder: Path) -> Iterator[Case]:
    """Hosts meet while other callers reach host 0, or another process answers in place of host 0. No secret is set."""

    def case(rng: Random) -> None:
        answering = rng.random() < 0.3
        bound = listening(LOOPBACK, 0)
        if not answering:
            bound.close()
        address = f"{LOOPBACK}:{bound.getsockname()[1] if answering else free_port()}"
        first, second = (Hosts(address, 2, number, 2.0) for number in (0, 1))
        with ThreadPoolExecutor() as pool:
            calls = [pool.submit(meet, second, IDENTITY)]
            if answering:
                strangers = [pool.submit(_answer, rng, bound)]
            else:
                calls.append(pool.submit(_welcomed, first))
                strangers = [pool.submit(_call, first, Random(rng.random())) for _ in range(rng.randint(1, 3))]
        for peer in (peer for each in calls if not each.exception() for peer in each.result()[0].values()):
            peer.close()
        errors = [error for each in (*calls, *strangers) if (error := each.exception())]
        # raise errors that are not ours first
        for error in sorted(errors, key=lambda each: isinstance(each, Ling3Error)):
            raise error

    yield case


@contextmanager
def _server(folder: Path) -> Iterator[Server]:
    """A server of the toy with bounded memory, which ends with this process."""
    bounded = ("prlimit", f"--as={4 * MEMORY}", "setpriv", "--pdeathsig", "KILL", *RUNNER)
    with Server(toy_copy(folder), "--max-requests", 8, "--max-body", 1 << 20, runner=bounded) as server:
        _check_alive(server, None)
        yield server


def _request(path: str, data: bytes) -> bytes:
    """A request with a valid head; the server closes the connection after the response."""
    verb = "POST" if data else "GET"
    lines = (
        f"{verb} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + data


def _chunked(path: str, data: bytes) -> bytes:
    """The same request with its body in two chunks."""
    head = (
        _request(path, data)
        .partition(b"\r\n\r\n")[0]
        .replace(f"Content-Length: {len(data)}".encode(), b"Transfer-Encoding: chunked")
    )
    parts = (data[:20], data[20:], b"")
    return head + b"\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def _exchange(server: Server, data: bytes, patience: float = WAIT) -> bytes:
    """Sends bytes and reads until the server closes; half-closes the connection if the server waits for more."""
    host, port = server.url.removeprefix("http://").split(":")
    received = bytearray()
    with socket.create_connection((host, int(port)), patience) as peer, suppress(ConnectionError):
        # half-close only after a wait: a server takes an early half-close for a client that has left
        for wait in (patience, WAIT):
            try:
                if not received and wait == patience:
                    peer.sendall(data)
                while part := peer.recv(1 << 16):
                    received += part
                return bytes(received)
            except TimeoutError:
                peer.shutdown(socket.SHUT_WR)
                peer.settimeout(WAIT)
        raise WrongResultError(f"no end of the response within {WAIT:g} s, after {bytes(received)[:200]!r}")
    return bytes(received)


def _response(data: bytes) -> tuple[int | None, Any]:
    """Status and JSON of a response, or None if the connection was closed without one."""
    if not data:
        return None, None
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if words[0] != b"HTTP/1.1" or len(words) < 3 or not words[1].isdigit():
        raise WrongResultError(f"no HTTP: {data[:200]!r}")
    status = int(words[1])
    if status >= 500 and status != 501:  # 501 is right for an unknown transfer coding
        raise WrongResultError(f"status {status}: {data[:500]!r}")
    with suppress(ValueError):
        return status, json.loads(body)
    return status, None


def _check_choices(found: Any, prompt: Any) -> None:
    """Compares the tokens of each answer to token ids with numpy's."""
    from tests.support.toy_artifact import answer

    prompts = [prompt] if isinstance(prompt, list) and all(type(each) is int for each in prompt) else prompt
    if not isinstance(found, dict) or not isinstance(prompts, list) or any(isinstance(each, str) for each in prompts):
        return
    for choice, ids in zip(found["choices"], prompts, strict=True):
        if (tokens := choice.get("token_ids")) is not None and tokens != answer(ids, len(tokens))[0]:
            raise WrongResultError(f"silently different tokens: {choice} for {ids}")


def _check_alive(server: Server, rng: Random | None) -> None:
    """Checks that the server runs and printed no error, and now and then that its answers are right."""
    new = server.said()[HEARD.get(server, 0) :]
    HEARD[server] = HEARD.get(server, 0) + len(new)
    if server.process.poll() is not None or "Traceback" in new:
        raise WrongResultError(f"the server said: {new[-4000:]}")
    if rng is None or rng.random() < 0.02:
        path, body = BODIES[0]
        status, found = _response(_exchange(server, _request(path, json_text(body))))
        if status != 200:
            raise WrongResultError(f"status {status} for a right request")
        _check_choices(found, body["prompt"])


def _message(rng: Random, kind: bytes, tree: Any) -> bytes:
    """A message between hosts, damaged or not."""
    text = json_text(mutated(rng, tree) if rng.random() < 0.6 else tree)
    whole = handshake.HEAD.pack(kind if rng.random() < 0.9 else rng.randbytes(1), len(text)) + text
    return mutated_bytes(rng, whole) if rng.random() < 0.2 else whole


def _welcomed(host: Hosts) -> tuple[dict[int, socket.socket], int]:
    """Host 0's part until the other host has joined and got the welcome."""
    peers, port = meet(host, IDENTITY)
    welcome(peers, port)
    return peers, port


def _call(host: Hosts, rng: Random) -> None:
    """Greets host 0 like host 1, perhaps with damage, and leaves."""
    with suppress(OSError), socket.create_connection(host.address, 1) as peer:
        theirs = json.loads(handshake.receive(peer)[1])["nonce"]
        proof = handshake.proof_of(host.secret, handshake.ROLES[0], (theirs, NONCE), 1)
        peer.sendall(_message(rng, handshake.HELLO, {"host": 1, "nonce": NONCE, "proof": proof}))
        peer.sendall(_message(rng, IDENTITY_OF, {"hosts": 2, "identity": IDENTITY}))


def _answer(rng: Random, bound: socket.socket) -> None:
    """Answers the next caller as host 0, with a damaged challenge, or with right proofs and a damaged welcome."""
    with bound, suppress(OSError, ValueError):
        bound.settimeout(3)
        peer, _ = bound.accept()
        with peer:
            peer.settimeout(3)
            if rng.random() < 0.5:
                peer.sendall(_message(rng, handshake.CHALLENGE, {"protocol": handshake.PROTOCOL, "nonce": NONCE}))
            else:
                handshake.challenge(peer, "", time.monotonic() + 3)
                peer.sendall(_message(rng, WELCOME, 4711))
            peer.recv(1 << 16)
