"""The queue of an engine's transfers: it saves states for other engines and loads theirs, in threads of its own.

The engine's thread only dispatches. A state that leaves is in host memory and is written here. A state that comes is in
host memory, whole and checked, before the engine hears of it. On any failure the server prefills itself, and counts the
reason.
"""

import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter as now
from typing import Any, Protocol

import numpy as np

from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.threads import JobThread
from ling3export.runners.load.sharded import ShardedState
from ling3export.runners.state.layout import (
    StateLayout,
    StateMismatch,
    check_same_state,
    description_of,
    layout_of,
    root_of,
)
from ling3export.runners.state.prefix_cache import chain_start, chained
from ling3export.runners.state.sequence_state import SequenceState, TransferredState, fill, token_of
from ling3export.runners.transfer.folder import FolderStore
from ling3export.runners.transfer.http import HttpStore
from ling3export.runners.transfer.options import Transfer
from ling3export.runners.transfer.store import NAME, StateAddress, StateStore

LOADS = 4  # at once
IDLE = 1.0  # seconds between two looks for leases that are over
CLOSING = 60.0  # seconds that a thread may take for its last job
FORM = {  # of kv_transfer_params of a prefill instance
    "remote_host": str,
    "remote_port": int,
    "remote_block_ids": list,
    "tp_size": int,
    "transfer_id": str,
    "state": dict,
    "tail": dict,
}

Exported = Callable[[], ShardedState | SequenceState]  # waits for a state that leaves the engine
Saved = Callable[[dict[str, Any] | None], bool]
Loaded = Callable[[TransferredState | None], None]


class TransferRequest(Protocol):
    """The fields of an engine's request that a transfer reads."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Its prompt."""

    @property
    def cache_salt(self) -> str:
        """Requests with different salts share nothing."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The client's or a router's parameters, of any form."""


class UnusableError(Exception):
    """A request's parameters cannot be used.

    Attributes:
        reason: Is counted.
        address: The state that is given back; None where it is not known.
    """

    def __init__(self, reason: str, text: str, address: StateAddress | None = None) -> None:
        super().__init__(text)
        self.reason, self.address = reason, address


class TransferQueue:
    """Saves states for other engines, and loads theirs."""

    def __init__(
        self,
        store: StateStore,
        layout: StateLayout,
        description: Mapping[str, object],
        root: str,
        options: Transfer,
        vocab_size: int,
        report: Callable[[str], None],
    ) -> None:
        self.store, self._layout, self._description, self._root = store, layout, description, root
        self._options, self._vocab_size, self._report = options, vocab_size, report
        self._engine = secrets.token_hex(8)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._wanted: set[int] = set()  # requests that wait for their states
        self._saves = JobThread("ling3-save", self._failed, store.expire, IDLE, store.close)
        self._loads = JobThread("ling3-load", self._failed, threads=LOADS)

    def save(self, number: int, request: TransferRequest, exported: Exported, done: Saved) -> None:
        """Saves the state after a prompt for another engine.

        Args:
            done: Gets the client's ``kv_transfer_params``, None where that failed; in this thread. Returns whether the
                client is still there: else the state is freed.
        """
        self._saves.put("save", partial(self._save, number, request, exported, done), partial(self._not_saved, done))

    def load(self, number: int, request: TransferRequest, done: Loaded) -> None:
        """Takes the state that a request's ``kv_transfer_params`` name; ``done`` gets None where that fails."""
        begun = now()
        with self._lock:
            self._wanted.add(number)

        def finish(transferred: TransferredState | None) -> None:
            with self._lock:
                self._wanted.discard(number)
            done(transferred)

        def failed(error: BaseException) -> None:
            self._count("load_failed")
            finish(None)

        self._loads.put("load", lambda: finish(self._loaded(number, request, begun)), failed)

    def drop(self, number: int) -> None:
        """Gives up the load of a request whose client left. A state that is not being taken yet is given back."""
        with self._lock:
            self._wanted.discard(number)

    def record(self) -> dict[str, int]:
        return dict(sorted((self.counts.copy() + self.store.counts.copy()).items()))

    def close(self) -> None:
        """Ends the threads after the jobs that wait. May be called again.

        A thread that waits for a device which does not answer is left.
        """
        self._loads.close(CLOSING)
        self._saves.close(CLOSING)

    def address_of(self, request: TransferRequest) -> StateAddress | None:
        """The state that a request names; None where it names none.

        Raises:
            UnusableError: Its parameters are of another prompt or artifact, or have another form.
        """
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return None
        right = all(type(params.get(name)) is kind for name, kind in FORM.items())
        right = right and 0 <= params["remote_port"] < 1 << 16 and params["tp_size"] == 1
        if not right or not NAME.fullmatch(params["transfer_id"]):
            raise UnusableError("bad_params", "kv_transfer_params: not those of a prefill instance")
        where = params["transfer_id"], params["remote_host"], params["remote_port"]
        address = StateAddress(*where, len(request.prompt_ids))
        try:
            check_same_state(self._description, params["state"])
        except StateMismatch as error:
            raise UnusableError("other_state", error.message, address) from error
        except (ValueError, TypeError, RecursionError) as error:  # no JSON: half a character, or not a number
            raise UnusableError("bad_params", f"kv_transfer_params: `state` is no JSON: {error}", address) from error
        if params.get("prompt_digest") != self._digest(request):
            raise UnusableError("other_prompt", "kv_transfer_params: the digest is that of another prompt", address)
        return address

    def release(self, address: StateAddress) -> None:
        """Tells a holder that nobody wants a state."""
        self.store.release(address, time.monotonic() + self._options.deadline)

    def _failed(self, text: str) -> None:
        self._report(f"transfer: {text}")

    def _count(self, reason: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[reason] += amount

    def _save(self, number: int, request: TransferRequest, exported: Exported, done: Saved) -> None:
        name, tokens, state = secrets.token_hex(16), np.asarray(request.prompt_ids, np.int32), exported()
        stored = self.store.put(name, {"state": self._description}, tokens, partial(fill, source=state))
        params = self._params(number, request, name) if stored else None
        self._count("saved" if params else "save_failed")
        if not done(params) and params is not None:
            self.release(StateAddress(name, *self.store.address))

    def _not_saved(self, done: Saved, error: BaseException) -> None:
        self._count("save_failed")
        done(None)

    def _params(self, number: int, request: TransferRequest, name: str) -> dict[str, Any]:
        host, port = self.store.address
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": str(number),
            "remote_host": host,
            "remote_port": port,
            "remote_block_ids": [*range(1, -(-len(request.prompt_ids) // self._layout.page) + 1)],
            "tp_size": 1,
            "transfer_id": name,
            "prompt_digest": self._digest(request),
            "state": dict(self._description),
            "lease": self._options.lease,
        }

    def _loaded(self, number: int, request: TransferRequest, begun: float) -> TransferredState | None:
        params: Mapping[str, Any] = request.kv_transfer_params or {}
        try:
            address = self.address_of(request)
            if address is None:
                raise UnusableError("bad_params", "kv_transfer_params: do_remote_prefill is not set")
            try:
                token = token_of(params["tail"]["token"], params["tail"].get("logprobs"), self._vocab_size)
            except (LookupError, TypeError, ValueError) as error:
                raise UnusableError("bad_params", "kv_transfer_params: `tail` has no token", address) from error
        except UnusableError as error:
            self._count(error.reason)
            self._report(f"{number}: {error}")
            if error.address is not None:
                self.release(error.address)
            return None
        if number not in self._wanted:
            self.release(address)
            return None
        state = self.store.get(address, time.monotonic() + self._options.deadline)
        if state is None or len(state.tokens) != address.tokens:
            self._count("load_failed")
            return None
        self._count("loaded")
        self._count("loaded_bytes", state.nbytes)
        phases = _phases(params.get("phases_ms")) | {"transfer": 1e3 * (now() - begun)}
        return TransferredState((token,), state, phases, state.nbytes)

    def _digest(self, request: TransferRequest) -> str:
        (block,) = chained(chain_start(self._root, request.cache_salt), request.prompt_ids, len(request.prompt_ids))
        return block.hex()


def _phases(values: object) -> dict[str, float]:
    """Milliseconds by name that another process measured; values of another form are left out."""
    if not isinstance(values, Mapping):
        return {}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(name, str) and re.fullmatch("[a-z]{1,20}", name) and type(value) in (int, float)
    }


def transfer_queue(
    manifest: Manifest, target: Target, transfer: Transfer, report: Callable[[str], None]
) -> TransferQueue:
    """An engine's queue, over the store of its carrier.

    Raises:
        ArtifactError: The target has no programs that move states.
        TransferError: The folder cannot be made, there is no shared memory, or a secret is needed.
    """
    layout, description = layout_of(target), description_of(manifest, target)
    store: StateStore
    if transfer.carrier == "http":
        store = HttpStore(layout, description, transfer)
    else:
        limit = transfer.limit if transfer.folder is None else None
        store = FolderStore(layout, description, transfer.folder, transfer.lease, limit)
    return TransferQueue(store, layout, description, root_of(manifest, target), transfer, manifest.vocab_size, report)
