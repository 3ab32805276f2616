"""Leases of what waits to be taken are renewed until that is done, and those who do not answer hold up nobody."""

import threading

import pytest

from ling3export.runners.transfer.renewals import Renewals
from ling3export.runners.transfer.store import StateAddress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_leases_are_renewed_at_a_third_of_their_length_until_they_are_dropped(clock):
    asked = []
    renewals = Renewals(lambda address: asked.append(address.name) or "renewed", clock)
    for name, lease in (("a", 30.0), ("b", 60.0)):
        renewals.add(StateAddress(name, "h", 1), lease, threaded=False)
    for _ in range(4):
        renewals.renew_due()
        clock.now += 10
    assert asked == ["a", "a", "b", "a"]
    renewals.drop("a")
    renewals.renew_due()
    assert asked[4:] == ["b"] and renewals.counts == {"renewed": 5} and len(renewals) == 1


def test_who_does_not_answer_is_asked_once_a_round_and_no_more(clock):
    """Others' leases are renewed meanwhile."""
    asked = []

    def renew(address):
        asked.append((address.host, address.name))
        return {"gone": "peer_gone", "here": "renewed"}.get(address.host, "refused")

    renewals = Renewals(renew, clock)
    for name, host in (("a", "gone"), ("b", "gone"), ("c", "other"), ("d", "other"), ("e", "here")):
        renewals.add(StateAddress(name, host, 1), 30.0, threaded=False)
    for _ in range(2):
        clock.now += 10
        renewals.renew_due()
    assert asked == [("gone", "a"), ("other", "c"), ("other", "d"), ("here", "e"), ("here", "e")]
    assert renewals.counts == {"renewal_peer_gone": 2, "renewal_refused": 2, "renewed": 2}


def test_the_thread_renews_by_itself():
    renewed = threading.Event()
    renewals = Renewals(lambda address: renewed.set() or "renewed")
    renewals.add(StateAddress("a", "h", 1), 0.003)
    assert renewed.wait(60)
    renewals.close()
    assert len(renewals) == 0 and not any(each.name == "ling3-leases" for each in threading.enumerate())
