"""States of an engine's sequences on their way to and from a connector, in a thread of their own.

The engine's thread only dispatches: what leaves is fetched to host memory and written here, and what comes is in host
memory, whole and checked, before the engine hears of it. The connector sees one rank of one: ``fetch`` and ``store``
give and take the order of the whole sequence, whatever the target's TP.
"""

import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from time import perf_counter as now
from typing import Any, NamedTuple, Protocol

from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.errors import Ling3Error
from ling3export.runners.load.kept import Kept, Whole
from ling3export.runners.load.segments import Hand, Leaving
from ling3export.runners.state.form import (
    Carried,
    Token,
    canonical,
    description_of,
    empty,
    fill,
    layer_groups,
    layout_of,
    root_of,
    storable,
    token_of,
)
from ling3export.runners.transfer.backend import Backend, Source
from ling3export.runners.transfer.connector import HostConnector
from ling3export.runners.transfer.folder import Folder
from ling3export.runners.transfer.objects import Kind, Layout
from ling3export.runners.transfer.options import Transfer
from ling3export.runners.transfer.plan import port_of
from ling3export.runners.transfer.protocol import Connector, Scheduled, Slots
from ling3export.runners.transfer.shm import Shm
from ling3export.runners.transfer.tcp import Tcp

LOOK = 0.001  # seconds between two looks for loads that have ended
IDLE = 1.0  # and for leases that are over
LAST = 60.0  # that the thread may take for its last job


class Asked(Protocol):
    """What matters here of a request."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt."""

    @property
    def cache_salt(self) -> str:
        """Who gives another one shares nothing."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What it has to say of a transfer."""


@dataclass
class Ticket:
    """A request as connectors know it."""

    request_id: str
    prompt_ids: Sequence[int]
    cache_salt: str
    kv_transfer_params: Mapping[str, Any] | None


def _ticket(number: int, request: Asked) -> Ticket:
    return Ticket(str(number), request.prompt_ids, request.cache_salt, request.kv_transfer_params)


class _Begun(NamedTuple):
    leaving: list[Leaving]
    groups: "queue.SimpleQueue[list[Callable[[], Kept]] | None]"


class _Save(NamedTuple):
    ticket: Ticket
    fetched: Callable[[], Kept | Whole] | None
    done: Callable[[dict[str, Any] | None], bool]


class _Load(NamedTuple):
    ticket: Ticket
    begun: float
    done: Callable[[Carried | None], None]


class Exchange:
    """Gives states to a connector, and takes them from it.

    Args:
        connector: Who carries them; one rank of one.
        backend: What the connector uses, for its counts.
        layout: What objects hold.
        groups: The layers of each of the connector's groups.
        vocab_size: Token ids are below it.
        report: Told of what failed.

    Attributes:
        counts: What happened how often, by name.
    """

    def __init__(
        self,
        connector: Connector,
        backend: Backend,
        layout: Layout,
        groups: Sequence[Mapping[Kind, range]],
        vocab_size: int,
        report: Callable[[str], None],
    ) -> None:
        self._groups = groups
        self._given: dict[str, tuple[Ticket, Slots]] = {}  # saved already, of requests that have not ended
        self._connector, self._backend, self._layout = connector, backend, layout
        self._vocab_size, self._report = vocab_size, report
        self.counts: Counter[str] = Counter()
        self._jobs: queue.SimpleQueue[_Begun | _Save | _Load | str | None] = queue.SimpleQueue()
        self._loads: dict[str, tuple[_Load, Slots, Token]] = {}
        self._serial = 0
        self._thread = threading.Thread(target=self._run, name="ling3-exchange", daemon=True)
        self._thread.start()

    def save(
        self,
        number: int,
        request: Asked,
        fetched: Callable[[], Kept | Whole] | None,
        done: Callable[[dict[str, Any] | None], bool],
    ) -> None:
        """Offers the state behind a prompt to whoever ``done`` tells of it.

        Args:
            number: The request's.
            request: What was asked.
            fetched: Waits for the state; None where it was given to what :meth:`begin` returned.
            done: Gets what the client is given, None where that failed; in the exchange's thread. Says whether the
                client is still there: else the state is freed.
        """
        self._jobs.put(_Save(_ticket(number, request), fetched, done))

    def begin(self, leaving: list[Leaving]) -> Hand:
        """Saves the states of sequences group by group, in a step whose groups are being computed.

        Returns:
            What takes the states of each group in order, of all sequences together, and then None.
        """
        groups: queue.SimpleQueue[list[Callable[[], Kept]] | None] = queue.SimpleQueue()
        self._jobs.put(_Begun(leaving, groups))
        return groups.put

    def load(self, number: int, request: Asked, done: Callable[[Carried | None], None]) -> None:
        """Takes the state that a request's ``kv_transfer_params`` name; ``done`` gets None where that fails."""
        self._jobs.put(_Load(_ticket(number, request), now(), done))

    def drop(self, number: int) -> None:
        """Nobody waits for a request's load any more, or will take its state."""
        self._jobs.put(str(number))

    def record(self) -> dict[str, int]:
        """All counts, as JSON."""
        counted = (self.counts, self._backend.counts, self._connector.counts)  # type: ignore[attr-defined]
        return dict(sorted(sum((each.copy() for each in counted), Counter[str]()).items()))

    def close(self) -> None:
        """Ends the thread; what has not been carried is not. May be called again.

        A thread that waits for a device which does not answer is left.
        """
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(LAST)

    def _run(self) -> None:
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=LOOK if self._loads else IDLE)
                except queue.Empty:
                    self._finish(set())
                    continue
                if job is None:
                    return
                if isinstance(job, str):
                    self._drop(job)
                elif isinstance(job, _Begun):
                    self._give(job)
                elif isinstance(job, _Save):
                    self._save(job)
                else:
                    self._load(job)
                self._finish(set())
        finally:
            self._connector.shutdown()

    def _step(self, plan: list[Scheduled], group_done: Callable[[int], None] | None = None) -> None:
        """One step of the connector: begins loads, and writes what is to be saved.

        ``group_done`` waits for what is saved of a group; without it everything is there, and all waits come first.
        """
        connector, groups = self._connector, range(self._connector.groups)
        meta = connector.build_connector_meta(plan)
        connector.bind_connector_metadata(meta)
        try:
            connector.start_load(None)
            for group in groups:
                connector.wait_for_layer_load(group)
                if group_done is not None:
                    group_done(group)
                    connector.save_layer(group, {}, meta)
            if group_done is None and meta.saves:
                for group in groups:
                    connector.save_layer(group, {}, meta)
        except BaseException:
            connector.handle_preemptions({part.request_id for part in meta.saves})
            raise
        finally:
            if meta.saves:
                connector.wait_for_save()
            connector.clear_connector_metadata()

    def _give(self, job: _Begun) -> None:
        """A step of sequences whose groups of layers come one after the other."""
        tickets = [_ticket(each.number, each.request) for each in job.leaving]
        slots = [
            Slots(0, tuple(range(1, len(each.pages) + 1)), own=empty(self._layout, len(each.pages)))
            for each in job.leaving
        ]

        def group_done(group: int) -> None:
            found = job.groups.get()
            if found is None:
                raise Ling3Error(f"expected {len(self._groups)} groups of layers, found {group}")
            for each, fetched in zip(slots, found, strict=True):
                assert each.own is not None
                fill(self._layout, each.own, fetched().whole(), self._groups[group])
            self.counts["groups_saved"] += len(found)

        pairs = list(zip(tickets, slots, strict=True))
        try:
            self._step([Scheduled(*each, len(each[0].prompt_ids)) for each in pairs], group_done)
            self._given |= {ticket.request_id: (ticket, each._replace(own=None)) for ticket, each in pairs}
        except Exception as error:
            self.counts["save_failed"] += len(tickets)
            names = ", ".join(ticket.request_id for ticket in tickets)
            self._report(f"transfer of {names}: expected its state to be saved by group, found {error}")

    def _drop(self, request_id: str) -> None:
        """Frees what was saved of a request whose client will not hear of it."""
        self._connector.handle_preemptions({request_id})
        if request_id not in self._given:
            return
        _, params = self._connector.request_finished(*self._given.pop(request_id))
        if params is not None:
            self._take_back(params)
        self._finish({request_id})

    def _take_back(self, params: Mapping[str, Any]) -> None:
        """Frees what was offered, as whoever wants it no more does."""
        source = Source(params["remote_host"], params["remote_port"] + port_of(0), params["transfer_id"])
        self._backend.fetch([], source, monotonic() + IDLE)

    def _save(self, job: _Save) -> None:
        params = None
        try:
            if job.fetched is None:
                if job.ticket.request_id not in self._given:  # it failed, which was reported
                    job.done(None)
                    return
                _, slots = self._given.pop(job.ticket.request_id)
            else:
                own = canonical(self._layout, job.fetched().whole())
                slots = Slots(0, tuple(range(1, own["mla.latent"].shape[1])), own=own)
                self._step([Scheduled(job.ticket, slots, len(job.ticket.prompt_ids))])
            _, params = self._connector.request_finished(job.ticket, slots)
            self.counts["saved"] += 1
        except Exception as error:
            self.counts["save_failed"] += 1
            self._report(f"transfer of {job.ticket.request_id}: expected its state to be saved, found {error}")
        if not job.done(params) and params is not None:
            self._take_back(params)
        self._finish({job.ticket.request_id})

    def _load(self, job: _Load) -> None:
        ticket = job.ticket
        try:
            said = (ticket.kv_transfer_params or {})["tail"]
            tail = token_of(said["token"], said.get("likely"), self._vocab_size)
        except (LookupError, TypeError, ValueError, AttributeError):
            self.counts["bad_params"] += 1
            self._connector.update_state_after_alloc(ticket, Slots(0, ()), 0)  # the giver is told, if it can be
            self._step([])
            return job.done(None)
        count = -(-len(ticket.prompt_ids) // self._layout.block)
        self._serial += 1
        slots = Slots(self._serial, tuple(range(1, count + 1)), own=empty(self._layout, count))
        external, _ = self._connector.get_num_new_matched_tokens(ticket, 0)
        self._connector.update_state_after_alloc(ticket, slots, external or 0)
        if external:
            self._loads[ticket.request_id] = job, slots, tail
        self._step([])
        if not external:
            self.counts["not_loaded"] += 1
            job.done(None)

    def _finish(self, ids: set[str]) -> None:
        """Tells those whose loads have ended; ``ids`` are requests whose states were offered."""
        _, received = self._connector.get_finished(ids)
        errors = self._connector.get_load_errors() if received else set()
        for request_id in received:
            nbytes = self._connector.carried.pop(request_id, 0)
            if request_id not in self._loads:
                continue
            job, slots, tail = self._loads.pop(request_id)
            if slots.slot in errors:
                self.counts["load_failed"] += 1
                job.done(None)
                continue
            self.counts["loaded"] += 1
            self.counts["loaded_bytes"] += nbytes
            params = job.ticket.kv_transfer_params or {}
            assert slots.own is not None
            phases = {**_phases(params.get("phases_ms")), "transfer": 1e3 * (now() - job.begun)}
            state = storable(slots.own)
            job.done(Carried((tail,), len(job.ticket.prompt_ids), state, phases, nbytes))


def _phases(given: object) -> dict[str, float]:
    """Milliseconds by name that another process measured; nothing where it is of another form."""
    if not isinstance(given, Mapping):
        return {}
    return {
        name: float(each)
        for name, each in given.items()
        if isinstance(name, str) and re.fullmatch("[a-z]{1,20}", name) and type(each) in (int, float)
    }


def exchange_of(manifest: Manifest, target: Target, transfer: Transfer, report: Callable[[str], None]) -> Exchange:
    """An engine's exchange.

    Raises:
        ArtifactError: The target has no programs that move states.
        TransferError: The port is taken, the folder cannot be made, or there is no shared memory.
    """
    layout, address = layout_of(target), (transfer.host, transfer.port)
    backend: Backend
    if transfer.carrier == "shm":
        backend = Shm(layout, transfer.limit, transfer.deadline, transfer.lease)
    elif transfer.carrier == "file":
        assert transfer.folder is not None
        backend = Folder(layout, transfer.folder, transfer.lease)
    else:
        port = transfer.port + port_of(0) if transfer.port else 0
        backend = Tcp(layout, transfer.limit, transfer.deadline, (transfer.host, port), transfer.secret, transfer.lease)
        address = transfer.host, backend.port - port_of(0)
    groups = layer_groups(manifest, target, layout)
    try:
        connector = HostConnector(
            backend,
            layout,
            description_of(manifest, target),
            root_of(manifest, target),
            rank=0,
            tp=1,
            address=address,
            deadline=transfer.deadline,
            every=0,
            striped=False,
            groups=groups,
            report=report,
            lease=transfer.lease,
        )
    except Ling3Error:
        backend.close()
        raise
    return Exchange(connector, backend, layout, groups, manifest.vocab_size, report)
