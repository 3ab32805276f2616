"""The paddings that cost least on a histogram of lengths, under the runner's own choice of a padding for each call.

A call costs its slots and CALL more, as the runner counts. The runner takes the padding at which a token of the waiting
work costs least, so a prompt of w chunks costs cost[w] = (p + CALL) + cost[w - p] with the p chosen for w: a table over
w, for each set of paddings. All sets of a grid are tried; if the grid had to be coarser than 16, the best is then moved
in steps of 16, a padding at a time, while that helps.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ling3export.model.geometry import CHUNK
from ling3export.plan.lengths import Length, chunked
from ling3export.runners.engine.inputs import CALL

SETS = 20_000  # tried at most: seconds
LARGEST = 8192  # slots; beyond, no search


class Histogram:
    """How many prompts have how many chunks.

    Args:
        lengths: The requests.
        largest: No padding is larger: the tables need go no further.
    """

    def __init__(self, lengths: Sequence[Length], largest: int) -> None:
        self.chunks = np.array([chunked(length.prompt) // CHUNK for length in lengths])
        self.counts = np.array([length.count for length in lengths], float)
        self._work = np.arange(1, largest // CHUNK + 1) * CHUNK

    def cost(self, paddings: tuple[int, ...]) -> float:
        """Of all prompts, each by itself, in token slots."""
        size = paddings[-1] // CHUNK
        sizes = np.array(paddings[::-1])  # of equal paddings the runner takes the largest
        each = (sizes + CALL) / np.minimum(self._work[:size, None], sizes)
        steps = sizes[np.argmin(each, axis=1)] // CHUNK
        table = [0.0]
        for w, step in enumerate(steps.tolist(), 1):
            table.append(step * CHUNK + CALL + table[max(0, w - step)])
        best = int(steps[-1])  # taken again and again while no padding holds the work
        whole = np.maximum(0, -(-(self.chunks - size) // best))
        costs = whole * (best * CHUNK + CALL) + np.array(table)[np.maximum(0, self.chunks - whole * best)]
        return float(np.sum(self.counts * costs))


def grid(count: int, largest: int) -> int:
    """The multiple that all sets of ``count`` paddings are tried in; 16 where they are few enough."""
    return next(step for step in range(CHUNK, largest + CHUNK, CHUNK) if math.comb(-(-largest // step), count) <= SETS)


def best_paddings(lengths: Sequence[Length], count: int, largest: int) -> tuple[int, ...] | None:
    """At most ``count`` paddings that cost least.

    Args:
        lengths: The histogram.
        count: How many paddings there may be.
        largest: The largest that may be: it bounds a call's time and temporaries.

    Returns:
        Ascending multiples of 16; of equal choices the fewest and smallest. None beyond LARGEST: no search.
    """
    if largest > LARGEST:
        return None
    histogram = Histogram(lengths, largest)
    step = grid(count, largest)
    points = [min(at, largest) for at in range(step, largest + step, step)]
    sets = (each for size in range(1, min(count, len(points)) + 1) for each in itertools.combinations(points, size))
    best = min(sets, key=histogram.cost)
    while (moved := _moved(histogram, best, largest)) != best:
        best = moved
    return best


def _moved(histogram: Histogram, paddings: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """The cheapest of the sets that differ in one padding."""
    bounds = (0, *paddings, largest + CHUNK)
    sets = [paddings]
    for index in range(len(paddings)):
        between = range(bounds[index] + CHUNK, bounds[index + 2], CHUNK)
        sets += [(*paddings[:index], value, *paddings[index + 1 :]) for value in between]
    return min(sets, key=histogram.cost)
