"""The connector of host arrays: what is saved into a backend and loaded from it, for any TP on both sides.

Two ways lead to a state. A prompt's beginning is found by its tokens, where an earlier sequence was saved (``every``).
And a prefill instance that was asked for it (``do_remote_decode``) offers the whole prompt's state under an id, which
its answer carries to a decode instance (``do_remote_prefill``). Whatever fails is a prefill of one's own: nothing that
was loaded counts, the slot is told by ``get_load_errors``, and the reason is counted.
"""

import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.transfer.backend import Backend, Presence
from ling3export.runners.transfer.objects import Key, Kind, Layout, StateMismatch, check_same_state, prefix_hashes
from ling3export.runners.transfer.plan import Pages, heads_of, port_of
from ling3export.runners.transfer.protocol import (
    Connector,
    Meta,
    Part,
    Remote,
    Removed,
    Request,
    Scheduled,
    Slots,
    Stored,
)
from ling3export.runners.transfer.worker import Worker

TRANSFER = re.compile("[0-9a-f]{32}")
REMEMBERED = 1 << 16  # transfers that cannot be used again
LONGEST = 1e6  # seconds of a lease


class _UnusableError(Exception):
    """What a request brought cannot be used; ``reason`` is counted, and ``remote`` is told so where it is known."""

    def __init__(self, reason: str, text: str, remote: Remote | None = None) -> None:
        super().__init__(text)
        self.reason, self.remote = reason, remote


class HostConnector(Worker, Connector):
    """Moves state between numpy arrays and a backend; one for each rank.

    Args:
        backend: What carries objects.
        layout: What they hold.
        description: What decides whether states fit.
        abi: Its digest, with which names begin (``state_abi``).
        rank: Which rank this is.
        tp: How many ranks the instance has.
        address: Host and base port of the instance, as others reach it; rank r is at the base port + 2 r + 1.
        deadline: Seconds that a load may take.
        every: Save a prompt's state every so many tokens, whole blocks; 0 saves only what is asked for.
        striped: Whether pages are striped over the ranks.
        groups: The layers of each kind in each group.
        report: Gets a line when another instance's state does not fit.
        lease: Seconds that the backend keeps what is offered; None where it does not let go of it, or does not say.

    Attributes:
        groups: How many groups of layers there are.
        counts: Why transfers were refused, by reason; the backend counts the rest.

    Raises:
        Ling3Error: The TP does not divide the heads, or ``every`` is no multiple of a block.
    """

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        description: Mapping[str, object],
        abi: str,
        *,
        rank: int,
        tp: int,
        address: tuple[str, int],
        deadline: float,
        every: int,
        striped: bool,
        groups: Sequence[Mapping[Kind, range]],
        report: Callable[[str], None],
        lease: float | None = None,
    ) -> None:
        if every % layout.block:
            raise Ling3Error(f"connector: expected a multiple of {layout.block} tokens between saves, found {every}")
        super().__init__(backend, layout, abi, rank=rank, tp=tp, deadline=deadline, striped=striped, groups=groups)
        self._description, self._address, self._every, self._report = description, address, every, report
        self._engine, self._lease = secrets.token_hex(8), lease
        self.counts: Counter[str] = self._renewals.counts
        self._loads: dict[str, Part] = {}
        self._refused: list[Remote] = []
        self._used: OrderedDict[str, None] = OrderedDict()  # transfers, the last ones

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        try:
            if self._remote(request) is not None:
                return max(0, len(request.prompt_ids) - computed), True
        except _UnusableError:
            return 0, False
        size = self._layout.block
        hashes = self._hashes(request, len(request.prompt_ids) - 1)
        for count in range((len(request.prompt_ids) - 1) // size, computed // size, -1):
            wanted = [Key(self._abi, Kind.SNAPSHOT, hashes[count - 1], self._heads)]
            wanted += [Key(self._abi, Kind.BLOCK, each, (0, 1), size) for each in hashes[computed // size : count]]
            found = {self._backend.look(key) for key in wanted}
            if found == {Presence.READY}:
                return count * size - computed, False
            if Presence.ABSENT not in found:
                return None, False
        return 0, False

    def update_state_after_alloc(self, request: Request, slots: Slots, external: int) -> None:
        try:
            remote = self._remote(request)
        except _UnusableError as error:
            if error.reason == "used" and not external:
                return None  # it comes again once the load has ended
            self.counts[error.reason] += 1
            self._refused += () if error.remote is None else (error.remote,)
            return self._report(f"{request.request_id}: {error}")
        if remote is not None:
            self._used[remote.transfer] = None
            if len(self._used) > REMEMBERED:
                self._used.popitem(last=False)
        if external:
            end, first = slots.computed + external, slots.computed // self._layout.block
            hashes = tuple(self._hashes(request, end))
            self._loads[request.request_id] = Part(
                request.request_id, slots, hashes, first, end, remote, parallel=remote is not None
            )
        elif remote is not None:
            self._refused.append(remote)

    def build_connector_meta(self, plan: Sequence[Scheduled]) -> Meta:
        saves = []
        for request, slots, tokens in plan:
            wanted = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
            whole = wanted and tokens == len(request.prompt_ids)
            if whole or (self._every and tokens and tokens % self._every == 0):
                transfer = secrets.token_hex(16) if whole else ""
                if whole:
                    self._offered[request.request_id] = transfer
                hashes = tuple(self._hashes(request, tokens))
                prompt = tuple(request.prompt_ids[:tokens])
                saves.append(Part(request.request_id, slots, hashes, 0, tokens, None, transfer, prompt))
        meta = Meta(tuple(self._loads.values()), tuple(saves), tuple(self._refused))
        self._loads, self._refused = {}, []
        return meta

    def request_finished(self, request: Request, slots: Slots) -> tuple[bool, dict[str, Any] | None]:
        transfer = self._offered.get(request.request_id)
        if transfer is None:
            return False, None
        host, port = self._address
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": port,
            "remote_block_ids": list(slots.pages),
            "tp_size": self._tp,
            "striped": self._striped,
            "transfer_id": transfer,
            "prompt_digest": self._hashes(request, len(request.prompt_ids))[-1].hex(),
            "state": dict(self._description),
            **({} if self._lease is None else {"lease": self._lease}),
        }

    def take_events(self) -> list[Stored | Removed]:
        removed, self._backend.removed = self._backend.removed, []
        gone = tuple(self._stored.pop(name) for name in removed if name in self._stored)
        found, self._events = self._events + ([Removed(gone)] if gone else []), []
        return found

    def _hashes(self, request: Request, tokens: int) -> list[bytes]:
        return prefix_hashes(self._abi, request.cache_salt, request.prompt_ids[:tokens], self._layout.block)

    def _remote(self, request: Request) -> Remote | None:
        """Where a request's state is offered; None where it brought nothing.

        Raises:
            _UnusableError: What it brought is of another prompt or artifact, was used before, or has another form.
        """
        given = request.kv_transfer_params or {}
        if not given.get("do_remote_prefill"):
            return None
        try:
            tp, numbers, transfer = given["tp_size"], given["remote_block_ids"], given["transfer_id"]
            host, port, digest = given["remote_host"], given["remote_port"], given["prompt_digest"]
            right = isinstance(host, str) and type(port) is int and 0 < port + port_of(tp) < 1 << 16
            right = right and isinstance(numbers, list) and all(type(n) is int and n > 0 for n in numbers)
            right = right and len(numbers) == -(-len(request.prompt_ids) // self._layout.block)
            right = right and isinstance(given["state"], Mapping)
            lease = given.get("lease")
            right = right and (lease is None or (type(lease) in (int, float) and 0 < lease <= LONGEST))
            if not right or not TRANSFER.fullmatch(transfer) or type(given["striped"]) is not bool:
                raise TypeError
            heads_of(0, self._layout.heads, tp)
        except (Ling3Error, LookupError, TypeError, AttributeError, ValueError) as error:
            text = "kv_transfer_params: expected those of a prefill instance, found others"
            raise _UnusableError("bad_params", text) from error
        remote = Remote(host, port, transfer, Pages(numbers, tp, given["striped"]), lease)
        try:
            check_same_state(self._description, given["state"])
        except StateMismatch as error:
            raise _UnusableError("other_state", error.message, remote) from error
        if digest != self._hashes(request, len(request.prompt_ids))[-1].hex():
            text = "kv_transfer_params: expected the digest of this prompt, found another"
            raise _UnusableError("other_prompt", text, remote)
        if transfer in self._used:
            raise _UnusableError("used", "kv_transfer_params: expected a transfer of its own, found one used before")
        return remote
