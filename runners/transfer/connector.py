"""vLLM's KVConnectorBase_V1, names and meaning, over a TransferQueue: for schedulers that were written for it.

The engine uses the queue itself. A state is whole and in canonical order, so an engine is one rank of one whatever its
TP, and ``wait_for_layer_load`` has nothing to wait for: a request's state is there before its first step.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ling3export.runners.state.sequence_state import SequenceState, TransferredState
from ling3export.runners.transfer.store import StateAddress
from ling3export.runners.transfer.transfer_queue import Exported, TransferQueue, TransferRequest, UnusableError


class ScheduledRequest(TransferRequest, Protocol):
    """A request of a scheduler, with the number that it has there."""

    @property
    def number(self) -> int:
        """Unique among the requests that have not finished."""


class ConnectorMetadata(NamedTuple):
    """The work of one step: requests whose states are loaded or saved, and states that are given back."""

    loads: tuple[ScheduledRequest, ...] = ()
    saves: tuple[ScheduledRequest, ...] = ()
    refused: tuple[StateAddress, ...] = ()


class Connector:
    """The calls of a scheduler and of a worker, in one process."""

    def __init__(self, queue: TransferQueue) -> None:
        self._queue = queue
        self._loads: list[ScheduledRequest] = []
        self._refused: list[StateAddress] = []
        self._meta = ConnectorMetadata()
        self._buffers: dict[int, TransferredState] = {}
        self._lock = threading.Lock()
        self._received: set[int] = set()
        self._saving: list[threading.Event] = []
        self._params: dict[int, dict[str, Any]] = {}

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: ScheduledRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens after the computed ones can be loaded, and whether that takes a while. Changes nothing."""
        try:
            address = self._queue.address_of(request)
        except UnusableError:
            address = None
        return (0, False) if address is None else (max(0, address.tokens - num_computed_tokens), True)

    def update_state_after_alloc(self, request: ScheduledRequest, num_external_tokens: int) -> None:
        """Has this many tokens loaded in the next step; for 0 the state is given back."""
        try:
            address = self._queue.address_of(request)
        except UnusableError as error:
            address, num_external_tokens = error.address, 0
        if num_external_tokens:
            self._loads.append(request)
        elif address is not None:
            self._refused.append(address)

    def build_connector_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMetadata:
        """The work of the step in which the prompts of these requests end; the next step begins without it."""
        saves = (request for request in scheduled if (request.kv_transfer_params or {}).get("do_remote_decode"))
        meta = ConnectorMetadata(tuple(self._loads), tuple(saves), tuple(self._refused))
        self._loads, self._refused = [], []
        return meta

    def request_finished(self, request: ScheduledRequest) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's memory must be kept for now, and the parameters for its client."""
        return False, self._params.pop(request.number, None)

    # The worker's side.

    def register_kv_caches(self, buffers: dict[int, TransferredState]) -> None:
        """Sets where loaded states go, by request."""
        self._buffers = buffers

    def bind_connector_metadata(self, meta: ConnectorMetadata) -> None:
        self._meta = meta

    def clear_connector_metadata(self) -> None:
        self._meta = ConnectorMetadata()

    def start_load_kv(self) -> None:
        for request in self._meta.loads:
            self._queue.load(request.number, request, self._loaded(request.number))
        for address in self._meta.refused:
            self._queue.release(address)

    def wait_for_layer_load(self, layer: str) -> None:
        """Returns at once."""

    def save_kv_layer(self, states: Callable[[int], Exported | SequenceState]) -> None:
        """Saves this step's states, of all layers; ``states`` gives each request's, or a call that waits for it."""
        for request in self._meta.saves:
            state, ended = states(request.number), threading.Event()
            self._saving.append(ended)

            def saved(params: dict[str, Any] | None, request: ScheduledRequest = request, ended: Any = ended) -> bool:
                if params is not None:
                    self._params[request.number] = params
                ended.set()
                return True

            exported = (lambda state=state: state) if isinstance(state, SequenceState) else state
            self._queue.save(request.number, request, exported, saved)

    def wait_for_save(self) -> None:
        """Returns once all saves of the step can be loaded elsewhere, or have failed."""
        for ended in self._saving:
            ended.wait()
        self._saving = []

    def get_finished(self) -> tuple[set[int], set[int]]:
        """Requests whose saved states may be freed (always none: a save copies), and those whose loads have ended."""
        with self._lock:
            received, self._received = self._received, set()
        return set(), received

    def shutdown(self) -> None:
        self._queue.close()

    def _loaded(self, number: int) -> Callable[[TransferredState | None], None]:
        def done(transferred: TransferredState | None) -> None:
            with self._lock:
                if transferred is not None:
                    self._buffers[number] = transferred
                self._received.add(number)

        return done
