"""The table of ranks: that of the specification, and heads that are all there, whatever the two sizes are."""

import itertools

import pytest

from ling3export.foundation.errors import PlanError
from ling3export.runners.transfer.ranks import rank_plan

DIVISORS = (1, 2, 4, 8, 16)


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
    found = [(rank.global_rank, rank.group_rank, rank.port) for rank in decode]
    assert found == [(8, 1, 1), (9, 2, 1), (10, 1, 3), (11, 2, 3)]


@pytest.mark.parametrize(("ps", "ds", "ptp", "dtp"), [(2, 1, 2, 2), (1, 2, 2, 4), (3, 2, 1, 4), (2, 3, 4, 8)])
def test_every_global_rank_is_there_once_and_every_group_has_each_of_its_ranks(ps, ds, ptp, dtp):
    plan = rank_plan(ps, ds, ptp, dtp)
    assert [rank.global_rank for rank in plan] == list(range(ps * ptp + ds * dtp))
    for group in range(ptp):
        members = [rank for rank in plan if rank.group == group]
        assert sorted(rank.group_rank for rank in members) == list(range(members[0].world))
        assert {rank.port for rank in members} == {2 * group + 1}


@pytest.mark.parametrize(
    ("ptp", "dtp"), [(p, d) for p, d in itertools.product(DIVISORS, DIVISORS) if d % p == 0], ids=str
)
def test_each_head_goes_from_the_rank_that_has_it_to_the_one_of_its_group_that_wants_it(ptp, dtp):
    plan = rank_plan(1, 1, ptp, dtp)
    sent = [
        (head, d.rank)
        for d in plan
        if d.role == "D"
        for p in plan
        if p.role == "P" and p.group == d.group
        for head in range(max(p.heads[0], d.heads[0]), min(p.heads[1], d.heads[1]))
    ]
    assert sorted(head for head, _ in sent) == [*range(16)]
    assert all(rank == head * dtp // 16 for head, rank in sent)


@pytest.mark.parametrize("sizes", [(1, 1, 4, 2), (1, 1, 2, 3), (0, 1, 1, 1), (1, 1, 0, 1), (1, 1, 1, 32)])
def test_a_rank_plan_of_other_sizes_is_refused(sizes):
    with pytest.raises(PlanError, match=r"rank plan: expected .* D's TP a multiple of P's .*, found"):
        rank_plan(*sizes)
