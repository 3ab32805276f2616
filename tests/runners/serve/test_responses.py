"""/v1/responses: items that become a chat, and a chat's answer as items and as the events that build them."""

import json
import random
from typing import Any

import httpx2
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import RequestDelta
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.app import Policy
from ling3export.runners.serve.generation import ChatBody, GenerationCall
from ling3export.runners.serve.responses import ResponsesAnswer, ResponsesBody
from ling3export.runners.serve.schema import ApiError, validated
from ling3export.runners.text.answer import AnswerFormat
from tests.support.serving import asked

ASKED: dict[str, Any] = {"model": "toy", "input": "A", "temperature": 0, "max_output_tokens": 8}
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "A"}], "max_tokens": 1}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OPTIONS_OF_ENGINE = {"max_requests": 8}


def call(engine: Engine, body: Any, path: str = "/v1/responses") -> httpx2.Response:
    return asked(engine, Policy("toy", None, 8, 100_000), path, body)


def streamed(engine: Engine, body: Any) -> list[dict[str, Any]]:
    """The events of a stream; checks that the client's own model accepts each, and that it has the name of its type."""
    answer = call(engine, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    found = []
    for said in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = said.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name not in ("id", "call_id", "created_at")}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def test_a_response_is_a_chats_answer(engine):
    more = {"instructions": "a", "input": [{"role": "user", "content": [{"type": "input_text", "text": "A"}]}]}
    found = call(engine, ASKED | more | {"metadata": {"k": "v"}}).json()
    Response.model_validate(found)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "A"}]
    chat = call(
        engine, {"model": "toy", "messages": messages, "temperature": 0, "max_tokens": 8}, "/v1/chat/completions"
    ).json()
    (choice,) = chat["choices"]
    (item,) = found["output"]
    assert text_of(found) == choice["message"]["content"]
    assert item["content"][0]["logprobs"] == []
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (found["instructions"], found["metadata"], found["store"]) == ("a", {"k": "v"}, False)
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [found["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")] == [
        chat["usage"][name] for name in names
    ]


def test_a_stream_has_the_events_that_clients_wait_for_and_ends_with_the_whole(engine):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    body = ASKED | {"text": form, "max_output_tokens": 30}
    events = streamed(engine, body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        kinds[-1],
    ]
    last = events[-1]["response"]
    assert kinds[-1] == last["status"] == "completed"
    assert json.loads(text_of(last))["n"] in (1, 2)
    assert "".join(event["delta"] for event in deltas) == text_of(last)
    assert without_ids(last) == without_ids(call(engine, body).json())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"input": None}, "a text or a list of items, [{\"role\": TEXT, \"content\": TEXT}, ...], found none"),
        ({"input": []}, "a text or a list of items, [{\"role\": TEXT, \"content\": TEXT}, ...], found []"),
        ({"input": [5]}, "found 5 at place 0"),
        ({"input": [{"role": "user"}]}, "found no `content` at place 0"),
        ({"input": [{"role": "user", "content": "A", "nope": 1}]}, "found `nope` 1 at place 0"),
        ({"input": [{"role": "user", "content": "A"}, {"type": "item_reference", "id": "x"}]},
         "`input`: expected items of type message, function_call, function_call_output, reasoning, found "
         '"item_reference" at place 1'),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         '`input`: expected content of text alone, found a part of type "input_image" at place 0'),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "found no `call_id` at place 0"),
        ({"input": "A" * 70_000}, "input: expected text within the context of 64 tokens"),
        ({"input": [{"role": "user", "content": "A"}] * 65}, "expected at most 64 messages, found 65"),
        ({"max_output_tokens": 0}, "found 0"),
        ({"store": True}, "this server keeps no answers"),
        ({"previous_response_id": "resp_1"},
         "this server keeps no answers, so `input` has the " 'whole conversation, found "resp_1"'),
        ({"conversation": "c"}, "this server keeps no answers"),
        ({"background": True}, "expected it left out or false, found true"),
        ({"include": ["file_search_call.results"]},
         'a list of "reasoning.encrypted_content" at most'),
        ({"text": {"format": {"type": "xml"}}},
         '`text`: expected a type of text, json_object or json_schema, found "xml"'),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "`text`: expected a json_schema with a schema"),
        ({"text": {"verbosity": "low"}}, "found \"low\""),
        ({"tools": [{"type": "web_search"}]}, "at place 0"),
        ({"tools": [{"type": "function", "name": "f"}]}, "expected a chat template that writes tools"),
        ({"reasoning": {"effort": "huge"}}, "expected an object with an effort, and at most"),
        ({"max_tokens": 3}, "expected one of the fields "),
        ({"n": 2}, "expected one of the fields "),
        ({"top_logprobs": 2}, "expected it left out or 0, found 2: not supported here"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused_by_name(engine, change, found):
    answer = call(engine, ASKED | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, next(iter(change))), error
    assert found in error["message"]


def test_half_a_character_in_metadata_comes_back(engine):
    """Regression: the whole answer was a 500, since half a character has no UTF-8 form."""
    found = call(engine, json.loads('{"metadata": {"k": "\\ud83d"}}') | ASKED)
    assert (found.status_code, found.json()["metadata"]) == (200, {"k": "\ud83d"})


@pytest.mark.parametrize("choice", [{"name": []}, {"function": {"name": {}}}, {"type": "function", "name": 5}])
def test_a_tool_choice_whose_name_is_no_text_is_refused(engine, choice):
    """Regression: a list or an object as the name was a 500."""
    for path, body in (("/v1/responses", ASKED), ("/v1/chat/completions", CHAT)):
        answer = call(engine, body | {"tool_choice": choice}, path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


def test_fields_that_ask_for_nothing_are_taken(engine):
    more = {
        "store": False,
        "previous_response_id": None,
        "reasoning": {},
        "truncation": "disabled",
        "text": {},
        "service_tier": "auto",
        "user": "u",
        "prompt_cache_key": "k",
        "include": [],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "stream_options": {"include_obfuscation": False},
        "top_k": 5,
    }
    assert text_of(call(engine, ASKED | more).json()) == text_of(call(engine, ASKED).json())
    # Fields that inspect-ai sends for an unknown model. Our thoughts are text, so both fields change nothing.
    more = {"store": False, "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    assert without_ids(call(engine, ASKED | more).json()) == without_ids(call(engine, ASKED).json())


def test_items_of_an_answer_go_back_as_a_history():
    """The items of an answer become one message of the assistant, as chat templates need it."""
    made = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}
    made |= {"status": "completed"}
    items = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": "A", "type": "message"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}],
        },
        made,
        made | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        made,
        {"type": "reasoning", "id": "rs_2", "summary": []},
        {"role": "user", "content": "B"},
    ]
    body = validated(ResponsesBody, ASKED | {"input": items, "instructions": "i"}, "toy")
    function = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert body.chat["messages"] == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": "A"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", **function}, {"id": "c2", **function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **function}]},
        {"role": "assistant", "content": "", "reasoning_content": ""},
        {"role": "user", "content": "B"},
    ]


def test_tools_are_a_chats_tools():
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    body = validated(ResponsesBody, ASKED | {"tools": [tool], "tool_choice": {"type": "function", "name": "f"}}, "toy")
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert body.chat["tools"] == [{"type": "function", "function": function}]


def answer_of(engine: Engine, form: AnswerFormat | None) -> ResponsesAnswer:
    tokenizer = engine.files.tokenizer("test")
    body = validated(ResponsesBody, ASKED, "toy")
    chat = validated(ChatBody, body.chat, "toy")
    call = GenerationCall(chat, [], ((1, 2),), tokenizer, format=form, outer=body)
    return ResponsesAnswer(call, "toy")


def test_thoughts_and_calls_are_items_of_their_own_in_pieces_of_any_size(engine):
    form, tokenizer = AnswerFormat(True, False, {"add": None}), engine.files.tokenizer("test")
    thought, tail = "<think>a b</think>", '\nso<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = tokenizer.encode(thought + tail, special=False)
    whole = answer_of(engine, form).whole([Completion([1, 2], ids, thought + tail, "eos", 0, 0)])
    Response.model_validate(whole)
    assert [(item["type"], item["status"]) for item in whole["output"]] == [
        (kind, "completed") for kind in ("reasoning", "message", "function_call")
    ]
    reasoning, message, made = whole["output"]
    assert (reasoning["content"][0]["text"], message["content"][0]["text"]) == ("a b", "so")
    assert (made["name"], made["arguments"]) == ("add", '{"a": 1}')
    count = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert len(tokenizer.encode("a b", special=False)) <= count <= len(tokenizer.encode(thought, special=False))
    for seed in range(10):
        draw, answer, at, stream = random.Random(seed), answer_of(engine, form), 0, tokenizer.stream()
        events = answer.begin()
        while at < len(ids):
            some = ids[at : at + draw.randint(1, 4)]
            at += len(some)
            text = "".join(map(stream.push, some)) + (stream.finish() if at == len(ids) else "")
            done = Completion([1, 2], ids, thought + tail, "eos", 0, 0) if at == len(ids) else None
            events += answer.piece(0, RequestDelta(text, some, done))
        for event in events:
            EVENT.validate_python(event)
        assert without_ids(events[-1]["response"]) == without_ids(whole)
        for at, item in enumerate(whole["output"]):
            deltas = [each["delta"] for each in events if "delta" in each and each["output_index"] == at]
            assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


def test_an_answer_without_a_character_is_an_empty_message(engine):
    whole = answer_of(engine, None).whole([Completion([1, 2], [3], "", "eos", 0, 0)])
    assert (text_of(whole), len(whole["output"]), whole["status"]) == ("", 1, "completed")


def test_a_stream_that_cannot_go_on_says_so(engine):
    answer = answer_of(engine, None)
    answer.begin()
    event = answer.failed(ApiError(503, "engine: expected it running, found it stopped", code="engine_stopped"))
    EVENT.validate_python(event | {"response": event["response"] | {"error": None}})  # its codes are OpenAI's own
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"]["message"] == "engine: expected it running, found it stopped"
