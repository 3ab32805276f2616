"""The router with fake servers: which servers it chooses, its requests, and the fallback if one fails."""

import asyncio
import json
import threading
from contextlib import AsyncExitStack

import httpx2
import pytest

from bench.pd import PHASES
from bench.pd import main as demo
from ling3export.runners.route import app
from ling3export.runners.route.app import Router, RoutingPolicy, application, workers_of
from ling3export.runners.route.workers import PrefillRefusedError, least_loaded
from ling3export.runners.serve.app import Policy
from ling3export.runners.serve.schema import ApiError
from tests.support.routers import FakeServer
from tests.support.serving import answered

PARAMS = {"do_remote_prefill": True, "transfer_id": "0" * 32}
BODY = {"model": "m", "prompt": "a" * 2000, "max_tokens": 5, "stream": False}


def test_the_least_loaded_server_is_chosen_first_among_equals():
    workers = workers_of([f"http://127.0.0.1:{port}" for port in (1, 2, 3)], None, 1.0)
    assert least_loaded(workers) is workers[0]
    workers[0].queued, workers[1].usage = 1, 0.5
    assert least_loaded(workers) is workers[2]
    workers[2].lost()
    assert least_loaded(workers) is workers[1]
    assert least_loaded([]) is None


class Fake(FakeServer):
    """Answers each request with the next of its answers."""

    def __init__(self, *answers):
        left = list(answers)
        super().__init__(lambda path, body: left.pop(0))


def routed(prefill, decode, body=BODY, path="/v1/completions", policy=None, waiting=0):
    """The statuses and the body that a client gets, and the router."""

    async def run():
        async with AsyncExitStack() as stack:
            urls = [[(await stack.enter_async_context(fake)).url for fake in fakes] for fakes in (prefill, decode)]
            router = Router(*(workers_of(each, None, 60.0) for each in urls), policy or RoutingPolicy())
            for worker in router.prefill:
                worker.queued = waiting
            replies = []
            try:
                async for reply in router.answer(path, body):
                    replies.append(reply)
            except (OSError, Exception) as error:
                return error, b"".join(reply.data for reply in replies), router
            return replies[0].status, b"".join(reply.data for reply in replies), router

    return asyncio.run(run())


def test_a_prompt_is_prefilled_in_one_place_and_answered_in_another():
    p, d = Fake((200, {"kv_transfer_params": PARAMS})), Fake((200, {"id": 1}))
    status, data, _ = routed([p], [d], BODY | {"stream_options": {"include_usage": True}, "max_completion_tokens": 5})
    assert (status, json.loads(data)) == (200, {"id": 1})
    ((_, asked),) = p.asked
    assert (asked["max_tokens"], asked["stream"], asked["n"]) == (1, False, 1)
    assert asked["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert not {"stream_options", "max_completion_tokens"} & asked.keys()
    assert d.asked[0][1]["kv_transfer_params"] == PARAMS and d.asked[0][1]["max_tokens"] == 5


def test_the_prefilling_server_gets_min_tokens_1():
    """P gets min_tokens 1, since it refuses more than max_tokens; D gets the original value."""
    p, d = Fake((200, {"kv_transfer_params": PARAMS})), Fake((200, {"id": 1}))
    assert routed([p], [d], BODY | {"min_tokens": 4, "priority": -1})[0] == 200
    assert [(each[1]["min_tokens"], each[1]["priority"]) for each in (p.asked[0], d.asked[0])] == [(1, -1), (4, -1)]


@pytest.mark.parametrize(
    ("prompt", "waiting", "why"),
    [
        ([1] * 33, 3, None),
        ([1] * 32, 0, "short"),
        ("a" * 132, 0, None),
        ("a" * 131, 0, "short"),
        ([1] * 33, 4, "queue_full"),
    ],
)
def test_a_short_prompt_and_one_that_finds_a_full_queue_are_prefilled_where_they_are_decoded(prompt, waiting, why):
    """The tokens of a text are estimated as a quarter of its characters."""
    p, d = Fake((200, {"kv_transfer_params": PARAMS})), Fake((200, {"id": 1}))
    policy = RoutingPolicy(most_local=32, most_queued=4)
    status, _, router = routed([p], [d], BODY | {"prompt": prompt}, policy=policy, waiting=waiting)
    assert (status, bool(p.asked), "kv_transfer_params" in d.asked[0][1]) == (200, why is None, why is None)
    assert why is None or f'ling3_route_fallbacks_total{{why="{why}"}} 1.0' in router.text().decode()


@pytest.mark.parametrize("failing", [None, (503, {}), (429, {}), (200, {"id": 1})])
def test_another_server_or_the_decoding_one_replaces_a_failed_prefill(failing):
    p, q, d = Fake(failing), Fake((200, {"kv_transfer_params": PARAMS})), Fake((200, {"id": 1}))
    assert routed([p, q], [d])[0] == 200 and d.asked[0][1]["kv_transfer_params"] == PARAMS
    p, d = Fake(failing), Fake((200, {"id": 1}))
    status, _, router = routed([p], [d])
    assert status == 200 and "kv_transfer_params" not in d.asked[0][1]
    assert 'ling3_route_fallbacks_total{why="prefill_by_decode"} 1.0' in router.text().decode()


def test_the_prompt_of_a_response_is_computed_where_it_is_answered():
    """Regression: the router had no /v1/responses; its body cannot carry the address of a state."""
    body = {"model": "m", "input": "a" * 2000, "instructions": "b"}
    p, d = Fake(), Fake((200, {"object": "response"}))
    status, data, router = routed([p], [d], body, "/v1/responses")
    assert (status, json.loads(data)) == (200, {"object": "response"})
    assert not p.asked and d.asked == [("/v1/responses", body)]
    routes = application(router, Policy("m", None, 1, 1000)).routes
    assert "/v1/responses" in {route.path for route in routes}


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/", 404, "path: expected one of /v1/completions, /v1/chat/completions, /v1/responses, /v1/models, "),
        ("GET", "/v1/completions", 405, "/v1/completions: expected POST, found GET"),
    ],
)
def test_a_path_or_method_that_there_is_not_gets_an_error_object(method, path, status, message):
    """Regression: the router answered `Not Found` as plain text, which clients of the API cannot parse."""
    answer = answered(application(Router([], [], RoutingPolicy()), Policy("m", None, 1, 1000)), method, path)
    assert answer.status_code == status and answer.json()["error"]["message"].startswith(message)


def test_a_wrong_request_is_refused_by_whoever_sees_it_first():
    p, d = Fake((400, {"error": {"message": "wrong"}})), Fake()
    error, _, _ = routed([p], [d])
    assert isinstance(error, PrefillRefusedError) and error.status == 400 and not d.asked


@pytest.mark.parametrize("failing", [None, (503, {})])
def test_where_an_answer_has_not_begun_another_server_gives_it(failing):
    d, e = Fake(failing), Fake((200, {"id": 2}))
    status, data, router = routed([], [d, e])
    assert (status, json.loads(data)) == (200, {"id": 2})
    assert router.decode[0].healthy is (failing is not None)


def test_the_last_servers_error_reaches_the_client():
    assert routed([], [Fake((503, {"error": "full"}))])[0] == 503
    error, _, router = routed([], [Fake(None)])
    assert isinstance(error, ApiError) and error.status == 503 and error.code == "no_server"
    assert 'ling3_route_requests_total{how="no_server"} 1.0' in router.text().decode()


def test_an_answer_that_breaks_off_ends_with_an_error_and_is_not_begun_again():
    d, e = Fake("data: one\n\n"), Fake()
    error, data, router = routed([], [d, e])
    assert data == b"data: one\n\n" and not e.asked
    assert 'ling3_route_requests_total{how="broken_off"} 1.0' in router.text().decode()
    assert isinstance(error, Exception)


def test_a_whole_answer_that_breaks_off_is_given_by_another_server():
    """Regression: the half that had arrived was sent with status 200, followed by an error event of a stream."""
    d, e = Fake(b'{"id": 1, "choices"'), Fake((200, {"id": 2}))
    status, data, router = routed([], [d, e])
    assert (status, json.loads(data)) == (200, {"id": 2})
    assert len(d.asked) == 1 and not router.decode[0].healthy
    assert 'ling3_route_fallbacks_total{why="decode_gone"} 1.0' in router.text().decode()
    error, data, _ = routed([], [Fake(b'{"id": 1, "choices"')])
    assert isinstance(error, ApiError) and (error.status, error.code, data) == (503, "no_server", b"")


def posted(body, router=None, **headers):
    """The router's answer to a body; without servers, no request goes further."""
    app = application(router or Router([], [], RoutingPolicy()), Policy("m", None, 1, 1 << 22))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = {b"content-type": headers.get("kind", "application/json").encode()}
    return answered(app, "POST", "/v1/completions", content=content, headers=kind)


def test_bodies_are_read_outside_of_the_event_loop(monkeypatch):
    """Regression: 60,000 objects in a body stopped all streams for 3.6 s."""
    threads, parse = list[str](), app.parse
    monkeypatch.setattr(app, "parse", lambda data: threads.append(threading.current_thread().name) or parse(data))
    router = Router([], [], RoutingPolicy())
    assert posted({"prompt": [{}] * 1000}, router).status_code == 503  # no server
    assert [name.startswith("ling3-route") for name in threads] == [True] and router.bodies == 0


def test_bodies_that_are_held_have_a_bound(monkeypatch):
    monkeypatch.setattr(app, "BODIES", 100)
    router = Router([], [], RoutingPolicy())
    answer = posted({"prompt": "a" * 200}, router)
    assert (answer.status_code, answer.headers["retry-after"], router.bodies) == (503, "1", 0)
    assert posted(b"{", router).status_code == 400 and router.bodies == 0
    assert posted({"prompt": "a"}, router).json()["error"]["code"] == "no_server" and router.bodies == 0


def test_a_client_cannot_say_where_a_state_is():
    """Regression: D connected to the address in a client's kv_transfer_params."""
    d = Fake((200, {"id": 1}))
    error, _, _ = routed([], [d], BODY | {"kv_transfer_params": PARAMS | {"remote_host": "10.0.0.1"}})
    assert isinstance(error, ApiError) and (error.status, error.param) == (400, "kv_transfer_params") and not d.asked
    assert routed([], [d], BODY | {"kv_transfer_params": None})[0] == 200


def test_a_post_of_another_site_is_refused():
    """Regression: text/plain, which a page of any site may send, was answered with 200."""
    answer = posted(BODY, kind="text/plain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_retry_after_is_passed_on():
    async def run():
        async with FakeServer(lambda path, body: (429, {"error": "full"}), {"Retry-After": "7"}) as server:
            app = application(
                Router([], workers_of([server.url], None, 60.0), RoutingPolicy()), Policy("m", None, 1, 5000)
            )
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
                return await client.post("/v1/completions", json=BODY)

    answer = asyncio.run(run())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


@pytest.mark.parametrize(
    ("carrier", "outside", "replicas"),
    [("file", False, (2, 2)), pytest.param("http", True, (1, 1), marks=pytest.mark.extras)],
    ids=["deployed", "vllm-router"],
)
def test_the_demo_gives_the_answers_of_one_server_and_stops_what_it_started(
    artifact, capsys, carrier, outside, replicas
):
    """The first is deploy/prefill-decode.sh, unchanged."""
    prompts = 3 if outside else 5
    found = demo(artifact("micro-tp1-snapshots"), carrier, outside, prompts, replicas)
    assert (found["same"], found["loaded"]) == (prompts, prompts) and found["hit_rate"] > 0
    assert set(found["phases_ms"]) == set(PHASES)
    said = f"states taken {prompts}/{prompts}; the same answers as one server {prompts}/{prompts}"
    assert said in capsys.readouterr().out
