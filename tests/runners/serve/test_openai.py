"""OpenAI's own client against a server process on loopback: what tests/runners/serve/test_fields.py says of fields."""

import json

import openai
import pytest

from tests.support import toy_artifact
from tests.support.serving import Server


@pytest.fixture(scope="module")
def client():
    with (
        Server(toy_artifact.shared(), "--model", "toy") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def test_a_chat_with_log_probabilities_and_a_schema_whole_and_as_a_stream(client):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 5}},
        "required": ["n"],
        "additionalProperties": False,
    }
    asked = {
        "model": "toy",
        "messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "A"}],
        "temperature": 0,
        "max_tokens": 30,
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
    }
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.finish_reason == "length" or 1 <= json.loads(choice.message.content)["n"] <= 5
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    assert sum(len(part.logprobs.content) for part in parts if part.logprobs) == whole.usage.completion_tokens
    assert chunks[-1].usage == whole.usage


def test_a_response_whole_and_as_a_stream(client):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    asked = {
        "model": "toy",
        "instructions": "a",
        "input": [{"role": "user", "content": "A"}],
        "temperature": 0,
        "max_output_tokens": 30,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        "include": ["message.output_text.logprobs"],
        "store": False,
    }
    whole = client.responses.create(**asked)
    assert json.loads(whole.output_text)["n"] in (1, 2)
    assert (whole.status, whole.usage.total_tokens) == (
        "completed",
        whole.usage.input_tokens + whole.usage.output_tokens,
    )
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == whole.output_text
        assert stream.get_final_response().usage == whole.usage
    again = client.responses.create(model="toy", input=[*asked["input"], *whole.output, *asked["input"]], store=False)
    assert again.usage.input_tokens > whole.usage.input_tokens
    for fields in ({"store": True}, {"previous_response_id": whole.id}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="toy", input="A", **fields)
        assert [refused.value.param] == [*fields] and "keeps no answers" in refused.value.message
