"""Which rank's bytes go where, where prefill and decode run with parallelism of their own (P and D for short).

The table of the specification: each of PS prefill instances has PTP ranks, each of DS decode instances DTP. An engine
of this package gathers a state in canonical order and so is one rank of one, whatever its TP; who carries the states
of ranks one by one reads here what belongs where.
"""

from typing import NamedTuple

from ling3export.foundation.errors import PlanError

Range = tuple[int, int]  # first and last plus one


class Rank(NamedTuple):
    """The place of one rank among all that transfer state to each other.

    Attributes:
        role: ``P`` or ``D``.
        rank: Its number in its instance.
        kv_rank: Number of its instance, decode instances after prefill instances.
        group_rank: Its number in its group.
        world: Members of its group: one of each prefill instance, ``DTP / PTP`` of each decode instance.
        global_rank: Its number among all.
        port: What is added to the base port.
        group: The prefill rank whose group it is in.
        heads: Those of the recurrent and conv state that it has. A rank of P sends to a rank of D the heads that both
            have, and the latents, of which there is one head, to the ranks of its group.
    """

    role: str
    rank: int
    kv_rank: int
    group_rank: int
    world: int
    global_rank: int
    port: int
    group: int
    heads: Range


def rank_plan(ps: int, ds: int, ptp: int, dtp: int, heads: int = 16) -> list[Rank]:
    """Every rank of ``ps`` prefill instances of ``ptp`` ranks and ``ds`` decode instances of ``dtp``, in global order.

    Raises:
        PlanError: ``dtp`` is no multiple of ``ptp``, a number is below 1, or a TP does not divide the heads.
    """
    if min(ps, ds, ptp, dtp) < 1 or dtp % ptp or heads % dtp:
        raise PlanError(
            f"rank plan: expected instances and ranks from 1 on, D's TP a multiple of P's and a divisor of {heads} "
            f"heads, found {ps} x {ptp} and {ds} x {dtp}"
        )
    members = dtp // ptp
    world = ps + ds * members
    ranks = []
    for kv in range(ps + ds):
        prefills, tp = kv < ps, ptp if kv < ps else dtp
        for rank in range(tp):
            group = rank if prefills else rank // members
            in_group = kv if prefills else ps + (kv - ps) * members + rank % members
            before = kv * ptp if prefills else ps * ptp + (kv - ps) * dtp
            held = rank * heads // tp, (rank + 1) * heads // tp
            role = "P" if prefills else "D"
            ranks.append(Rank(role, rank, kv, in_group, world, before + rank, 2 * group + 1, group, held))
    return ranks
