"""States that are exported from an engine and imported by one: tokens are those of one engine, despite any fault."""

import socket
import time
from dataclasses import replace

import httpx2
import pytest
from msgspec import structs

from ling3export.foundation.errors import ArtifactError, Ling3Error, RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.serve.app import Policy, application
from ling3export.runners.serve.run import bound
from ling3export.runners.state.layout import layout_of
from ling3export.runners.transfer import transfer_queue
from ling3export.runners.transfer.options import Transfer
from tests.support import transfers
from tests.support.serving import Server, serving
from tests.support.transfers import AWAY, moved
from tests.support.waiting import until

TOLD = {"check": "programs", "report": lambda text: None, "prefix_cache": False}
PROMPT = tuple(range(20, 90))


@pytest.fixture(scope="module", params=transfers.STORES)
def engine(request, artifact, tmp_path_factory):
    """An engine that exports and imports: both ends of each transfer."""
    folder = tmp_path_factory.mktemp("states") if request.param == "file" else None
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        how = Transfer(request.param, folder=folder, deadline=60.0, port=listener.getsockname()[1])
        with (
            Engine(artifact("micro-tp1-snapshots"), transfer=how, **TOLD) as engine,
            serving(application(engine, Policy("toy", None, 4, 5000)), listener=listener),
        ):
            yield engine


@pytest.mark.parametrize("length", [1, 15, 64, 70])
def test_an_imported_state_continues_with_the_same_tokens(engine, length):
    asked = Request(PROMPT[:length], 12, Sampling(1.0, seed=length), ignore_eos=True, logprobs=2)
    (alone,) = engine.complete([asked])
    before = engine.stats()
    given, taking = moved(engine, asked)
    (done,) = engine.complete([taking])
    after = engine.stats()
    assert done.token_ids == alone.token_ids and done.stop_reason == "length"
    assert [each.top for each in done.logprobs] == [each.top for each in alone.logprobs]
    assert (done.cached_tokens, after["tokens_in"] - before["tokens_in"]) == (length, length)
    phases = done.kv_transfer_params["phases_ms"]
    assert set(phases) == {"queue", "prefill", "save", "transfer", "decode"}
    save = given.kv_transfer_params["phases_ms"]["save"]
    assert abs(sum(phases.values()) - (given.e2e_ms + save + done.ttft_ms)) < 1
    assert after["transfer"]["loaded"] > before["transfer"].get("loaded", 0)
    assert after["free"] == after["pools"]


def test_a_state_that_cannot_be_taken_is_computed_again(engine):
    """A used state, one of another prompt or artifact, one with a missing or invalid sampled token, or no object."""
    asked = Request(PROMPT, 5, ignore_eos=True)
    (alone,) = engine.complete([asked])
    _, taking = moved(engine, asked)
    other = {**taking.kv_transfer_params["state"], "weights": "another"}
    wrong = (
        {"prompt_digest": "0" * 64},
        {"state": other},
        {"tail": None},
        {"tail": {"token": 1 << 20}},
        {"tp_size": 3},
        {"remote_port": "x"},
        {"remote_block_ids": None},
        {"transfer_id": None},
    )
    for params in wrong:
        (done,) = engine.complete([replace(taking, kv_transfer_params=taking.kv_transfer_params | params)])
        assert (done.token_ids, done.kv_transfer_params, done.cached_tokens) == (alone.token_ids, None, 0), params
    assert engine.complete([taking])[0].cached_tokens == 0, "who refuses a state says so, and it is freed"
    _, taking = moved(engine, asked)
    first, again = engine.complete([taking])[0], engine.complete([taking])[0]
    assert first.token_ids == again.token_ids == alone.token_ids
    assert (first.cached_tokens, again.cached_tokens) == (len(PROMPT), 0), "an id counts once"
    counted = engine.stats()["transfer"]
    assert (counted["other_prompt"], counted["other_state"]) == (1, 1) and counted["bad_params"] == 6


def test_an_answer_that_ends_with_its_first_token_needs_no_slot(engine):
    asked = Request(PROMPT[:30], 1, ignore_eos=True)
    given, taking = moved(engine, asked)
    (done,) = engine.complete([taking])
    assert (done.token_ids, done.stop_reason) == (given.token_ids, "length")
    assert engine.stats()["free"] == engine.stats()["pools"]


def test_a_request_that_waits_for_its_state_can_be_cancelled(artifact):
    """Its peer accepts the connection and sends nothing: the request ends at once, and nothing is held."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Engine(artifact("micro-tp1-snapshots"), transfer=Transfer("http", deadline=60.0), **TOLD) as engine,
    ):
        _, taking = moved(engine, Request(PROMPT, 5), remote_port=silent.getsockname()[1])
        (handle,) = engine.submit(taking)
        handle.cancel()
        assert handle.result(60).stop_reason == "cancelled"
        assert engine.stats()["free"] == engine.stats()["pools"]
        silent.close()  # ends the pull


def test_two_servers_speak_the_protocol_of_vllm(artifact):
    """A router's calls: to P with one token, then the same body to D with P's parameters."""
    path, body = artifact("micro-tp1-snapshots"), {"prompt": list(PROMPT), "temperature": 0, "ignore_eos": True}
    body |= {"model": "micro-tp1-snapshots", "cache_salt": "salt", "return_token_ids": True}
    both = ("--check", "programs", "--transfer", "http", "--role")
    with Server(path, *both, "prefill") as p, Server(path, *both, "decode") as d:
        ask = f"{d.url}/v1/completions"
        alone = httpx2.post(ask, json=body | {"max_tokens": 9}, timeout=60).json()["choices"][0]["token_ids"]
        away = AWAY | {"remote_host": None, "remote_port": None}
        given = httpx2.post(
            f"{p.url}/v1/completions", json=body | {"max_tokens": 1, "kv_transfer_params": away}, timeout=60
        ).json()
        params = given["kv_transfer_params"]
        assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
        assert params["remote_host"] == "127.0.0.1" and params["remote_block_ids"] == [1, 2, 3, 4, 5]
        assert isinstance(params["remote_engine_id"], str) and isinstance(params["remote_port"], int)
        taking = body | {"max_tokens": 9, "kv_transfer_params": params}
        done = httpx2.post(ask, json=taking, timeout=60).json()
        assert done["choices"][0]["token_ids"] == alone
        assert done["usage"]["prompt_tokens_details"] == {"cached_tokens": len(PROMPT)}
        assert d.metrics()['ling3_transfer_total{what="loaded"}'] == 1
        refused = httpx2.post(ask, json=body | {"max_tokens": 1, "kv_transfer_params": away}, timeout=60)
        assert refused.status_code == 400
        assert "expected an engine with --transfer and --role prefill or both" in refused.json()["error"]["message"]
        p.process.kill()  # its state goes with it
        taking["kv_transfer_params"] = params | {"transfer_id": "0" * 32}
        assert httpx2.post(ask, json=taking, timeout=60).json()["choices"][0]["token_ids"] == alone
        assert d.metrics()['ling3_transfer_total{what="load_failed"}'] == 1


def test_impossible_transfers_are_refused(artifact):
    with pytest.raises(RequestError, match="expected do_remote_decode alone and max_tokens of 1, found 5"):
        Request((1,), 5, kv_transfer_params=AWAY)
    with pytest.raises(RequestError, match="expected kv_transfer_params that are an object, found 3"):
        Request((1,), 1, kv_transfer_params=3)
    with pytest.raises(RequestError, match="expected tokens alone with kv_transfer_params, found logits"):
        Request((1,), 1, kv_transfer_params=AWAY, logits=True)
    with pytest.raises(Ling3Error, match="expected a folder with --transfer file only, found none"):
        Transfer("file")
    with pytest.raises(Ling3Error, match="--role: expected one of both, prefill, decode, found router"):
        Transfer("shm", "router")
    (target,) = artifact.manifest("micro-tp1-snapshots").targets.values()
    without = structs.replace(
        target, cells={name: cell for name, cell in target.cells.items() if cell.phase != "offload"}
    )
    with pytest.raises(ArtifactError, match="transfer: the artifact has no programs offload and onload"):
        layout_of(without)


def asked(length: int, salt: str = "") -> Request:
    return Request(PROMPT[:length], 9, Sampling(1.0, seed=length), ignore_eos=True, cache_salt=salt)


def test_a_save_that_fails_is_an_answer_without_a_state(artifact, monkeypatch):
    """The first request's save fails; the next one is saved."""
    right, turns = transfer_queue.fill, iter([1])

    def fill(state, source):
        if next(turns, None) == 1:
            raise Ling3Error("a copy failed")
        right(state, source)

    monkeypatch.setattr(transfer_queue, "fill", fill)
    with Engine(artifact("micro-tp1-snapshots"), transfer=Transfer("shm", deadline=60.0), **TOLD) as engine:
        salt = "salt"
        given, again = (
            engine.complete([replace(asked(30, f"{salt} {n}"), max_tokens=1, kv_transfer_params=AWAY)])[0]
            for n in range(2)
        )
        assert given.kv_transfer_params is None and again.kv_transfer_params is not None
        assert given.token_ids == again.token_ids
        said = engine.stats()["transfer"]
        assert (said["save_failed"], said["saved"], said["abandoned"]) == (1, 1, 1)
        assert engine.stats()["free"] == engine.stats()["pools"]


def test_states_that_no_peer_will_read_are_freed_at_once(artifact):
    """Cancelled before the call, during it, while its state is saved, or later; no lease has to end."""
    with Engine(artifact("micro-tp1-snapshots"), transfer=Transfer("shm", lease=600.0), **TOLD) as engine:
        salt, kept = "salt", 0
        for number in range(12):
            (handle,) = engine.submit(replace(asked(30, f"{salt} {number}"), max_tokens=1, kv_transfer_params=AWAY))
            time.sleep(0.002 * number)
            handle.cancel()
            kept += handle.result(60).kv_transfer_params is not None

        def left() -> int:
            said = engine.stats()["transfer"]
            return said.get("stored", 0) - said.get("pulled", 0) - said.get("expired", 0)

        until(lambda: left() == kept)
        assert engine.stats()["free"] == engine.stats()["pools"] and engine.stats()["live"] == 0
