"""Slots and pages: never shared, never lost, never number 0."""

import random
from collections import Counter

import pytest

from ling3export.errors import ArtifactError
from ling3export.runners.engine.block_manager import PLACEMENTS, Allocator, Lease


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
    said = "state placement: expected replicated or striped or by_sequence, found by_moon, in the manifest"
    with pytest.raises(ArtifactError, match=said):
        Allocator(1, 1, 1, "by_moon")


@pytest.mark.parametrize("placement", ["striped", "by_sequence"])
def test_pages_that_devices_cannot_share_are_refused(placement):
    said = rf"state pages: expected a multiple of 4 \({placement} over as many devices\), found 6, in the manifest"
    with pytest.raises(ArtifactError, match=said):
        Allocator(2, 6, 4, placement, devices=4)


def test_striped_pages_go_round_the_devices_each_sequence_from_another():
    """Page n is on device (n - 1) mod 4; page j of a sequence with home h is on device (h + j) mod 4."""
    allocator = Allocator(slots=9, pages=12, page_size=1, placement="striped", devices=4)
    leases = [lease for lease in (allocator.admit(tokens) for tokens in (6, 1, 1, 1)) if lease]
    assert [(lease.home, lease.pages) for lease in leases] == [
        (0, [1, 2, 3, 4, 5, 6]), (2, [7]), (3, [8]), (1, [10])
    ]  # fmt: skip
    first, second, third, fourth = leases
    assert allocator.grow(third, 2) and third.pages == [8, 9], "from device 3 on to device 0"
    assert not allocator.grow(third, 3), "device 1 has given its last page, though two are free elsewhere"
    assert allocator.blocks(first, third) and allocator.blocks(fourth, third) and not allocator.blocks(second, third)
    allocator.release(first)
    assert allocator.grow(third, 3) and third.pages == [8, 9, 2]
    assert allocator.longest == 12
    assert (allocator.free_slots, allocator.free_pages) == (6, 7)


def test_many_short_striped_sequences_live_on_all_devices():
    """Their first pages once all lay on device 0, which then attended for all and was full first."""
    allocator = Allocator(slots=64, pages=64, page_size=256, placement="striped", devices=16)
    leases = [lease for lease in (allocator.admit(100) for _ in range(64)) if lease]
    assert Counter((lease.pages[0] - 1) % 16 for lease in leases) == dict.fromkeys(range(16), 4)


def test_by_sequence_gives_each_sequence_a_home():
    """Device d has pages 3d + 1 … 3d + 3; sequences go where fewest live."""
    allocator = Allocator(slots=9, pages=12, page_size=1, placement="by_sequence", devices=4, rows=8)
    leases = [allocator.admit(2) for _ in range(4)]
    assert [(lease.home, lease.pages) for lease in leases if lease] == [
        (0, [1, 2]), (1, [4, 5]), (2, [7, 8]), (3, [10, 11])
    ]  # fmt: skip
    assert allocator.admit(2) is None
    fifth = allocator.admit(1)
    assert fifth is not None and (fifth.home, fifth.pages) == (0, [3])
    assert not allocator.grow(fifth, 2)
    assert leases[0] is not None and leases[1] is not None
    assert allocator.blocks(leases[0], fifth) and not allocator.blocks(leases[1], fifth)
    assert allocator.longest == 3


def test_by_sequence_rows_are_those_of_the_home():
    """Row r of B is on device r·TP // B."""
    allocator = Allocator(slots=9, pages=36, page_size=1, placement="by_sequence", devices=4, rows=8)
    leases = [lease for lease in (allocator.admit(1) for _ in range(9)) if lease]
    assert [lease.home for lease in leases] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert allocator.rows(leases, 8) == [0, 2, 4, 6, 1, 3, 5, 7, None]
    assert allocator.rows(leases[1:3], 4) == [1, 2]
    assert allocator.rows(leases[:4], 2) == [0, None, 1, None], "two rows serve devices 0 and 2 alone"


def test_by_sequence_never_lives_where_no_row_is():
    allocator = Allocator(slots=4, pages=8, page_size=1, placement="by_sequence", devices=4, rows=2)
    assert [lease.home for lease in (allocator.admit(1) for _ in range(4)) if lease] == [0, 2, 0, 2]
    assert allocator.admit(1) is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nothing_leaks_and_nothing_is_shared(seed, placement):
    rng = random.Random(seed)
    devices = rng.choice([1, 2, 4])
    slots, pages, size = rng.randint(1, 6), devices * rng.randint(1, 10), rng.choice([1, 4, 16])
    allocator = Allocator(slots, pages, size, placement, devices)
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
            where = [(page - 1) % devices if placement == "striped" else (page - 1) // (pages // devices)
                     for page in lease.pages]  # fmt: skip
            wanted = [(lease.home + j) % devices if placement == "striped" else lease.home for j in range(len(where))]
            assert placement == "replicated" or where == wanted
    for lease in held:
        allocator.release(lease)
    assert (allocator.free_slots, allocator.free_pages) == (slots, pages)
    whole = allocator.admit(allocator.longest * size)
    assert whole is not None
    assert sorted(whole.pages) == list(range(1, allocator.longest + 1))
