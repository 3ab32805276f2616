"""/v1/messages with Anthropic's own client: with and without streams, with tools, thoughts and errors of its form."""

import json
from typing import Any

import anthropic
import httpx2
import pytest

from ling3export.runners.engine.engine import Engine
from ling3export.runners.serve.app import Policy
from ling3export.runners.serve.messages import MessagesBody
from ling3export.runners.serve.schema import validated
from tests.runners.serve.test_clients import ANSWER, ASKED, CALLS, THOUGHT, script, weather, written
from tests.support import serving
from tests.support.scripted import MODEL, listening, scripted

MESSAGES = "/v1/messages"
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of the next days.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}
HELLO: dict[str, Any] = {"model": "toy", "max_tokens": 8, "messages": [{"role": "user", "content": "A"}]}
OPTIONS_OF_ENGINE = {"max_requests": 8}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    def answer(prompt: str) -> str:
        return "hm</think>one STOP two" if "until" in prompt else script(prompt)

    with scripted(tmp_path_factory.mktemp("scripted"), answer) as (engine, runner), listening(engine) as url:
        yield url, runner


@pytest.fixture
def client(served):
    with anthropic.Anthropic(base_url=served[0], api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(client: anthropic.Anthropic, streams: bool, **fields: Any) -> Any:
    """The message; of a stream, the one that the client assembles from the events."""
    fields = {"model": MODEL, "max_tokens": 1000, **fields}
    if not streams:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        text = "".join(event.text for event in stream if event.type == "text")
        message = stream.get_final_message()
    assert text == "".join(block.text for block in message.content if block.type == "text")
    return message


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_anthropics_client_calls_tools_and_gets_an_answer(served, client, streams):
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    first = asked(client, streams, messages=messages, tools=[TOOL])
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["thinking", "tool_use", "tool_use"]
    thought, *calls = first.content
    assert (thought.thinking, [call.input for call in calls]) == (THOUGHT, CALLS)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)} for call in calls]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = asked(client, streams, messages=messages, tools=[TOOL])
    assert (last.stop_reason, last.content[-1].text) == ("end_turn", ANSWER)
    # The next prompt has the whole first turn as the model wrote it, including its thought.
    assert f"<think>{THOUGHT}</think>{''.join(map(written, CALLS))}<|role_end|>" in served[1].prompts[-1]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "stop"),
    [
        ({"stop_sequences": ["no", "STOP"]}, ("stop_sequence", "STOP", "one ")),
        ({}, ("end_turn", None, "one STOP two")),
        ({"max_tokens": 15}, ("max_tokens", None, None)),
    ],
)
def test_stop_reasons(client, streams, fields, stop):
    found = asked(client, streams, messages=[{"role": "user", "content": "until"}], **fields)
    reason, sequence, text = stop
    assert (found.stop_reason, found.stop_sequence) == (reason, sequence)
    assert text is None or found.content[-1].text == text
    assert found.usage.output_tokens == 15 or reason != "max_tokens"
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens > 10


@pytest.mark.parametrize(
    ("thinking", "end"), [({"type": "disabled"}, "<think></think>"), ({"type": "adaptive"}, "<think>")]
)
def test_thinking_reaches_the_template(served, client, thinking, end):
    asked(client, False, messages=[{"role": "user", "content": ASKED}], thinking=thinking)
    assert served[1].prompts[-1].endswith(end)


def test_tokens_are_counted_as_a_message_counts_them(client):
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": ASKED}], "tools": [TOOL], "system": "Be brief."}
    counted = client.messages.count_tokens(model=MODEL, **fields).input_tokens
    usage = asked(client, False, **fields).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_a_system_line_that_differs_in_each_request_is_dropped():
    """It would end every prefix that requests share."""

    def messages(system: Any) -> Any:
        return validated(MessagesBody, HELLO | {"system": system}, "toy").chat["messages"]

    plain = messages("Be brief.\nBe kind.")
    line = "x-anthropic-billing-header: cc_version=2.1; cch=0f3a1;"
    assert plain[0] == {"role": "system", "content": "Be brief.\nBe kind."}
    assert messages(f"{line}\nBe brief.\nBe kind.") == plain
    blocks = [{"type": "text", "text": text} for text in (line, "Be brief.", "Be kind.")]
    assert messages([each | {"cache_control": {"type": "ephemeral"}} for each in blocks]) == plain
    assert messages([{"type": "text", "text": line}]) == plain[1:]


def test_a_history_is_a_chats():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "5"}], "is_error": False},
        {"type": "text", "text": "go on"},
    ]
    history = [*HELLO["messages"], {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    body = validated(MessagesBody, HELLO | {"messages": history, "tools": [TOOL]}, "toy").chat
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert body["messages"] == [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "t1"},
        {"role": "user", "content": "go on"},
    ]
    function = {"name": "get_weather", "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    assert body["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", True)),
        ({"type": "tool", "name": "f"}, ({"type": "function", "function": {"name": "f"}}, True)),
    ],
)
def test_tool_choices(choice, fields):
    body = validated(MessagesBody, HELLO | {"tool_choice": choice}, "toy").chat
    assert (body["tool_choice"], body["parallel_tool_calls"]) == fields


def call(engine: Engine, body: Any, path: str = MESSAGES, key: str | None = None, **headers: str) -> httpx2.Response:
    return serving.asked(engine, Policy("toy", key, 8, 100_000), path, body, **headers)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"max_tokens": None}, "`max_tokens`: expected a whole number from 1 to 2147483647, found none"),
        ({"max_tokens": 0}, "`max_tokens`: expected a whole number from 1 to 2147483647, found 0"),
        ({"messages": []}, "`messages`: expected a list of messages"),
        ({"messages": [5]}, "`messages`: expected a list of messages"),
        ({"messages": [{"role": "tool", "content": "A"}]}, 'a role of user or assistant, found "tool" at place 0'),
        ({"messages": [{"role": [], "content": "A"}]}, "a role of user or assistant, found [] at place 0"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 'of the user, found "image" at place 0'),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "a `tool_use_id` in each tool_result"),
        ({"messages": [{"role": "user"}]}, "content that is a text or a list of blocks, found null at place 0"),
        ({"messages": [{"role": "user", "content": "A" * 1000}]}, "within the context of 64 tokens"),
        ({"system": [{"type": "image"}]}, "`system`: expected content of text alone"),
        ({"stop_sequences": [""]}, "`stop_sequences`: expected a text or a list of at most 16"),
        ({"thinking": {"type": "much"}}, '`thinking`: expected a type of enabled, adaptive or disabled, found "much"'),
        ({"tool_choice": {"type": []}}, "`tool_choice`: expected a type of auto, any, tool or none, found []"),
        ({"tool_choice": {"type": "tool", "name": {}}}, "`tool_choice`: expected"),
        ({"tools": [{"type": "web_search_20250305"}]}, '`tools`: expected tools with an input_schema'),
        ({"output_config": {"format": {"type": "xml"}}}, "`output_config`: expected a format of type json_schema"),
        ({"output_config": {"effort": "huge"}}, "`output_config`: expected"),
        ({"nope": 1}, "`nope`: expected one of the fields "),
        ({"n": 2}, "`n`: expected one of the fields "),
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused_in_the_protocols_form(engine, change, found):
    answer = call(engine, HELLO | change)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error"), error
    assert found in error["error"]["message"]


def test_errors_of_the_server_have_the_protocols_form(engine):
    for body, status, kind in (
        (HELLO | {"model": "other"}, 404, "not_found_error"),
        (HELLO | {"metadata": {"user_id": "x" * 200_000}}, 413, "request_too_large"),
        (HELLO, 401, "authentication_error"),
    ):
        answer = call(engine, body, key="key-1" if status == 401 else None)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert call(engine, HELLO, key="key-1", **{"x-api-key": "key-1"}).status_code == 200
    assert call(engine, HELLO, key="key-1", **{"x-api-key": "key-2"}).status_code == 401


def test_a_message_is_a_chats_answer(engine):
    found = call(engine, HELLO | {"temperature": 0}).json()
    chat = call(engine, HELLO | {"temperature": 0}, "/v1/chat/completions").json()
    assert found["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert found["usage"]["output_tokens"] == chat["usage"]["completion_tokens"] == 8


def test_a_form_is_followed(engine):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "max_tokens": 30}
    assert json.loads(call(engine, HELLO | form).json()["content"][0]["text"])["n"] in (1, 2)
