"""The calls that programs take: which paddings there are, which one pays, and the fields of the step contract."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ling3export.artifacts.schema import Target

Fields = dict[str, np.ndarray]
# What a prefill call costs beside its padded tokens, counted in them, where the compiler gives no estimate of its time.
# Measured on cpu: docs/log.md, 2026-11-21, "what a prefill call costs".
CALL = 32
# How much more a token may cost in a call that sequences wait for, so that they wait for a shorter one.
PATIENCE = 1.25


@dataclass(frozen=True)
class Shapes:
    """The paddings and dimensions of an artifact's programs.

    Attributes:
        prefill: Paddings of prefill programs in tokens, ascending.
        decode: Paddings of decode programs in sequences, ascending.
        chunk: Padded tokens a chunk.
        max_pages: Columns of a page table.
        costs: What a call at each prefill padding costs, in any unit; empty means padding + CALL.
        score: Paddings of score programs in tokens, ascending; empty where there are none.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    chunk: int
    max_pages: int
    costs: tuple[float, ...] = ()
    score: tuple[int, ...] = ()

    @classmethod
    def of(cls, target: Target) -> "Shapes":
        """The shapes of a manifest's target; costs are the compiler's estimates if every prefill program has one."""
        prefill, decode, score = (target.paddings(phase) for phase in ("prefill", "decode", "score"))
        estimates = [target.cells[f"prefill@{padding}"].estimated_seconds for padding in prefill]
        costs = tuple(seconds for seconds in estimates if seconds)
        if len(costs) < len(prefill):
            costs = ()
        return cls(prefill, decode, target.state.chunk, target.state.max_pages, costs, score)

    def paying(self, work: int, *, beside_decode: bool = False) -> int:
        """The prefill padding at which a token costs least; among equals the largest.

        Args:
            work: How many padded tokens are to be prefilled.
            beside_decode: Sequences wait for the call. Then no padding is taken beyond the first at which a token of a
                full call costs at most PATIENCE times what it costs at best: the call is shorter, and little is lost.
        """
        costs = dict(zip(self.prefill, self.costs or [padding + CALL for padding in self.prefill], strict=True))
        most = self.prefill[-1]
        if beside_decode:
            each = {padding: cost / padding for padding, cost in costs.items()}
            most = next(padding for padding in self.prefill if each[padding] <= PATIENCE * min(each.values()))
        return min(
            (padding for padding in self.prefill if padding <= most),
            key=lambda padding: (costs[padding] / min(work, padding), -padding),
        )

    def scoring(self, work: int) -> int:
        """The score padding at which one of ``work`` padded tokens costs least; among equals the largest."""
        return min(self.score, key=lambda padding: ((padding + CALL) / min(work, padding), -padding))


class Span(NamedTuple):
    """Consecutive tokens of one sequence that a prefill or score call stores.

    Attributes:
        slot: The sequence's state slot.
        start: Position of the first token.
        tokens: Ids.
        pages: The sequence's pages in the order of its positions, those of this span's tokens included.
        next_tokens: In a score call, the token to be scored behind each of ``tokens``, or -1 for none.
    """

    slot: int
    start: int
    tokens: Many[int]
    pages: Many[int]
    next_tokens: Many[int] = ()


class DecodeRow(NamedTuple):
    """A sequence's row of a decode call.

    Attributes:
        slot: The sequence's state slot.
        position: Where the token is stored.
        pages: The sequence's pages in the order of its positions.
        token: The token's id; -1 is the one that ``sample`` left in the slot, which the host need not know.
    """

    slot: int
    position: int
    pages: Many[int]
    token: int = -1


class SampleRow(NamedTuple):
    """A sequence's row of a sample call; the defaults take the best token.

    Attributes:
        slot: The sequence's state slot, where the token is left for the next decode.
        position: The token's position: its randomness comes from this and the seed alone.
        temperature, top_k, top_p, seed: The fields of ``request.Sampling``.
    """

    slot: int
    position: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def prefill_fields(padding: int, spans: Iterable[Span], chunk: int, max_pages: int, *, score: bool = False) -> Fields:
    """The fields of a prefill call, or of a score call, of ``padding`` padded tokens.

    The spans lie one behind the other, each from a chunk of its own on; chunks behind the last are padding.

    Args:
        padding: Padded tokens of the call.
        spans: At most one a sequence, with ``padding // chunk`` chunks together at most.
        chunk: Padded tokens a chunk.
        max_pages: Columns of the page table.
        score: Also give ``next_token``.
    """
    count, row = padding // chunk, 0
    fields = {name: np.zeros(count, np.int32) for name in ("chunk_slot", "chunk_start", "chunk_len", "fresh")}
    fields["tokens"] = np.zeros(padding, np.int32)
    fields["page_table"] = np.zeros((count, max_pages), np.int32)
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
        fields["page_table"][rows, : len(span.pages)] = span.pages
        if score:
            fields["next_token"][at : at + length] = span.next_tokens
        row = rows.stop
    return fields


def decode_fields(padding: int, rows: Mapping[int, DecodeRow], max_pages: int) -> Fields:
    """The fields of a decode call of ``padding`` rows; those without a sequence are padding."""
    whole = [DecodeRow(0, 0, (), 0)] * padding
    table = np.zeros((padding, max_pages), np.int32)
    for row, each in rows.items():
        whole[row] = each
        table[row, : len(each.pages)] = each.pages
    slot, position, _, token = zip(*whole, strict=True)
    columns = {"slot": slot, "position": position, "token": token}
    return {name: np.array(column, np.int32) for name, column in columns.items()} | {"page_table": table}


def sample_fields(count: int, rows: Mapping[int, SampleRow]) -> Fields:
    """The fields of a sample call of ``count`` rows; those without a sequence are padding."""
    whole = [SampleRow(0, 0)] * count
    for row, each in rows.items():
        whole[row] = each
    kinds = {"temperature": np.float32, "top_p": np.float32, "seed": np.uint32}
    columns = zip(SampleRow._fields, zip(*whole, strict=True), strict=True)
    fields = {name: np.array(column, kinds.get(name, np.int32)) for name, column in columns}
    return fields | {"seed": fields["seed"].view(np.int32)}


def fitting(work: int, paddings: tuple[int, ...]) -> int:
    """The smallest padding that holds ``work``, else the largest."""
    return next((padding for padding in paddings if padding >= work), paddings[-1])
