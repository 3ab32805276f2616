"""Inputs of programs: the fields of the step contract."""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

Fields = dict[str, np.ndarray]


class Span(NamedTuple):
    """Consecutive tokens of one sequence that a prefill or score call stores.

    Attributes:
        next_tokens: In a score call, the token to be scored after each of ``tokens``, or -1 for none.
    """

    slot: int
    start: int
    tokens: Many[int]
    next_tokens: Many[int] = ()


# How tokens are sampled, as sample calls take it: the fields of ``request.Sampling``.
_FLOAT, _WHOLE = np.float32, np.int32
SAMPLING = np.dtype(
    [("temperature", _FLOAT), ("top_k", _WHOLE), ("top_p", _FLOAT), ("min_p", _FLOAT), ("seed", np.uint32)]
)
GREEDY = np.array((0, 0, 1, 0, 0), SAMPLING)


def prefill_fields(
    padding: int, spans: Iterable[Span], chunk: int, pages: np.ndarray, *, score: bool = False
) -> Fields:
    """The fields of a prefill call, or of a score call, of ``padding`` padded tokens.

    Each span begins at a chunk of its own, after the last chunk of the span before it. The other chunks are padding.

    Args:
        spans: At most one a sequence, with ``padding // chunk`` chunks together at most.
        pages: int32 ``[slots + 1, max_pages]``: the page table of every state slot (``BlockManager.page_table``).
        score: Also give ``next_token``.
    """
    count, row = padding // chunk, 0
    fields = {name: np.zeros(count, np.int32) for name in ("chunk_slot", "chunk_start", "chunk_len", "fresh")}
    fields["tokens"] = np.zeros(padding, np.int32)
    if score:
        fields["next_token"] = np.full(padding, -1, np.int32)
    for span in spans:
        length, at = len(span.tokens), row * chunk
        rows = slice(row, row + -(-length // chunk))
        offsets = np.arange(0, length, chunk)
        fields["tokens"][at : at + length] = span.tokens
        fields["chunk_slot"][rows] = span.slot
        fields["chunk_start"][rows] = span.start + offsets
        fields["chunk_len"][rows] = np.minimum(chunk, length - offsets)
        fields["fresh"][row] = span.start == 0
        if score:
            fields["next_token"][at : at + length] = span.next_tokens
        row = rows.stop
    return fields | {"page_table": pages[fields["chunk_slot"]]}


def decode_fields(
    padding: int, slots: Many[int], positions: Many[int], pages: np.ndarray, tokens: Many[int] | None = None
) -> Fields:
    """The fields of a decode call of ``padding`` rows; rows after the given ones are padding.

    Args:
        slots: The state slot of each row; 0 makes a row padding, with position and token 0.
        positions: Where each row's token is stored.
        pages: The page table of every state slot, as in ``prefill_fields``.
        tokens: Each row's token; by default the one that ``sample`` left in the slot, which the host need not know.
    """
    fields = {name: np.zeros(padding, np.int32) for name in ("slot", "position", "token")}
    rows = slice(len(slots))
    fields["slot"][rows] = slots
    fields["position"][rows] = positions
    fields["token"][rows] = -1 if tokens is None else tokens
    return fields | {"page_table": pages[fields["slot"]]}


def sample_fields(
    count: int, rows: Many[int] | slice, slots: Many[int], positions: Many[int], sampling: np.ndarray | None = None
) -> Fields:
    """The fields of a sample call of ``count`` rows; those that are not among ``rows`` are padding.

    Args:
        slots: The state slot of each, where its token is left for the next decode.
        positions: Each token's position: its randomness comes from this and the seed alone.
        sampling: SAMPLING ``[slots + 1]``: how the tokens of each state slot are sampled; None takes the best ones.
    """
    slot, position = np.zeros((2, count), np.int32)
    slot[rows], position[rows] = slots, positions
    rows_sampling = np.full(count, GREEDY) if sampling is None else sampling[slot]
    settings = {name: rows_sampling[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    return {"slot": slot, "position": position, **settings, "seed": rows_sampling["seed"].view(np.int32)}


def fitting(work: int, paddings: tuple[int, ...]) -> int:
    """The smallest padding that holds ``work``, else the largest."""
    return next((padding for padding in paddings if padding >= work), paddings[-1])
