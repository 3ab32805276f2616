"""The paddings that waste least on a histogram of lengths: an exact search over a grid.

For a largest padding M, a prompt of w slots takes whole calls of M and one that holds the rest r in 1 … M. So only the
histogram of r counts, and the other paddings cut 1 … M into ranges: the range (a, b] costs b a prompt in it. The best
cut into k ranges is a dynamic programme, best[k][b] = min over a of best[k - 1][a] + b (H[b] - H[a]), H being the
cumulated histogram. Every M of the grid is tried that takes no more calls than the largest padding of now: with more
calls the padded slots could always be fewer, and the time more.
"""

from collections.abc import Sequence

import numpy as np

from ling3export.lengths import Length, chunked
from ling3export.model.geometry import CHUNK

POINTS = 512  # of the grid: the search takes seconds at most


def grid(lengths: Sequence[Length], largest: int) -> int:
    """The multiple that paddings are searched in: 16 up to 8192 slots, coarser beyond."""
    longest = max(chunked(length.prompt) for length in lengths)
    return CHUNK * -(-min(largest, longest) // (CHUNK * POINTS))


def best_paddings(lengths: Sequence[Length], count: int, largest: int) -> tuple[int, ...]:
    """At most ``count`` paddings with the fewest padded slots, each request by itself, in no more calls than now.

    Args:
        lengths: The histogram.
        count: How many paddings there may be.
        largest: The largest of now, and the largest that may be: it bounds a call's time and temporaries.

    Returns:
        Ascending multiples of ``grid(lengths, largest)``, or ``largest`` itself; of equal choices the smallest largest.
    """
    step = grid(lengths, largest)
    slots = np.array([chunked(length.prompt) for length in lengths])
    counts = np.array([length.count for length in lengths], float)
    values = np.minimum(np.arange(-(-min(largest, int(slots.max())) // step) + 1) * step, largest)
    allowed = float(np.sum(counts * -(-slots // largest)))
    chosen: tuple[float, tuple[int, ...]] | None = None
    for top in range(1, len(values)):
        calls = -(-slots // values[top])
        if float(np.sum(counts * calls)) > allowed:
            continue
        whole = (calls - 1) * values[top]
        rests = np.bincount(-(-(slots - whole) // step), counts, top + 1)
        cost, cuts = _cut(rests, values[: top + 1], count)
        cost += float(np.sum(counts * whole))
        if chosen is None or cost < chosen[0]:
            chosen = (cost, cuts)
    assert chosen is not None  # the last of the values takes as many calls as `largest`
    return tuple(int(values[cut]) for cut in chosen[1])


def _cut(rests: np.ndarray, values: np.ndarray, count: int) -> tuple[float, tuple[int, ...]]:
    """The cheapest at most ``count`` ends of ranges, the last of them the end of ``rests``; with their cost."""
    top = len(rests) - 1
    held = np.cumsum(rests)
    ends = np.arange(top + 1)
    # each[a, b]: what the prompts in (a, b] cost at padding b.
    each = np.where(ends[:, None] < ends, values * (held - held[:, None]), np.inf)
    best = np.full(top + 1, np.inf)
    best[0] = 0.0
    befores = []
    costs = []
    for _ in range(min(count, top)):
        through = best[:, None] + each
        before = np.argmin(through, axis=0)
        best = through[before, ends]
        befores.append(before)
        costs.append(best[top])
    used = int(np.argmin(costs)) + 1
    cuts = [top]
    for before in reversed(befores[1:used]):
        cuts.append(int(before[cuts[-1]]))
    return float(costs[used - 1]), tuple(reversed(cuts))
