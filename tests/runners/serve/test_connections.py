"""What a connection may cost: deadlines, how many there may be, and that whatever is refused gets an error object."""

import asyncio
import json
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import RequestHandle
from ling3export.runners.serve import app as server_app
from ling3export.runners.serve import run
from ling3export.runners.serve.app import Policy, application
from ling3export.runners.serve.connection import PIECES, READ, Connection, ConnectionLimits
from ling3export.runners.serve.run import affordable, bound, own_names
from ling3export.runners.serve.schema import ApiError, parse
from tests.support import serving as serving_support
from tests.support import toy_artifact
from tests.support.serving import LATE, RUNNER, Server, error_of, serving
from tests.support.waiting import until

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
    """All that comes until the server closes the connection."""
    found = b""
    while data := client.recv(1 << 16):
        found += data
    return found


def response(client: socket.socket) -> bytes:
    """The next response, whose length its headers say."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += client.recv(1 << 16)
    head, _, body = found.partition(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(body) < size:
        body += client.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def refusal(answer: bytes) -> tuple[int, str, str]:
    """Status, message and code of the one response that is there, which is an error object and ends the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and answer.count(b"HTTP/1.1 ") == 1, answer
    assert list(json.loads(body)) == ["error"]
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return int(head.split()[1]), error["message"], error["code"]


@pytest.mark.parametrize(
    ("sent", "drop", "what"),
    [(b"GET /health HTTP/1.1\r\nHost: local", b"l", "headers"), (HEAD + b"Content-Length: 999\r\n\r\n{", b" ", "body")],
)
def test_a_request_that_comes_too_slowly_is_ended(engine, sent, drop, what):
    """Half a request was waited for without end; a byte now and then does not help it."""
    with serving(application(engine, POLICY), head=0.5, body=0.5) as address, connected(address, sent) as client:
        client.settimeout(0.05)
        end, found = time.monotonic() + LATE, b""
        while not found and time.monotonic() < end:
            try:
                client.sendall(drop)
                found = client.recv(1 << 16)
            except TimeoutError:
                pass
        message = f"{what}: expected all of it within 0.5 s, found a part"
        assert refusal(found) == (408, message, "request_timeout")


def test_a_connection_that_asks_nothing_is_closed_without_a_word(engine):
    """Also behind an answer. Clients would take a word for the answer to what they ask next."""
    with serving(application(engine, POLICY), idle=1) as address, connected(address) as client:
        assert rest(client) == b""
        with connected(address, HEALTH) as other:
            assert rest(other).endswith(b'{"status":"ok"}')


def test_a_client_that_reads_nothing_is_ended():
    """Its answer waited for it without end."""
    ended = threading.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        left = asyncio.create_task(receive())
        while not left.done():
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
            await asyncio.sleep(0)
        await left
        ended.set()

    async def gone(scope, receive, send):
        await receive()
        await app(scope, receive, send)

    with serving(gone, unread=0.3) as address, connected(address, HEALTH):
        assert ended.wait(LATE)


def test_new_connections_take_the_place_of_those_that_wait_longest(engine):
    """Half requests that filled a server kept everybody else out."""
    with serving(application(engine, POLICY), connections=4) as address, ExitStack() as stack:
        half = [stack.enter_context(connected(address, b"GET /health HTTP/1.1\r\nHost:"[:size])) for size in (0, 9, 20)]
        for _ in range(30):
            half.append(stack.enter_context(connected(address, b"GET ")))
            with connected(address, HEALTH) as client:
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        message = "connections: expected at most 4 at once, found one more"
        assert [rest(client) for client in half[:1]] == [b""]
        assert {refusal(rest(client)) for client in half[2:25]} == {(503, message, "too_many_connections")}


def test_a_full_server_refuses_with_an_error_object():
    """When every connection has a call that runs."""
    release, running = threading.Event(), threading.Semaphore(0)

    async def app(scope, receive, send):
        running.release()
        while not release.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    with (
        serving(app, connections=2) as address,
        connected(address, HEALTH) as one,
        connected(address, HEALTH) as two,
        ExitStack() as stack,
    ):
        stack.callback(release.set)
        assert running.acquire(timeout=LATE) and running.acquire(timeout=LATE)
        for _ in range(3):
            with connected(address, HEALTH) as client:
                message = "connections: expected at most 2 at once, found one more"
                assert refusal(rest(client)) == (503, message, "too_many_connections")
        release.set()
        for client in (one, two):
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_half_requests_do_not_keep_others_out_where_few_files_may_be_open():
    """230 half requests under ``ulimit -n 200`` kept /health dead for good."""
    limited = ["bash", "-c", 'ulimit -n 200 && exec "$@"', "limited", *RUNNER]
    with Server(toy_artifact.shared(), runner=limited) as server, ExitStack() as stack:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        for _ in range(230):
            stack.enter_context(connected(address, b"GET /health HTTP/1.1\r\nHost:"))
        for _ in range(5):
            assert httpx2.get(f"{server.url}/health", timeout=20).json() == {"status": "ok"}
        assert "connections at once instead of 512: few files may be open (ulimit -n)" in server.said()
        assert server.stop() == 0
        assert "Traceback" not in server.said()


def test_connections_leave_files_for_everything_else(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(run, "say", said.append)
    monkeypatch.setattr(run.resource, "getrlimit", lambda kind: (1024, 4096))
    assert affordable(ConnectionLimits(512)) == ConnectionLimits(512) and said == []
    assert 512 < affordable(ConnectionLimits(1000)).connections < 1000 and len(said) == 1
    monkeypatch.setattr(run.resource, "getrlimit", lambda kind: (20, 20))
    assert affordable(ConnectionLimits()).connections == 16


SMALL = b"1\r\na\r\n" * PIECES
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "status", "found"),
    [
        (b"\x16\x03\x01\x02\r\n\r\n", 400, "illegal request line"),
        (b"GET /health\r\n\r\n", 400, "illegal request line"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Missing mandatory Host: header"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "Found multiple Host: headers"),
        (b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n", 400, "illegal header line"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70000, 431, "Receive buffer too long"),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "conflicting Content-Length headers"),
        (HEAD + b"Content-Length: 5, 6\r\n\r\n", 400, "conflicting Content-Length headers"),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400, "bad Content-Length"),
        (HEAD + b"Content-Length: +1\r\n\r\n", 400, "bad Content-Length"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "Only Transfer-Encoding: chunked is supported"),
        (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 501, "multiple Transfer-Encoding"),
        (CHUNKED + b"5\r\n{    \r\nz\r\n", 400, "illegal chunk header"),
        (CHUNKED + b"-5\r\n", 400, "illegal chunk header"),
        (CHUNKED + SMALL + b"1\r\na\r\n" * 9, 400, "a body in pieces of less than 256 bytes"),
    ],
)
def test_bytes_that_are_no_request_get_an_error_object(engine, data, status, found):
    """They got a line of plain text; and a body in many tiny chunks held the event loop for seconds."""
    with serving(application(engine, POLICY)) as address, connected(address, data) as client:
        code, message, kind = refusal(rest(client))
        assert (code, kind) == (status, "invalid_http")
        assert message.startswith(f"request: expected HTTP/1.1, found {found}")
        with connected(address, HEALTH) as other:
            assert other.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


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
    """RFC 9112, 6.1: somebody on the way may take what follows for another request. It is not answered."""
    with serving(application(engine, POLICY)) as address, connected(address, data) as client:
        message = f"`Transfer-Encoding`: expected it alone and in HTTP/1.1, found {found}"
        assert refusal(rest(client)) == (400, message, "invalid_http")


def test_requests_behind_each_other_are_answered_in_order(engine):
    with serving(application(engine, POLICY)) as address:
        with connected(address, CHUNKED + b"2;a=b\r\n{}\r\n0\r\nx: y\r\n\r\n" + HEALTH) as client:
            found = b""
            while found.count(b"HTTP/1.1 ") < 2 or not found.endswith(b"}"):
                found += client.recv(1 << 16)
        assert b"`prompt`: expected" in found or b"`model`: expected" in found
        assert found.endswith(b'{"status":"ok"}')


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
    """A page whose name leads to this machine (DNS rebinding) reached a server without a key."""
    policy = replace(POLICY, hosts=names("127.0.0.1", "Box.example"))
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "box.example", "box.Example:80"):
        assert asked(engine, policy, Host=host).status_code == 200
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost:80:evil", "", "::1"):
        refused = asked(engine, policy, "/health", Host=host)
        assert refused.status_code == 421
        said = f"`Host`: expected one of 127.0.0.1, [::1], box.example, localhost, found {host}: see --allow-host"
        assert refused.json()["error"] == error_of(said, "invalid_request_error", "unknown_host")


def test_where_others_can_reach_it_names_are_open_unless_given():
    assert names("127.0.0.2") == {"127.0.0.1", "127.0.0.2", "[::1]", "localhost"}
    assert names("0.0.0.0") is None
    assert names("0.0.0.0", "llm.example") == {"llm.example"}


@pytest.mark.parametrize("stream", [False, True])
def test_at_the_end_of_the_grace_calls_get_an_error_object(engine, monkeypatch, caplog, stream):
    """A client got plain text, or half a stream without a reason."""
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


def test_large_bodies_are_held_in_bounded_number(engine, monkeypatch):
    """Each was received whole and in a thread of its own, however many there were. Small ones have their place."""
    monkeypatch.setattr(server_app, "BODIES", 2)
    large = 1 << 20
    sent = HEAD + b"Content-Length: %d\r\n\r\n" % large + b" " * (large - 1)
    with serving(application(engine, POLICY)) as address, ExitStack() as stack:
        clients = [stack.enter_context(connected(address, sent)) for _ in range(4)]
        until(lambda: len(select.select(clients, [], [], LATE)[0]) >= 2)
        for answer in map(response, select.select(clients, [], [], 0)[0]):
            assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer and b'"code": "busy"' in answer
        url = f"http://localhost:{address[1]}/v1/completions"
        small = httpx2.post(url, json={"model": "toy", "prompt": [1, 2], "max_tokens": 2}, timeout=LATE)
        assert small.status_code == 200
    with serving(application(engine, POLICY)) as address:
        url = f"http://localhost:{address[1]}/v1/completions"
        for _ in range(4):  # what ended holds nothing
            assert httpx2.post(url, json={"model": "toy", "prompt": [1, 2], "user": "u" * 99999}).status_code == 200


def test_large_bodies_take_turns(engine):
    """Fifty of them were read in each turn of the event loop, so that nobody else had one for tens of milliseconds."""
    piece, taken, turn = b" " * (server_app.SMALL + 1), Counter[int](), 0

    async def run() -> None:
        nonlocal turn
        app, answers, running = application(engine, POLICY), [], True

        async def ticking() -> None:
            nonlocal turn
            while running:
                turn += 1
                await asyncio.sleep(0)

        async def client() -> None:
            pieces = iter(range(9, -1, -1))

            async def receive() -> dict[str, Any]:
                taken[turn] += 1
                return {"type": "http.request", "body": piece, "more_body": next(pieces) > 0}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    answers.append(message["status"])

            headers = [(b"content-type", b"application/json")]
            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/completions",
                "headers": headers,
                "query_string": b"",
                "http_version": "1.1",
            }
            await app(scope, receive, send)

        ticker = asyncio.create_task(ticking())
        await asyncio.gather(*(client() for _ in range(5)))
        running = False
        await ticker
        assert answers == [400] * 5

    asyncio.run(run())
    first, *later = (taken[key] for key in sorted(taken))
    assert first == 5 and sum(later) == 45 and max(later) == 1  # each begins at once, then a piece of all in a turn


def test_few_calls_are_read_at_a_time(engine, monkeypatch):
    """Many calls passed the check for room together, and were tokenized all at once. Small ones wait for no large."""
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
def test_the_decoder_of_large_bodies_reads_what_the_other_reads(item):
    """json's decoder in C holds all other threads: for 0.3 s on 4 MB of empty lists."""
    data = b'{"prompt": [' + b",".join([item] * 60_000) + b'], "\\u00e9\\n": "x"}'
    assert parse(data) == json.loads(data)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"[" + b"[]," * 70_000 + b"[]]", "more than 65,536 lists and objects"),
        (b"[" + b"1," * 70_000 + b"1]", "more than 65,536 elements in a row"),
        (b'{"a": 1, "b": {' + b'"c":1,' * 70_000 + b'"d":1}}', "more than 65,536 elements in a row"),
        (b'["\\"", ' + b'"a",' * 70_000 + b"1]", "more than 65,536 elements in a row"),
    ],
)
def test_a_body_of_too_many_elements_is_refused_before_it_is_parsed(monkeypatch, data, found):
    """Parsing 4 MB of them took seconds, and the collector of garbage stopped everybody meanwhile."""
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(ApiError) as caught:
        parse(data)
    assert (caught.value.status, caught.value.message) == (400, f"body: expected JSON, found {found}")


def test_a_client_is_read_a_little_at_a_time(monkeypatch, engine):
    """50 bodies of 4 MB kept everybody else waiting for half a second, at 256 KiB of each in a turn."""
    sizes: list[int] = []
    received = Connection.data_received

    def noted(self: Connection, data: bytes) -> None:
        sizes.append(len(data))
        received(self, data)

    monkeypatch.setattr(Connection, "data_received", noted)
    body = json.dumps({"model": "toy", "prompt": "a" * 1_000_000}).encode()
    data = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
    with serving(application(engine, POLICY)) as address, connected(address, data) as client:
        assert refusal(rest(client))[0] == 400
    assert sum(sizes) == len(data) and max(sizes[1:]) <= READ  # the first may have the headers, too


def test_commas_in_a_text_are_no_elements():
    data = json.dumps({"prompt": ',"[{' * 70_000 + "\\"}).encode()
    assert parse(data) == json.loads(data)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("prompt", [1] * 65, "token ids"),
        ("prompt", [[1], [1] * 65], "token ids"),
        ("messages", [{"role": "user", "content": ""}] * 65, "messages"),
    ],
)
def test_lists_that_can_never_fit_are_refused_by_their_length(engine, field, value, what):
    """Millions of items were checked one by one first."""
    body = json.dumps({"model": "toy", field: value}).encode()
    head = HEAD if field == "prompt" else HEAD.replace(b"/completions", b"/chat/completions")
    data = head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
    with serving(application(engine, POLICY)) as address, connected(address, data) as client:
        code, message, _ = refusal(rest(client))
    assert (code, message) == (400, f"`{field}`: expected at most 64 {what}, found 65")
