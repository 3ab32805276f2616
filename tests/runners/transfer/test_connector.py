"""The connector over every backend: from any TP to any other, whole or not at all; and what the checker refuses."""

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import Ling3Error, PlanError
from ling3export.foundation.processes import free_port
from ling3export.runners.transfer.connector import HostConnector
from ling3export.runners.transfer.objects import Kind
from ling3export.runners.transfer.plan import Pages, heads_of, port_of
from ling3export.runners.transfer.protocol import Checked, Meta, ProtocolError, Removed, Scheduled, Slots, Stored
from ling3export.runners.transfer.renewals import Renewals
from ling3export.runners.transfer.tcp import Tcp
from ling3export.runners.transfer.worker import THREADS
from tests.support.transfers import ABI, BACKENDS, DESCRIPTION, LAYOUT, LIMIT, backend, fresh_salt

SLOTS, PAGES = 3, 9
GROUPS = ({Kind.BLOCK: range(0, 1), Kind.SNAPSHOT: range(0, 2)}, {Kind.BLOCK: range(1, 2), Kind.SNAPSHOT: range(2, 3)})
WHOLE = ({Kind.BLOCK: range(2), Kind.SNAPSHOT: range(3)},)
LEASE = 60.0
TOKENS = 20  # two whole blocks, and a half


@dataclass
class Request:
    request_id: str = "r"
    prompt_ids: list[int] = field(default_factory=lambda: list(range(TOKENS)))
    cache_salt: str = field(default_factory=fresh_salt)
    kv_transfer_params: Any = None


def base_port(tp: int) -> int:
    """A base port whose ranks' ports are free."""
    while True:
        port = free_port()
        try:
            for rank in range(tp):
                Tcp(LAYOUT, LIMIT, 1.0, ("127.0.0.1", port + port_of(rank)), "", 1.0).close()
        except (Ling3Error, OverflowError):
            continue
        return port


class Instance:
    """All ranks of one instance in this process, each with pools of its own."""

    def __init__(
        self, name, folder, tp, *, every=0, striped=False, groups=WHOLE, listens=True, deadline=5.0, lease=None
    ) -> None:
        port = base_port(tp) if name == "tcp" and listens else 0
        self.tp, self.striped, self.parts, self.said = tp, striped, groups, []
        self.ranks, self.pools = [], []
        for rank in range(tp):
            if name == "tcp":
                where = port + port_of(rank) if port else 0
                end = Tcp(LAYOUT, LIMIT, deadline, ("127.0.0.1", where), "", 60.0)
            else:
                end = backend(name, folder, deadline=deadline)
            self.ranks.append(
                Checked(
                    HostConnector(
                        end,
                        LAYOUT,
                        DESCRIPTION,
                        ABI,
                        rank=rank,
                        tp=tp,
                        address=("127.0.0.1", port),
                        deadline=deadline,
                        every=every,
                        striped=striped,
                        groups=groups,
                        report=self.said.append,
                        lease=lease,
                    )
                )
            )
            heads = heads_of(rank, LAYOUT.heads, tp)
            pools = {}
            for piece in LAYOUT.pieces:
                rows = SLOTS if piece.kind == Kind.SNAPSHOT else PAGES // tp + 2 if striped else PAGES + 1
                shape = (LAYOUT.layers[piece.kind], rows, *LAYOUT.shape(piece, heads, LAYOUT.block))
                pools[piece.name] = np.zeros(shape, BY_NAME[piece.dtype].numpy)
            self.pools.append(pools)
            self.ranks[-1].register_state_buffers(pools)

    def fill(self, slots: Slots, state: dict[str, np.ndarray]) -> None:
        """Puts a whole sequence's state, [layers, ...] by name, where it belongs."""
        pages = Pages(slots.pages, self.tp, self.striped)
        for rank, pools in enumerate(self.pools):
            for piece in LAYOUT.pieces:
                if piece.kind == Kind.SNAPSHOT:
                    low, high = heads_of(rank, LAYOUT.heads, self.tp)
                    part = np.take(state[piece.name], range(low, high), piece.axis + 1)
                    pools[piece.name][:, slots.slot] = part
                    continue
                for block, number in enumerate(slots.pages):
                    if (place := pages.local(number, rank)) is not None:
                        part = state[piece.name][:, block * LAYOUT.block : (block + 1) * LAYOUT.block]
                        pools[piece.name][:, place, : part.shape[1]] = part

    def state(self, slots: Slots, tokens: int) -> dict[str, np.ndarray]:
        """The whole sequence's state; of latents that several ranks have, each has to have the same."""
        pages, found = Pages(slots.pages, self.tp, self.striped), {}
        for piece in LAYOUT.pieces:
            if piece.kind == Kind.SNAPSHOT:
                parts = [pools[piece.name][:, slots.slot] for pools in self.pools]
                found[piece.name] = np.concatenate(parts, piece.axis + 1)
                continue
            blocks = []
            for number in slots.pages:
                held = [
                    pools[piece.name][:, place]
                    for rank, pools in enumerate(self.pools)
                    if (place := pages.local(number, rank)) is not None
                ]
                assert all(np.array_equal(bits(held[0]), bits(each)) for each in held)
                blocks.append(held[0])
            found[piece.name] = np.concatenate(blocks, 1)[:, :tokens]
        return found

    def step(self, plan=()) -> Meta:
        """One step of every rank, as an engine makes it."""
        meta = self.ranks[0].build_connector_meta(plan)
        for rank in self.ranks:
            rank.bind_connector_metadata(meta)
            rank.start_load(None)
        for rank, pools in zip(self.ranks, self.pools, strict=True):
            for group, part in enumerate(self.parts):
                rank.wait_for_layer_load(group)
                if meta.saves:
                    layers = {piece.name: part[piece.kind] for piece in LAYOUT.pieces}
                    rank.save_layer(group, {name: pools[name][list(each)] for name, each in layers.items()}, meta)
            rank.wait_for_save()
            rank.clear_connector_metadata()
        return meta

    def received(self, name: str, seconds: float = 10.0) -> set[int]:
        """Waits until every rank has a load behind it; the slots that failed on any of them."""
        waiting, failed, until = set(range(self.tp)), set(), time.monotonic() + seconds
        while waiting:
            assert time.monotonic() < until
            waiting -= {rank for rank in waiting if name in self.ranks[rank].get_finished(set())[1]}
            time.sleep(0.002)
        for rank in self.ranks:
            failed |= rank.get_load_errors()
        return failed

    def close(self) -> None:
        for rank in self.ranks:
            rank.shutdown()


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def sequence(tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(seed), {}
    for piece in LAYOUT.pieces:
        shape = (LAYOUT.layers[piece.kind], *LAYOUT.shape(piece, (0, LAYOUT.heads), tokens))
        found[piece.name] = rng.standard_normal(shape, np.float32).astype(BY_NAME[piece.dtype].numpy)
    return found


def assert_same(found, wanted) -> None:
    for name, array in wanted.items():
        assert np.array_equal(bits(found[name]), bits(array)), name


@pytest.fixture
def by_hand(monkeypatch):
    """No thread renews leases: the test does."""
    monkeypatch.setattr(Renewals, "_run", lambda self: None)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def instance(stack, *given, **named) -> Instance:
    made = Instance(*given, **named)
    stack.callback(made.close)
    return made


def prefilled(stack, name, folder, tp, **named) -> tuple[Instance, Request, dict, dict]:
    """A prefill instance that has answered: also the request, its state, and what the answer carries."""
    p = instance(stack, name, folder, tp, **named)
    request, slots, state = (
        Request(kv_transfer_params={"do_remote_decode": True}),
        Slots(1, (4, 2, 7)),
        sequence(TOKENS),
    )
    p.fill(slots, state)
    assert p.ranks[0].get_num_new_matched_tokens(request, 0) == (0, False)
    p.ranks[0].update_state_after_alloc(request, slots, 0)
    p.step([Scheduled(request, slots, TOKENS)])
    delayed, params = p.ranks[0].request_finished(request, slots)
    assert not delayed
    return p, request, state, params


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("ptp", "dtp", "striped", "groups"),
    [
        (1, 1, (False, False), WHOLE),
        (2, 4, (False, True), GROUPS),
        (4, 2, (True, False), WHOLE),
        (4, 1, (True, True), GROUPS),
        (1, 4, (False, False), GROUPS),
    ],
)
def test_a_prompt_goes_from_any_tp_to_any_other(name, ptp, dtp, striped, groups, tmp_path, stack):
    p, request, state, params = prefilled(stack, name, tmp_path, ptp, striped=striped[0], groups=groups)
    d = instance(stack, name, tmp_path, dtp, striped=striped[1], listens=False)
    asked = Request("d", request.prompt_ids, request.cache_salt, params)
    slots = Slots(2, (1, 8, 3))
    assert d.ranks[0].get_num_new_matched_tokens(asked, 0) == (TOKENS, True)
    d.ranks[0].update_state_after_alloc(asked, slots, TOKENS)
    d.step()
    assert d.received("d") == set()
    assert_same(d.state(slots, TOKENS), state)
    d.ranks[0].update_state_after_alloc(asked, slots, 0)  # again, once it is loaded: nothing is given back
    assert d.ranks[0].build_connector_meta([]) == Meta()
    until, waiting = time.monotonic() + 10, set(range(ptp))
    while waiting and time.monotonic() < until:
        waiting -= {number for number in waiting if p.ranks[number].get_finished({"r"})[0] == {"r"}}
    assert not waiting
    again = d.ranks[0].get_num_new_matched_tokens(asked, 0)
    assert again == (0, False), "an id counts once"


@pytest.mark.parametrize("name", ["shm", "file"])
def test_a_beginning_that_was_saved_is_found_by_its_tokens(name, tmp_path, stack):
    p = instance(stack, name, tmp_path, 2, every=LAYOUT.block, groups=GROUPS)
    request, slots, state = Request(), Slots(1, (4, 2)), sequence(16)
    p.fill(slots, state)
    half = {key: array[:, :8] if key == "mla.latent" else array for key, array in state.items()}
    p.step([Scheduled(request, slots._replace(pages=(4,)), 8)])
    p.step([Scheduled(request, slots, 16)])
    assert p.ranks[0].request_finished(request, slots) == (False, None)
    assert [(len(event.hashes), event.parent is None, event.tokens) for event in p.ranks[0].take_events()] == [
        (1, True, tuple(range(8))),
        (1, False, tuple(range(8, 16))),
    ]
    d, answers = instance(stack, name, tmp_path, 2, listens=False), []
    for length in (8, 9, 16, 17, 20):
        asked = Request("d", list(range(length)), request.cache_salt)
        answers.append(d.ranks[0].get_num_new_matched_tokens(asked, 0)[0])
    assert answers == [0, 8, 8, 16, 16]
    assert d.ranks[0].get_num_new_matched_tokens(Request("e", list(range(20))), 0) == (0, False), "another salt"
    for tokens, wanted in ((16, state), (8, half)):
        asked, place = Request(f"d{tokens}", list(range(tokens + 1)), request.cache_salt), Slots(2, (1, 8, 3))
        d.ranks[0].update_state_after_alloc(asked, place, tokens)
        d.step()
        assert all(rank.get_load_errors() == set() for rank in d.ranks)
        assert_same(d.state(place._replace(pages=(1, 8, 3)[: tokens // 8]), tokens), wanted)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": {**DESCRIPTION, "weights": "b" * 64}}, "other_state"),
        ({"prompt_digest": "0" * 64}, "other_prompt"),
        ({"tp_size": 3}, "bad_params"),
        ({"tp_size": "1"}, "bad_params"),
        ({"transfer_id": "x"}, "bad_params"),
        ({"transfer_id": 5}, "bad_params"),
        ({"remote_port": 70000}, "bad_params"),
        ({"remote_block_ids": [1]}, "bad_params"),
        ({"remote_block_ids": [1, 2, 0]}, "bad_params"),
        ({"striped": 1}, "bad_params"),
        ({"state": 5}, "bad_params"),
        ({"state": None, "remote_host": None}, "bad_params"),
    ],
)
def test_params_of_another_state_prompt_or_form_are_a_prefill_of_ones_own(change, reason, tmp_path, stack):
    _, request, _, params = prefilled(stack, "file", tmp_path, 1)
    d = instance(stack, "file", tmp_path, 1, listens=False)
    asked = Request("d", request.prompt_ids, request.cache_salt, {**params, **change})
    assert d.ranks[0].get_num_new_matched_tokens(asked, 0) == (0, False)
    assert d.ranks[0].counts == {} and d.said == [], "no side effects"
    d.ranks[0].update_state_after_alloc(asked, Slots(1, (1, 2, 3)), 0)
    assert d.ranks[0].counts == {reason: 1} and len(d.said) == 1
    meta = d.ranks[0].build_connector_meta([])
    told = [] if reason == "bad_params" else [params["transfer_id"]]  # the giver hears of it where it is known
    assert (meta.loads, meta.saves, [each.transfer for each in meta.refused]) == ((), (), told)


def test_a_load_that_fails_on_a_rank_is_told_by_its_slot(tmp_path, stack):
    """The other end is gone: nothing is written."""
    p, request, _, params = prefilled(stack, "tcp", tmp_path, 2)
    p.close()
    d = instance(stack, "tcp", tmp_path, 1, listens=False, deadline=2.0)
    asked, slots = Request("d", request.prompt_ids, request.cache_salt, params), Slots(2, (1, 8, 3))
    d.ranks[0].update_state_after_alloc(asked, slots, TOKENS)
    d.step()
    assert d.received("d") == {2}
    assert not any(array.any() for array in d.pools[0].values())


def test_a_transfer_that_is_refused_is_freed_at_once(tmp_path, stack):
    p, request, _, params = prefilled(stack, "tcp", tmp_path, 2)
    d = instance(stack, "tcp", tmp_path, 2, listens=False)
    asked = Request("d", request.prompt_ids, request.cache_salt, params)
    assert d.ranks[0].get_num_new_matched_tokens(asked, 0) == (TOKENS, True)
    d.ranks[0].update_state_after_alloc(asked, Slots(2, (1, 8, 3)), 0)
    d.step()
    until = time.monotonic() + 10
    while (counts := [rank._backend.counts["given_back"] for rank in p.ranks]) != [1, 1] and time.monotonic() < until:
        time.sleep(0.01)
    assert counts == [1, 1] and all(not rank._backend._offers for rank in p.ranks)


def test_a_load_that_waits_for_its_turn_keeps_its_lease(tmp_path, stack, by_hand):
    """All threads that load are busy, and hold what the fifth waits for until the lease would be over."""
    p, request, _, params = prefilled(stack, "tcp", tmp_path, 2, lease=LEASE)
    assert params["lease"] == LEASE
    at = time.monotonic()
    for rank in p.ranks:
        rank._backend._clock = lambda: at
    d = instance(stack, "tcp", tmp_path, 1, listens=False, deadline=60.0)
    worker, go = d.ranks[0]._connector, threading.Event()
    worker._renewals._clock = lambda: at
    for _ in range(THREADS):
        worker._pool.submit(go.wait, 60)
    asked = Request("d", request.prompt_ids, request.cache_salt, params)
    d.ranks[0].update_state_after_alloc(asked, Slots(2, (1, 8, 3)), TOKENS)
    d.step()
    for _ in range(6):  # two leases
        at += LEASE / 3
        worker._renewals.renew_due()
        for rank in p.ranks:
            rank._backend._expire()
    assert worker.counts == {"renewed": 12}, "six times, at two ranks"
    assert not any(rank._backend.counts["expired"] for rank in p.ranks)
    go.set()
    assert d.received("d", 60.0) == set() and worker._renewals._held == {}


def test_a_request_that_is_cancelled_before_its_load_gives_the_lease_back(tmp_path, stack, by_hand):
    p, request, _, params = prefilled(stack, "tcp", tmp_path, 2, lease=LEASE)
    d = instance(stack, "tcp", tmp_path, 1, listens=False, deadline=60.0)
    worker, go = d.ranks[0]._connector, threading.Event()
    for _ in range(THREADS):
        worker._pool.submit(go.wait, 60)
    asked = Request("d", request.prompt_ids, request.cache_salt, params)
    d.ranks[0].update_state_after_alloc(asked, Slots(2, (1, 8, 3)), TOKENS)
    d.step()
    d.ranks[0].handle_preemptions({"d"})
    assert worker._renewals._held == {}
    go.set()
    assert d.received("d", 60.0) == set()
    end = time.monotonic() + 60
    while any(rank._backend.counts["given_back"] != 1 for rank in p.ranks):
        assert time.monotonic() < end
    assert not any(array.any() for array in d.pools[0].values())


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"lease": None}, {}),
        ({"lease": 0}, {"bad_params": 1}),
        ({"lease": "60"}, {"bad_params": 1}),
        ({"lease": 1e9}, {"bad_params": 1}),
    ],
)
def test_who_says_nothing_of_a_lease_is_asked_for_none(changes, counted, tmp_path, stack, by_hand):
    """An older version neither says how long it keeps a state nor understands that it should for longer."""
    _, request, _, params = prefilled(stack, "tcp", tmp_path, 1)
    assert "lease" not in params
    d = instance(stack, "tcp", tmp_path, 1, listens=False, deadline=60.0)
    asked, slots = Request("d", request.prompt_ids, request.cache_salt, params | changes), Slots(2, (1, 8, 3))
    external = d.ranks[0].get_num_new_matched_tokens(asked, 0)[0]
    d.ranks[0].update_state_after_alloc(asked, slots, external)
    d.step()
    assert d.ranks[0].counts == counted and d.ranks[0]._connector._renewals._thread is None
    if not counted:
        assert d.received("d", 60.0) == set()


def test_a_load_of_a_preempted_request_writes_nothing(tmp_path, stack, monkeypatch):
    _, request, _, params = prefilled(stack, "file", tmp_path, 1)
    d = instance(stack, "file", tmp_path, 1, listens=False)
    asked, slots = Request("d", request.prompt_ids, request.cache_salt, params), Slots(2, (1, 8, 3))
    d.ranks[0].update_state_after_alloc(asked, slots, TOKENS)
    begun = threading.Event()
    fetch = d.ranks[0]._backend.fetch

    def slow(*given):
        begun.wait(10)
        return fetch(*given)

    monkeypatch.setattr(d.ranks[0]._backend, "fetch", slow)
    d.step()
    d.ranks[0].handle_preemptions({"d"})
    begun.set()
    assert d.received("d") == set()
    assert not any(array.any() for array in d.pools[0].values())


def test_what_is_evicted_is_told(tmp_path, stack):
    p = instance(stack, "file", tmp_path, 1, every=8)
    request, slots = Request(), Slots(1, (4,))
    p.step([Scheduled(request, slots, 8)])
    (stored,) = p.ranks[0].take_events()
    assert isinstance(stored, Stored)
    connector = p.ranks[0]._connector
    connector._backend.removed.extend([*connector._stored, "unknown"])
    assert p.ranks[0].take_events() == [Removed(stored.hashes)]
    assert p.ranks[0].take_events() == []


def test_pools_of_another_shape_are_refused(tmp_path, stack):
    p = instance(stack, "file", tmp_path, 2)
    wrong = {**p.pools[0], "kda.conv": np.zeros((3, SLOTS, 3, 4, 5), np.float32)}
    with pytest.raises(Ling3Error, match=r"pool `kda\.conv`: expected bfloat16 \[3, 3, 2, 5\] .* float32"):
        p.ranks[0].register_state_buffers(wrong)
    with pytest.raises(Ling3Error, match=r"pool `mla\.latent`: expected .*, found none"):
        p.ranks[0].register_state_buffers({})


def test_a_tp_that_does_not_divide_the_heads_is_refused(tmp_path):
    with pytest.raises(PlanError, match="a TP that divides 4 heads, found 3"):
        Instance("file", tmp_path, 3)
    with pytest.raises(Ling3Error, match="expected a multiple of 8 tokens between saves, found 12"):
        Instance("file", tmp_path, 1, every=12)


def checked() -> tuple[Checked, Meta]:
    """A checker around a connector that does nothing, and a meta with a save."""
    idle = SimpleNamespace(groups=2)
    for name in (
        "bind_connector_metadata",
        "clear_connector_metadata",
        "start_load",
        "wait_for_layer_load",
        "save_layer",
        "wait_for_save",
        "request_finished",
    ):
        setattr(idle, name, lambda *given: None)
    return Checked(idle), Meta(saves=("a save",))


def test_calls_in_the_agreed_order_pass():
    connector, meta = checked()
    for _ in range(2):
        connector.bind_connector_metadata(meta)
        connector.start_load(None)
        for group in range(2):
            connector.wait_for_layer_load(group)
            connector.save_layer(group, {}, meta)
        connector.wait_for_save()
        connector.clear_connector_metadata()
    assert connector.request_finished(Request("a"), Slots(1, ())) is None


def test_calls_out_of_order_are_refused():
    def refused(text: str, *calls) -> None:
        connector, meta = checked()
        for call, *given in calls[:-1]:
            getattr(connector, call)(*(meta if each == "meta" else each for each in given))
        call, *given = calls[-1]
        with pytest.raises(ProtocolError, match=text):
            getattr(connector, call)(*(meta if each == "meta" else each for each in given))

    bind, finished = ("bind_connector_metadata", "meta"), ("request_finished", Request("a"), Slots(1, ()))
    refused("expected bind_connector_metadata before save_layer, found none", ("save_layer", 0, {}, "meta"))
    refused("expected bind_connector_metadata before start_load, found none", ("start_load", None))
    refused("expected a group from 0 to 1, found group 2", bind, ("wait_for_layer_load", 2))
    refused("expected a group from 0 to 1, found group -1", bind, ("save_layer", -1, {}, "meta"))
    refused("expected save_layer with the meta of its step, found another", bind, ("save_layer", 0, {}, Meta()))
    refused("expected wait_for_save before clear_connector_metadata", bind, ("clear_connector_metadata",))
    refused("expected clear_connector_metadata before the next step", bind, bind)
    refused("expected one request_finished of a, found two", finished, finished)


def test_names_of_two_artifacts_never_meet(tmp_path, stack):
    """The digest of what decides a state begins every hash."""
    p = instance(stack, "file", tmp_path, 1)
    assert p.ranks[0]._abi == ABI
