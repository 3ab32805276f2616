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

from ling3export.errors import Ling3Error
from ling3export.peers import free_port
from ling3export.runners import channel as channels
from ling3export.runners import rendezvous
from ling3export.runners.channel import END, TURN, Channel
from ling3export.runners.hosts import Hosts, agreed
from ling3export.runners.rendezvous import HostsError, announced, meet

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
def connected(lost: list[str]) -> Iterator[list[Channel]]:
    two = in_threads(*(lambda place=place: Channel(place, IDENTITY, lost.append) for place in hosts()))
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
    one.send(TURN, b"hello")
    assert two.take() == (TURN, b"hello")
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
        lambda: meet(first, IDENTITY | agreed(True)), lambda: meet(second, IDENTITY | agreed(False))
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


def test_a_stranger_is_not_taken_for_a_host(no_service):
    first, second = hosts()

    def stranger() -> Channel:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                with socket.create_connection(first.address) as caller:
                    caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
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
    lost: list[str] = []
    with connected(lost):  # both beat every 5 s only
        until = time.monotonic() + 10
        while len(lost) < 2 and time.monotonic() < until:
            time.sleep(0.05)
    assert "host 1: expected a sign of life, found none for 0.5 s" in lost or (
        "host 0: expected a sign of life, found none for 0.5 s" in lost
    )


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
    said: list[tuple[str, str]] = []
    one, two = in_threads(*(lambda place=place: Channel(place, IDENTITY, lambda text: None) for place in hosts()))
    one._lost = lambda text: said.append(("end", text))
    one.outlive(lambda text: said.append(("told", text)), 0.3)
    begun = time.monotonic()
    two.close()
    while len(said) < 2 and time.monotonic() < begun + 10:
        time.sleep(0.02)
    assert time.monotonic() - begun >= 0.3
    text = "host 1: expected its process to run, found that it ended"
    assert said == [("told", text), ("end", text)]
    one.close()


def test_every_host_gets_what_all_gave(no_service):
    with connected([]) as (one, two):
        assert in_threads(lambda: one.gather(b"one"), lambda: two.gather(b"two")) == [(b"one", b"two")] * 2
