"""The connector: vLLM's KVConnectorBase_V1, names and meaning, over a store of states.

A prefill instance that was asked for it (``do_remote_decode``) saves a prompt's state, whole or group of layers by
group, under a name that its answer carries to a decode instance (``do_remote_prefill``), which loads it. Whatever fails
is a prefill of one's own: nothing is put into the state buffers, and the reason is counted. An engine is one rank of
one, whatever its TP: a state is in canonical order.
"""

import re
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.state.layout import StateLayout, StateMismatch, check_same_state
from ling3export.runners.state.prefix_cache import chain_start, chained
from ling3export.runners.state.sequence_state import Arrays, SequenceState, fill
from ling3export.runners.transfer.renewals import Renewals
from ling3export.runners.transfer.store import PendingWrite, StateAddress, StateStore

NAME = re.compile("[0-9a-f]{32}")
REMEMBERED = 1 << 16  # states that cannot be loaded again
LONGEST = 1e6  # seconds of a lease
THREADS = 4  # loads at once
RENEWAL = 5.0  # seconds that one renewal of a lease may take

Layers = Mapping[str, range]  # those of a group, by the name of the pool


class ProtocolError(Ling3Error):
    """An engine calls its connector in another order than the one agreed."""


class Request(Protocol):
    """What a connector has to know of a request.

    Attributes:
        request_id: Its id.
        prompt_ids: Its prompt.
        cache_salt: Who gives another one shares nothing.
        kv_transfer_params: What the client or a router gave, of any form; None where nothing is transferred.
    """

    request_id: str
    prompt_ids: Sequence[int]
    cache_salt: str
    kv_transfer_params: Mapping[str, Any] | None


class Load(NamedTuple):
    """A state that is loaded: the request's id, where the state is, and how long its holder keeps it, if it says so."""

    request_id: str
    address: StateAddress
    lease: float | None


class Meta(NamedTuple):
    """What the worker's side does in one step: loads, saves, and states that are given back."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Request, ...] = ()
    refused: tuple[StateAddress, ...] = ()


class _UnusableError(Exception):
    """What a request brought cannot be used; ``reason`` is counted, and the state is given back where it is known."""

    def __init__(self, reason: str, text: str, load: Load | None = None) -> None:
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
        counts: Why states were refused, by reason; the store counts the rest.
        renewals: Of what waits to be loaded.

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
        self.renewals = Renewals(lambda address: store.renew(address, time.monotonic() + min(RENEWAL, deadline)))
        self.counts: Counter[str] = self.renewals.counts
        self._loads: dict[str, Load] = {}
        self._refused: list[StateAddress] = []
        self._used: OrderedDict[str, None] = OrderedDict()  # names of states, the last ones
        self._buffers: dict[str, SequenceState] = {}
        self._meta: Meta | None = None
        self._writes: dict[str, tuple[str, PendingWrite]] = {}  # names and states that are being saved, by request
        self._unsaved: set[int] = set()  # groups of this step
        self._saved: dict[str, str] = {}  # names by request, of requests that have not finished
        self._sent: dict[str, str] = {}  # requests by name, of states that are there for their reader
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._received: set[str] = set()
        self._pool = ThreadPoolExecutor(THREADS, "ling3-load")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens behind the computed ones can be loaded, and whether that takes a while. Changes nothing."""
        try:
            load = self._load_of(request)
        except _UnusableError:
            return 0, False
        return (0, False) if load is None else (max(0, len(request.prompt_ids) - num_computed_tokens), True)

    def update_state_after_alloc(self, request: Request, num_external_tokens: int) -> None:
        """Tells that so many tokens are to be loaded in the next step; for 0 the state is given back."""
        try:
            load = self._load_of(request)
        except _UnusableError as error:
            if error.reason == "used" and not num_external_tokens:
                return None  # it comes again once the load has ended
            self.counts[error.reason] += 1
            self._refused += () if error.load is None else (error.load.address,)
            return self._report(f"{request.request_id}: {error}")
        if load is None:
            return None
        self._used[load.address.name] = None
        if len(self._used) > REMEMBERED:
            self._used.popitem(last=False)
        if num_external_tokens:
            self._loads[request.request_id] = load
        else:
            self._refused.append(load.address)

    def build_connector_meta(self, scheduled: Sequence[Request]) -> Meta:
        """What this step's worker does, of requests whose prompts it ends; forgets it for the next step."""
        saves = (each for each in scheduled if (each.kv_transfer_params or {}).get("do_remote_decode"))
        meta = Meta(tuple(self._loads.values()), tuple(saves), tuple(self._refused))
        self._loads, self._refused = {}, []
        return meta

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether what the request holds must stay for now, and what its client is given. Comes once."""
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

    def bind_connector_metadata(self, meta: Meta) -> None:
        """Begins a step."""
        _check(self._meta is None, "clear_connector_metadata before the next step", "another bind")
        self._meta, self._unsaved = meta, {*range(len(self._groups))} if meta.saves else set()

    def clear_connector_metadata(self) -> None:
        """Ends a step."""
        _check(not self._writes, "wait_for_save before clear_connector_metadata", "none")
        self._meta = None

    def start_load_kv(self, loaded: Callable[[], None]) -> None:
        """Begins this step's loads; calls ``loaded`` when one has ended."""
        for load in self._bound("start_load_kv").loads:
            if load.lease is not None:
                self.renewals.add(load.address, load.lease)
            with self._lock:
                self._running.add(load.request_id)
            self._pool.submit(self._load, load, loaded)
        for address in self._bound("start_load_kv").refused:
            self._pool.submit(self.give_back, address)

    def wait_for_layer_load(self, group: int) -> None:
        """Waits for the loads of a group of layers that this step needs: none, for a state loads beside the steps."""
        self._check_group(group)

    def save_kv_layer(self, group: int, states: Mapping[str, Callable[[], Arrays]]) -> None:
        """Copies a group of layers into the store, by the request's id: each is waited for, by the name of the pool."""
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
        """Requests whose states were sent or are over, and those whose loads have ended, since the last call."""
        with self._lock:
            received, self._received = self._received, set()
        return {request for name in self._store.ended() if (request := self._sent.pop(name, None))}, received

    def handle_preemptions(self, ids: set[str]) -> None:
        """Loads of these requests deliver nothing from now on, and what is being saved of them is given up."""
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
        self.renewals.close()
        self._pool.shutdown(cancel_futures=True)
        self._store.close()

    def _load(self, load: Load, loaded: Callable[[], None]) -> None:
        try:
            wanted, state = load.request_id in self._running, None
            if wanted:
                state = self._store.get(load.address, time.monotonic() + self._deadline)
            else:
                self.give_back(load.address)
            self.renewals.drop(load.address.name)
            with self._lock:
                if state is not None and len(state.tokens) == load.address.tokens and load.request_id in self._running:
                    self._buffers[load.request_id] = state
        finally:
            with self._lock:
                self._running.discard(load.request_id)
                self._received.add(load.request_id)
            loaded()

    def _digest(self, request: Request) -> str:
        (found,) = chained(chain_start(self._root, request.cache_salt), request.prompt_ids, len(request.prompt_ids))
        return found.hex()

    def _load_of(self, request: Request) -> Load | None:
        """Where a request's state is; None where it brought nothing.

        Raises:
            _UnusableError: What it brought is of another prompt or artifact, was used before, or has another form.
        """
        given = request.kv_transfer_params or {}
        if not given.get("do_remote_prefill"):
            return None
        host: Any = given.get("remote_host")
        port: Any = given.get("remote_port")
        name: Any = given.get("transfer_id")
        state: Any = given.get("state")
        lease: Any = given.get("lease")
        right = isinstance(host, str) and type(port) is int and 0 <= port < 1 << 16 and given.get("tp_size") == 1
        right = right and isinstance(name, str) and bool(NAME.fullmatch(name)) and isinstance(state, Mapping)
        right = right and isinstance(given.get("remote_block_ids"), list)
        if not right or not (lease is None or (type(lease) in (int, float) and 0 < lease <= LONGEST)):
            text = "kv_transfer_params: expected those of a prefill instance, found others"
            raise _UnusableError("bad_params", text)
        load = Load(request.request_id, StateAddress(name, host, port, len(request.prompt_ids)), lease)
        try:
            check_same_state(self._description, state)
        except StateMismatch as error:
            raise _UnusableError("other_state", error.message, load) from error
        if given.get("prompt_digest") != self._digest(request):
            text = "kv_transfer_params: expected the digest of this prompt, found another"
            raise _UnusableError("other_prompt", text, load)
        if name in self._used:
            raise _UnusableError("used", "kv_transfer_params: expected a state of its own, found one used before")
        return load

    def _bound(self, call: str) -> Meta:
        _check(self._meta is not None, f"bind_connector_metadata before {call}", "none")
        assert self._meta is not None
        return self._meta

    def _check_group(self, group: int) -> None:
        _check(0 <= group < len(self._groups), f"a group from 0 to {len(self._groups) - 1}", f"group {group}")


def _check(right: bool, expected: str, found: str) -> None:
    if not right:
        raise ProtocolError(f"connector: expected {expected}, found {found}")
