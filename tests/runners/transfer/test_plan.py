"""Rank plans and copy plans: the tables of the specification, and tensors that are themselves again behind any plan."""

import itertools

import numpy as np
import pytest

from ling3export.foundation.errors import PlanError
from ling3export.runners.transfer.plan import (
    HeadCopy,
    Pages,
    carry_heads,
    head_plan,
    heads_of,
    latent_source,
    page_plan,
    rank_plan,
)

DIVISORS = (1, 2, 4, 8, 16)
PAIRS = list(itertools.product(DIVISORS, DIVISORS))
HEADS, LAYERS, PAGES, PAGE = 16, 2, 7, 3


def test_one_prefill_instance_of_2_ranks_and_one_decode_instance_of_4():
    """The columns: role, rank, kv_rank, group_rank, world, global, port; groups are P0, D0, D1 and P1, D2, D3."""
    plan = rank_plan(1, 1, 2, 4)
    assert [rank[:7] for rank in plan] == [
        ("P", 0, 0, 0, 3, 0, 1),
        ("P", 1, 0, 0, 3, 1, 3),
        ("D", 0, 1, 1, 3, 2, 1),
        ("D", 1, 1, 2, 3, 3, 1),
        ("D", 2, 1, 1, 3, 4, 3),
        ("D", 3, 1, 2, 3, 5, 3),
    ]
    groups = [[f"{rank.role}{rank.rank}" for rank in plan if rank.group == group] for group in (0, 1)]
    assert groups == [["P0", "D0", "D1"], ["P1", "D2", "D3"]]


def test_from_8_ranks_to_16():
    decode = [rank for rank in rank_plan(1, 1, 8, 16) if rank.role == "D"][:4]
    assert [(rank.global_rank, rank.group_rank, rank.port) for rank in decode] == [
        (8, 1, 1),
        (9, 2, 1),
        (10, 1, 3),
        (11, 2, 3),
    ]


@pytest.mark.parametrize(("ps", "ds", "ptp", "dtp"), [(2, 1, 2, 2), (1, 2, 2, 4), (3, 2, 1, 4), (2, 3, 4, 8)])
def test_every_global_rank_is_there_once_and_every_group_has_each_of_its_ranks(ps, ds, ptp, dtp):
    plan = rank_plan(ps, ds, ptp, dtp)
    assert [rank.global_rank for rank in plan] == list(range(ps * ptp + ds * dtp))
    for group in range(ptp):
        members = [rank for rank in plan if rank.group == group]
        assert sorted(rank.group_rank for rank in members) == list(range(members[0].world))
        assert {rank.port for rank in members} == {2 * group + 1}


@pytest.mark.parametrize("sizes", [(1, 1, 4, 2), (1, 1, 2, 3), (0, 1, 1, 1), (1, 1, 0, 1)])
def test_a_rank_plan_of_other_sizes_is_refused(sizes):
    with pytest.raises(PlanError, match=r"rank plan: expected .* D's TP a multiple of P's, found"):
        rank_plan(*sizes)


def test_eight_heads_from_2_ranks_to_4():
    assert head_plan(8, 2, 4) == [
        HeadCopy(0, 0, (0, 2), (0, 2)),
        HeadCopy(0, 1, (2, 4), (0, 2)),
        HeadCopy(1, 2, (0, 2), (0, 2)),
        HeadCopy(1, 3, (2, 4), (0, 2)),
    ]


def test_six_ranks_get_heads_of_four():
    """12 heads: neither TP is a multiple of the other."""
    assert head_plan(12, 4, 6) == [
        HeadCopy(0, 0, (0, 2), (0, 2)),
        HeadCopy(0, 1, (2, 3), (0, 1)),
        HeadCopy(1, 1, (0, 1), (1, 2)),
        HeadCopy(1, 2, (1, 3), (0, 2)),
        HeadCopy(2, 3, (0, 2), (0, 2)),
        HeadCopy(2, 4, (2, 3), (0, 1)),
        HeadCopy(3, 4, (0, 1), (1, 2)),
        HeadCopy(3, 5, (1, 3), (0, 2)),
    ]


@pytest.mark.parametrize("tps", [(3, 4), (4, 3), (32, 16), (0, 1)])
def test_a_tp_that_does_not_divide_the_heads_is_refused(tps):
    with pytest.raises(PlanError, match=r"copy plan: expected a TP that divides 16 heads, found (3|32|0)"):
        head_plan(16, *tps)


@pytest.mark.parametrize(("ptp", "dtp"), PAIRS)
@pytest.mark.parametrize("axis", [1, 2])
def test_heads_carried_from_any_size_to_any_other_are_the_same_heads(ptp, dtp, axis):
    """And as many bytes move as the tensor has."""
    shape = [LAYERS, 3, 5]
    shape.insert(axis, HEADS)
    whole = np.random.default_rng(0).integers(0, 1 << 32, shape, np.uint32).view("<f4")
    sources = np.split(whole, ptp, axis)
    targets = [np.zeros_like(part) for part in np.split(whole, dtp, axis)]
    plan = head_plan(HEADS, ptp, dtp)
    assert carry_heads(plan, sources, targets, axis) == whole.nbytes
    assert np.array_equal(np.concatenate(targets, axis).view(np.uint32), whole.view(np.uint32))
    assert sum(high - low for _, _, (low, high), _ in plan) == HEADS
    back = [np.zeros_like(part) for part in sources]
    assert carry_heads(head_plan(HEADS, dtp, ptp), targets, back, axis) == whole.nbytes
    assert np.array_equal(np.concatenate(back, axis).view(np.uint32), whole.view(np.uint32))


def pool(pages: Pages, blocks: np.ndarray | None, count: int) -> list[np.ndarray]:
    """Every rank's pool [layers, pages, page], with ``blocks`` [layers, blocks, page] where they belong."""
    each = -(-count // pages.tp) + 1 if pages.striped else count + 1
    pools = [np.zeros((LAYERS, each, PAGE), np.int32) for _ in range(pages.tp)]
    for block, number in enumerate(pages.numbers if blocks is not None else ()):
        for rank in range(pages.tp):
            if (place := pages.local(number, rank)) is not None:
                pools[rank][:, place] = blocks[:, block]
    return pools


@pytest.mark.parametrize(("ptp", "dtp"), PAIRS)
@pytest.mark.parametrize("striped", list(itertools.product((False, True), repeat=2)))
def test_pages_carried_from_any_placement_to_any_other_are_the_same_pages(ptp, dtp, striped):
    """A rank that has all pages gets each of them, of striped ones each rank its own: so many bytes move."""
    rng = np.random.default_rng(ptp * 100 + dtp)
    source = Pages([int(n) + 1 for n in rng.permutation(40)[:PAGES]], ptp, striped[0])
    target = Pages([int(n) + 1 for n in rng.permutation(40)[:PAGES]], dtp, striped[1])
    blocks = rng.integers(1, 1000, (LAYERS, PAGES, PAGE), np.int32)
    pools = pool(target, None, 40)
    plan = page_plan(source, target)
    sources = pool(source, blocks, 40)
    for copy in plan:
        pools[copy.d][:, copy.target] = sources[copy.p][:, copy.source]
    moved = sum(pools[copy.d][:, copy.target].nbytes for copy in plan)
    assert moved == blocks.nbytes * (1 if striped[1] else dtp)
    assert all(np.array_equal(*each) for each in zip(pools, pool(target, blocks, 40), strict=True))
    if not striped[0]:
        assert all(copy.p == latent_source(copy.d, ptp, dtp) for copy in plan)


def test_a_copy_plan_of_pages_needs_as_many_on_both_sides():
    with pytest.raises(PlanError, match="expected as many pages on both sides, found 2 and 3"):
        page_plan(Pages([1, 2], 1, False), Pages([1, 2, 3], 1, False))


def test_ranges_of_heads():
    assert [heads_of(rank, 16, 4) for rank in range(4)] == [(0, 4), (4, 8), (8, 12), (12, 16)]
