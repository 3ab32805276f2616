"""Who sends what to whom, where prefill and decode run with parallelism of their own (P and D for short).

Each of PS prefill instances has PTP ranks, each of DS decode instances DTP. Head ranges of the recurrent state are cut
anew between any two sizes that divide the heads. Latents have one head: every rank holds all pages of them, or pages
are striped over the ranks.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ling3export.foundation.errors import PlanError

Range = tuple[int, int]  # first and last plus one


class Rank(NamedTuple):
    """The place of one rank among all that transfer state to each other.

    Attributes:
        role: ``P`` or ``D``.
        rank: Its number in its instance.
        kv_rank: Number of its instance, decode instances behind prefill instances.
        group_rank: Its number in its group.
        world: Members of its group: one of each prefill instance, ``DTP / PTP`` of each decode instance.
        global_rank: Its number among all.
        port: What is added to the base port.
        group: The prefill rank whose group it is in.
    """

    role: str
    rank: int
    kv_rank: int
    group_rank: int
    world: int
    global_rank: int
    port: int
    group: int


class HeadCopy(NamedTuple):
    """Heads that prefill rank ``p`` sends to decode rank ``d``: ranges within the two ranks' own heads."""

    p: int
    d: int
    source: Range
    target: Range

    def apply(self, source: np.ndarray, target: np.ndarray, axis: int) -> int:
        """Copies from p's array to d's, whose axis ``axis`` are their heads; the bytes."""
        part = _along(source, self.source, axis)
        _along(target, self.target, axis)[...] = part
        return part.nbytes


class PageCopy(NamedTuple):
    """A block of latents that prefill rank ``p`` sends to decode rank ``d``.

    Attributes:
        p: The sender.
        d: The receiver.
        block: Which block of the sequence.
        source: The page in p's pool.
        target: The page in d's pool.
    """

    p: int
    d: int
    block: int
    source: int
    target: int


class Pages(NamedTuple):
    """Where an instance has a sequence's blocks.

    Attributes:
        numbers: The page of each block, from 1 on, as the block manager counts.
        tp: The instance's ranks.
        striped: Whether page n lies on rank (n - 1) mod tp alone; otherwise every rank has all pages.
    """

    numbers: Sequence[int]
    tp: int
    striped: bool

    def local(self, number: int, rank: int) -> int | None:
        """The place of a page in a rank's pool, None where the rank does not have it."""
        if not self.striped:
            return number
        return (number - 1) // self.tp + 1 if (number - 1) % self.tp == rank else None


def port_of(rank: int) -> int:
    """What a prefill rank adds to the base port, where it can be pulled from."""
    return 2 * rank + 1


def rank_plan(ps: int, ds: int, ptp: int, dtp: int) -> list[Rank]:
    """Every rank of ``ps`` prefill instances of ``ptp`` ranks and ``ds`` decode instances of ``dtp``, in global order.

    Raises:
        PlanError: ``dtp`` is no multiple of ``ptp``, or a number is below 1.
    """
    if min(ps, ds, ptp, dtp) < 1 or dtp % ptp:
        raise PlanError(
            f"rank plan: expected instances and ranks from 1 on, D's TP a multiple of P's, found {ps} x {ptp} and "
            f"{ds} x {dtp}"
        )
    each = dtp // ptp
    world = ps + ds * each
    ranks = [
        Rank("P", rank, kv, kv, world, kv * ptp + rank, port_of(rank), rank) for kv in range(ps) for rank in range(ptp)
    ]
    for kv in range(ps, ps + ds):
        for rank in range(dtp):
            group = rank // each
            number = ps * ptp + (kv - ps) * dtp + rank
            ranks.append(Rank("D", rank, kv, ps + (kv - ps) * each + rank % each, world, number, port_of(group), group))
    return ranks


def heads_of(rank: int, heads: int, tp: int) -> Range:
    """The heads that a rank of ``tp`` has.

    Raises:
        PlanError: ``tp`` does not divide ``heads``.
    """
    if tp < 1 or heads % tp:
        raise PlanError(f"copy plan: expected a TP that divides {heads} heads, found {tp}")
    return rank * heads // tp, (rank + 1) * heads // tp


def head_plan(heads: int, ptp: int, dtp: int) -> list[HeadCopy]:
    """What every prefill rank sends to every decode rank, by sender.

    Raises:
        PlanError: A TP does not divide the heads.
    """
    heads_of(0, heads, ptp)  # refuses, also where there is no rank to ask
    plan = []
    for p in range(ptp):
        mine = heads_of(p, heads, ptp)
        for d in range(dtp):
            its = heads_of(d, heads, dtp)
            low, high = max(mine[0], its[0]), min(mine[1], its[1])
            if low < high:
                plan.append(HeadCopy(p, d, (low - mine[0], high - mine[0]), (low - its[0], high - its[0])))
    return plan


def latent_source(d: int, ptp: int, dtp: int) -> int:
    """The prefill rank that a decode rank gets latents from, where every prefill rank has all of them."""
    return d * ptp // dtp


def page_plan(source: Pages, target: Pages) -> list[PageCopy]:
    """Which rank sends which page to whom, by block and receiver: to each receiver those pages that it holds.

    Raises:
        PlanError: Both sides do not have as many blocks.
    """
    if len(source.numbers) != len(target.numbers):
        raise PlanError(
            f"copy plan: expected as many pages on both sides, found {len(source.numbers)} and {len(target.numbers)}"
        )
    plan = []
    for block, (given, taken) in enumerate(zip(source.numbers, target.numbers, strict=True)):
        for d in range(target.tp):
            place = target.local(taken, d)
            if place is not None:
                p = (given - 1) % source.tp if source.striped else latent_source(d, source.tp, target.tp)
                held = source.local(given, p)
                assert held is not None
                plan.append(PageCopy(p, d, block, held, place))
    return plan


def carry_heads(
    plan: Iterable[HeadCopy], sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], axis: int
) -> int:
    """Carries every prefill rank's array into those of the decode ranks; the bytes."""
    return sum(copy.apply(sources[copy.p], targets[copy.d], axis) for copy in plan)


def _along(array: np.ndarray, part: Range, axis: int) -> np.ndarray:
    return array[(slice(None),) * axis + (slice(*part),)]
