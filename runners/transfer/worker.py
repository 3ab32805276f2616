"""The worker's side of the connector of host arrays: it copies between this rank's pools and a backend's objects."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.transfer.backend import Backend, Writer
from ling3export.runners.transfer.objects import Key, Kind, Layout
from ling3export.runners.transfer.plan import HeadCopy, Pages, head_plan, heads_of, page_plan
from ling3export.runners.transfer.protocol import Meta, Part, Remote, Removed, Slots, Stored
from ling3export.runners.transfer.renewals import Renewals

THREADS = 4  # loads at once
RENEWAL = 5.0  # seconds that one renewal of a lease may take


class Worker:
    """Saves and loads what a step's meta says; a load is whole or changes nothing. ``Connector`` describes the calls.

    Args:
        backend: What carries objects.
        layout: What they hold.
        state_abi: Begins every name.
        rank: Which rank this is.
        tp: How many ranks the instance has.
        deadline: Seconds that a load may take.
        striped: Whether pages are striped over the ranks.
        groups: The layers of each kind in each group.

    Attributes:
        groups: How many groups of layers there are.
        carried: Payload bytes of each whole load by its request, until somebody takes them.

    Raises:
        Ling3Error: The TP does not divide the heads.
    """

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        state_abi: str,
        *,
        rank: int,
        tp: int,
        deadline: float,
        striped: bool,
        groups: Sequence[Mapping[Kind, range]],
    ) -> None:
        self._backend, self._layout, self._abi = backend, layout, state_abi
        self._rank, self._tp, self._deadline, self._striped = rank, tp, deadline, striped
        self._parts, self.groups = groups, len(groups)
        self.carried: dict[str, int] = {}
        self._heads = heads_of(rank, layout.heads, tp)
        self._offered: dict[str, str] = {}  # transfer by request
        self._events: list[Stored | Removed] = []
        self._stored: dict[str, bytes] = {}  # hash of a block by the object's name
        self._buffers: Mapping[str, np.ndarray] = {}
        self._meta = Meta()
        self._writers: dict[str, list[tuple[Key, int, Writer | None]]] = {}
        self._lock = threading.Lock()
        self._running: dict[str, Future[None]] = {}
        self._cancelled: set[str] = set()
        self._received: set[str] = set()
        self._finished: set[str] = set()  # and not sent yet
        self._gone: set[str] = set()  # transfers that were sent before their requests had finished
        self._errors: set[int] = set()
        self._pool = ThreadPoolExecutor(THREADS, "ling3-load")
        self._renewals = Renewals(lambda source: backend.renew(source, time.monotonic() + min(RENEWAL, deadline)))

    def register_state_buffers(self, buffers: Mapping[str, np.ndarray]) -> None:
        """Raises Ling3Error where a pool is missing, or has another shape or dtype than the layout says."""
        for piece in self._layout.pieces:
            shape = self._layout.shape(piece, self._heads, self._layout.block)
            array = buffers.get(piece.name)
            wanted = (self._layout.layers[piece.kind], *shape)
            found = None if array is None else (array.shape[0], *array.shape[2:])
            if array is None or found != wanted or array.dtype.name != piece.dtype:
                raise Ling3Error(
                    f"pool `{piece.name}`: expected {piece.dtype} {list(wanted)} without its slots or pages, found "
                    f"{'none' if array is None else f'{array.dtype} {list(found or ())}'}"
                )
        self._buffers = buffers

    def bind_connector_metadata(self, meta: Meta) -> None:
        self._meta = meta

    def clear_connector_metadata(self) -> None:
        for part in self._meta.loads:
            if not part.parallel:
                self._running.pop(part.request_id, None)
        self._meta = Meta()

    def start_load(self, ctx: object) -> None:
        for part in self._meta.loads:
            if self._rank == 0 and part.remote is not None and part.remote.lease is not None:
                self._renewals.add(part.request_id, part.remote.sources(), part.remote.lease)
            with self._lock:
                self._running[part.request_id] = self._pool.submit(self._load, part)
        for remote in self._meta.refused:
            self._pool.submit(self._give_back, remote)

    def wait_for_layer_load(self, group: int) -> None:
        for part in self._meta.loads:
            if not part.parallel:
                self._running[part.request_id].result()

    def save_layer(self, group: int, state: Mapping[str, np.ndarray], meta: Meta) -> None:
        for part in meta.saves:
            arrays_of = state if part.slots.own is None else part.slots.own
            if part.request_id not in self._writers:
                self._writers[part.request_id] = [(key, row, self._backend.create(key)) for key, row in self._own(part)]
            for key, row, writer in self._writers[part.request_id]:
                for at, layer in enumerate(self._parts[group].get(key.kind, ())) if writer is not None else ():
                    assert writer is not None
                    place = at if part.slots.own is None else layer  # a sequence's own arrays have all layers
                    arrays = {piece.name: arrays_of[piece.name][place, row] for piece in self._layout.of(key.kind)}
                    if key.kind == Kind.BLOCK:
                        arrays = {name: array[: key.tokens] for name, array in arrays.items()}
                    writer.write(layer, arrays)

    def wait_for_save(self) -> None:
        for part in self._meta.saves:
            if (written := self._writers.pop(part.request_id, None)) is None:
                continue  # given up
            new = [key for key, _, writer in written if writer is not None and writer.finish()]
            if part.transfer:
                self._offered[part.request_id] = part.transfer
                self._backend.offer(part.transfer, [key for key, _, _ in written])
            blocks = [key for key in new if key.kind == Kind.BLOCK]
            if blocks and not part.transfer:
                self._stored.update({key.name: key.prefix for key in blocks})
                self._events.append(self._stored_event(part, blocks))

    def get_finished(self, ids: set[str]) -> tuple[set[str], set[str]]:
        self._finished |= ids & self._offered.keys()
        self._gone |= self._backend.sent()
        sent = {name for name in self._finished if self._offered[name] in self._gone}
        self._gone -= {self._offered.pop(name) for name in sent}
        self._finished -= sent
        with self._lock:
            received, self._received = self._received, set()
        return sent, received

    def get_load_errors(self) -> set[int]:
        with self._lock:
            found, self._errors = self._errors, set()
        return found

    def handle_preemptions(self, ids: set[str]) -> None:
        with self._lock:
            self._cancelled |= ids & self._running.keys()
        for request_id in ids:
            self._renewals.drop(request_id)
            for _, _, writer in self._writers.pop(request_id, []):
                self._offered.pop(request_id, None)
                if writer is not None:
                    writer.abandon()

    def shutdown(self) -> None:
        self._renewals.close()
        self._pool.shutdown(cancel_futures=True)
        self._backend.close()

    def _own(self, part: Part) -> list[tuple[Key, int]]:
        """Objects of a sequence that this rank has, and the page or the slot of each."""
        pages, found = Pages(part.slots.pages, self._tp, self._striped), []
        for key, number in zip(self._blocks(part), pages.numbers, strict=False):
            if (place := pages.local(number, self._rank)) is not None:
                found.append((key, place))
        slot = part.slots.slot if part.slots.own is None else 0
        return [*found, (Key(self._abi, Kind.SNAPSHOT, part.hashes[-1], self._heads), slot)]

    def _blocks(self, part: Part) -> list[Key]:
        size = self._layout.block
        return [
            Key(self._abi, Kind.BLOCK, each, (0, 1), min(size, part.tokens - at * size))
            for at, each in enumerate(part.hashes)
        ]

    def _stored_event(self, part: Part, blocks: list[Key]) -> Stored:
        first = part.hashes.index(blocks[0].prefix)
        parent = part.hashes[first - 1] if first else None
        tokens = part.prompt[first * self._layout.block :]
        return Stored(part.hashes[first:], parent, tokens, self._layout.block)

    def _load(self, part: Part) -> None:
        """Loads a sequence into its slot and pages, whole or not at all."""
        self._renewals.drop(part.request_id)
        right = False
        try:
            if part.request_id not in self._cancelled:
                right = self._carry(part, time.monotonic() + self._deadline)
            elif part.remote is not None:
                self._give_back(part.remote)
        finally:
            with self._lock:
                if not right and part.request_id not in self._cancelled:
                    self._errors.add(part.slots.slot)
                self._cancelled.discard(part.request_id)
                if part.parallel:
                    self._running.pop(part.request_id, None)
                    self._received.add(part.request_id)

    def _give_back(self, remote: Remote) -> None:
        """Says that nobody wants a transfer."""
        for source in remote.sources() if self._rank == 0 else ():
            self._backend.fetch([], source, time.monotonic() + self._deadline)

    def _carry(self, part: Part, until: float) -> bool:
        count = len(part.hashes)
        mine = Pages(part.slots.pages[:count], self._tp, self._striped)
        theirs = mine if part.remote is None else part.remote.pages._replace(numbers=part.remote.pages.numbers[:count])
        blocks = [copy for copy in page_plan(theirs, mine) if copy.block >= part.first]
        heads = head_plan(self._layout.heads, theirs.tp, self._tp)
        ends = [(copy.p, copy.d) for copy in blocks] + [(copy.p, copy.d) for copy in heads]
        keys = self._blocks(part)
        found: list[tuple[Any, Key, np.ndarray]] = []
        for p in range(theirs.tp):
            wanted: list[tuple[Any, Key]] = [(c, keys[c.block]) for c in blocks if (c.p, c.d) == (p, self._rank)]
            held = heads_of(p, self._layout.heads, theirs.tp)
            snapshot = Key(self._abi, Kind.SNAPSHOT, part.hashes[-1], held)
            wanted += [(copy, snapshot) for copy in heads if (copy.p, copy.d) == (p, self._rank)]
            if not wanted:
                continue
            pullers = sorted({d for sender, d in ends if sender == p})
            source = part.remote and part.remote.sources()[p]._replace(
                part=pullers.index(self._rank), parts=len(pullers)
            )
            payloads = self._backend.fetch([key for _, key in wanted], source, until)
            for (copy, key), payload in zip(wanted, payloads, strict=True):
                if payload is None:
                    return False
                found.append((copy, key, payload))
        with self._lock:
            if part.request_id in self._cancelled:
                return False
            for copy, key, payload in found:
                self._place(part.slots, copy, key, payload)
            self.carried[part.request_id] = sum(payload.nbytes for _, _, payload in found)
        return True

    def _place(self, slots: Slots, copy: Any, key: Key, payload: np.ndarray) -> None:
        arrays = self._layout.arrays(key, payload)
        buffers, slot = (self._buffers, slots.slot) if slots.own is None else (slots.own, 0)
        for piece in self._layout.of(key.kind):
            pool, array = buffers[piece.name], arrays[piece.name]
            if isinstance(copy, HeadCopy):
                assert piece.axis is not None
                copy.apply(array, pool[:, slot], piece.axis + 1)
            else:
                pool[:, copy.target, : key.tokens] = array
