"""A histogram of request lengths, what the runner pads on it at given paddings, and paddings that pad less.

A file of JSON lines: ``{"prompt_tokens": 317, "output_tokens": 50, "count": 3}``, ``count`` 1 if it is left out.

The runner fills prefill calls with chunks of 16 padded tokens, a sequence's chunks one after the other, and takes for
each call the padding at which a token of the waiting work costs least (``Shapes.cheapest_padding``: a call counts as
its padded tokens and CALL more). So the waste has two ends: every request *alone* (an idle server: each pays for its
own padding), and all of them *packed* (all waiting at once: calls are full, only last chunks are not).

The search for better paddings counts alike: a prompt of w chunks costs cost[w] = (p + CALL) + cost[w - p] with the p
that the runner takes for w: a table over w, for each set of paddings. All sets of a grid are tried; if the grid had to
be coarser than 16, the best is then moved in steps of 16, a padding at a time, while that helps.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np

from ling3export.artifacts.paddings import CALL, Shapes
from ling3export.artifacts.records import WrongRecordError, from_json, within
from ling3export.foundation.errors import PlanError
from ling3export.foundation.strict_json import parse_json
from ling3export.model.geometry import CHUNK

Record = TypeVar("Record")
Count = Annotated[int, within(1, 2**40)]  # sums stay far inside exact integers
SETS = 20_000  # the most sets of paddings that are tried: it takes seconds
SEARCHED = 8192  # the largest padding that is searched for


@dataclass(frozen=True)
class Length:
    """A line of the file: ``count`` requests whose prompts and answers have as many tokens."""

    prompt_tokens: Count
    output_tokens: Count
    count: Count = 1


def read_lengths(path: Path) -> list[Length]:
    """The histogram of a file; equal lengths are added up.

    Raises:
        PlanError: No file, no JSON, an unknown or missing field, or a number that is no positive integer; with the
            line.
    """
    counts: Counter[tuple[int, int]] = Counter()
    example = 'a line is {"prompt_tokens": 317, "output_tokens": 50, "count": 3}'
    for found in read_records(path, "--lengths", Length, example):
        counts[found.prompt_tokens, found.output_tokens] += found.count
    return [Length(*key, count) for key, count in sorted(counts.items())]


def read_records(path: Path, option: str, kind: type[Record], example: str) -> list[Record]:
    """The lines of a file, each the fields of ``kind``; ``option`` is what messages call it.

    Raises:
        PlanError: No file, no line, no JSON, or other fields; with the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlanError(f"{option} `{path.name}`: expected a readable file, found {reason}, in {path.parent}") from None
    found = []
    for number, line in enumerate(lines, 1):
        where = f"line {number} of {path.name}"
        try:
            if line.strip():
                found.append(from_json(kind, parse_json(line.encode())))
        except WrongRecordError as error:
            raise PlanError(f"{option}: {error}, in {where}", example) from None
        except ValueError as error:
            raise PlanError(f"{option}: expected JSON, found {error}, in {where}", example) from None
    if not found:
        raise PlanError(f"{option} `{path}`: expected at least one line, found none")
    return found


def split_by_context(lengths: Sequence[Length], context: int) -> tuple[list[Length], int]:
    """The lengths that a context holds, and the count of requests that it does not hold and the runner refuses."""
    fits = [length for length in lengths if length.prompt_tokens + length.output_tokens <= context]
    return fits, sum(length.count for length in lengths) - sum(length.count for length in fits)


def calls(work: int, paddings: Sequence[int]) -> list[tuple[int, int]]:
    """Prefill calls for ``work`` padded tokens, in the runner's order: a padding, and how often in a row.

    All but the last call are full.
    """
    shapes = Shapes(tuple(paddings), (), CHUNK)
    found = []
    while work > 0:
        padding = shapes.cheapest_padding(work)
        # The choice is the same for all work that no padding holds.
        count = max(1, (work - paddings[-1]) // padding)
        found.append((padding, count))
        work -= count * padding
    return found


def chunked(tokens: int) -> int:
    """Padded tokens that a prompt takes in whole chunks."""
    return -(-tokens // CHUNK) * CHUNK


@dataclass(frozen=True)
class Padded:
    """Calls of a phase, their padded tokens (in decode: rows), and how many of those hold none."""

    calls: int
    padded: int
    wasted: int


@dataclass(frozen=True)
class PrefillWaste:
    """What prefill pads."""

    tokens: int  # tokens of all prompts
    alone: Padded  # the sums when every request is prefilled by itself
    paddings: dict[int, Padded]  # the same by padding
    packed: Padded  # the sums when all requests wait at once


@dataclass(frozen=True)
class DecodeWaste:
    """What decode pads; a request's first token comes from its prefill."""

    rows: int  # rows that are decoded
    alone_padding: int  # the padding of one sequence at a time
    alone: Padded  # the sums when every request is decoded by itself
    running: int  # sequences that are decoded together in ``full``
    full_padding: int  # their padding
    full: Padded  # the sums when ``running`` sequences are decoded together all the time


def prefill_waste(lengths: Sequence[Length], paddings: Sequence[int]) -> PrefillWaste:
    """What prefill pads at these paddings."""
    tokens = sum(length.prompt_tokens * length.count for length in lengths)
    called: Counter[int] = Counter()
    used: Counter[int] = Counter()
    for length in lengths:
        left = length.prompt_tokens
        for padding, count in calls(chunked(left), paddings):
            called[padding] += length.count * count
            used[padding] += length.count * min(left, count * padding)
            left -= min(left, count * padding)
    by_padding = {padding: _sums([(padding, called[padding])], used[padding]) for padding in paddings}
    work = sum(chunked(length.prompt_tokens) * length.count for length in lengths)
    return PrefillWaste(tokens, _sums([*called.items()], tokens), by_padding, _sums(calls(work, paddings), tokens))


def _sums(found: Sequence[tuple[int, int]], used: int) -> Padded:
    padded = sum(padding * count for padding, count in found)
    return Padded(sum(count for _, count in found), padded, padded - used)


def decode_waste(lengths: Sequence[Length], paddings: Sequence[int], running: int) -> DecodeWaste:
    """What decode pads at these paddings: one sequence at a time, and ``running`` all the time."""
    rows = sum((length.output_tokens - 1) * length.count for length in lengths)
    together = min(running, paddings[-1])  # more take turns, in full calls
    padding = next(padding for padding in paddings if padding >= together)
    steps, padded = -(-rows // together), -(-rows * padding // together)
    alone = _sums([(paddings[0], rows)], rows)
    return DecodeWaste(rows, paddings[0], alone, together, padding, Padded(steps, padded, padded - rows))


class Histogram:
    """How many prompts have how many chunks.

    Args:
        lengths: The requests.
        largest: No padding is larger: the tables need go no further.
    """

    def __init__(self, lengths: Sequence[Length], largest: int) -> None:
        self.chunks = np.array([chunked(length.prompt_tokens) // CHUNK for length in lengths])
        self.counts = np.array([length.count for length in lengths], float)
        self._work = np.arange(1, largest // CHUNK + 1) * CHUNK

    def cost(self, paddings: tuple[int, ...]) -> float:
        """What all prompts cost, each by itself, in padded tokens."""
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
        Ascending multiples of 16; of equal choices the fewest and smallest. None beyond SEARCHED: no search.
    """
    if largest > SEARCHED:
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
