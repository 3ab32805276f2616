"""The connector over each store: whole or not at all, and what is called out of order is refused."""

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from ling3export.runners.state.layout import CONV, LATENT, POOLS, RECURRENT
from ling3export.runners.transfer.connector import LOADS, Connector, ConnectorMetadata, ProtocolError
from ling3export.runners.transfer.store import StateAddress
from tests.support.transfers import DESCRIPTION, LAYOUT, LEASE, STORES, random_state, remove_all, same, store
from tests.support.waiting import until

TOKENS = 20  # two whole pages, and a half
WHOLE = ({POOLS[LATENT]: range(2), POOLS[RECURRENT]: range(3), POOLS[CONV]: range(3)},)
GROUPS = (
    {POOLS[LATENT]: range(0, 1), POOLS[RECURRENT]: range(0, 2), POOLS[CONV]: range(0, 2)},
    {POOLS[LATENT]: range(1, 2), POOLS[RECURRENT]: range(2, 3), POOLS[CONV]: range(2, 3)},
)
_SALTS = count()


@dataclass
class Request:
    request_id: str = "r"
    prompt_ids: list[int] = field(default_factory=lambda: list(range(TOKENS)))
    cache_salt: str = field(default_factory=lambda: str(next(_SALTS)))
    kv_transfer_params: Any = None


class Engine:
    """Drives a connector as an engine does."""

    def __init__(self, kind, folder, groups=WHOLE, deadline=60.0) -> None:
        self.store, self.said, self.buffers = store(kind, folder, deadline=deadline), [], {}
        self.groups, self.loaded, self.ended = groups, threading.Event(), set()
        self.connector = Connector(
            self.store,
            LAYOUT,
            DESCRIPTION,
            "root",
            deadline=deadline,
            lease=LEASE,
            groups=groups,
            report=self.said.append,
        )
        self.connector.register_kv_caches(self.buffers)

    def step(self, requests=(), state=None) -> ConnectorMetadata:
        connector, pools = self.connector, None if state is None else state.pool_arrays(LAYOUT.page)
        meta = connector.build_connector_meta(requests)
        connector.bind_connector_metadata(meta)
        connector.start_load_kv(self.loaded.set)
        for group, layers in enumerate(self.groups if meta.saves else ()):
            part = {name: pools[name][each.start : each.stop] for name, each in layers.items()}
            connector.wait_for_layer_load(group)
            connector.save_kv_layer(group, {each.request_id: lambda part=part: part for each in meta.saves})
        connector.wait_for_save()
        connector.clear_connector_metadata()
        return meta

    def load(self, asked) -> int:
        """Begins to load what a request brought; how many tokens that is."""
        tokens, _ = self.connector.get_num_new_matched_tokens(asked, 0)
        self.connector.update_state_after_alloc(asked, tokens)
        self.step()
        return tokens

    def received(self, name="d", seconds=60.0):
        """The state that a request's load brought, once that has ended."""
        end = time.monotonic() + seconds
        while name not in self.ended:
            assert time.monotonic() < end
            self.ended |= self.connector.get_finished()[1]
            time.sleep(0.002)
        assert self.loaded.is_set()
        self.ended.discard(name)
        return self.buffers.pop(name, None)


@pytest.fixture
def stack():
    remove_all()
    with ExitStack() as stack:
        yield stack


def engine(stack, *given, **named) -> Engine:
    made = Engine(*given, **named)
    stack.callback(made.connector.shutdown)
    return made


def prefilled(stack, kind, folder, groups=WHOLE, seed=0):
    """A prefill engine that has answered; what a decode engine is asked with; and the state."""
    p = engine(stack, kind, folder, groups)
    request = Request(kv_transfer_params={"do_remote_decode": True})
    state = replace(random_state(TOKENS, seed), tokens=np.arange(TOKENS, dtype=np.int32))
    assert p.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    p.connector.update_state_after_alloc(request, 0)
    p.step([request], state)
    delayed, params = p.connector.request_finished(request)
    assert not delayed
    return p, Request("d", request.prompt_ids, request.cache_salt, params), state


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("groups", [WHOLE, GROUPS], ids=["whole", "groups"])
def test_a_prompts_state_goes_from_one_to_the_other_once(kind, groups, tmp_path, stack):
    p, asked, state = prefilled(stack, kind, tmp_path, groups)
    d = engine(stack, kind, tmp_path)
    assert d.connector.get_num_new_matched_tokens(asked, 0) == (TOKENS, True)
    assert d.load(asked) == TOKENS and same(d.received(), state)
    assert d.load(asked) == TOKENS and d.received() is None, "a state counts once"
    until(lambda: p.connector.get_finished()[0] == {"r"})
    assert asked.kv_transfer_params["remote_block_ids"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": {**DESCRIPTION, "weights": "b" * 64}}, "other_state"),
        ({"state": {**DESCRIPTION, "format": 1}}, "other_state"),
        ({"prompt_digest": "0" * 64}, "other_prompt"),
        ({"tp_size": 3}, "bad_params"),
        ({"tp_size": "1"}, "bad_params"),
        ({"transfer_id": "x"}, "bad_params"),
        ({"transfer_id": 5}, "bad_params"),
        ({"remote_port": 70000}, "bad_params"),
        ({"remote_block_ids": None}, "bad_params"),
        ({"state": 5}, "bad_params"),
        ({"state": None, "remote_host": None}, "bad_params"),
        ({"lease": 0}, "bad_params"),
        ({"lease": "60"}, "bad_params"),
        ({"lease": 1e9}, "bad_params"),
    ],
)
def test_params_of_another_state_prompt_or_form_are_a_prefill_of_ones_own(change, reason, tmp_path, stack):
    p, asked, _ = prefilled(stack, "file", tmp_path)
    d, name = engine(stack, "file", tmp_path), asked.kv_transfer_params["transfer_id"]
    asked.kv_transfer_params = asked.kv_transfer_params | change
    assert d.connector.get_num_new_matched_tokens(asked, 0) == (0, False)
    assert d.connector.counts == {} and d.said == [], "no side effects"
    d.connector.update_state_after_alloc(asked, 0)
    assert d.connector.counts == {reason: 1} and len(d.said) == 1
    meta = d.step()
    told = [] if reason == "bad_params" else [name]  # the giver hears of it where it is known
    assert (meta.loads, meta.saves, [each.name for each in meta.refused]) == ((), (), told)
    until(lambda: not told or p.connector.get_finished()[0] == {"r"})


def test_a_load_that_fails_brings_nothing(tmp_path, stack):
    """The other end is gone."""
    p, asked, _ = prefilled(stack, "tcp", tmp_path)
    p.connector.shutdown()
    d = engine(stack, "tcp", tmp_path, deadline=2.0)
    assert d.load(asked) == TOKENS and d.received() is None
    assert d.store.counts == {"peer_gone": 1}


@pytest.mark.parametrize("kind", STORES)
def test_what_is_not_wanted_is_freed_at_once(kind, tmp_path, stack):
    p, asked, _ = prefilled(stack, kind, tmp_path)
    d = engine(stack, kind, tmp_path)
    d.connector.update_state_after_alloc(asked, 0)
    d.step()
    until(lambda: p.connector.get_finished()[0] == {"r"})


def crowded(stack, folder):
    """An engine that loads four states at once, none before the event, and states of as many others and two more."""
    found = [prefilled(stack, "tcp", folder, seed=number) for number in range(LOADS + 2)]
    d, go = engine(stack, "tcp", folder, deadline=60.0), threading.Event()
    get = d.store.get
    d.store.get = lambda *given: (go.wait(60), get(*given))[1]
    for number, (_, asked, _) in enumerate(found):
        asked.request_id, asked.kv_transfer_params["lease"] = str(number), 0.3
    return found, d, go


def test_a_load_that_waits_for_its_turn_keeps_its_lease_and_gives_it_back_when_cancelled(tmp_path, stack):
    """A lease of which nothing is known is not renewed, nor is that of a load whose turn it is."""
    found, d, go = crowded(stack, tmp_path)
    found[LOADS][1].kv_transfer_params["lease"] = None
    assert [d.load(asked) for _, asked, _ in found] == [TOKENS] * (LOADS + 2)
    cancelled = str(LOADS + 1)
    until(lambda: d.connector.counts["renewed"] >= 3)
    assert [p.store.counts["renewed"] > 0 for p, *_ in found] == [False] * (LOADS + 1) + [True]
    d.connector.handle_preemptions({cancelled})
    go.set()
    for number, (_, _, state) in enumerate(found):
        brought = d.received(str(number)) if str(number) != cancelled else None
        assert same(brought, state) == (str(number) != cancelled)
    until(lambda: found[-1][0].connector.get_finished()[0] == {"r"})
    assert d.buffers == {} and found[-1][0].store.counts["given_back"] == 1


def test_a_lease_that_is_not_renewed_is_asked_for_no_more(tmp_path, stack):
    """Its holder is gone, or knows it no more: the loads before it are not disturbed."""
    found, d, go = crowded(stack, tmp_path)
    name = found[LOADS][1].kv_transfer_params["transfer_id"]
    d.store.release(StateAddress(name, *found[LOADS][0].store.address), time.monotonic() + 60)
    found[LOADS + 1][0].connector.shutdown()
    assert [d.load(asked) for _, asked, _ in found] == [TOKENS] * (LOADS + 2)
    until(lambda: d.connector.counts == {"renewal_refused": 1, "renewal_peer_gone": 1})
    go.set()
    assert [d.received(str(number)) is not None for number in range(LOADS + 2)] == [True] * LOADS + [False] * 2
    assert d.connector.counts == {"renewal_refused": 1, "renewal_peer_gone": 1}


def test_a_save_that_finds_no_room_is_an_answer_without_a_state(tmp_path, stack):
    p, request = engine(stack, "tcp", tmp_path), Request(kv_transfer_params={"do_remote_decode": True})
    big = Request("big", list(range(100_000)), "", {"do_remote_decode": True})
    state = random_state(100_000)
    p.step([big], state)
    assert p.connector.request_finished(big) == (False, None) and p.store.counts == {"full": 1}
    p.step([request], random_state())
    assert p.connector.request_finished(request)[1] is not None


def test_calls_out_of_order_are_refused(tmp_path, stack):
    request, pools = Request("a", kv_transfer_params={"do_remote_decode": True}), random_state().pool_arrays(8)
    parts = [{name: pools[name][each.start : each.stop] for name, each in layers.items()} for layers in GROUPS]

    def refused(text: str, *calls) -> None:
        connector = engine(stack, "file", tmp_path, GROUPS).connector
        meta = connector.build_connector_meta([request])
        steps = {
            "bind": lambda: connector.bind_connector_metadata(meta),
            "load": lambda: connector.start_load_kv(lambda: None),
            "wait": connector.wait_for_save,
            "clear": connector.clear_connector_metadata,
            "give up": lambda: connector.handle_preemptions({"a"}),
        }
        for number, call in enumerate(calls, 1):
            step = steps.get(call, lambda call=call: connector.save_kv_layer(call, {"a": lambda: parts[call]}))
            if number < len(calls) or not text:
                step()
                continue
            with pytest.raises(ProtocolError, match=text):
                step()

    refused("expected bind_connector_metadata before save_kv_layer, found none", 0)
    refused("expected bind_connector_metadata before start_load_kv, found none", "load")
    refused("expected a group from 0 to 1, found group 2", "bind", 2)
    refused("expected one save_kv_layer of group 0 a step, found two", "bind", 0, 0)
    refused(r"expected save_kv_layer of every group before wait_for_save, found none of \[1\]", "bind", 0, "wait")
    refused("expected wait_for_save before clear_connector_metadata", "bind", 0, 1, "clear")
    refused("expected clear_connector_metadata before the next step", "bind", "bind")
    refused("", "bind", "load", 0, 1, "wait", "clear", "bind", 0, "give up", "wait", "clear")
