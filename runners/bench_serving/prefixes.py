"""Prefixes that the texts of a data set share, and the tokens that a prefix cache would win.

Think of a radix tree that counts at each node how many texts pass it. Nodes with fewer than N texts are cut off; the
remaining leaves are the longest prefixes that N texts share. No tree is built: in sorted order the texts of a node are
neighbours, and N of them share what the first and the last share. Texts are strings or tuples of token ids.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.lib.stride_tricks import sliding_window_view

from ling3export.foundation.errors import RequestError

QUESTIONS = ("prompt", "question", "instruction", "text")  # the fields of plain records, in this order
DIALOGS = ("conversations", "conversation", "messages")  # the fields of dialogs, in this order
USERS = ("human", "user")
Text = str | tuple[int, ...]


@dataclass(frozen=True)
class Repetition:
    """The shared prefixes of a number of texts, each with the number of texts that have it; the most frequent first."""

    texts: int
    prefixes: list[tuple[Text, int]]

    @property
    def ratio(self) -> float:
        """Prefixes for each text."""
        return len(self.prefixes) / self.texts

    @property
    def coverage(self) -> float:
        """Share of the texts that have one of the prefixes."""
        return sum(count for _, count in self.prefixes) / self.texts

    @property
    def mean_length(self) -> float:
        """Mean length of the prefixes; 0 without one."""
        return sum(len(prefix) for prefix, _ in self.prefixes) / max(len(self.prefixes), 1)


def repetition(texts: Sequence[Text], least: int = 2, longer: int = 120) -> Repetition:
    """The longest prefixes that at least ``least`` texts share, if they are longer than ``longer`` units.

    Raises:
        RequestError: There is no text.
    """
    if not texts:
        raise RequestError("prefixes: the data set has no text")
    ordered = sorted(texts)
    common = [shared(before, after) for before, after in itertools.pairwise(ordered)]
    heights = [len(text) for text in ordered]
    if least > 1:  # the prefix that each window of `least` texts shares
        heights = sliding_window_view(common, least - 1).min(1).tolist() if least <= len(texts) else []
    prefixes = []
    first = 0
    while first < len(heights):
        height, last = heights[first], first
        # Windows of one height whose first texts share it are one node.
        while last + 1 < len(heights) and heights[last + 1] == height and common[last] >= height:
            last += 1
        end = last + least  # after the last text of the node, unless a window next to it is of a child
        inner = (first > 0 and common[first - 1] >= height) or (end < len(ordered) and common[end - 1] >= height)
        if height > longer and not inner:
            prefixes.append((ordered[first][:height], end - first))
        first = last + 1
    return Repetition(len(texts), sorted(prefixes, key=lambda pair: (-pair[1], pair[0])))


def shared(one: Text, other: Text) -> int:
    """Length of the longest common prefix, by bisection."""
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
    """Tokens that a cache of whole blocks would win if it never evicts and gets the prompts in order, and all tokens.

    A block hits if an earlier prompt has the same tokens up to its end. A prompt's last token is always computed.
    """
    known: dict[tuple[int, tuple[int, ...]], int] = {}  # (number of the blocks before it, its tokens) → its number
    hits = total = 0
    for prompt in prompts:
        total += len(prompt)
        chain, hit = 0, True
        for start in range(0, len(prompt) - block + 1, block):
            key = (chain, prompt[start : start + block])
            hit = hit and key in known and start + block < len(prompt)
            hits += block * hit
            chain = known.setdefault(key, len(known) + 1)
    return hits, total


def text_of(record: dict[str, Any], field: str | None, where: str) -> str:
    """The text of a record that counts: a field, or the first user turn. Raises RequestError: it has none of these."""
    turns: list[Any] = next((record[name] for name in DIALOGS if isinstance(record.get(name), list)), [])
    users = [turn for turn in turns if isinstance(turn, dict) and turn.get("from", turn.get("role")) in USERS]
    value = record.get(field) if field else next((record[name] for name in QUESTIONS if name in record), None)
    if field is None and users:
        value = users[0].get("value", users[0].get("content"))
    if not isinstance(value, str):
        wanted = f"a text in `{field}`" if field else f"a user's turn of text, or one of {', '.join(QUESTIONS)}"
        raise RequestError(f"{where}: expected {wanted}, found {type(value).__name__}")
    return value
