"""How often texts begin alike: the leaves of the radix tree whose nodes at least N texts pass, and what a cache wins.

A radix tree counts at each node how many texts pass it or end there. Nodes with fewer than N are cut off. The nodes
without a child that are left are the longest beginnings that N texts share; those longer than L are selected. No tree
is built: in sorted order the texts of a node are neighbours, so that N texts share what the first and the last of
them share. Texts are strings (their unit is the code point) or tuples of token ids.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.lib.stride_tricks import sliding_window_view

from ling3export.foundation.errors import RequestError
from ling3export.runners.bench_serving.workloads import turns_of

QUESTIONS = ("prompt", "question", "instruction", "text")  # the fields of plain records, in this order
USERS = ("human", "user")
Text = str | tuple[int, ...]


@dataclass(frozen=True)
class Repetition:
    """How often the texts of a data set begin alike.

    Attributes:
        texts: How many there are.
        prefixes: The selected beginnings, each with the number of texts that have it; the most frequent first.
    """

    texts: int
    prefixes: list[tuple[Text, int]]

    @property
    def ratio(self) -> float:
        """Selected beginnings for each text."""
        return len(self.prefixes) / self.texts

    @property
    def coverage(self) -> float:
        """Share of the texts that have one of them."""
        return sum(count for _, count in self.prefixes) / self.texts

    @property
    def mean_length(self) -> float:
        """Their mean length; 0 where none is selected."""
        return sum(len(prefix) for prefix, _ in self.prefixes) / max(len(self.prefixes), 1)


def repetition(texts: Sequence[Text], least: int = 2, longer: int = 120) -> Repetition:
    """The longest beginnings that at least ``least`` texts share, if they are longer than ``longer`` units.

    Raises:
        RequestError: There is no text, or a bound is none.
    """
    if not texts:
        raise RequestError("prefixes: expected at least one text, found none")
    if least < 1 or longer < 0:
        raise RequestError(f"prefixes: expected a count from 1 and a length from 0, found {least} and {longer}")
    ordered = sorted(texts)
    common = [shared(before, after) for before, after in itertools.pairwise(ordered)]
    heights = [len(text) for text in ordered]
    if least > 1:  # what each window of so many texts shares
        heights = sliding_window_view(common, least - 1).min(1).tolist() if least <= len(texts) else []
    found = []
    first = 0
    while first < len(heights):
        height, last = heights[first], first
        # Windows of one height whose first texts share it are one node.
        while last + 1 < len(heights) and heights[last + 1] == height and common[last] >= height:
            last += 1
        end = last + least  # behind the last text of the node, unless a window beside it is of a child
        inner = (first > 0 and common[first - 1] >= height) or (end < len(ordered) and common[end - 1] >= height)
        if height > longer and not inner:
            found.append((ordered[first][:height], end - first))
        first = last + 1
    return Repetition(len(texts), sorted(found, key=lambda pair: (-pair[1], pair[0])))


def shared(one: Text, other: Text) -> int:
    """Units that two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` are the same, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def cached_blocks(prompts: Sequence[tuple[int, ...]], block: int) -> tuple[int, int]:
    """What a cache of whole blocks that never forgets would win, if it got the prompts one after the other.

    A block is found if an earlier prompt has the same tokens up to its end; a prompt's last token is always computed.

    Args:
        prompts: Token ids.
        block: Tokens a block.

    Returns:
        Tokens that are found, and all tokens.
    """
    known: dict[tuple[int, tuple[int, ...]], int] = {}  # (number of the blocks before it, its tokens) → its number
    found = total = 0
    for prompt in prompts:
        total += len(prompt)
        chain, hit = 0, True
        for start in range(0, len(prompt) - block + 1, block):
            key = (chain, prompt[start : start + block])
            hit = hit and key in known and start + block < len(prompt)
            found += block * hit
            chain = known.setdefault(key, len(known) + 1)
    return found, total


def text_of(record: dict[str, Any], field: str | None, whole: bool, where: str) -> str:
    """What counts of a record: a field, the first user turn, or all turns.

    Raises:
        RequestError: It has none of these.
    """
    turns = turns_of(record)
    if field is None and turns:
        texts = [text for who, text in turns if whole or who in USERS]
        return "\n".join(texts if whole else texts[:1])
    value = record.get(field) if field else next((record[name] for name in QUESTIONS if name in record), None)
    if not isinstance(value, str):
        wanted = f"a text in `{field}`" if field else f"turns of text, or one of {', '.join(QUESTIONS)}"
        raise RequestError(f"{where}: expected {wanted}, found {'none' if value is None else type(value).__name__}")
    return value
