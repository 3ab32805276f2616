"""How hosts find each other, which settings they compare, and how they notice a lost host; without devices."""

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click
import numpy as np
import pytest

from ling3export.foundation.errors import ArtifactError, Ling3Error, RankDivergence
from ling3export.foundation.processes import free_port
from ling3export.runners.engine import core as cores
from ling3export.runners.engine.core import SharedCore, StepInputs
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.engine.loop import Loop
from ling3export.runners.engine.request import Request
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.hosts import channel as channels
from ling3export.runners.hosts import handshake, rendezvous
from ling3export.runners.hosts.channel import STEP, Channel
from ling3export.runners.hosts.handshake import HEAD, HELLO, REFUSED
from ling3export.runners.hosts.hosts import Hosts, find_hosts, read_secret
from ling3export.runners.hosts.rendezvous import IDENTITY as IDENTIFIES
from ling3export.runners.hosts.rendezvous import HostsError, Identity, announced, meet
from ling3export.runners.load.loader import Timings, load
from tests.support.builds import python
from tests.support.fake_backend import VOCAB
from tests.support.hosting import NoService
from tests.support.scheduler_rig import Rig
from tests.support.waiting import until

SECRET = "correct horse battery staple".replace(" ", "-")
Lost = list[tuple[str, int]]  # the message about a lost host, and the exit code
IDENTITY = {"artifact": "a1", "target": "cpu-4x4-tp16", "overlap": True}


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that run at once; an error is a result."""

    def result(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Ling3Error as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(result, calls, timeout=60))


def hosts(count: int = 2, timeout: float = 20.0, **settings: Any) -> list[Hosts]:
    address = f"127.0.0.1:{free_port()}"
    return [Hosts(address, count, number, timeout, **settings) for number in range(count)]


def lead(place: Hosts) -> tuple[list[int], int]:
    """Host 0's part: the hosts that it met, and the port for jax's service."""
    peers, port = meet(place, IDENTITY)
    rendezvous.welcome(peers, port)
    for peer in peers.values():
        peer.close()
    return sorted(peers), port


def join(place: Hosts, identity: Identity = IDENTITY) -> int:
    """Another host's part: the port for jax's service."""
    peers, port = meet(place, identity)
    peers[0].close()
    return port


@contextmanager
def connected(lost: Lost, **settings: Any) -> Iterator[list[Channel]]:
    two = in_threads(
        *(lambda place=place: Channel(place, IDENTITY, lambda *how: lost.append(how)) for place in hosts(**settings))
    )
    try:
        yield two
    finally:
        for each in two:
            each.close()


@pytest.fixture(autouse=True)
def this_process_goes_on(monkeypatch):
    """Replaces ``end_anyway``, which would end all tests if something fails."""
    monkeypatch.setattr(channels, "end_anyway", lambda seconds: None)


@pytest.fixture
def no_service(monkeypatch):
    monkeypatch.setattr(channels, "Service", NoService)


@pytest.fixture
def lost() -> Lost:
    return []


def test_a_late_host_is_waited_for(no_service):
    first, second = hosts()

    def late() -> Channel:
        time.sleep(1.5)
        return Channel(second, IDENTITY, print)

    begun = time.monotonic()
    one, two = in_threads(lambda: Channel(first, IDENTITY, print), late)
    assert time.monotonic() - begun >= 1.5
    one.send(STEP, b"hello")
    assert two.take() == (STEP, b"hello")
    two.parts(b"two")
    assert one.parts(b"one") == [b"one", b"two"]
    one.close()
    two.close()


def test_a_host_that_does_not_come_is_named_on_all_that_are_there():
    first, second, _ = hosts(3, timeout=1.0)
    one, two = in_threads(lambda: meet(first, IDENTITY), lambda: meet(second, IDENTITY))
    text = "hosts: expected 3 within 1 s, found no word of host 2"
    assert str(one) == f"{text}\nhint: start the same command on every host; LING3_START_TIMEOUT=SECONDS waits longer"
    assert str(two) == f"host 0 gave up: {text}"


def test_a_first_host_that_does_not_come_is_named():
    _, second = hosts(2, timeout=0.5)
    (error,) = in_threads(lambda: meet(second, IDENTITY))
    assert isinstance(error, HostsError)
    assert error.message == f"host 0: expected it at {second.coordinator} within 0.5 s, found Connection refused"


@pytest.mark.parametrize(
    ("other", "count", "said"),
    [
        ({"artifact": "b2"}, 2, "host 1: expected artifact a1 as on host 0, found b2"),
        ({"overlap": False}, 2, "host 1: expected overlap True as on host 0, found False"),
        ({}, 4, "hosts: expected 2 as on host 0, found 4 on host 1"),
    ],
    ids=["artifact", "overlap", "count"],
)
def test_a_host_that_does_not_fit_is_refused_and_comes_again_as_it_should(capsys, other, count, said):
    """Regression: it ended host 0, and its error contained host 0's settings."""
    first, second = hosts()

    def wrong_then_right() -> Any:
        with pytest.raises(HostsError) as caught:
            join(replace(second, count=count), IDENTITY | other)
        # host 0's values are not sent
        told = said.replace("artifact a1", "artifact").replace("overlap True", "overlap")
        assert caught.value.message == f"host 0 refused this host: {told}"
        return join(second)

    one, two = in_threads(lambda: lead(first), wrong_then_right)
    assert one == ([1], two)
    assert capsys.readouterr().err == f"host 0: refused a host and waits on: {said}\n"


def test_refused_hosts_are_named_after_the_timeout():
    first, second = hosts(2, timeout=1.0)
    one, two = in_threads(lambda: lead(first), lambda: join(second, IDENTITY | {"artifact": "b2"}))
    assert one.message == (
        "hosts: expected 2 within 1 s, found no word of host 1; refused: host 1: expected artifact a1 as on host 0, "
        "found b2"
    )
    assert two.message == "host 0 refused this host: host 1: expected artifact as on host 0, found b2"


def test_a_port_that_is_taken_is_named():
    first, _ = hosts()
    with socket.create_server(first.address), pytest.raises(HostsError) as caught:
        join(first, IDENTITY)
    assert caught.value.message == (
        f"coordinator {first.coordinator}: expected a free port on this machine, found Address already in use"
    )


@pytest.mark.parametrize("taken", [2, 3])
def test_jax_is_served_at_another_port_where_one_was_taken(monkeypatch, taken):
    tried: list[int] = []

    class Taken(NoService):
        def __init__(self, host: str, port: int, count: int) -> None:
            tried.append(port)
            if len(tried) <= taken:
                raise Ling3Error("jax's service: expected it to start, found its port taken")

    monkeypatch.setattr(channels, "Service", Taken)
    first, second = hosts()
    one, two = in_threads(lambda: Channel(first, IDENTITY, print), lambda: Channel(second, IDENTITY, print))
    assert len(tried) == 3
    if taken == 3:
        assert isinstance(one, Ling3Error) and "found its port taken" in two.message
        return
    assert one.service_port == two.service_port == tried[-1] != tried[0]
    one.close()
    two.close()


def called(place: Hosts) -> socket.socket:
    """A connection to host 0, as soon as it listens."""
    end = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(place.address, timeout=120)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.02)


def heard(caller: socket.socket) -> bytes:
    """All that host 0 sends until it closes the connection."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := caller.recv(1 << 16):
            said += part
    return said


def message(kind: bytes, text: bytes) -> bytes:
    return HEAD.pack(kind, len(text)) + text


STRANGERS = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "deep JSON": message(HELLO, b"[" * 4000),
    "an infinity": message(HELLO, b'{"host": Infinity, "nonce": "", "proof": ""}'),
    "a number of 3,000 digits": message(HELLO, b'{"host": 1' + b"0" * 3000 + b', "nonce": "", "proof": ""}'),
    "half a character": message(HELLO, b'{"host": 1, "nonce": "' + b"0" * 32 + b'", "proof": "\\ud800"}'),
    "a list": message(HELLO, b"[]"),
    "900 MiB": HEAD.pack(HELLO, 900 << 20) + b"x" * 10_000,
    "the greeting of protocol 1": message(
        HELLO, json.dumps({"protocol": 1, "host": 1, "hosts": 2, "identity": IDENTITY}).encode()
    ),
    "a greeting without a proof": message(IDENTIFIES, json.dumps({"hosts": 2, "identity": IDENTITY}).encode()),
    "the proof of another secret": message(
        HELLO, json.dumps({"host": 1, "nonce": "0" * 32, "proof": "0" * 64}).encode()
    ),
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_an_unknown_caller_is_dropped_and_counted_without_an_answer(monkeypatch, capsys, said):
    """Regression: some of these ended host 0 with a traceback; one with the right digest was accepted as host 1."""
    monkeypatch.setattr(rendezvous, "GREETING", 1.0)
    first, second = hosts(secret=SECRET)

    def stranger() -> Any:
        with called(first) as caller:
            with contextlib.suppress(ConnectionError):
                caller.sendall(said)
            answer = heard(caller)
        size = HEAD.unpack(answer[: HEAD.size])[1] + HEAD.size
        assert json.loads(answer[HEAD.size : size]).keys() == {"protocol", "nonce"}
        assert answer[size:] in (b"", message(REFUSED, b""))
        return join(second)

    one, two = in_threads(lambda: lead(first), stranger)
    assert one == ([1], two)
    assert capsys.readouterr().err == "hosts: all 2 are there; callers dropped that were no hosts of this start: 1\n"


def test_a_caller_has_one_deadline_for_all_its_bytes(monkeypatch):
    """Regression: with one byte now and then, a caller exceeded the start timeout."""
    monkeypatch.setattr(rendezvous, "GREETING", 0.5)
    first, _ = hosts(2, timeout=2.0)

    def slow() -> float:
        with called(first) as caller:
            begun = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() - begun < 20:
                    caller.sendall(b"L")
                    time.sleep(0.1)
            return time.monotonic() - begun

    one, seconds = in_threads(lambda: lead(first), slow)
    assert seconds < 2
    assert one.message == (
        "hosts: expected 2 within 2 s, found no word of host 1; callers dropped that were no hosts of this start: 1"
    )


def test_silent_callers_delay_nobody(monkeypatch):
    """However many they are, the oldest is dropped for the next caller; its silence is not awaited."""
    monkeypatch.setattr(rendezvous, "GREETING", 60.0)
    monkeypatch.setattr(rendezvous, "CALLERS", 3)
    first, second = hosts(timeout=10.0)

    def crowded() -> Any:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(called(first))
            return join(second)

    one, two = in_threads(lambda: lead(first), crowded)
    assert one == ([1], two)


def test_hosts_of_different_secrets_do_not_meet(capsys):
    first, second = hosts(2, timeout=1.0, secret=SECRET)
    one, two = in_threads(lambda: lead(first), lambda: join(replace(second, secret=SECRET[::-1]), IDENTITY))
    assert one.message == (
        "hosts: expected 2 within 1 s, found no word of host 1; callers dropped that were no hosts of this start: 1"
    )
    assert two.message == "host 0: expected it to have this host's secret, found that it has another one"


def test_a_host_tells_nothing_to_who_cannot_prove_to_be_host_0():
    first, second = hosts(secret=SECRET)
    told = []

    def impostor() -> None:
        with socket.create_server(first.address) as listener:
            caller, _ = listener.accept()
            with caller:
                nonce = json.dumps({"protocol": handshake.PROTOCOL, "nonce": "0" * 32}).encode()
                caller.sendall(message(handshake.CHALLENGE, nonce))
                _, hello = handshake.receive(caller)
                # Without the secret, it can only send the caller's own proof back.
                caller.sendall(message(handshake.PROVEN, json.loads(hello)["proof"].encode()))
                told.extend([hello, heard(caller)])

    _, two = in_threads(impostor, lambda: join(second))
    assert two.message == "host 0: expected it to have this host's secret, found that it has another one"
    assert json.loads(told[0]).keys() == {"host", "nonce", "proof"} and told[1] == b""


def test_a_host_that_restarts_takes_its_place_while_others_are_awaited():
    """Regression: it failed the whole start."""
    first, second, third = hosts(3)

    def restarted() -> Any:
        killed = threading.Thread(target=lambda: told.append(in_threads(lambda: join(second))[0]))
        killed.start()
        time.sleep(0.5)
        again = threading.Thread(target=lambda: met.append(join(second)))
        again.start()
        killed.join(120)
        met.append(join(third))
        again.join(120)

    told: list[Any] = []
    met: list[Any] = []
    one, _ = in_threads(lambda: lead(first), restarted)
    assert one == ([1, 2], met[0]) and met == [one[1]] * 2
    assert told[0].message == "host 0 refused this host: another process called as host 1 and took its place"


def test_a_host_that_ended_before_all_were_there_is_waited_for_again():
    first, _, third = hosts(3, timeout=2.0)

    def gone_then_there() -> Any:
        with called(first) as caller:
            threading.Timer(0.5, lambda: caller.shutdown(socket.SHUT_RDWR)).start()
            handshake.prove(caller, "", 1, time.monotonic() + 10)
            handshake.tell(caller, IDENTIFIES, hosts=3, identity=IDENTITY)
            with pytest.raises(ConnectionError):  # not before host 0 has accepted it
                handshake.receive(caller)
        return join(third)

    one, two = in_threads(lambda: lead(first), gone_then_there)
    text = "hosts: expected 3 within 2 s, found no word of host 1"
    assert (one.message, two.message) == (text, f"host 0 gave up: {text}")


def test_other_machines_are_met_with_a_secret_or_with_trust():
    """Regression: every caller that reached the port could be host 1."""
    for coordinator in ("10.0.0.1:9", "node1:9", "[fe80::1]:9", "0.0.0.0:9"):
        with pytest.raises(Ling3Error) as caught:
            Hosts(coordinator, 2, 1)
        assert caught.value.message == (
            f"coordinator {coordinator}: other machines reach host 0, and there is no secret"
        )
        assert "LING3_SECRET_FILE" in str(caught.value.hint) and "LING3_TRUST_NETWORK" in str(caught.value.hint)
        assert SECRET not in repr(Hosts(coordinator, 2, 1, secret=SECRET))
        assert Hosts(coordinator, 2, 1, trust_network=True).secret == ""
        assert Hosts(coordinator, 1, 0).count == 1
    for coordinator in ("127.0.0.1:9", "[::1]:9", "localhost:9"):
        assert Hosts(coordinator, 2, 1).secret == ""


def test_the_secret_is_in_a_private_file_or_in_the_environment(tmp_path):
    file, variables = tmp_path / "secret", {"LING3_SECRET": SECRET[::-1]}
    assert read_secret({}) == ""
    assert read_secret(variables) == SECRET[::-1]
    variables["LING3_SECRET_FILE"] = str(file)
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    assert read_secret(variables) == SECRET
    found = find_hosts({"DIST_INIT_ADDR": "10.0.0.1:9", "NNODES": "2", "NODE_RANK": "1", **variables})
    assert found is not None and found.secret == SECRET
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(Ling3Error, match=r"expected a file of this user alone \(0600\), found mode 06[024]{2} of"):
            read_secret(variables)
    file.chmod(0o600)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(Ling3Error, match="expected a regular file, found a pipe"):
        read_secret({"LING3_SECRET_FILE": str(tmp_path / "pipe")})
    for text in ("", "short", "x" * 2000, "two words of some length", "é" * 20):
        file.write_text(text)
        for environment in ({"LING3_SECRET_FILE": str(file)}, {"LING3_SECRET": text}):
            with pytest.raises(Ling3Error, match="expected 16 to 1,024 characters of printable ASCII without blanks"):
                read_secret(environment)


def test_host_0_listens_only_at_the_coordinators_address():
    first, second = hosts()
    elsewhere = ("127.0.0.2", first.address[1])

    def reach() -> Any:
        called(first).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(elsewhere, timeout=5)
        return join(second)

    one, _ = in_threads(lambda: lead(first), reach)
    with socket.socket() as free:
        free.bind(("127.0.0.1", one[1]))  # jax's service needs this port


def test_a_silent_host_is_given_up(no_service, lost, monkeypatch):
    """Its machine or the network is gone, so that nothing closes the connection."""
    monkeypatch.setattr(channels, "BEATS", 0.1)
    with connected(lost, host_timeout=0.5):  # both send signs of life only every 5 s
        until(lambda: len(lost) == 2)
    assert {code for _, code in lost} == {1}
    assert {text for text, _ in lost} & {f"host {n}: no sign of life for 0.5 s" for n in (0, 1)}


def test_a_first_host_that_ends_before_it_meets_the_others_tells_them(capsys):
    first, second, third = hosts(3)

    def fails() -> None:
        with announced(first):
            raise click.UsageError("suite `s`: expected at least one task, found none.")

    def refused() -> None:
        try:
            fails()
        except click.UsageError as error:
            raise Ling3Error(error.message) from None

    one, *others = in_threads(refused, lambda: meet(second, IDENTITY), lambda: meet(third, IDENTITY))
    text = "suite `s`: expected at least one task, found none."
    assert [one.message, *(other.message for other in others)] == [text, *[f"host 0 gave up: {text}"] * 2]
    assert capsys.readouterr().err == "host 0: telling the others that it ends, for at most 10 s\n"


def test_host_0_waits_briefly_to_tell_the_others_its_error(monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWERING", 0.2)
    with pytest.raises(Ling3Error, match="broken"), announced(hosts()[0]):
        raise Ling3Error("broken")


def test_a_host_reports_a_lost_host_before_it_ends(no_service, lost):
    """A server's clients get the reason before it ends."""
    told: list[str] = []
    with connected(lost) as (one, two):
        one.outlive(told.append, 0.3)
        begun = time.monotonic()
        two.close()
        until(lambda: bool(told))
        assert lost == []
        until(lambda: bool(lost))
        assert time.monotonic() - begun >= 0.3
    text = "host 1: expected its process to run, found that it ended"
    assert (told, lost) == ([text], [(text, 1)])


def rig(channel: Channel, ahead: int) -> Rig:
    """A rig on the fake model, equal on every host."""
    return Rig(slots=2, pages=16, decode=(2,), context=64, ahead=ahead, channel=channel)


def core(channel: Channel, ahead: int) -> SharedCore:
    made = rig(channel, ahead).core
    assert isinstance(made, SharedCore)
    return made


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_host_with_other_tokens_ends_before_its_calls_differ(no_service, lost, ahead, monkeypatch):
    """It ends with the next step; the other host gets its name and the exit code."""
    monkeypatch.setattr(channels, "SETTLE", 3600)  # seconds until the process must have ended
    with connected(lost) as (one, two):
        first, other = core(one, ahead), rig(two, ahead)
        second: Any = other.core
        backend: Any = other.backend
        inputs = StepInputs((Sequence(Request((1, 2, 3), 20), 0),))
        for _ in range(3):
            mine, found = first.step(inputs), second.received(two.take()[1])
            assert [each.token for each in mine.emitted] == [each.token for each in found.emitted]
            inputs = StepInputs()
        read = backend.read
        monkeypatch.setattr(backend, "read", lambda handle: (read(handle) + 1) % VOCAB)
        first.step(StepInputs())
        second.received(two.take()[1])
        made = len(backend.calls)
        first.step(StepInputs())
        with pytest.raises(RankDivergence) as caught:
            second.received(two.take()[1])
        text = "sampled tokens: expected those of host 0, found others on host 1"
        assert caught.value.message == text
        assert len(backend.calls) == made
        until(lambda: bool(lost))
    assert lost == [(text, 5)]


def test_hosts_compare_digests_of_the_little_endian_tokens(no_service):
    with connected([]) as (one, two):
        first, second = core(one, 0), core(two, 0)
        tokens: list[int] = []
        inputs = StepInputs((Sequence(Request((1, 2, 3), 20), 0),))
        for compare in (False, False, True, True):
            inputs = inputs._replace(compare=compare)
            mine, _ = in_threads(lambda asked=inputs: first.step(asked), lambda: second.received(two.take()[1]))
            if compare:
                assert mine.digests == (hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).digest(),) * 2
                tokens = []
            tokens += [each.token for each in mine.emitted]
            inputs = StepInputs()


def test_a_message_that_host_0_cannot_send_ends_the_others(no_service, lost, monkeypatch):
    """Regression: a numpy integer as seed ended host 0 in its encoder, and the others waited for the step."""
    monkeypatch.setattr(channels, "SETTLE", 0.01)
    ended: list[tuple[str, int]] = []
    monkeypatch.setattr(channels, "end_process", lambda *how: ended.append(how))
    with connected(lost) as (one, two):
        first, _ = core(one, 0), core(two, 0)
        monkeypatch.setattr(cores, "encode", lambda inputs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            first.step(StepInputs((Sequence(Request((1, 2, 3), 20), 0),)))
        until(lambda: bool(lost and ended))
    text = "a step failed: division by zero"
    assert lost == [(f"host 0 ended: {text}", 1)] and ended == [(text, 1)]


def test_an_engine_that_fails_between_two_steps_ends_the_others(no_service, lost, monkeypatch):
    """Regression: its clients got the error, but the other hosts waited for the next step."""
    monkeypatch.setattr(channels, "end_process", lambda *_: None)
    with connected(lost) as (one, _):
        first = core(one, 0)
        monkeypatch.setattr(first, "step", lambda inputs: None)  # it returns nothing to deliver
        (handle,) = Loop(first, Timings()).submit([Request((1, 2, 3), 20)])
        with pytest.raises(EngineStopped, match="NoneType"):
            handle.result()
        until(lambda: bool(lost))
    ((text, code),) = lost
    assert text.startswith("host 0 ended: the engine failed: ") and code == 1


@pytest.mark.parametrize("lacks", ["took none of its steps", "gave no part of a step"])
def test_a_host_that_only_sends_signs_of_life_is_given_up_by_name(no_service, lost, lacks):
    """The thread of its devices hangs. Regression: host 0 waited forever for a part of a state or of logits."""
    with connected(lost, host_timeout=2) as (one, two):
        one.send(STEP)
        two.take()
        if "steps" in lacks:
            one.send(STEP)
        else:
            # never ends; in a real host, its process would end
            threading.Thread(target=one.parts, args=(b"one",), daemon=True).start()
        until(lambda: len(lost) == 2)
    assert lost == [(f"host 1: {lacks} for 2 s", 1)] * 2


def test_a_host_that_loads_for_longer_than_a_step_may_take_is_no_failure(no_service, lost):
    with connected(lost, host_timeout=1) as (one, two):
        gathers = threading.Thread(target=one.parts, args=(b"one",))
        gathers.start()
        time.sleep(1.5)
        two.parts(b"two")
        gathers.join(60)
        assert not gathers.is_alive() and lost == []


def test_a_slow_host_that_takes_steps_is_no_failure(no_service, lost):
    with connected(lost, host_timeout=2) as (one, two):
        for _ in range(8):
            one.send(STEP)
        for _ in range(8):
            time.sleep(0.3)
            two.take()
        assert lost == []


def test_host_0_that_cannot_load_tells_the_others(tmp_path, capsys):
    """Regression: they waited for the whole start timeout."""
    first, second = hosts()
    one, two = in_threads(lambda: load(tmp_path / "none.ling3", hosts=first), lambda: join(second))
    assert isinstance(one, ArtifactError)
    assert two.message == f"host 0 gave up: {one.message}"


def test_an_error_that_follows_from_a_lost_host_comes_after_what_the_watch_says(no_service):
    """Regression: the step's error ended the process with a traceback before the watch had printed the cause."""
    order: list[str] = []
    found = threading.Event()

    def slowly(text: str, code: int) -> None:
        found.set()
        time.sleep(1)
        order.append(text)

    first, second = hosts()
    one, two = in_threads(lambda: Channel(first, IDENTITY, print), lambda: Channel(second, IDENTITY, slowly))
    try:
        with two.together():
            one.close()
            assert found.wait(120)
            raise ValueError("a collective failed")
    except ValueError:
        order.append("raised")
    two.close()
    assert order == ["host 0: expected its process to run, found that it ended", "raised"]


ENDLESS = """
import atexit, ctypes
from ling3export.runners.hosts import channel
from ling3export.runners.hosts.hosts import Hosts
class Service:
    __init__ = end = lambda *_: None
channel.Service, channel.SETTLE = Service, 0.5
atexit.register(ctypes.PyDLL(None).sleep, 600)  # keeps Python's lock
with channel.Channel(Hosts({coordinator!r}, 1, 0), {{}}).together():
    raise ValueError("a collective failed")
"""


def test_a_host_ends_although_its_devices_do_not():
    """Regression: Python's exit waited forever for a collective's threads, and the timer could not run."""
    done = python("-c", ENDLESS.format(coordinator=f"127.0.0.1:{free_port()}"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: a collective failed"


def test_a_long_message_arrives_whole(no_service, monkeypatch):
    monkeypatch.setattr(channels, "PIECE", 10)
    with connected([]) as (one, two):
        for size in (0, 9, 10, 11, 20, 21, 35):
            payload = bytes(range(size))
            one.send(b"T", payload)
            two.send(b"P", payload)
            assert two.take() == (b"T", payload) and one.take(1) == (b"P", payload)
