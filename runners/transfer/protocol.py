"""What an engine and a connector say to each other, and a checker of the order in which they do.

Names and meaning follow vLLM's KVConnectorBase_V1. Host 0's process calls the scheduler's side; every process calls the
worker's side once a step.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.transfer.backend import Source
from ling3export.runners.transfer.plan import Pages, port_of


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


class Slots(NamedTuple):
    """Where a sequence's state is.

    Attributes:
        slot: Of its recurrent and conv state.
        pages: Of its latents, block after block.
        computed: How many tokens' state was there before anything was loaded.
        own: The sequence's own arrays, of one slot and as many pages, where it does not lie in the registered pools;
            ``slot`` then only names it.
    """

    slot: int
    pages: tuple[int, ...]
    computed: int = 0
    own: Mapping[str, np.ndarray] | None = None


class Scheduled(NamedTuple):
    """A sequence in a step: behind it the state of its first ``tokens`` tokens is there."""

    request: Request
    slots: Slots
    tokens: int


class Remote(NamedTuple):
    """Where a prefill instance offers a sequence's state: of each rank at ``port + 2 rank + 1``.

    Attributes:
        host: Its name or address.
        port: Its base port.
        transfer: The transfer's id.
        pages: Where the instance has the blocks.
        lease: Seconds that it keeps them, unless that is renewed; None where it does not say, as older ones do not.
    """

    host: str
    port: int
    transfer: str
    pages: Pages
    lease: float | None = None

    def sources(self) -> list[Source]:
        """Where each rank is asked."""
        return [Source(self.host, self.port + port_of(rank), self.transfer) for rank in range(self.pages.tp)]


class Part(NamedTuple):
    """Blocks of a sequence and the snapshot behind the last of them.

    Attributes:
        request_id: Whose.
        slots: Where they are, or belong.
        hashes: Of all blocks up to the snapshot.
        first: The first block that is meant.
        tokens: Up to the snapshot.
        remote: Where it is loaded from; None where it is found by name.
        transfer: The id under which it is offered; empty where it is found by name.
        prompt: Those tokens.
        parallel: Whether it loads while other sequences go on.
    """

    request_id: str
    slots: Slots
    hashes: tuple[bytes, ...]
    first: int
    tokens: int
    remote: Remote | None = None
    transfer: str = ""
    prompt: tuple[int, ...] = ()
    parallel: bool = False


class Meta(NamedTuple):
    """What the worker's side does in one step: loads, saves, and transfers that are given back."""

    loads: tuple[Part, ...] = ()
    saves: tuple[Part, ...] = ()
    refused: tuple[Remote, ...] = ()


class Stored(NamedTuple):
    """Blocks of a sequence can be found by others now.

    Attributes:
        hashes: Their names, one behind the other.
        parent: The name before them; None for the first blocks of a sequence.
        tokens: Theirs.
        block: Tokens a block.
        salt: Who gives another one finds none of them.
        state: Whether the recurrent state behind each is meant, and not its latents.
    """

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    block: int
    salt: str = ""
    state: bool = False


class Removed(NamedTuple):
    """Blocks cannot be found any more; with ``state`` it is the recurrent states behind them."""

    hashes: tuple[bytes, ...]
    state: bool = False


class Cleared(NamedTuple):
    """Nothing can be found any more."""


Event = Stored | Removed | Cleared


class Connector(Protocol):
    """Both sides of a connector.

    Attributes:
        groups: How many groups of layers there are.
        carried: Payload bytes of each whole load by its request, until somebody takes them.
    """

    groups: int
    carried: dict[str, int]

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens behind the first ``computed`` can be loaded, None to ask again; and whether they load while
        other sequences go on. Changes nothing."""

    def update_state_after_alloc(self, request: Request, slots: Slots, external: int) -> None:
        """Tells where ``external`` tokens are to be loaded to; 0 where none are. May come twice."""

    def build_connector_meta(self, plan: Sequence[Scheduled]) -> Meta:
        """What this step's workers do; forgets it for the next step, and changes nothing of the plan."""

    def request_finished(self, request: Request, slots: Slots) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's state must stay for now, and what its client is given. Once, before it is freed."""

    def take_events(self) -> list[Stored | Removed]:
        """What others can find, and what not any more, since the last call."""

    def register_state_buffers(self, buffers: Mapping[str, np.ndarray]) -> None:
        """Tells where the pools of this rank are, by the name of the piece, [layers, slots or pages, ...]."""

    def bind_connector_metadata(self, meta: Meta) -> None:
        """Begins a step."""

    def clear_connector_metadata(self) -> None:
        """Ends it."""

    def start_load(self, ctx: object) -> None:
        """Begins this step's loads; ``ctx`` is what the engine knows of the step."""

    def wait_for_layer_load(self, group: int) -> None:
        """Waits for the loads of a group of layers that sequences of this step need."""

    def save_layer(self, group: int, state: Mapping[str, np.ndarray], meta: Meta) -> None:
        """Takes the pools of a group's layers, which its part of the step has written."""

    def wait_for_save(self) -> None:
        """Returns once the pools may be written again, and all saves can be found."""

    def get_finished(self, ids: set[str]) -> tuple[set[str], set[str]]:
        """Of the finished requests ``ids`` and those before, whose state was sent; and whose loads have ended."""

    def get_load_errors(self) -> set[int]:
        """Slots whose loads failed since the last call: what they hold counts for nothing."""

    def handle_preemptions(self, ids: set[str]) -> None:
        """Loads of these requests write nothing from now on, and what is being saved of them is given up."""

    def shutdown(self) -> None:
        """Ends everything that runs."""


class Checked:
    """A connector whose calls are checked.

    Args:
        connector: Who does the work.

    Raises:
        ProtocolError: In any call that is out of order.
    """

    def __init__(self, connector: Connector) -> None:
        self._connector, self.groups = connector, connector.groups
        self._meta: Meta | None = None
        self._unsaved = False
        self._left: set[int] = set()  # groups that have not been saved in this step
        self._finished: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def request_finished(self, request: Request, slots: Slots) -> tuple[bool, dict[str, Any] | None]:
        """Comes once for a request."""
        self._check(request.request_id not in self._finished, f"one request_finished of {request.request_id}", "two")
        self._finished.add(request.request_id)
        return self._connector.request_finished(request, slots)

    def bind_connector_metadata(self, meta: Meta) -> None:
        """Comes once a step."""
        self._check(self._meta is None, "clear_connector_metadata before the next step", "another bind")
        self._meta, self._unsaved = meta, bool(meta.saves)
        self._left = {*range(self.groups if meta.saves else 0)}
        self._connector.bind_connector_metadata(meta)

    def clear_connector_metadata(self) -> None:
        """Comes behind the saves."""
        self._check(not self._unsaved, "wait_for_save before clear_connector_metadata", "none")
        self._meta = None
        self._connector.clear_connector_metadata()

    def start_load(self, ctx: object) -> None:
        """Comes within a step."""
        self._check(self._meta is not None, "bind_connector_metadata before start_load", "none")
        self._connector.start_load(ctx)

    def wait_for_layer_load(self, group: int) -> None:
        """Names a group that there is."""
        self._check_group(group)
        self._connector.wait_for_layer_load(group)

    def save_layer(self, group: int, state: Mapping[str, np.ndarray], meta: Meta) -> None:
        """Comes within a step, with its meta."""
        self._check(self._meta is not None, "bind_connector_metadata before save_layer", "none")
        self._check(meta is self._meta, "save_layer with the meta of its step", "another one")
        self._check_group(group)
        self._check(not meta.saves or group in self._left, f"one save_layer of group {group} a step", "two")
        self._left.discard(group)
        self._connector.save_layer(group, state, meta)

    def handle_preemptions(self, ids: set[str]) -> None:
        """Comes at any time; a step whose saves are all given up saves no further group."""
        if self._meta is not None and ids >= {part.request_id for part in self._meta.saves}:
            self._left.clear()
        self._connector.handle_preemptions(ids)

    def wait_for_save(self) -> None:
        """Comes behind the step's last save."""
        self._check(not self._left, "save_layer of every group before wait_for_save", f"none of {sorted(self._left)}")
        self._connector.wait_for_save()
        self._unsaved = False

    def _check_group(self, group: int) -> None:
        self._check(0 <= group < self.groups, f"a group from 0 to {self.groups - 1}", f"group {group}")

    @staticmethod
    def _check(right: bool, expected: str, found: str) -> None:
        if not right:
            raise ProtocolError(f"connector: expected {expected}, found {found}")
