"""Slots and pages are never shared, never lost, and never number 0."""

import random
from collections import Counter

import pytest

from ling3export.foundation.errors import ArtifactError
from ling3export.runners.state.block_manager import BlockManager, BlockTable


def test_admission_and_growth_take_whole_pages_or_nothing():
    blocks = BlockManager(slots=2, pages=5, page_size=4)
    table = blocks.admit(9)
    assert table is not None
    assert (table.slot, table.pages) == (1, [1, 2, 3])
    assert blocks.admit(9) is None
    assert (blocks.free_slots, blocks.free_pages) == (1, 2)
    assert [blocks.grow(table, tokens) for tokens in (10, 12, 13, 20, 21)] == [True, True, True, True, False]
    assert table.pages == [1, 2, 3, 4, 5]


def test_a_block_table_goes_back_once():
    blocks = BlockManager(slots=1, pages=2, page_size=4)
    table = blocks.admit(4)
    assert table is not None
    blocks.release(table)
    with pytest.raises(ValueError, match="slot 1: expected a block table that is held, found one given back before"):
        blocks.release(table)


def test_pages_that_devices_cannot_share_are_refused():
    said = r"state pages: expected a multiple of 4 \(striped over as many devices\), found 6, in the manifest"
    with pytest.raises(ArtifactError, match=said):
        BlockManager(2, 6, 4, stripes=4)


def test_striped_pages_go_round_the_devices_each_sequence_from_another():
    """Page n is on device (n - 1) mod 4; page j of a sequence with home h is on device (h + j) mod 4."""
    blocks = BlockManager(slots=9, pages=12, page_size=1, stripes=4)
    tables = [table for table in (blocks.admit(tokens) for tokens in (6, 1, 1, 1)) if table]
    assert [(table.home, table.pages) for table in tables] == [(0, [1, 2, 3, 4, 5, 6]), (2, [7]), (3, [8]), (1, [10])]
    first, second, third, fourth = tables
    assert blocks.grow(third, 2) and third.pages == [8, 9], "from device 3 on to device 0"
    assert not blocks.grow(third, 3), "device 1 has given its last page, though two are free elsewhere"
    assert (
        blocks.could_free_page_for(first, third)
        and blocks.could_free_page_for(fourth, third)
        and not blocks.could_free_page_for(second, third)
    )
    blocks.release(first)
    assert blocks.grow(third, 3) and third.pages == [8, 9, 2]
    assert (blocks.free_slots, blocks.free_pages) == (6, 7)


def test_many_short_striped_sequences_live_on_all_devices():
    """Regression: their first pages were all on device 0, which then attended for all and was full first."""
    blocks = BlockManager(slots=64, pages=64, page_size=256, stripes=16)
    tables = [table for table in (blocks.admit(100) for _ in range(64)) if table]
    assert Counter((table.pages[0] - 1) % 16 for table in tables) == dict.fromkeys(range(16), 4)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("striped", [False, True])
def test_nothing_leaks_and_nothing_is_shared(seed, striped):
    rng = random.Random(seed)
    devices = rng.choice([1, 2, 4])
    slots, pages, size = rng.randint(1, 6), devices * rng.randint(1, 10), rng.choice([1, 4, 16])
    blocks = BlockManager(slots, pages, size, stripes=devices if striped else 1)
    held: list[BlockTable] = []
    for _ in range(500):
        action = rng.random()
        if action < 0.4:
            table = blocks.admit(rng.randint(1, size * 5))
            if table is not None:
                held.append(table)
        elif held and action < 0.7:
            table = rng.choice(held)
            before = list(table.pages)
            if not blocks.grow(table, rng.randint(1, size * 8)):
                assert table.pages == before
        elif held:
            blocks.release(held.pop(rng.randrange(len(held))))
        taken = [page for table in held for page in table.pages]
        assert len(set(taken)) == len(taken) == pages - blocks.free_pages
        assert len({table.slot for table in held}) == len(held) == slots - blocks.free_slots
        assert all(1 <= page <= pages for page in taken)
        assert all(1 <= table.slot <= slots for table in held)
        tables = {table.slot: table.pages for table in held}
        assert [[page for page in row if page] for row in blocks.page_table.tolist()] == [
            tables.get(slot, []) for slot in range(slots + 1)
        ]
        for table in held:
            where = [(page - 1) % devices for page in table.pages]
            wanted = [(table.home + j) % devices for j in range(len(where))]
            assert not striped or where == wanted
    for table in held:
        blocks.release(table)
    assert (blocks.free_slots, blocks.free_pages) == (slots, pages)
    whole = blocks.admit(pages * size)
    assert whole is not None
    assert sorted(whole.pages) == list(range(1, pages + 1))
