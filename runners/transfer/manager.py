"""A thread that drives an engine's connector: it saves states for other engines, and loads theirs.

The engine's thread only dispatches: what leaves is offloaded to host memory and written here, and what comes is in host
memory, whole and checked, before the engine hears of it.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter as now
from typing import Any, NamedTuple

from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.threads import JobThread
from ling3export.runners.load.sharded import ShardedState
from ling3export.runners.state.layout import description_of, layout_of, root_of
from ling3export.runners.state.sequence_state import Arrays, SequenceState, Token, TransferredState, token_of
from ling3export.runners.transfer.connector import Connector, Layers, TransferRequest
from ling3export.runners.transfer.folder import FolderStore
from ling3export.runners.transfer.options import Transfer
from ling3export.runners.transfer.store import StateAddress, StateStore
from ling3export.runners.transfer.tcp import TcpStore

IDLE = 1.0  # seconds between two looks for leases that are over
LAST = 60.0  # that the thread may take for its last job

Exported = Callable[[], ShardedState | SequenceState]  # waits for a state that leaves the engine
Saved = Callable[[dict[str, Any] | None], bool]
Groups = Callable[[int], Mapping[str, Callable[[], Arrays]]]  # waits for a group of layers, by the request's id
Loaded = Callable[[TransferredState | None], None]


class _Waiting(NamedTuple):
    """A request whose state is being loaded."""

    ticket: TransferRequest
    begun: float
    tail: Token
    done: Loaded


class KVTransferManager:
    """Saves states for other engines, and loads theirs.

    Args:
        connector: What saves and loads them.
        store: What the connector uses, for its counts.
        groups: The layers of each of the connector's groups.
        vocab_size: Token ids are below it.
        report: Told of what failed.

    Attributes:
        counts: What happened how often, by name.
    """

    def __init__(
        self,
        connector: Connector,
        store: StateStore,
        groups: Sequence[Layers],
        vocab_size: int,
        report: Callable[[str], None],
    ) -> None:
        self._connector, self._store, self._groups = connector, store, groups
        self._vocab_size, self._report = vocab_size, report
        self.counts: Counter[str] = Counter()
        self._loads: dict[str, _Waiting] = {}
        self._buffers: dict[str, SequenceState] = {}
        connector.register_kv_caches(self._buffers)
        self._jobs = JobThread("ling3-exchange", self._failed, self._finish, IDLE, connector.shutdown)

    def save(self, number: int, request: Any, exported: Exported, done: Saved) -> None:
        """Saves the state behind a prompt for another engine.

        Args:
            number: The request's.
            request: The engine's request.
            exported: Waits for the state.
            done: Gets what the client is given, None where that failed; in this thread. Says whether the client is
                still there: else the state is freed.
        """
        self._jobs.put("save", lambda: self._save(_named(number, request), exported, done), lambda error: done(None))

    def load(self, number: int, request: Any, done: Loaded) -> None:
        """Takes the state that a request's ``kv_transfer_params`` name; ``done`` gets None where that fails."""
        begun = now()
        self._jobs.put(
            "load",
            lambda: self._load(_named(number, request), begun, done),
            lambda error: self._not_loaded(number, done),
        )

    def drop(self, number: int) -> None:
        """Frees what a request holds here, because its client left: its load is not waited for, its state not taken."""
        self._jobs.put("drop", lambda: self._drop(str(number)))

    def record(self) -> dict[str, int]:
        """All counts, as JSON."""
        counted = (self.counts, self._store.counts, self._connector.counts)
        return dict(sorted(sum((each.copy() for each in counted), Counter[str]()).items()))

    def close(self) -> None:
        """Ends the thread; jobs that wait are not done. May be called again.

        A thread that waits for a device which does not answer is left.
        """
        self._jobs.close(LAST)

    def _failed(self, text: str) -> None:
        self.counts["failed"] += 1
        self._report(f"transfer: {text}")

    def _not_loaded(self, number: int, done: Loaded) -> None:
        """Has a request go on without its state."""
        self._loads.pop(str(number), None)
        self.counts["load_failed"] += 1
        done(None)

    def _step(self, requests: Sequence[TransferRequest], states: Groups) -> None:
        """One step of the connector: begins loads, and saves the prompts' states; ``states`` waits for a group's."""
        connector = self._connector
        meta = connector.build_connector_meta(requests)
        connector.bind_connector_metadata(meta)
        try:
            connector.start_load_kv(lambda: self._jobs.put("loaded", _nothing))
            for group in range(len(self._groups) if meta.saves else 0):
                connector.wait_for_layer_load(group)
                connector.save_kv_layer(group, states(group))
        except BaseException:
            connector.handle_preemptions({each.request_id for each in meta.saves})
            raise
        finally:
            connector.wait_for_save()
            connector.clear_connector_metadata()

    def _save(self, ticket: TransferRequest, exported: Exported, done: Saved) -> None:
        params = None
        try:
            state = exported()
            arrays = state.arrays() if isinstance(state, ShardedState) else state.pool_arrays(1)
            self._step([ticket], lambda group: {ticket.request_id: lambda: arrays})
            _, params = self._connector.request_finished(ticket)
            self.counts["saved" if params else "save_failed"] += 1
        except Exception as error:
            self.counts["save_failed"] += 1
            self._report(f"transfer of {ticket.request_id}: expected its state to be saved, found {error}")
        if not done(params) and params is not None:
            self._take_back(params)

    def _drop(self, request_id: str) -> None:
        """Gives up the load of a request whose client has left."""
        self._connector.handle_preemptions({request_id})
        self._loads.pop(request_id, None)

    def _take_back(self, params: Mapping[str, Any]) -> None:
        """Frees a state that was saved for another engine, as that engine would do."""
        self._connector.give_back(StateAddress(params["transfer_id"], params["remote_host"], params["remote_port"]))

    def _load(self, ticket: TransferRequest, begun: float, done: Loaded) -> None:
        tokens, tail = 0, None
        try:
            said = (ticket.kv_transfer_params or {})["tail"]
            tail = token_of(said["token"], said.get("likely"), self._vocab_size)
            tokens, _ = self._connector.get_num_new_matched_tokens(ticket, 0)
        except (LookupError, TypeError, ValueError, AttributeError):
            self.counts["bad_params"] += 1
        self._connector.update_state_after_alloc(ticket, tokens)  # for 0 the giver is told, if it can be
        if tokens and tail is not None:
            self._loads[ticket.request_id] = _Waiting(ticket, begun, tail, done)
        self._step([], lambda group: {})
        if not tokens:
            self.counts["not_loaded"] += tail is not None
            done(None)

    def _finish(self) -> None:
        """Tells the requests whose loads have ended."""
        _, received = self._connector.get_finished()
        for request_id in received:
            state = self._buffers.pop(request_id, None)
            if (waiting := self._loads.pop(request_id, None)) is None:
                continue
            transferred = None
            try:
                transferred = None if state is None else self._transferred(waiting, state)
            finally:
                self.counts["load_failed" if transferred is None else "loaded"] += 1
                waiting.done(transferred)

    def _transferred(self, waiting: _Waiting, state: SequenceState) -> TransferredState:
        self.counts["loaded_bytes"] += state.nbytes
        phases = _phases((waiting.ticket.kv_transfer_params or {}).get("phases_ms"))
        phases["transfer"] = 1e3 * (now() - waiting.begun)
        return TransferredState((waiting.tail,), state, phases, state.nbytes)


def _named(number: int, request: Any) -> TransferRequest:
    return TransferRequest(str(number), request.prompt_ids, request.cache_salt, request.kv_transfer_params)


def _nothing() -> None:
    pass


def _phases(given: object) -> dict[str, float]:
    """Milliseconds by name that another process measured; values of another form are left out."""
    if not isinstance(given, Mapping):
        return {}
    return {
        name: float(each)
        for name, each in given.items()
        if isinstance(name, str) and re.fullmatch("[a-z]{1,20}", name) and type(each) in (int, float)
    }


def transfer_manager(
    manifest: Manifest, target: Target, transfer: Transfer, report: Callable[[str], None]
) -> KVTransferManager:
    """An engine's manager, over the store of its carrier.

    Raises:
        ArtifactError: The target has no programs that move states.
        TransferError: The port is taken, the folder cannot be made, or there is no shared memory.
    """
    layout, description = layout_of(target), description_of(manifest, target)
    groups = [{array.name: range(array.shape[0]) for array in target.state.arrays}]
    store: StateStore
    if transfer.carrier == "tcp":
        store = TcpStore(layout, description, transfer)
    else:
        limit = transfer.limit if transfer.folder is None else None
        store = FolderStore(layout, description, transfer.folder, transfer.lease, limit)
    connector = Connector(
        store,
        layout,
        description,
        root_of(manifest, target),
        deadline=transfer.deadline,
        lease=transfer.lease,
        groups=groups,
        report=report,
    )
    return KVTransferManager(connector, store, groups, manifest.vocab_size, report)
