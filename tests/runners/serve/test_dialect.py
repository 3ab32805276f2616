"""Calls of tools in the dialect of the public checkpoints: how they are read, and how a grammar has them written."""

import json

import pytest

from tests.support.conversations import CALL, GIVEN, NOT_THINKING, WEATHER, Function, Parameter
from tests.support.scripted import function_calls, talking


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    with talking(tmp_path_factory.mktemp("scripted")) as talk:
        yield talk


def test_a_call_that_max_tokens_cuts_comes_back_whole_as_text(talk):
    for size in range(1, len(CALL), 7):
        choice = talk.ask(CALL, tools=[WEATHER.tool], max_tokens=size, **NOT_THINKING)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL[:size], "length")
        assert not choice["message"].get("tool_calls")


def test_bytes_that_are_no_utf8_become_replacement_characters(talk):
    for text, message in (
        ([*b"a\xff\xc3b"], {"content": "a\ufffd\ufffdb"}),
        ([*b"T\xe2\x82</think>", *b"\xf0\x9f"], {"content": "\ufffd", "reasoning_content": "T\ufffd"}),
    ):
        found = talk.said(text, **(NOT_THINKING if len(message) == 1 else {}))
        assert {name: found[name] for name in message} == message
    written = CALL.encode().replace(b"Paris", b"P\xffs")
    found = talk.said([*written], tools=[WEATHER.tool], **NOT_THINKING)
    assert function_calls(found) == [("get_weather", {"city": "P\ufffds", "days": 3})]


def test_without_tools_or_with_tool_choice_none_nothing_is_a_call(talk):
    for fields in ({}, {"tools": [WEATHER.tool], "tool_choice": "none"}):
        found = talk.said(CALL, **fields, **NOT_THINKING)
        assert (found["content"], found.get("tool_calls") or []) == (CALL, [])


def test_with_tool_choice_auto_a_call_may_be_made_or_not(talk):
    fields = {"tools": [WEATHER.tool], "tool_choice": "auto", **NOT_THINKING}
    assert function_calls(talk.said(CALL, **fields)) == [("get_weather", GIVEN)]
    assert talk.said("No.", **fields)["content"] == "No."


OTHER = Function("other", {"a": Parameter("object")})
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("fields", [{}, NOT_THINKING], ids=["thinking", "not thinking"])
def test_with_tool_choice_required_or_named_a_grammar_makes_the_call(talk, choice, fields):
    """What the model wants to write is written where the dialect allows it; text in the place of a call is not."""
    tool = json.loads(json.dumps(WEATHER.tool))
    tool["function"]["parameters"] |= {"required": ["city", "days"], "additionalProperties": False}
    fields = fields | {"tools": [tool, OTHER.tool], "tool_choice": choice, "max_tokens": 400}
    thought = "Hm.</think>" if "chat_template_kwargs" not in fields else ""
    found = talk.said(thought + CALL, **fields)
    assert talk.runner.refused == []
    assert function_calls(found) == [("get_weather", GIVEN)]
    found = talk.said(thought + "No. " + CALL.replace("3<", "three 3<"), **fields)
    assert talk.runner.refused != []
    assert function_calls(found) == [("get_weather", GIVEN)]
    assert not (found["content"] or "").strip()
    talk.runner.refused.clear()
