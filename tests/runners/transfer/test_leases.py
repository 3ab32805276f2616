"""Leases: renewed for as long as somebody waits, over at their end, given back at once by who wants nothing."""

import threading
import time

import pytest

from ling3export.runners.transfer.backend import Presence, Source
from ling3export.runners.transfer.folder import collect as collect_folder
from ling3export.runners.transfer.renewals import Renewals
from ling3export.runners.transfer.shm import collect
from ling3export.runners.transfer.tcp import Tcp
from tests.support import transfers
from tests.support.transfers import BACKENDS, LIMIT, backend, keys, write

TRANSFER = "0" * 32
LEASE = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def by_hand(monkeypatch):
    """No thread renews: the test does."""
    monkeypatch.setattr(Renewals, "_run", lambda self: None)


def soon() -> float:
    return time.monotonic() + 60


def over(end) -> set[str]:
    """The transfers that ended since the last call."""
    if isinstance(end, Tcp):
        end._expire()  # which its thread does now and then
    return end.sent()


@pytest.fixture(params=BACKENDS)
def ends(request, tmp_path, clock):
    """Who offers two objects under one clock with who wants them; the objects; where they are offered."""
    transfers.remove_all()
    holder, taker = (backend(request.param, tmp_path, LIMIT, 60.0, LEASE, clock) for _ in range(2))
    wanted = keys(8)
    assert all(write(holder, key) for key in wanted)
    holder.offer(TRANSFER, wanted)
    yield holder, taker, wanted, Source("127.0.0.1", getattr(holder, "port", 1), TRANSFER)
    holder.close()
    taker.close()


def test_a_lease_that_is_renewed_outlives_its_first_end_and_then_ends(ends, clock, tmp_path):
    holder, taker, wanted, source = ends
    for _ in range(3):
        clock.now += LEASE - 1
        assert over(holder) == set()
        assert taker.renew(source, soon()) == "renewed"
    assert list(collect(dry_run=True)) == list(collect_folder(tmp_path, dry_run=True)) == [], "gc takes none that runs"
    clock.now += LEASE + 1
    assert over(holder) == {TRANSFER}
    assert taker.renew(source, soon()) == "refused"
    assert taker.fetch(wanted, source, soon()) == [None, None]
    assert all(holder.look(key) is Presence.ABSENT for key in wanted)


def test_what_is_given_back_is_free_at_once(ends):
    holder, taker, wanted, source = ends
    assert over(holder) == set()
    assert taker.fetch([], source, soon()) == []
    end = soon()
    while over(holder) != {TRANSFER}:  # a holder over TCP says so a moment after the other end
        assert time.monotonic() < end
    assert taker.renew(source, soon()) == "refused"
    assert all(holder.look(key) is Presence.ABSENT for key in wanted)


def test_nobody_at_the_port_renews_nothing(tmp_path):
    holder, taker = backend("tcp", tmp_path), backend("tcp", tmp_path)
    source = Source("127.0.0.1", holder.port, TRANSFER)
    assert taker.renew(source, soon()) == "refused" and holder.counts["unknown"] == 1
    holder.close()
    assert taker.renew(source, soon()) == "peer_gone"
    taker.close()


def test_leases_are_renewed_at_a_third_of_their_length_until_they_are_dropped(by_hand, clock):
    asked = []
    renewals = Renewals(lambda source: asked.append(source.transfer) or "renewed", clock)
    for name, lease in (("a", 30.0), ("b", 60.0)):
        renewals.add(name, [Source("h", 1, name)], lease)
    for _ in range(4):
        renewals.renew_due()
        clock.now += 10
    assert asked == ["a", "a", "b", "a"]
    renewals.drop("a")
    renewals.renew_due()
    assert asked[4:] == ["b"] and renewals.counts == {"renewed": 5}


def test_who_does_not_answer_is_asked_once_a_round_and_no_more(by_hand, clock):
    """Others' leases are renewed meanwhile."""
    asked = []

    def renew(source):
        asked.append((source.host, source.transfer))
        return {"gone": "peer_gone", "here": "renewed"}.get(source.host, "refused")

    renewals = Renewals(renew, clock)
    for name, host in (("a", "gone"), ("b", "gone"), ("c", "other"), ("d", "other"), ("e", "here")):
        renewals.add(name, [Source(host, 1, name)], 30.0)
    for _ in range(2):
        clock.now += 10
        renewals.renew_due()
    assert asked == [("gone", "a"), ("other", "c"), ("other", "d"), ("here", "e"), ("here", "e")]
    assert renewals.counts == {"renewal_peer_gone": 2, "renewal_refused": 2, "renewed": 2}


def test_the_thread_renews_by_itself():
    renewed = threading.Event()
    renewals = Renewals(lambda source: renewed.set() or "renewed")
    renewals.add("a", [Source("h", 1, "a")], 0.003)
    assert renewed.wait(60)
    renewals.close()
