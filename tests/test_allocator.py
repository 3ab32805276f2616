"""Slots and pages: never shared, never lost, never number 0."""

import random

import pytest

from ling3export.errors import ArtifactError
from ling3export.runners.allocator import Allocator, Lease


def test_admission_takes_a_slot_and_the_pages_of_its_tokens():
    allocator = Allocator(slots=2, pages=5, page_size=4)
    lease = allocator.admit(9)
    assert lease is not None
    assert (lease.slot, lease.pages) == (1, [1, 2, 3])
    assert (allocator.free_slots, allocator.free_pages) == (1, 2)


def test_admission_takes_nothing_when_pages_are_short():
    allocator = Allocator(slots=2, pages=2, page_size=4)
    assert allocator.admit(9) is None
    assert (allocator.free_slots, allocator.free_pages) == (2, 2)


def test_growing_takes_a_page_at_a_page_border_only():
    allocator = Allocator(slots=1, pages=2, page_size=4)
    lease = allocator.admit(1)
    assert lease is not None
    assert [allocator.grow(lease, tokens) for tokens in (2, 4, 5, 8, 9)] == [True, True, True, True, False]
    assert lease.pages == [1, 2]


def test_a_lease_goes_back_once():
    allocator = Allocator(slots=1, pages=2, page_size=4)
    lease = allocator.admit(4)
    assert lease is not None
    allocator.release(lease)
    with pytest.raises(ValueError, match="slot 1: expected a lease that is held, found one given back before"):
        allocator.release(lease)


def test_unknown_placement_is_refused():
    with pytest.raises(ArtifactError, match="state placement: expected replicated or striped or by_sequence, found by_moon, in the manifest"):
        Allocator(1, 1, 1, "by_moon")


@pytest.mark.parametrize("seed", range(20))
def test_nothing_leaks_and_nothing_is_shared(seed):
    rng = random.Random(seed)
    slots, pages, size = rng.randint(1, 6), rng.randint(1, 20), rng.choice([1, 4, 16])
    allocator = Allocator(slots, pages, size)
    held: list[Lease] = []
    for _ in range(500):
        action = rng.random()
        if action < 0.4:
            lease = allocator.admit(rng.randint(1, size * 5))
            if lease is not None:
                held.append(lease)
        elif held and action < 0.7:
            lease = rng.choice(held)
            before = list(lease.pages)
            if not allocator.grow(lease, rng.randint(1, size * 8)):
                assert lease.pages == before
        elif held:
            allocator.release(held.pop(rng.randrange(len(held))))
        taken = [page for lease in held for page in lease.pages]
        assert len(set(taken)) == len(taken) == pages - allocator.free_pages
        assert len({lease.slot for lease in held}) == len(held) == slots - allocator.free_slots
        assert all(1 <= page <= pages for page in taken)
        assert all(1 <= lease.slot <= slots for lease in held)
    for lease in held:
        allocator.release(lease)
    assert (allocator.free_slots, allocator.free_pages) == (slots, pages)
    whole = allocator.admit(pages * size)
    assert whole is not None
    assert sorted(whole.pages) == list(range(1, pages + 1))
