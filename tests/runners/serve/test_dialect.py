"""Calls of tools in the dialect of the public checkpoints: how they are read, and how a grammar has them written."""

import json

import pytest

from tests.support.conversations import CALL, GIVEN, NOT_THINKING, WEATHER, Function, Parameter
from tests.support.scripted import function_calls, streamed, talking


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    with talking(tmp_path_factory.mktemp("scripted")) as talk:
        yield talk


@pytest.mark.parametrize(
    "written", ['"\\ud800"', '{"\\udfff": 1}', "9" * 5000, "[" * 3000 + "]" * 3000, "1e99999", '{"a": 1, "a": 2}']
)
def test_json_that_no_other_reader_takes_is_no_error(talk, written):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
    text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    (call,) = talk.said(text, tools=[tool], **NOT_THINKING)["tool_calls"]
    assert call["function"]["name"] == "f"
    message, _ = streamed(talk.ask(text, tools=[tool], stream=True, **NOT_THINKING))
    assert message["tool_calls"][0]["function"]["arguments"] == call["function"]["arguments"]


@pytest.mark.parametrize(
    "value",
    [
        "a < b > c", 'say "x" and \'y\'', "a\nb\n", "&lt;b&gt; &amp; &#10;", "</tool_call>", "</think>", "<arg_key>",
        "<tool_call>f</tool_call>", "</arg_key>\n<arg_value>", "a</arg_value>b", "</arg_value>", "<think>a</think>",
        "</arg", "<|role_end", "\\n\\\"", "🙂👩‍👩‍👧é",
    ],
)  # fmt: skip
@pytest.mark.parametrize("inside", [False, True], ids=["behind the thought", "in the thought"])
def test_a_value_may_hold_what_looks_like_a_mark(talk, value, inside):
    text = f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    found = talk.said("T" + ("" if inside else "</think>") + text, tools=[WEATHER.tool])
    assert function_calls(found) == [("get_weather", {"city": value})]
    assert (found["reasoning_content"], found["content"] or "") == ("T", "")


def test_a_call_that_max_tokens_cuts_comes_back_whole_as_text(talk):
    for size in range(1, len(CALL), 7):
        choice = talk.ask(CALL, tools=[WEATHER.tool], max_tokens=size, **NOT_THINKING)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL[:size], "length")
        assert not choice["message"].get("tool_calls")


def test_a_call_in_an_open_thought_that_is_cut_is_not_lost(talk):
    found = talk.said("T" + CALL[:-5], tools=[WEATHER.tool])
    assert (found.get("reasoning_content") or "") + (found.get("content") or "") == "T" + CALL[:-5]
    assert not found.get("tool_calls")


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


# --- which dialect, and whether to call ---

JSON_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
JSON_TEMPLATE = """\
{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{% for message in messages %}<role>HUMAN</role>{{ message.content }}<|role_end|>{% endfor %}
Call as <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><role>ASSISTANT</role>"""


def test_the_dialect_is_the_one_that_the_template_writes(tmp_path, talk):
    """Ling-2's templates ask for JSON between the same marks."""
    found = talk.said(JSON_CALL, tools=[WEATHER.tool], **NOT_THINKING)
    assert (found["content"], found.get("tool_calls") or []) == (JSON_CALL, [])
    with talking(tmp_path, template=JSON_TEMPLATE) as other:
        assert function_calls(other.said(JSON_CALL, tools=[WEATHER.tool])) == [("get_weather", GIVEN)]
        found = other.said(CALL, tools=[WEATHER.tool])
        assert (found["content"], found.get("tool_calls") or []) == (CALL, [])


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


@pytest.mark.parametrize("value", ["a < b", 'x "y"', "<b>&amp;\nc", "</think>", "3", "杭州", "<tool_call>", ""])
def test_a_grammar_takes_bare_strings(talk, value):
    tool = Function("f", {"a": Parameter("string")}).tool
    tool["function"]["parameters"]["required"] = ["a"]
    text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    fields = {"tools": [tool], "tool_choice": "required", "max_tokens": 300, **NOT_THINKING}
    found = talk.said(text, **fields)
    assert talk.runner.refused == []
    assert function_calls(found) == [("f", {"a": value})]


def test_with_parallel_tool_calls_false_there_is_one_call_at_most(talk):
    fields = {"tools": [WEATHER.tool], "parallel_tool_calls": False, "max_tokens": 600, **NOT_THINKING}
    assert function_calls(talk.said(f"So. {CALL}{CALL}", **fields)) == [("get_weather", GIVEN)]
    assert talk.said("No.", **fields)["content"] == "No."


def test_a_value_is_written_by_its_schema_under_a_grammar(talk):
    """A number where the schema says integer, one of the words where it says which; each field that is required."""
    properties = {"n": {"type": "integer"}, "unit": {"type": "string", "enum": ["C", "F"]}}
    parameters = {"type": "object", "properties": properties, "required": ["n", "unit"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = (
        "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>x12</arg_value>"
        "<arg_key>unit</arg_key>\n<arg_value>KF</arg_value>\n</tool_call>"
    )
    found = talk.said(text, tools=[tool], tool_choice="required", max_tokens=300, **NOT_THINKING)
    assert talk.runner.refused != []
    assert function_calls(found) == [("f", {"n": 12, "unit": "F"})]
    talk.runner.refused.clear()
