"""The connector: vLLM's KVConnectorBase_V1, names and meaning, over a store of states.

A prefill instance that was asked for it (``do_remote_decode``) saves a prompt's state, whole or group of layers by
group, under a name that its answer carries to a decode instance (``do_remote_prefill``), which loads it. Whatever fails
is a prefill of one's own: nothing is put into the state buffers, and the reason is counted. An engine is one rank of
one, whatever its TP: a state is in canonical order.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.state.layout import StateLayout, StateMismatch, check_same_state
from ling3export.runners.state.prefix_cache import chain_start, chained
from ling3export.runners.state.sequence_state import Arrays, SequenceState, fill
from ling3export.runners.transfer.store import NAME, PendingWrite, StateAddress, StateStore

Layers = Mapping[str, range]  # a group's, by the name of the pool
LONGEST = 1e6  # seconds of a lease
LOADS = 4  # at once
WAITING = 512  # threads of loads that wait for their turn
RENEWALS = 3  # in a lease: two may be lost
RENEWAL = 5.0  # seconds that one renewal of a lease may take
FORM = {  # of what a prefill instance says
    "remote_host": str,
    "remote_port": int,
    "remote_block_ids": list,
    "tp_size": int,
    "transfer_id": str,
    "state": dict,
}


class ProtocolError(Ling3Error):
    """An engine called its connector in the wrong order."""


class TransferRequest(NamedTuple):
    """What a connector has to know of a request.

    Attributes:
        request_id: Its id.
        prompt_ids: Its prompt.
        cache_salt: Requests with different salts share nothing.
        kv_transfer_params: What the client or a router gave, of any form; None where nothing is transferred.
    """

    request_id: str
    prompt_ids: Sequence[int]
    cache_salt: str
    kv_transfer_params: Mapping[str, Any] | None


class PendingLoad(NamedTuple):
    """A state that is to be loaded: the request's id, the state's address, and its lease in seconds, if it is known."""

    request_id: str
    address: StateAddress
    lease: float | None


class ConnectorMetadata(NamedTuple):
    """The work of one step: states to load, requests whose states are saved, and states that are given back."""

    loads: tuple[PendingLoad, ...] = ()
    saves: tuple[TransferRequest, ...] = ()
    refused: tuple[StateAddress, ...] = ()


class _UnusableError(Exception):
    """A request's parameters cannot be used; ``reason`` is counted, and the state is given back where it is known."""

    def __init__(self, reason: str, text: str, load: PendingLoad | None = None) -> None:
        super().__init__(text)
        self.reason, self.load = reason, load


class Connector:
    """Saves states into a store and loads them from it.

    Args:
        store: What carries states.
        layout: What they hold.
        description: What decides whether they fit.
        root: What names begin with (``root_of``).
        deadline: Seconds that a load may take.
        lease: Seconds that the store keeps what is saved for its reader.
        groups: The layers of each group.
        report: Gets a line when another instance's state does not fit.

    Attributes:
        counts: Why states were refused, and what became of renewals, by reason; the store counts the rest.

    Raises:
        ProtocolError: Any call comes out of order: a save without a step or of an unknown group, one of a group twice,
            an end before ``wait_for_save``, a request that finishes twice.
    """

    def __init__(
        self,
        store: StateStore,
        layout: StateLayout,
        description: Mapping[str, object],
        root: str,
        *,
        deadline: float,
        lease: float,
        groups: Sequence[Layers],
        report: Callable[[str], None],
    ) -> None:
        self._store, self._layout, self._description, self._root = store, layout, description, root
        self._deadline, self._lease, self._groups, self._report = deadline, lease, groups, report
        self._engine = secrets.token_hex(8)
        self.counts: Counter[str] = Counter()
        self._loads: dict[str, PendingLoad] = {}
        self._refused: list[StateAddress] = []
        self._buffers: dict[str, SequenceState] = {}
        self._meta: ConnectorMetadata | None = None
        self._writes: dict[str, tuple[str, PendingWrite]] = {}  # names and states that are being saved, by request
        self._unsaved: set[int] = set()  # groups of this step
        self._saved: dict[str, str] = {}  # names by request, of requests that have not finished
        self._sent: dict[str, str] = {}  # requests by name, of states that are there for their reader
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._received: set[str] = set()
        self._turns, self._closed = threading.Semaphore(LOADS), False
        self._pool = ThreadPoolExecutor(WAITING, "ling3-load")

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens behind the computed ones can be loaded, and whether that takes a while. Changes nothing."""
        try:
            load = self._load_of(request)
        except _UnusableError:
            return 0, False
        return (0, False) if load is None else (max(0, len(request.prompt_ids) - num_computed_tokens), True)

    def update_state_after_alloc(self, request: TransferRequest, num_external_tokens: int) -> None:
        """Tells that so many tokens are to be loaded in the next step; for 0 the state is given back."""
        try:
            load = self._load_of(request)
        except _UnusableError as error:
            self.counts[error.reason] += 1
            self._refused += () if error.load is None else (error.load.address,)
            return self._report(f"{request.request_id}: {error}")
        if load is None:
            return None
        if num_external_tokens:
            self._loads[request.request_id] = load
        else:
            self._refused.append(load.address)

    def build_connector_meta(self, scheduled: Sequence[TransferRequest]) -> ConnectorMetadata:
        """The work of this step, in which the prompts of these requests end; the next step begins without it."""
        saves = (each for each in scheduled if (each.kv_transfer_params or {}).get("do_remote_decode"))
        meta = ConnectorMetadata(tuple(self._loads.values()), tuple(saves), tuple(self._refused))
        self._loads, self._refused = {}, []
        return meta

    def request_finished(self, request: TransferRequest) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's memory must be kept for now, and the parameters for its client. Is called once."""
        name = self._saved.pop(request.request_id, None)
        if name is None:
            return False, None
        host, port = self._store.address
        count = len(request.prompt_ids)
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": port,
            "remote_block_ids": [*range(1, -(-count // self._layout.page) + 1)],
            "tp_size": 1,
            "transfer_id": name,
            "prompt_digest": self._digest(request),
            "state": dict(self._description),
            "lease": self._lease,
        }

    def register_kv_caches(self, buffers: dict[str, SequenceState]) -> None:
        """Tells where loaded states belong, by request."""
        self._buffers = buffers

    def bind_connector_metadata(self, meta: ConnectorMetadata) -> None:
        """Begins a step."""
        _check(self._meta is None, "clear_connector_metadata before the next step", "another bind")
        self._meta, self._unsaved = meta, {*range(len(self._groups))} if meta.saves else set()

    def clear_connector_metadata(self) -> None:
        """Ends a step."""
        _check(not self._writes, "wait_for_save before clear_connector_metadata", "none")
        self._meta = None

    def start_load_kv(self, loaded: Callable[[], None]) -> None:
        """Begins this step's loads; calls ``loaded`` when one has ended."""
        meta = self._bound("start_load_kv")
        for load in meta.loads:
            with self._lock:
                self._running.add(load.request_id)
            self._pool.submit(self._load, load, loaded)
        for address in meta.refused:
            self._pool.submit(self.give_back, address)

    def wait_for_layer_load(self, group: int) -> None:
        """Waits for the loads of a group of layers that this step needs: none, for a state loads beside the steps."""
        self._check_group(group)

    def save_kv_layer(self, group: int, states: Mapping[str, Callable[[], Arrays]]) -> None:
        """Copies a group of layers into the store; ``states`` has, by request id, a call that waits for its arrays."""
        meta = self._bound("save_kv_layer")
        self._check_group(group)
        _check(group in self._unsaved, f"one save_kv_layer of group {group} a step", "two")
        self._unsaved.discard(group)
        for request in meta.saves:
            if request.request_id not in self._writes and len(self._unsaved) + 1 == len(self._groups):
                name, tokens = secrets.token_hex(16), np.asarray(request.prompt_ids, np.int32)
                if (write := self._store.create(name, {"state": self._description}, tokens)) is not None:
                    self._writes[request.request_id] = name, write
            if (found := self._writes.get(request.request_id)) is not None:
                fill(found[1].state, states[request.request_id](), self._groups[group])

    def wait_for_save(self) -> None:
        """Returns once all saves of the step can be loaded elsewhere."""
        _check(not self._unsaved, "save_kv_layer of every group before wait_for_save", f"none of {[*self._unsaved]}")
        for request_id, (name, write) in self._writes.items():
            if write.finish():
                self._saved[request_id], self._sent[name] = name, request_id
        self._writes = {}

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose saved states have ended, and those whose loads have ended, since the last call."""
        ended = {request for name in self._store.ended() if (request := self._sent.pop(name, None))}
        with self._lock:
            received, self._received = self._received, set()
        return ended, received

    def handle_preemptions(self, ids: set[str]) -> None:
        """Drops the loads of these requests, and gives up the states of them that are being saved."""
        with self._lock:
            self._running -= ids
        for request_id in ids & self._writes.keys():
            self._writes.pop(request_id)[1].abandon()
        if self._meta is not None and not self._writes:
            self._unsaved = set()

    def give_back(self, address: StateAddress) -> None:
        """Says that nobody wants a state."""
        self._store.release(address, time.monotonic() + self._deadline)

    def shutdown(self) -> None:
        """Ends everything that runs."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        self._store.close()

    def _load(self, load: PendingLoad, loaded: Callable[[], None]) -> None:
        """Takes a state, or gives it back where nobody waits for it any more."""
        state = None
        try:
            state = self._take(load)
        except Exception as error:
            self._report(f"{load.request_id}: its state was not loaded: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                if state is not None and len(state.tokens) == load.address.tokens and load.request_id in self._running:
                    self._buffers[load.request_id] = state
                self._running.discard(load.request_id)
                self._received.add(load.request_id)
            loaded()

    def _take(self, load: PendingLoad) -> SequenceState | None:
        """The state, or None; its lease is renewed until its turn."""
        lease = load.lease
        while not self._turns.acquire(timeout=None if lease is None else lease / RENEWALS):
            said = self._store.renew(load.address, time.monotonic() + min(RENEWAL, self._deadline))
            with self._lock:
                self.counts[said if said == "renewed" else f"renewal_{said}"] += 1
            lease = lease if said == "renewed" else None
        try:
            if load.request_id in self._running and not self._closed:
                return self._store.get(load.address, time.monotonic() + self._deadline)
            if not self._closed:
                self.give_back(load.address)
            return None
        finally:
            self._turns.release()

    def _digest(self, request: TransferRequest) -> str:
        (found,) = chained(chain_start(self._root, request.cache_salt), request.prompt_ids, len(request.prompt_ids))
        return found.hex()

    def _load_of(self, request: TransferRequest) -> PendingLoad | None:
        """The state that a request names; None where it names none.

        Raises:
            _UnusableError: What it brought is of another prompt or artifact, or has another form.
        """
        given = request.kv_transfer_params or {}
        if not given.get("do_remote_prefill"):
            return None
        right = all(type(given.get(name)) is kind for name, kind in FORM.items())
        right = right and 0 <= given["remote_port"] < 1 << 16 and given["tp_size"] == 1
        lease: Any = given.get("lease")
        right = right and (lease is None or (type(lease) in (int, float) and 0 < lease <= LONGEST))
        if not right or not NAME.fullmatch(given["transfer_id"]):
            text = "kv_transfer_params: expected those of a prefill instance, found others"
            raise _UnusableError("bad_params", text)
        where = given["transfer_id"], given["remote_host"], given["remote_port"]
        address = StateAddress(*where, len(request.prompt_ids))
        load = PendingLoad(request.request_id, address, lease)
        try:
            check_same_state(self._description, given["state"])
        except StateMismatch as error:
            raise _UnusableError("other_state", error.message, load) from error
        except (ValueError, TypeError, RecursionError) as error:  # no JSON: half a character, or not a number
            text = f"kv_transfer_params: `state` is no JSON: {error}"
            raise _UnusableError("bad_params", text, load) from error
        if given.get("prompt_digest") != self._digest(request):
            text = "kv_transfer_params: expected the digest of this prompt, found another"
            raise _UnusableError("other_prompt", text, load)
        return load

    def _bound(self, call: str) -> ConnectorMetadata:
        _check(self._meta is not None, f"bind_connector_metadata before {call}", "none")
        assert self._meta is not None
        return self._meta

    def _check_group(self, group: int) -> None:
        _check(0 <= group < len(self._groups), f"a group from 0 to {len(self._groups) - 1}", f"group {group}")


def _check(right: bool, expected: str, found: str) -> None:
    if not right:
        raise ProtocolError(f"connector: expected {expected}, found {found}")
