"""A real server process and the real `openai` client: the engine's answers, errors, disconnects, and the end."""

import json

import httpx2
import openai
import pytest

from ling3export.runners.engine.engine import Engine
from tests.support.artifacts_fixture import Artifacts, run
from tests.support.serving import RUNNER, Server, data_lines, error_of

KEY = "sesame-7f3a"
MOST = 6
LONG = 900  # tokens: seconds on this artifact
ASK = {"model": "micro-tp1", "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "there were twice as many apples"}]


@pytest.fixture(scope="module")
def server(artifact: Artifacts, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(f"{KEY}\n")
    with Server(artifact("micro-tp1"), "--api-key-file", file, "--max-requests", MOST, "--max-body", 20000) as server:
        yield server
        assert server.stop() == 0
        said = server.said()
        assert "Traceback" not in said and "WARNING" not in said and "ERROR" not in said, said
        assert said.endswith("serve: ended\n")


@pytest.fixture(scope="module")
def client(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def engine(artifact: Artifacts):
    """The same artifact in this process gives the expected answers."""
    with Engine(artifact("micro-tp1"), report=lambda text: None) as engine:
        yield engine


def idle(server: Server) -> dict[str, float]:
    """Waits until nothing runs; every slot and page is then free."""
    found = server.until("ling3_requests_live", 0, Authorization=f"Bearer {KEY}")
    assert found["ling3_slots_free"] == found["ling3_slots"] == 8
    assert found["ling3_pages_free"] == found["ling3_pages"] > 0
    return found


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("micro-tp1", "model", "ling3export")
    assert model.max_model_len == 1024
    assert client.models.retrieve("micro-tp1") == model
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-7")
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    "prompt", ["the number of", ["the number of", "it was"], [5, 6, 7], [[5, 6, 7], [8], [9, 9]]], ids=str
)
def test_completions_are_the_engines(client, engine, prompt):
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    expected = engine.generate(prompts, max_tokens=12)
    found = client.completions.create(
        model="micro-tp1", prompt=prompt, max_tokens=12, temperature=0, extra_body={"return_token_ids": True}
    )
    assert (found.object, found.model) == ("text_completion", "micro-tp1")
    assert [choice.index for choice in found.choices] == list(range(len(prompts)))
    assert [choice.text for choice in found.choices] == [done.text for done in expected]
    assert [choice.token_ids for choice in found.choices] == [done.token_ids for done in expected]
    reasons = ["length" if done.stop_reason == "length" else "stop" for done in expected]
    assert [choice.finish_reason for choice in found.choices] == reasons
    sums = [sum(len(getattr(done, name)) for done in expected) for name in ("prompt_ids", "token_ids")]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (*sums, sum(sums))


def test_a_stream_says_what_the_whole_says(client, engine):
    prompts = ["the number of", "it was a long way"]
    expected = engine.generate(prompts, max_tokens=40)
    stream = client.completions.create(
        model="micro-tp1",
        prompt=prompts,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, *chunks = ["", ""], ["", ""], *stream
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert chunk.usage is None and choice.index in (0, 1)
        texts[choice.index] += choice.text
        reasons[choice.index] += choice.finish_reason or ""
    assert texts == [done.text for done in expected]
    assert reasons == ["length" if done.stop_reason == "length" else "stop" for done in expected]
    assert len(chunks) > 10, "it came in pieces"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == sum(len(done.token_ids) for done in expected)
    phases = chunks[-1].model_extra["phases_ms"]  # of the first choice
    assert {*phases} == {"queue", "prefill"} and min(phases.values()) >= 0
    assert not any("phases_ms" in chunk.model_extra for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("parts", [False, True])
def test_chat(client, engine, parts):
    (expected,) = engine.generate([MESSAGES], max_tokens=20)
    content = [{"type": "text", "text": "there were twice "}, {"type": "text", "text": "as many apples"}]
    messages = [{"role": "user", "content": content}] if parts else MESSAGES
    found = client.chat.completions.create(model="micro-tp1", messages=messages, max_tokens=20, temperature=0)
    (choice,) = found.choices
    assert (found.object, choice.message.role, choice.message.content) == ("chat.completion", "assistant", "")
    assert choice.message.reasoning_content == expected.text, "the template begins a thought, which never ends"
    assert found.usage.prompt_tokens == len(expected.prompt_ids)
    stream = client.chat.completions.create(
        model="micro-tp1", messages=messages, max_completion_tokens=20, temperature=0, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    parts = [chunk.choices[0].delta.model_extra.get("reasoning_content", "") for chunk in chunks]
    assert "".join(parts) == expected.text
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_sampling_is_the_engines(client, engine):
    how = {"temperature": 0.8, "top_p": 0.9, "seed": 77}
    (expected,) = engine.generate(["the number of"], max_tokens=24, top_k=40, **how)
    ask = {"model": "micro-tp1", "prompt": "the number of", "max_tokens": 24}
    found = [client.completions.create(**ask, **how, extra_body={"top_k": 40}).choices[0].text for _ in range(2)]
    assert found == [expected.text] * 2
    assert len({client.completions.create(**ask).choices[0].text for _ in range(4)}) > 1, "without a seed they differ"


@pytest.mark.parametrize("key", ["", "wrong", KEY + "x", KEY[:-1]])
def test_every_call_but_health_needs_the_key(server, key):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for path in ("/v1/models", "/metrics", "/nothing"):
        answer = httpx2.get(server.url + path, headers=headers)
        assert answer.status_code == 401
        found = f"expected `Bearer KEY` with this server's key, found {'another' if key else 'none'}"
        error = error_of(f"`Authorization`: {found}", "authentication_error", "invalid_api_key")
        assert answer.json()["error"] == error
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}


def test_the_start_says_once_which_settings_requests_have_that_name_none(server):
    """This checkpoint's generation_config.json has no settings."""
    assert server.said().count("serve: settings of requests that name none: those of OpenAI's API\n") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled(client, server, stream):
    before = idle(server)
    ask = ASK | {"prompt": [[1, 2]] * 2, "max_tokens": LONG, "stream": stream}
    with httpx2.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as raw:
        if stream:
            with raw.stream("POST", f"{server.url}/v1/completions", json=ask) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx2.ReadTimeout):
                raw.post(f"{server.url}/v1/completions", json=ask, timeout=0.3)
    after = idle(server)
    left = 'ling3_completions_total{reason="left"}'
    assert after[left] - before.get(left, 0) == 2
    assert after["ling3_generated_tokens_total"] - before["ling3_generated_tokens_total"] < 2 * LONG


def test_metrics_count(client, server):
    before = idle(server)
    client.completions.create(model="micro-tp1", prompt=[[1, 2, 3]] * 2, max_tokens=5, extra_body={"ignore_eos": True})
    after = idle(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["ling3_prompt_tokens_total"] == 6
    assert grown["ling3_generated_tokens_total"] == 10
    assert grown['ling3_completions_total{reason="length"}'] == 2
    assert grown['ling3_http_responses_total{path="/v1/completions",status="200"}'] == 1
    for name in ("queue", "first_token", "token_gap", "request"):
        assert grown[f"ling3_{name}_seconds_count"] == 2
    assert after["ling3_compile_events_total"] == 0
    assert grown['ling3_calls_total{cell="decode@8"}'] == 4


def test_sigterm_lets_calls_end(artifact: Artifacts):
    """A running stream is finished, new calls are refused, and the exit code is 0."""
    with Server(artifact("micro-tp1"), LING3_API_KEY=KEY) as server:
        ask = ASK | {"prompt": [1, 2], "max_tokens": 150, "stream": True, "return_token_ids": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=ask, headers=headers, timeout=60) as answer:
            lines = data_lines(answer.iter_lines())
            first = json.loads(next(lines))
            server.process.terminate()
            *others, last = lines
        chunks = [first, *map(json.loads, others)]
        assert last == "[DONE]"
        assert sum(len(chunk["choices"][0].get("token_ids", [])) for chunk in chunks) == 150
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{server.url}/health")


def test_an_address_in_use_is_refused_before_loading(server, artifact: Artifacts):
    port = server.url.rpartition(":")[2]
    done = run(*RUNNER, "serve", "no-such-artifact", "--port", port, code=1)
    assert done.stdout == ""
    assert done.stderr == (
        f"error: address `127.0.0.1:{port}`: expected one that is free here, found Address already in use\n"
        "hint: take another with --host and --port; port 0 is any free one\n"
    )
