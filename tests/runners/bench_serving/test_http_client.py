"""The client: token times of a stream, token counts that servers report, and every way in which an answer can fail."""

import asyncio
import math
import socket

import pytest

from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.runners.bench_serving.http_client import HttpClient
from ling3export.runners.bench_serving.measure import run
from ling3export.runners.bench_serving.workloads import SampleRequest, arrivals
from tests.support.fake_openai import HEAD, chunk, event, serving, whole, words


def client(url, **more):
    return HttpClient(url, **({"model": None, "key": None, "ignore_eos": True} | more))


def sent(url, asks, limit=None, **more):
    async def go():
        server = client(url, **more)
        await server.open()
        return await run(server, asks, arrivals(len(asks), math.inf, 0), limit=limit)

    return asyncio.run(go())


def test_each_piece_of_a_stream_is_a_token_in_its_time():
    with serving(lambda body: words(body, gap=0.02)) as (url, bodies):
        done = sent(url, [SampleRequest("hello", 5), SampleRequest((1, 2), 3)])
    first, second = sorted(done.results, key=lambda result: -result.tokens)
    assert (first.tokens, second.tokens, first.prompt_tokens, first.error) == (5, 3, 7, None)
    assert first.text == "w0 w1 w2 w3 w4 "
    assert first.ttft >= 0.02 and min(first.itl) > 0 and first.e2e >= 0.1
    assert len(first.times) == 5 and done.duration >= first.e2e
    assert done.compiles is None and done.unfinished == 0
    warm_up = {
        "model": "fake",
        "prompt": "hello",
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert bodies[0] == warm_up and len(bodies) == 3


def test_the_warm_up_is_short_and_its_failure_ends_the_run():
    with serving(words) as (url, bodies):
        sent(url, [SampleRequest("a", 100)])
    assert [body["max_tokens"] for body in bodies] == [32, 100]
    refusal = whole({"error": {"message": "no such prompt"}}, "400 Bad Request")
    with (
        serving(lambda body: [refusal]) as (url, _),
        pytest.raises(Ling3Error, match=r"warm-up: expected an answer .*, found .*no such prompt"),
    ):
        sent(url, [SampleRequest("a", 100)])


def test_an_answer_that_says_how_it_ended_is_whole():
    """Regression: transformers' server sends no [DONE] after its answers, and all of them counted as cut short."""
    last = {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}
    answer = [HEAD, event({"choices": [{"text": "a", "finish_reason": None}]}), event(last), b"0\r\n\r\n"]
    with serving(lambda body: answer) as (url, _):
        (result,) = sent(url, [SampleRequest("a", 1)]).results
    assert (result.error, result.tokens, result.text) == (None, 1, "a")


def test_tokens_that_come_together_have_one_time():
    def answer(body):
        pieces = [{"choices": [{"text": "ab", "token_ids": [1, 2]}]}, {"choices": [{"text": "", "token_ids": [3]}]}]
        return [HEAD, event(pieces[0]), 0.02, event(pieces[1]), event(b"[DONE]"), b"0\r\n\r\n"]

    with serving(answer) as (url, _):
        (result,) = sent(url, [SampleRequest("a", 3)]).results
    assert result.tokens == 3
    assert result.itl[0] == 0 and result.itl[1] > 0
    assert result.pieces == result.times[:1]  # the second event has no text


def test_an_event_may_come_in_any_pieces():
    def answer(body):
        data = b"".join(part[part.index(b"\n") + 1 : -2] for part in words(body)[1:-1] if isinstance(part, bytes))
        return [HEAD, *(chunk(data[at : at + 7]) for at in range(0, len(data), 7)), b"0\r\n\r\n"]

    with serving(answer) as (url, _):
        (result,) = sent(url, [SampleRequest("a", 4)]).results
    assert (result.text, result.tokens, result.error) == ("w0 w1 w2 w3 ", 4, None)


def test_an_answer_without_text_has_the_time_of_its_end():
    usage = event(
        {
            "choices": [{"text": ""}],
            "usage": {"completion_tokens": 1, "prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
        }
    )
    with serving(lambda body: [HEAD, usage, event(b"[DONE]"), b"0\r\n\r\n"]) as (url, _):
        (result,) = sent(url, [SampleRequest("a", 4)]).results
    assert (result.tokens, len(result.times), result.cached) == (1, 1, 1)


FAULTS = {
    "status": ([whole({"error": {"message": "too many"}}, "429 Too Many Requests")], "status 429: too many"),
    "no JSON": ([HEAD, event(b"{"), b"0\r\n\r\n"], "ValueError|JSONDecodeError"),
    "no object": ([HEAD, event([]), b"0\r\n\r\n"], "an event that is no object"),
    "error": (
        [HEAD, event({"error": {"message": "engine stopped"}}), event(b"[DONE]"), b"0\r\n\r\n"],
        "engine stopped",
    ),
    "cut short": ([HEAD, event({"choices": [{"text": "a"}]}), b"0\r\n\r\n"], "cut short"),
    "connection": ([HEAD, event({"choices": [{"text": "a"}]})], "RemoteProtocolError"),
    "no HTTP": ([b"hello\r\n\r\n"], "RemoteProtocolError"),
    "silence": ([HEAD, 5.0], "TimeoutError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_fails_says_why_and_the_others_go_on(fault):
    parts, message = FAULTS[fault]
    with serving(lambda body: parts if body["prompt"] == "bad" else words(body)) as (url, _):
        done = sent(url, [SampleRequest("good", 2), SampleRequest("bad", 2), SampleRequest("good", 3)], timeout=0.5)
    failed = [result.error for result in done.results if result.error is not None]
    assert len(failed) == 1 and len(done.results) == 3
    assert any(part in failed[0] for part in message.split("|")), failed


def test_no_more_requests_run_at_once_than_may():
    running = [0, 0]

    def answer(body):
        return words(body, gap=0.01)

    with serving(answer) as (url, _):
        done = sent(url, [SampleRequest("a", 3)] * 8, limit=2)
    changes = sorted(
        [(each.start, 1) for each in done.results] + [(each.start + each.e2e, -1) for each in done.results]
    )
    for _, change in changes:
        running[0] += change
        running[1] = max(running)
    assert running == [0, 2]


def test_an_interrupted_run_has_what_was_done_until_then():
    async def go(url):
        server = client(url)
        await server.open()
        asks = [SampleRequest("quick", 2), SampleRequest("quick", 3), SampleRequest("slow", 2)]
        task = asyncio.create_task(run(server, asks, [0.0] * 3))
        while not task.done() and len(bodies) < 4:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        task.cancel()
        return await task

    with serving(lambda body: words(body, gap=30.0 if body["prompt"] == "slow" else 0.0)) as (url, bodies):
        done = asyncio.run(go(url))
    assert (len(done.results), done.unfinished) == (2, 1)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http://a:x", "http://a:0"])
def test_an_invalid_address_is_refused(url):
    with pytest.raises(RequestError, match=r"url: expected http://HOST:PORT, found"):
        client(url)


def test_without_a_server_or_its_models_the_error_says_so():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(Ling3Error, match=r"server: expected one at 127.0.0.1:\d+, found "):
            asyncio.run(client(url).open())
    with serving(words, models={"data": []}) as (url, _):
        with pytest.raises(Ling3Error, match="expected a list of models at /v1/models, found something else"):
            asyncio.run(client(url).open())
        assert sent(url, [SampleRequest("a", 2)], model="named").results[0].tokens == 2
    with serving(words, models=whole({}, "500 Internal Server Error")) as (url, _):  # transformers' server, offline
        with pytest.raises(Ling3Error, match="expected 200 for /v1/models, found 500"):
            asyncio.run(client(url).open())
        assert sent(url, [SampleRequest("a", 2)], model="named").results[0].tokens == 2


def test_our_own_server_is_asked_for_token_ids():
    ours = {"data": [{"id": "m", "owned_by": "ling3export"}]}
    with serving(lambda body: words(body, ids=body["return_token_ids"]), models=ours) as (url, bodies):
        server = client(url + "/v1/", key="secret")
        asyncio.run(server.open())
        result = asyncio.run(server.send(server.prepare(SampleRequest("a", 3))))
    assert (result.tokens, bodies[0]["return_token_ids"], bodies[0]["model"]) == (3, True, "m")
