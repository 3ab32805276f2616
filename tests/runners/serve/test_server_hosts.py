"""A server on 4 processes of 4 virtual devices: the first answers, others follow; clients get an error if one dies."""

import os
import signal

import httpx2
import msgspec
import openai
import pytest
import zmq

from ling3export.runners.engine.engine import Engine
from tests.support.hosting import ENDED, hosting, wait_until_following
from tests.support.serving import error_of

pytestmark = pytest.mark.hosts

COUNT = 4
GONE = error_of("engine: expected every host to run, found one gone: the server ends", "server_error", "host_gone")


@pytest.mark.extras
def test_four_processes_serve_as_one_and_say_when_one_is_gone(artifact):
    command = ["serve", artifact("micro-4x1"), "--port", 0, "--check", "programs"]
    with hosting([command] * COUNT) as processes:
        wait_until_following(processes[2])
        assert processes[0].stdout is not None
        url = processes[0].stdout.readline().strip()
        assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client,
            Engine(artifact("micro-tp4"), report=lambda text: None) as engine,
        ):
            prompts = [[1, 2, 3], [7, 8]]
            how = {"max_tokens": 4, "temperature": 0.8, "seed": 5}
            expected = [done.token_ids for done in engine.generate(prompts, **how)]
            more = {"extra_body": {"return_token_ids": True}}
            whole = client.completions.create(model="micro-4x1", prompt=prompts, **how, **more)
            assert [choice.token_ids for choice in whole.choices] == expected
            ask = {"model": "micro-4x1", "prompt": [1, 2, 3], "max_tokens": 900, "temperature": 0}
            stream = client.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
            next(stream)
            os.kill(processes[2].pid, signal.SIGKILL)
            with pytest.raises(openai.APIError) as cut:
                list(stream)
            assert cut.value.body == GONE
            assert httpx2.get(f"{url}/health").status_code == 503
            assert httpx2.get(f"{url}/health").json() == {"error": GONE}
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(**ask)
            assert (refused.value.status_code, refused.value.body) == (503, GONE)
        said = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [1, 1, -signal.SIGKILL, 1], said
    for number in (0, 1, 3):  # host 0 informs those that have no connection to the lost one
        assert said[number][1].endswith(ENDED.format(2))
    assert [out for out, _ in said] == [""] * COUNT


def test_host_0_publishes_the_events_of_all(artifact):
    command = ["serve", artifact("micro-2x1-snapshots"), "--port", 0, "--kv-events", "tcp://127.0.0.1:0"]
    with hosting([command] * 2) as processes, zmq.Context() as context, context.socket(zmq.SUB) as heard:
        assert processes[0].stdout is not None
        url = processes[0].stdout.readline().strip()
        heard.connect(f"tcp://127.0.0.1:{httpx2.get(f'{url}/health').json()['kv_events']['port']}")
        heard.setsockopt(zmq.SUBSCRIBE, b"")
        body = {"model": "micro-2x1-snapshots", "max_tokens": 2, "ignore_eos": True}
        prompts = iter(range(1, 300))  # until the subscription has arrived
        while not heard.poll(200):
            first = next(prompts)
            for cached in (0, 32):
                prompt = {"prompt": [*range(first, first + 40)]}
                answer = httpx2.post(f"{url}/v1/completions", json=body | prompt, timeout=60).json()
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        _, events, _ = msgspec.msgpack.decode(heard.recv_multipart()[2])
        assert events[0]["type"] == "BlockStored" and len(events[0]["token_ids"]) == 32
