"""The connector with vLLM's method names, over a queue with each store: a complete state, one given back, or a miss."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ling3export.runners.transfer.connector import Connector
from ling3export.runners.transfer.options import Transfer
from ling3export.runners.transfer.transfer_queue import TransferQueue
from tests.support.transfers import AWAY, DESCRIPTION, LAYOUT, STORES, random_state, remove_all, same, store
from tests.support.waiting import until

TOKENS = 20  # two whole pages, and a half


@dataclass
class Request:
    number: int = 1
    prompt_ids: list[int] = field(default_factory=lambda: list(range(TOKENS)))
    cache_salt: str = ""
    kv_transfer_params: Any = None


@pytest.fixture(params=STORES)
def ends(request, tmp_path):
    """The connectors of P and D, their queues, and the lines that they report."""
    remove_all()
    lines: list[str] = []
    queues = [
        TransferQueue(store(request.param, tmp_path), LAYOUT, DESCRIPTION, "root", Transfer(), 1000, lines.append)
        for _ in range(2)
    ]
    yield [Connector(queue) for queue in queues], queues, lines
    for queue in queues:
        queue.close()


def saved(connector, request, state):
    """The parameters that P returns after the step that ends the prompt."""
    connector.bind_connector_metadata(connector.build_connector_meta([request, Request(2)]))
    connector.start_load_kv()
    connector.save_kv_layer(lambda number: state)
    connector.wait_for_save()
    connector.clear_connector_metadata()
    assert connector.get_finished() == (set(), set())
    kept, params = connector.request_finished(request)
    assert kept is False and connector.request_finished(request) == (False, None)
    return None if params is None else params | {"tail": {"token": 7}}


def loaded(connector, buffers):
    """Runs one step of D; returns the requests whose loads ended."""
    connector.register_kv_caches(buffers)
    connector.bind_connector_metadata(connector.build_connector_meta([]))
    connector.start_load_kv()
    connector.wait_for_layer_load("0")
    connector.clear_connector_metadata()
    received: set[int] = set()

    def there():
        received.update(connector.get_finished()[1])
        return received

    until(there)
    return received


def test_a_state_goes_from_one_connector_to_the_other(ends):
    (p, d), _, _ = ends
    state, asked = random_state(TOKENS), Request(kv_transfer_params=AWAY)
    taking = Request(5, kv_transfer_params=saved(p, asked, state))
    assert d.get_num_new_matched_tokens(taking, 3) == (TOKENS - 3, True)
    assert d.get_num_new_matched_tokens(asked, 3) == (0, False)
    d.update_state_after_alloc(taking, TOKENS - 3)
    buffers: dict[int, Any] = {}
    assert loaded(d, buffers) == {5}
    assert same(replace(buffers[5].state, first=state.first), state) and buffers[5].tokens[0][0] == 7


@pytest.mark.parametrize("ends", ["shm"], indirect=True)
@pytest.mark.parametrize("change", ["none wanted", "another prompt", "other state", "half a character", "no form"])
def test_a_state_that_is_not_wanted_or_does_not_fit_is_given_back(ends, change):
    (p, d), (holder, taker), _ = ends
    taking = Request(5, kv_transfer_params=saved(p, Request(kv_transfer_params=AWAY), random_state(TOKENS)))
    params = taking.kv_transfer_params
    if change == "another prompt":
        taking.prompt_ids = [*range(1, TOKENS + 1)]
    elif change == "other state":
        params["state"] = {"weights": "b"}
    elif change == "half a character":
        params["state"] = {"a": "\ud800"}
    elif change == "no form":
        params["remote_port"] = "x"
    d.update_state_after_alloc(taking, 0 if change == "none wanted" else TOKENS)
    d.bind_connector_metadata(d.build_connector_meta([]))
    d.start_load_kv()
    if change != "no form":  # without a form, the request is unknown
        until(lambda: _over(holder))
    assert taker.record().get("loaded", 0) == 0


def _over(queue):
    record = queue.record()
    return record.get("given_back", 0) + record.get("pulled", 0)


def test_a_load_that_fails_ends(ends):
    (p, d), (_, taker), _ = ends
    params = saved(p, Request(kv_transfer_params=AWAY), random_state(TOKENS))
    taking = Request(5, kv_transfer_params=params | {"transfer_id": "0" * 32})
    d.update_state_after_alloc(taking, TOKENS)
    buffers: dict[int, Any] = {}
    assert loaded(d, buffers) == {5} and buffers == {}
    assert taker.record()["load_failed"] == 1
