"""Limits of connections: deadlines, the number of connections, and an error object for each refusal."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from ling3export.foundation import strict_json
from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import RequestHandle
from ling3export.runners.serve import app as server_app
from ling3export.runners.serve import run
from ling3export.runners.serve.app import Policy, application
from ling3export.runners.serve.run import affordable, bound, own_names
from ling3export.runners.serve.schema import ApiError, parse
from tests.support import serving as serving_support
from tests.support.serving import LATE, error_of, serving

POLICY = Policy("toy", None, max_requests=4, max_body=1 << 20)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
OPTIONS_OF_ENGINE = {"max_requests": 4}


@contextmanager
def connected(address: tuple[str, int], data: bytes = b"") -> Iterator[socket.socket]:
    """A client that has sent ``data``."""
    with socket.create_connection(address, LATE) as client:
        client.sendall(data)
        yield client


def rest(client: socket.socket) -> bytes:
    """All data until the server closes the connection."""
    found = b""
    while data := client.recv(1 << 16):
        found += data
    return found


def response(client: socket.socket) -> bytes:
    """The next response, with the length in its headers."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += client.recv(1 << 16)
    head, _, body = found.partition(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(body) < size:
        body += client.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def refusal(answer: bytes) -> tuple[int, str, str]:
    """Status, message and code of the connection's one response, an error object after which the connection ends."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and answer.count(b"HTTP/1.1 ") == 1, answer
    assert list(json.loads(body)) == ["error"]
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return int(head.split()[1]), error["message"], error["code"]


def test_a_body_that_comes_too_slowly_is_ended(engine, monkeypatch):
    """Regression: half a request was waited for forever. A byte now and then does not extend the deadline."""
    monkeypatch.setattr(server_app, "BODY_SECONDS", 0.5)
    sent = HEAD + b"Content-Length: 999\r\n\r\n{"
    with serving(application(engine, POLICY)) as address, connected(address, sent) as client:
        client.settimeout(0.05)
        end, found = time.monotonic() + LATE, b""
        while not found and time.monotonic() < end:
            try:
                client.sendall(b" ")
                found = client.recv(1 << 16)
            except TimeoutError:
                pass
        assert refusal(found) == (408, "body: expected all of it within 0.5 s, found a part", "request_timeout")


@pytest.mark.parametrize("length", [b"Content-Length: 2000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_a_body_of_too_many_bytes_is_refused(engine, length):
    with serving(application(engine, POLICY)) as address, connected(address, HEAD + length) as client:
        with suppress(ConnectionError):
            for _ in range(40 if b"chunked" in length else 0):
                client.sendall(b"8000\r\n" + b" " * 0x8000 + b"\r\n")
        found = response(client)
    assert found.startswith(b"HTTP/1.1 413 ") and b'"code": "body_too_large"' in found


def test_connections_leave_files_for_everything_else(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(run, "say", said.append)
    monkeypatch.setattr(run.resource, "getrlimit", lambda kind: (1024, 4096))
    assert affordable(512) == 512 and said == []
    assert 512 < affordable(1000) < 1000 and len(said) == 1
    monkeypatch.setattr(run.resource, "getrlimit", lambda kind: (20, 20))
    assert affordable(512) == 1


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


SMUGGLED = b"0\r\n\r\n" + HEALTH


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED, "`Content-Length` beside it"),
        (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n" + SMUGGLED, "`Content-Length` beside it"),
        (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + SMUGGLED, "HTTP/1.0"),
    ],
)
def test_two_ends_of_a_body_are_refused(engine, data, found):
    """RFC 9112, 6.1: a proxy may read the rest as another request. The server does not answer it."""
    with serving(application(engine, POLICY)) as address, connected(address, data) as client:
        message = f"`Transfer-Encoding`: expected it alone and in HTTP/1.1, found {found}"
        assert refusal(rest(client)) == (400, message, "invalid_http")


def asked(engine: Engine, policy: Policy, path: str = "/v1/models", **headers: str) -> httpx2.Response:
    return serving_support.asked(engine, policy, path, method="GET", **headers)


@pytest.mark.parametrize("given", ["Bearer key-1", "bearer key-1", "BEARER  key-1"])
def test_the_scheme_of_the_key_has_no_case(engine, given):
    policy = replace(POLICY, api_key="key-1")
    assert asked(engine, policy, Authorization=given).status_code == 200
    for wrong in ("", "key-1", "Basic key-1", "Bearer", "Bearer key-1x", "Bearer key-1 key-1", "Bearer Key-1", "é é"):
        refused = asked(engine, policy, Authorization=wrong)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"


def names(host: str, *more: str) -> frozenset[str] | None:
    with bound(host, 0) as listener:
        return own_names(listener, more)


def test_on_loopback_a_server_answers_to_its_own_names(engine):
    """Regression: a page whose name leads to this machine (DNS rebinding) reached a server without a key."""
    policy = replace(POLICY, hosts=names("127.0.0.1", "Box.example"))
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "box.example", "box.Example:80"):
        assert asked(engine, policy, Host=host).status_code == 200
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost:80:evil", "", "::1"):
        refused = asked(engine, policy, "/health", Host=host)
        assert refused.status_code == 421
        said = f"`Host`: expected one of 127.0.0.1, [::1], box.example, localhost, found {host}: see --allow-host"
        assert refused.json()["error"] == error_of(said, "invalid_request_error", "unknown_host")


def test_a_server_that_others_can_reach_accepts_any_host_name_unless_given():
    assert names("127.0.0.2") == {"127.0.0.1", "127.0.0.2", "[::1]", "localhost"}
    assert names("0.0.0.0") is None
    assert names("0.0.0.0", "llm.example") == {"llm.example"}


@pytest.mark.parametrize("stream", [False, True])
def test_at_the_end_of_the_grace_calls_get_an_error_object(engine, monkeypatch, caplog, stream):
    """Regression: a client got plain text, or half a stream without a reason."""
    handles: list[RequestHandle] = []
    monkeypatch.setattr(engine, "submit", lambda *requests, **_: handles or [endless(requests[0], handles)])

    def endless(request: Any, into: list[RequestHandle]) -> RequestHandle:
        into.append(RequestHandle(request, 0, lambda number: None))
        return into[0]

    ask = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 9, "stream": stream}
    body = json.dumps(ask).encode()
    data = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with ExitStack() as stack:
        with serving(application(engine, POLICY), grace=0.2) as address:
            client = stack.enter_context(connected(address, data))
            while not handles:
                time.sleep(0.01)
            found = client.recv(1 << 16) if stream else b""
        found += rest(client)
    message = "server: expected the call to end before the server, found it running"
    error = {"error": error_of(message, "server_error", "ending")}
    if stream:
        assert found.startswith(b"HTTP/1.1 200 ") and found.endswith(b"\r\n0\r\n\r\n")
        assert f"data: {json.dumps(error)}\n\n".encode() in found
    else:
        assert found.startswith(b"HTTP/1.1 503 ") and json.loads(found.partition(b"\r\n\r\n")[2]) == error
    assert not [record for record in caplog.records if record.exc_info]


def test_few_calls_are_read_at_a_time(engine, monkeypatch):
    """Regression: many calls passed the check for room and were tokenized at once.

    Small calls do not wait for large ones.
    """
    most, lock = dict.fromkeys(("small", "large"), 0), threading.Lock()
    hold = threading.Event()
    counts = {"small": 0, "large": 0}

    def slow(prompt: Any, *_: Any, **__: Any) -> Any:
        kind = "large" if len(prompt) > server_app.SMALL else "small"
        with lock:
            counts[kind] += 1
            most[kind] = max(most[kind], counts[kind])
        if kind == "large":
            assert hold.wait(LATE)
        time.sleep(0.05)
        with lock:
            counts[kind] -= 1
        raise RequestError("read")

    monkeypatch.setattr(engine, "prompt_ids", slow)
    with serving(application(engine, POLICY)) as address:
        url = f"http://localhost:{address[1]}/v1/completions"

        def post(size: int) -> int:
            return httpx2.post(url, json={"model": "toy", "prompt": "a" * size}, timeout=LATE).status_code

        with ThreadPoolExecutor(12) as pool:
            large, small = (pool.map(post, sizes) for sizes in ([100_000] * 4, [10] * 8))
            assert [*small] == [400] * 8
            hold.set()
            assert [*large] == [400] * 4
    assert (most["small"], most["large"]) == (2, 1)


@pytest.mark.parametrize("item", [b"1", b"[]", b'""', b'{"a": 1}', b"1.5", b"null"])
def test_the_decoder_of_large_bodies_reads_what_the_other_reads(monkeypatch, item):
    """json's decoder in C blocks all other threads: for 0.3 s on 4 MB of empty lists."""
    monkeypatch.setattr(strict_json, "QUICK", 0)
    data = b'{"prompt": [' + b",".join([item] * 16_000) + b'], "\\u00e9\\n": "x"}'
    assert parse(data) == json.loads(data)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"metadata": [' + b"{}," * 60_000 + b"{}]}", "more than 16,384 lists and objects"),  # 126 ms of Python
        (b"[" + b"[]," * 16_384 + b"[]]", "more than 16,384 lists and objects"),
        (b"[" + b"1," * 70_000 + b"1]", "more than 65,536 elements in a row"),
        (b'{"a": 1, "b": {' + b'"c":1,' * 70_000 + b'"d":1}}', "more than 65,536 elements in a row"),
        (b'["\\"", ' + b'"a",' * 70_000 + b"1]", "more than 65,536 elements in a row"),
    ],
)
def test_a_body_of_too_many_elements_is_refused_before_it_is_parsed(monkeypatch, data, found):
    """Regression: parsing 4 MB of them took seconds, and garbage collection stopped all other threads meanwhile."""
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(ApiError) as caught:
        parse(data)
    assert (caught.value.status, caught.value.message) == (400, f"body: expected JSON, found {found}")


def test_commas_in_a_text_are_no_elements():
    data = json.dumps({"prompt": ',"[{' * 70_000 + "\\"}).encode()
    assert parse(data) == json.loads(data)
