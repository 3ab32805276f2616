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
from time import perf_counter as now
from typing import Any, NamedTuple, Protocol

import numpy as np

from ling3export.artifacts.records import sha256_of
from ling3export.artifacts.schema import Manifest, Target
from ling3export.dtypes import BY_NAME
from ling3export.errors import ArtifactError, Ling3Error
from ling3export.runners.load.kept import PAGED, Kept, Whole
from ling3export.runners.transfer.backend import Backend
from ling3export.runners.transfer.connector import HostConnector
from ling3export.runners.transfer.folder import Folder
from ling3export.runners.transfer.objects import Kind, Layout, Piece
from ling3export.runners.transfer.options import Transfer
from ling3export.runners.transfer.plan import port_of
from ling3export.runners.transfer.protocol import Connector, Scheduled, Slots
from ling3export.runners.transfer.shm import Shm
from ling3export.runners.transfer.tcp import Tcp

LOOK = 0.001  # seconds between two looks for loads that have ended
IDLE = 1.0  # and for leases that are over
MOST_LIKELY = 20  # tokens beside the one that was sampled

Token = tuple[int, tuple[float, tuple[tuple[int, float], ...]] | None]  # and what request.Likely says of it


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


class Carried(NamedTuple):
    """A sequence that comes with its state.

    Attributes:
        tokens: Those that were generated elsewhere, each with what ``request.Likely`` says of it, or None.
        stored: How many positions the state is of.
        state: What ``ModelRunner.store`` takes.
        phases: Milliseconds that it spent elsewhere, by what was done; and since it arrived here.
    """

    tokens: tuple[Token, ...]
    stored: int
    state: Whole
    phases: Mapping[str, float]


class _Save(NamedTuple):
    ticket: Ticket
    fetched: Callable[[], Kept]
    done: Callable[[dict[str, Any] | None], None]


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
        vocab_size: Token ids are below it.
        report: Told of what failed.

    Attributes:
        counts: What happened how often, by name.
    """

    def __init__(
        self, connector: Connector, backend: Backend, layout: Layout, vocab_size: int, report: Callable[[str], None]
    ) -> None:
        self._connector, self._backend, self._layout = connector, backend, layout
        self._vocab_size, self._report = vocab_size, report
        self.counts: Counter[str] = Counter()
        self._jobs: queue.SimpleQueue[_Save | _Load | str | None] = queue.SimpleQueue()
        self._loads: dict[str, tuple[_Load, Slots, Token]] = {}
        self._serial = 0
        self._thread = threading.Thread(target=self._run, name="ling3-exchange", daemon=True)
        self._thread.start()

    def save(
        self, number: int, request: Asked, fetched: Callable[[], Kept], done: Callable[[dict[str, Any] | None], None]
    ) -> None:
        """Offers the state behind a prompt to whoever ``done`` tells of it.

        Args:
            number: The request's.
            request: What was asked.
            fetched: Waits for the state.
            done: Gets what the client is given, None where that failed; in the exchange's thread.
        """
        self._jobs.put(_Save(_ticket(number, request), fetched, done))

    def load(self, number: int, request: Asked, done: Callable[[Carried | None], None]) -> None:
        """Takes the state that a request's ``kv_transfer_params`` name; ``done`` gets None where that fails."""
        self._jobs.put(_Load(_ticket(number, request), now(), done))

    def drop(self, number: int) -> None:
        """Nobody waits for a request's load any more."""
        self._jobs.put(str(number))

    def record(self) -> dict[str, int]:
        """All counts, as JSON."""
        return dict(sorted((self.counts + self._backend.counts + self._connector.counts).items()))  # type: ignore[attr-defined]

    def close(self) -> None:
        """Ends the thread; what has not been carried is not. May be called again."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

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
                    self._connector.handle_preemptions({job})
                elif isinstance(job, _Save):
                    self._save(job)
                else:
                    self._load(job)
                self._finish(set())
        finally:
            self._connector.shutdown()

    def _step(self, plan: list[Scheduled]) -> None:
        """One step of the connector: begins loads, and writes what is to be saved."""
        connector = self._connector
        meta = connector.build_connector_meta(plan)
        connector.bind_connector_metadata(meta)
        connector.start_load(None)
        if meta.saves:
            connector.save_layer(0, {}, meta)
            connector.wait_for_save()
        connector.clear_connector_metadata()

    def _save(self, job: _Save) -> None:
        params = None
        try:
            own = self._canonical(job.fetched().whole())
            pages = tuple(range(1, own["mla.latent"].shape[1]))
            slots = Slots(0, pages, own=own)
            self._step([Scheduled(job.ticket, slots, len(job.ticket.prompt_ids))])
            _, params = self._connector.request_finished(job.ticket, slots)
            self.counts["saved"] += 1
        except Exception as error:
            self.counts["save_failed"] += 1
            self._report(f"transfer of {job.ticket.request_id}: expected its state to be saved, found {error}")
        job.done(params)
        self._finish({job.ticket.request_id})

    def _load(self, job: _Load) -> None:
        ticket = job.ticket
        try:
            tail = self._tail(ticket.kv_transfer_params or {})
        except (LookupError, TypeError, ValueError):
            self.counts["bad_params"] += 1
            return job.done(None)
        count = -(-len(ticket.prompt_ids) // self._layout.block)
        self._serial += 1
        slots = Slots(self._serial, tuple(range(1, count + 1)), own=self._empty(count))
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
        for request_id in received & self._loads.keys():
            job, slots, tail = self._loads.pop(request_id)
            if slots.slot in errors:
                self.counts["load_failed"] += 1
                job.done(None)
                continue
            self.counts["loaded"] += 1
            params = job.ticket.kv_transfer_params or {}
            assert slots.own is not None
            phases = {**_phases(params.get("phases_ms")), "transfer": 1e3 * (now() - job.begun)}
            state = self._stored(slots.own)
            job.done(Carried((tail,), len(job.ticket.prompt_ids), state, phases))

    def _tail(self, params: Mapping[str, Any]) -> Token:
        """The token behind the prompt, as another process sampled it.

        Raises:
            LookupError, TypeError, ValueError: It has another form.
        """
        token, likely = params["tail"]["token"], params["tail"].get("likely")
        if type(token) is not int or not 0 <= token < self._vocab_size:
            raise ValueError
        if likely is not None:
            top = [(int(each), float(logprob)) for each, logprob in likely[1]]
            likely = float(likely[0]), tuple(top[:MOST_LIKELY])
        return token, likely

    def _empty(self, count: int) -> dict[str, np.ndarray]:
        """A sequence's own arrays: one slot, and pages 1 to ``count``."""
        found = {}
        for piece in self._layout.pieces:
            rows = count + 1 if piece.kind == Kind.BLOCK else 1
            shape = self._layout.shape(piece, (0, self._layout.heads), self._layout.block)
            found[piece.name] = np.zeros((self._layout.layers[piece.kind], rows, *shape), BY_NAME[piece.dtype].numpy)
        return found

    def _canonical(self, whole: Whole) -> dict[str, np.ndarray]:
        """A sequence's own arrays, filled. A row of the conv state has its taps first, in a program's order."""
        latent, conv = whole.arrays[PAGED], whole.arrays["kda_conv"]
        layers, heads, _ = conv.shape
        key = whole.arrays["kda_recurrent"].shape[2]
        own = self._empty(latent.shape[1])
        own["mla.latent"][:, 1:] = latent
        own["kda.recurrent"][:, 0] = whole.arrays["kda_recurrent"]
        own["kda.conv"][:, 0] = conv.reshape(layers, heads, -1, 3, key).transpose(0, 3, 1, 4, 2)
        return own

    @staticmethod
    def _stored(own: Mapping[str, np.ndarray]) -> Whole:
        conv = own["kda.conv"][:, 0].transpose(0, 2, 4, 1, 3)
        return Whole({
            PAGED: own["mla.latent"][:, 1:], "kda_recurrent": own["kda.recurrent"][:, 0],
            "kda_conv": conv.reshape(*conv.shape[:2], -1),
        })  # fmt: skip


def _phases(given: object) -> dict[str, float]:
    """Milliseconds by name that another process measured; nothing where it is of another form."""
    if not isinstance(given, Mapping):
        return {}
    return {
        name: float(each) for name, each in given.items()
        if isinstance(name, str) and re.fullmatch("[a-z]{1,20}", name) and type(each) in (int, float)
    }  # fmt: skip


def layout_of(target: Target) -> Layout:
    """What the objects of a target's sequences hold.

    Raises:
        ArtifactError: It has no programs that move states.
    """
    paddings = target.paddings("fetch")
    if not paddings:
        raise ArtifactError(
            "transfer: expected the programs fetch and store, found none",
            "build the artifact again with --snapshots N",
        )
    leaves = {leaf.name: leaf for leaf in target.cells[f"fetch@{paddings[0]}"].outputs if leaf.group == "out"}
    latent, recurrent, conv = (leaves[name] for name in (PAGED, "kda_recurrent", "kda_conv"))
    heads, key = recurrent.shape[1:3]
    return Layout(
        (
            Piece("mla.latent", Kind.BLOCK, (latent.shape[3],), latent.dtype),
            Piece("kda.recurrent", Kind.SNAPSHOT, tuple(recurrent.shape[1:]), recurrent.dtype, 0),
            Piece("kda.conv", Kind.SNAPSHOT, (3, heads, key, conv.shape[2] // 3 // key), conv.dtype, 1),
        ),
        {Kind.BLOCK: latent.shape[0], Kind.SNAPSHOT: recurrent.shape[0]}, heads, target.state.page_size,
    )  # fmt: skip


def description_of(manifest: Manifest, target: Target) -> dict[str, object]:
    """What decides whether states fit, in few words: they name what differs, ``state_abi`` decides."""
    config = {name: value for name, value in manifest.config.items() if not name.endswith("token_id")}
    weights = {name: tensor.sha256 for name, tensor in manifest.weights.index.items()}
    return {
        "state_abi": target.state_abi, "config": sha256_of(config)[:16], "weights": sha256_of(weights)[:16],
        "dtypes": [piece.dtype for piece in layout_of(target).pieces], "format": 1,
    }  # fmt: skip


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
    groups = [{kind: range(count) for kind, count in layout.layers.items()}]
    try:
        connector = HostConnector(
            backend, layout, description_of(manifest, target), target.state_abi, rank=0, tp=1, address=address,
            deadline=transfer.deadline, every=0, striped=False, groups=groups, report=report,
        )  # fmt: skip
    except Ling3Error:
        backend.close()
        raise
    return Exchange(connector, backend, layout, manifest.vocab_size, report)
