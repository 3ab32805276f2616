"""How hosts find each other, what they compare, and how they learn that one is gone; without devices."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click
import pytest

from fake_backend import VOCAB, FakeBackend
from ling3export.errors import Ling3Error, RankDivergence
from ling3export.processes import free_port
from ling3export.runners.cli.hosts import announced
from ling3export.runners.engine.block_manager import BlockManager
from ling3export.runners.engine.core import Arrival, SharedCore, StepInputs
from ling3export.runners.engine.inputs import Shapes
from ling3export.runners.engine.request import Request
from ling3export.runners.engine.scheduler import Scheduler
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.evals.trials import tokens_digest
from ling3export.runners.hosts import channel as channels
from ling3export.runners.hosts import rendezvous
from ling3export.runners.hosts.channel import END, STEP, Channel
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.hosts.rendezvous import HEAD, HELLO, HostsError, meet

IDENTITY = {"artifact": "a1", "target": "cpu-4x4-tp16", "overlap": True}


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that run at once; an error is a result."""
    results: list[Any] = [None] * len(calls)

    def work(place: int) -> None:
        try:
            results[place] = calls[place]()
        except Ling3Error as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def hosts(count: int = 2, timeout: float = 20.0) -> list[Hosts]:
    address = f"127.0.0.1:{free_port()}"
    return [Hosts(address, count, number, timeout) for number in range(count)]


class NoService:
    """Instead of jax's service, which these tests do not need."""

    def __init__(self, host: str, port: int, count: int) -> None:
        pass

    def end(self) -> None:
        pass


@contextmanager
def connected(lost: list[tuple[str, int]]) -> Iterator[list[Channel]]:
    def gone(text: str, code: int) -> None:
        lost.append((text, code))

    two = in_threads(*(lambda place=place: Channel(place, IDENTITY, gone) for place in hosts()))
    try:
        yield two
    finally:
        for each in two:
            each.close()


@pytest.fixture
def no_service(monkeypatch):
    monkeypatch.setattr(channels, "Service", NoService)


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
    assert str(one) == f"{text}\nhint: start the same command on every host; --start-timeout waits longer"
    assert str(two) == f"host 0 gave up: {text}"


def test_a_first_host_that_does_not_come_is_named():
    _, second = hosts(2, timeout=0.5)
    (error,) = in_threads(lambda: meet(second, IDENTITY))
    assert isinstance(error, HostsError)
    assert error.message == f"host 0: expected it at {second.coordinator} within 0.5 s, found Connection refused"


def test_hosts_that_load_another_artifact_overlap_or_count_otherwise_are_refused_on_both():
    first, second = hosts()
    other = IDENTITY | {"artifact": "b2"}
    one, two = in_threads(lambda: meet(first, IDENTITY), lambda: meet(second, other))
    text = "host 1: expected artifact a1 as on host 0, found b2"
    assert (one.message, two.message) == (text, f"host 0 gave up: {text}")
    first, second = hosts()
    one, two = in_threads(
        lambda: meet(first, IDENTITY | {"overlap": True}), lambda: meet(second, IDENTITY | {"overlap": False})
    )  # fmt: skip
    text = "host 1: expected overlap True as on host 0, found False"
    assert (one.message, two.message) == (text, f"host 0 gave up: {text}")
    first, second = hosts()
    one, two = in_threads(lambda: meet(first, IDENTITY), lambda: meet(replace(second, count=4), IDENTITY))
    text = "hosts: expected 2 as on host 0, found 4 on host 1"
    assert (one.message, two.message) == (text, f"host 0 gave up: {text}")


def test_a_port_that_is_taken_is_named():
    first, _ = hosts()
    with socket.create_server(first.address), pytest.raises(HostsError) as caught:
        meet(first, IDENTITY)
    assert caught.value.message == (
        f"coordinator {first.coordinator}: expected a free port on this machine, found Address already in use"
    )


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", HEAD.pack(HELLO, 1_000_000) + b"[" * 1_000_000], ids=["HTTP", "deep JSON"]
)
def test_a_stranger_is_not_taken_for_a_host(no_service, said):
    """JSON nested a million deep once ended host 0 with a traceback."""
    first, second = hosts()

    def stranger() -> Channel:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                with socket.create_connection(first.address) as caller:
                    caller.sendall(said)
                break
            except OSError:
                time.sleep(0.05)
        return Channel(second, IDENTITY, print)

    one, two = in_threads(lambda: Channel(first, IDENTITY, print), stranger)
    one.send(END)
    assert two.take() == (END, b"")
    one.close()
    two.close()


def test_a_silent_host_is_given_up(no_service, monkeypatch):
    """Its machine or the network is gone: nothing closes the connection."""
    monkeypatch.setattr(channels, "SILENCE", 0.5)
    lost: list[tuple[str, int]] = []
    with connected(lost):  # both beat every 5 s only
        until = time.monotonic() + 10
        while len(lost) < 2 and time.monotonic() < until:
            time.sleep(0.05)
    assert {code for _, code in lost} == {1}
    assert {text for text, _ in lost} & {f"host {n}: expected a sign of life, found none for 0.5 s" for n in (0, 1)}


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


def test_it_does_not_wait_for_them_for_long(monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWERING", 0.2)
    with pytest.raises(Ling3Error, match="broken"), announced(hosts()[0]):
        raise Ling3Error("broken")


def test_who_outlives_another_host_says_so_first_and_ends_then(no_service):
    """As a server does: its clients hear why before it ends."""
    lost: list[tuple[str, int]] = []
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


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def core(channel: Channel, ahead: int) -> SharedCore:
    """On the fake model; every host has the same."""
    backend, blocks = FakeBackend(2, 16, 4, 4), BlockManager(2, 16, 4)
    scheduler = Scheduler(backend, Shapes((4, 16), (2,), 4), blocks, VOCAB, ahead=ahead)
    return SharedCore(scheduler, lambda arrival: Sequence(arrival.request, arrival.number, 20, frozenset()), channel)


@pytest.mark.parametrize("ahead", [0, 1])
def test_who_reads_other_tokens_ends_before_it_makes_other_calls(no_service, ahead, monkeypatch):
    """With the next step; the other host hears who it was, and the exit code."""
    monkeypatch.setattr(channels, "SETTLE", 3600)  # until which its process has to have ended
    lost: list[tuple[str, int]] = []
    with connected(lost) as (one, two):
        first, second = core(one, ahead), core(two, ahead)
        backend = second.scheduler._backend
        assert isinstance(backend, FakeBackend)
        inputs = StepInputs((Arrival(0, Request((1, 2, 3), 20)),))
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
        inputs = StepInputs((Arrival(0, Request((1, 2, 3), 20)),))
        for compare in (False, False, True, True):
            inputs = inputs._replace(compare=compare)
            mine, _ = in_threads(
                lambda asked=inputs: first.step(asked), lambda: second.received(two.take()[1])
            )  # fmt: skip
            if compare:
                assert mine.digests == (bytes.fromhex(tokens_digest(tokens)),) * 2
                tokens = []
            tokens += [each.token for each in mine.emitted]
            inputs = StepInputs()


def test_every_host_gets_what_all_gave(no_service):
    with connected([]) as (one, two):
        assert in_threads(lambda: one.gather(b"one"), lambda: two.gather(b"two")) == [(b"one", b"two")] * 2
