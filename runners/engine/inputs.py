"""The calls that programs take: which paddings there are, which one pays, and the fields of the step contract."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ling3export.runners.engine.block_manager import Lease
    from ling3export.runners.engine.sequence import Sequence

Fields = dict[str, np.ndarray]
# What a prefill call costs beside its token slots, in token slots, where the compiler gives no estimate of its time.
# Measured on cpu: docs/log.md, 2026-11-21, "what a prefill call costs".
CALL = 32
# How much more a token's slot may cost in a call that sequences wait for, so that they wait for a shorter one.
PATIENCE = 1.25


@dataclass(frozen=True)
class Shapes:
    """What the artifact's programs take.

    Attributes:
        prefill: Paddings in token slots, ascending.
        decode: Paddings in sequences, ascending.
        chunk: Token slots a chunk.
        max_pages: Columns of a page table.
        costs: Of a call at each prefill padding, in any unit; empty for padding + CALL.
        score: Paddings of score programs in token slots, ascending; empty where there are none.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    chunk: int
    max_pages: int
    costs: tuple[float, ...] = ()
    score: tuple[int, ...] = ()

    @classmethod
    def of(cls, target: Mapping[str, Any]) -> "Shapes":
        """Those of a manifest's target; costs are the compiler's estimates where every prefill has one."""
        paddings: dict[str, dict[int, float | None]] = {"prefill": {}, "decode": {}, "score": {}}
        for cell in target["cells"].values():
            paddings.setdefault(cell["phase"], {})[cell["padding"]] = cell.get("estimated_seconds")
        prefill, decode, score = (tuple(sorted(paddings[phase])) for phase in ("prefill", "decode", "score"))
        costs = tuple(seconds for padding in prefill if (seconds := paddings["prefill"][padding]))
        if len(costs) < len(prefill):
            costs = ()
        return cls(prefill, decode, target["state"]["chunk"], target["state"]["max_pages"], costs, score)

    def paying(self, work: int, *, beside_decode: bool = False) -> int:
        """The prefill padding at which a token of ``work`` token slots costs least; of equals the largest.

        Args:
            work: Token slots that are to be prefilled.
            beside_decode: Sequences wait for the call. Then paddings are left out beyond the first of whose full calls
                a slot costs at most PATIENCE times what it costs at best: a shorter call, and little is lost.
        """
        costs = dict(zip(self.prefill, self.costs or [padding + CALL for padding in self.prefill], strict=True))
        most = self.prefill[-1]
        if beside_decode:
            slot = {padding: cost / padding for padding, cost in costs.items()}
            most = next(padding for padding in self.prefill if slot[padding] <= PATIENCE * min(slot.values()))
        return min(
            (padding for padding in self.prefill if padding <= most),
            key=lambda padding: (costs[padding] / min(work, padding), -padding),
        )

    def scoring(self, work: int) -> int:
        """The score padding at which a token of ``work`` token slots costs least; of equals the largest."""
        return min(self.score, key=lambda padding: ((padding + CALL) / min(work, padding), -padding))


class PrefillFields:
    """The fields of one prefill call, filled chunk by chunk.

    Args:
        padding: Token slots.
        shapes: Of the programs.

    Attributes:
        fields: Of the step contract.
        free: Chunks that are left.
    """

    def __init__(self, padding: int, shapes: Shapes) -> None:
        self._chunk = shapes.chunk
        self._count = self.free = padding // shapes.chunk
        names = ("chunk_slot", "chunk_start", "chunk_len", "fresh")
        self.fields: Fields = {name: np.zeros(self._count, np.int32) for name in names}
        self.fields["tokens"] = np.zeros(padding, np.int32)
        self.fields["page_table"] = np.zeros((self._count, shapes.max_pages), np.int32)

    def add(self, sequence: "Sequence", lease: "Lease") -> int:
        """Takes as many of a sequence's unstored tokens as fit; returns how many."""
        first = sequence.stored
        stop = first + min(sequence.unstored, self.free * self._chunk)
        for start in range(first, stop, self._chunk):
            self._put(sequence, lease, start, min(start + self._chunk, stop))
        return stop - first

    @property
    def last(self) -> int:
        """The row of the chunk that was filled last."""
        return self._count - self.free - 1

    def _put(self, sequence: "Sequence", lease: "Lease", start: int, stop: int) -> None:
        n, fields = self._count - self.free, self.fields
        fields["tokens"][n * self._chunk : n * self._chunk + stop - start] = sequence.tokens(start, stop)
        fields["chunk_slot"][n] = lease.slot
        fields["chunk_start"][n] = start
        fields["chunk_len"][n] = stop - start
        fields["fresh"][n] = start == 0
        fields["page_table"][n, : len(lease.pages)] = lease.pages
        self.free -= 1


def decode_fields(rows: Many[tuple[int, "Sequence", "Lease"]], padding: int, shapes: Shapes) -> Fields:
    """The fields of a decode call: each sequence in its row, at the position that it stores next."""
    fields = {name: np.zeros(padding, np.int32) for name in ("slot", "position", "token")}
    fields["page_table"] = np.zeros((padding, shapes.max_pages), np.int32)
    for row, sequence, lease in rows:
        fields["slot"][row] = lease.slot
        fields["position"][row] = sequence.stored
        fields["token"][row] = -1  # the one that was sampled last is on the devices
        fields["page_table"][row, : len(lease.pages)] = lease.pages
    return fields


def sample_fields(rows: Many[tuple[int, "Sequence"]], count: int) -> Fields:
    """The fields of a sample call of ``count`` rows; the others are padding."""
    integers = {name: np.zeros(count, np.int32) for name in ("slot", "position", "top_k")}
    seed = np.zeros(count, np.uint32)
    temperature, top_p = np.zeros(count, np.float32), np.ones(count, np.float32)
    for row, sequence in rows:
        sampling, lease = sequence.request.sampling, sequence.lease
        assert lease is not None
        integers["slot"][row] = lease.slot
        integers["position"][row] = sequence.stored
        integers["top_k"][row] = sampling.top_k
        temperature[row], top_p[row], seed[row] = sampling.temperature, sampling.top_p, sampling.seed
    return {**integers, "temperature": temperature, "top_p": top_p, "seed": seed.view(np.int32)}


def fitting(work: int, paddings: tuple[int, ...]) -> int:
    """The smallest padding that holds ``work``, else the largest."""
    return next((padding for padding in paddings if padding >= work), paddings[-1])
