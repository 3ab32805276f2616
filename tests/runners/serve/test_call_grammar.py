"""Ling-3.0's conversation through the endpoints: the template's input, and the calls that a grammar allows."""

import json
import random
from typing import Any

import jsonschema
import pytest

from ling3export.checkpoint.synth_tokenizer import CHAT_TEMPLATE
from ling3export.foundation.errors import RequestError
from ling3export.runners.serve.app import Policy
from ling3export.runners.serve.generation import ChatBody, chat, conversation
from ling3export.runners.serve.responses import ResponsesBody
from ling3export.runners.serve.schema import ApiError, validated
from ling3export.runners.text.grammar import LARGEST
from ling3export.runners.text.tokenizer import ChatTemplate
from tests.support.matching import drawn, followed, message_of, written
from tests.support.serving import asked, prompting

OURS = CHAT_TEMPLATE.read_text()
TEMPLATE = ChatTemplate(OURS, {}, "ours")
SAID: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "A"}]}
ASKED: dict[str, Any] = {"model": "toy", "input": "A"}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer", "minimum": 3},
        "chosen": {"enum": ["x y", 'a"/', 1]},
        "short": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "named": {"$ref": "#/$defs/Name"},
        "shaped": {"type": "string", "pattern": "^a/b+$"},
        "listed": {"type": "array", "items": {"$ref": "#/$defs/Name"}},
        "one": {"type": "string", "allOf": [{"const": "u"}]},
    },
    "required": ["text"],
    "$defs": {"Name": {"type": "string", "enum": ["u"]}},
}
FUNCTIONS = {"f": SCHEMA, "free": None, "none": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = {"tools": [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in FUNCTIONS.items()]}
CHAIN = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(9999)}
FORCED = {"tool_choice": "required"}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def prompted(monkeypatch):
    """Gives the model our template's dialect, and a prompt that fits into the toy's context."""
    return prompting(monkeypatch, OURS)


ONE = written("f", ("text", "3"), ("count", "3"))


def rendered(kind: type[ChatBody | ResponsesBody], body: dict[str, Any]) -> str:
    asked = validated(kind, body, "toy")
    chat = asked if isinstance(asked, ChatBody) else validated(ChatBody, asked.chat, "toy")
    return TEMPLATE.render(conversation(chat.messages), **chat.template_options)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "detailed thinking on<|role_end|><role>HUMAN</role>A<|role_end|><role>ASSISTANT</role>\n<think>"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "\n<think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "\n<think></think>"),
        ({"reasoning_effort": "none"}, "\n<think></think>"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "\n<think>"),
        *(({"reasoning_effort": effort}, "\n<think>") for effort in ("minimal", "low", "medium", "high", "xhigh")),
        ({"add_generation_prompt": False}, "A<|role_end|>"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<role>HUMAN</role>A"),
    ],
)
@pytest.mark.parametrize(("kind", "body"), [(ChatBody, SAID), (ResponsesBody, ASKED)])
def test_a_request_says_how_the_template_writes_it(kind, body, fields, end):
    assert rendered(kind, body | fields).endswith(end)


def test_an_effort_reaches_the_template_by_its_name():
    asked = validated(ChatBody, SAID | {"reasoning_effort": "low", "chat_template_kwargs": {"a": [1]}}, "toy")
    assert (
        ChatTemplate("{{ reasoning_effort }} {{ a[0] }}", {}, "t").render(
            conversation(asked.messages), **asked.template_options
        )
        == "low 1"
    )
    assert rendered(ResponsesBody, ASKED | {"reasoning": {"effort": "none"}}).endswith("<think></think>")
    assert validated(ResponsesBody, ASKED | {"reasoning": {"effort": "high"}}, "toy").chat["reasoning_effort"] == "high"


@pytest.mark.parametrize("thought", ["reasoning_content", "reasoning"])
def test_earlier_thoughts_calls_and_results_go_back_in(thought):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"text": "3", "count": 3}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        *SAID["messages"],
        {"role": "assistant", "content": None, thought: "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", thought: "so", "content": "B"},
    ]
    assert rendered(ChatBody, {"model": "toy", "messages": messages}) == (
        "<role>SYSTEM</role>be brief\ndetailed thinking on<|role_end|><role>HUMAN</role>A<|role_end|>"
        f"<role>ASSISTANT</role>\n<think>hm</think>{ONE}<|role_end|>"
        "<role>OBSERVATION</role>\n<tool_response>\n2\n</tool_response><|role_end|>"
        "<role>ASSISTANT</role>\n<think>so</think>B<|role_end|><role>ASSISTANT</role>\n<think>"
    )
    items = [
        {"role": "user", "content": "A"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"text": "3", "count": 3}'},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
    ]
    body = {"model": "toy", "instructions": "be brief", "input": items}
    assert rendered(ResponsesBody, body) == rendered(ChatBody, {"model": "toy", "messages": messages[:-1]})


def test_two_turns_without_thinking_are_written_as_the_first_was():
    """The second prompt begins byte by byte with the first one and its answer, so that the prefix cache has both."""
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    first = rendered(ChatBody, SAID | fields)
    turns = [*SAID["messages"], {"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]
    assert rendered(ChatBody, SAID | fields | {"messages": turns}) == (
        f"{first}B<|role_end|><role>HUMAN</role>C<|role_end|><role>ASSISTANT</role>\n<think></think>"
    )
    assert "detailed thinking off" in first and first.endswith("<think></think>")


@pytest.mark.parametrize(
    ("message", "end"),
    [
        ({"content": "e"}, "<think></think>e"),
        ({"content": "half a "}, "<think></think>half a "),
        ({"content": "B", "reasoning_content": "hm"}, "<think>hm</think>B"),
        ({"content": "", "reasoning_content": "half a thought"}, "<think>half a thought"),
        ({"reasoning_content": "half a thought"}, "<think>half a thought"),
    ],
)
def test_the_last_message_is_continued(message, end):
    """After its content, which may be in another field; if it has no content, inside its thought."""
    messages = [*SAID["messages"], {"role": "assistant", **message}]
    fields = {"messages": messages, "continue_final_message": True}
    assert rendered(ChatBody, SAID | fields).endswith(f"<role>ASSISTANT</role>\n{end}")


def test_a_message_that_the_template_does_not_write_cannot_be_continued():
    with pytest.raises(RequestError, match="expected a last message that the chat template writes, to be continued"):
        ChatTemplate("A", {}, "t").render(SAID["messages"], continue_final_message=True)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "variables of the chat template's own, found `messages`"),
        ({"chat_template_kwargs": {"tools": 1}}, "found `tools`"),
        ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "found `add_generation_prompt`"),
        ({"chat_template_kwargs": [1]}, "expected an object, found [1]"),
        ({"reasoning_effort": "huge"}, '"low", "medium", "high", "xhigh" or "max", found "huge"'),
        ({"reasoning_effort": 1}, "found 1"),
        ({"continue_final_message": 1}, "expected true or false, found 1"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "expected false with `continue_final_message`, found true",
        ),
    ],
)
def test_fields_that_the_template_does_not_support_are_refused_by_name(engine, fields, found):
    with pytest.raises(ApiError) as caught:
        chat(SAID | fields, engine, "toy")
    assert (caught.value.status, caught.value.param) == (400, next(iter(fields)))
    assert found in caught.value.message


@pytest.mark.parametrize(
    ("prompt", "text", "thought", "content"),
    [
        ("A\n<think>", "hm</think>B", "hm", "B"),
        ("A\n<think>", "hm", "hm", ""),
        ("A\n<think></think>", "<think>B", None, "<think>B"),
        ("about <think>", "hm</think>B", "hm", "B"),
        ("about <think>, A", "B", None, "B"),
    ],
)
def test_an_answer_begins_where_the_prompt_ends(engine, prompted, prompt, text, thought, content):
    """Regression: a question about the mark made the answer a thought."""
    prompted(prompt)
    said = message_of(chat(SAID, engine, "toy"), text)
    assert (said.get("reasoning_content"), said["content"]) == (thought, content)


@pytest.mark.parametrize(("prompt", "thought"), [("<think>half", "hm"), ("<think>a</think>half", None)])
def test_a_continued_answer_goes_on_where_it_was(engine, prompted, prompt, thought):
    prompted(prompt)
    said = message_of(chat(SAID | {"continue_final_message": True}, engine, "toy"), "hm</think>B" if thought else "B")
    assert (said.get("reasoning_content"), said["content"]) == (thought, "B")


TAKEN = [
    ONE,
    ONE.replace("\n", ""),
    written("f", ("text", 'any <b> </arg_valu> "\n&amp;')),
    written("f", ("text", "")),
    written("f", ("text", ""), ("chosen", "x y")),
    written("f", ("text", ""), ("chosen", 'a"/')),
    written("f", ("text", ""), ("chosen", "1")),
    written("f", ("text", ""), ("short", "abc")),
    written("f", ("text", ""), ("short", "null")),
    written("f", ("text", ""), ("named", "u")),
    written("f", ("text", ""), ("shaped", "a/bb")),
    written("f", ("text", ""), ("listed", '["u", "u"]')),
    written("f", ("text", ""), ("one", "u")),
    written("f", ("text", ""), ("short", "abcd")),  # plain texts follow no pattern and no length
    written("f", ("text", ""), ("shaped", "xa/b")),
    written("free", ("any", "thing"), ("more", "{")),
    "<tool_call>free</tool_call>",
    "<tool_call>none\n</tool_call>",
]
REFUSED = [
    "no call",
    written("f", ("count", "3")),
    written("f", ("text", ""), ("count", "2")),
    written("f", ("text", ""), ("chosen", "x")),
    written("f", ("text", ""), ("chosen", "2")),
    written("f", ("text", ""), ("named", "v")),
    written("f", ("text", ""), ("listed", '["v"]')),
    written("f", ("text", ""), ("other", "v")),
    written("none", ("any", "thing")),
    written("other"),
    '<tool_call>\n{"name": "f", "arguments": {"text": ""}}\n</tool_call>',
]


@pytest.mark.parametrize("text", [*TAKEN, *REFUSED, ONE + ONE])
@pytest.mark.parametrize("within", [False, True])
def test_a_call_that_is_required_follows_the_schema(engine, prompted, text, within):
    """The call is also parsed, after a thought, or in its place if the call ends the thought."""
    prompted("A<think>" if within else "A<think></think>")
    call = chat(SAID | TOOLS | {"tool_choice": "required"}, engine, "toy")
    for thought in ("so</think>\n\n", *(("so ",) if text[0] == "<" else ())) if within else ("",):
        taken = text in TAKEN
        assert followed(engine, call.requests[0].grammar, thought + text) == (taken, taken)
        if taken:
            said = message_of(call, thought + text)
            assert [made["function"]["name"] for made in said["tool_calls"]] == [text[11:].split("<")[0].split("\n")[0]]
            assert said["content"] is None
            assert said.get("reasoning_content") == (thought.removesuffix("</think>\n\n") or None)


@pytest.mark.parametrize("text", [*TAKEN, *REFUSED])
def test_the_function_that_is_named_is_called(engine, prompted, text):
    prompted("A<think></think>")
    call = chat(SAID | TOOLS | {"tool_choice": NAMED}, engine, "toy")
    taken = (text in TAKEN and text.startswith("<tool_call>f\n")) or text == ONE.replace("\n", "")
    assert followed(engine, call.requests[0].grammar, text) == (taken, taken)


def test_a_forced_call_and_structured_output_are_the_same_in_responses(engine, prompted):
    prompted("A<think>")
    tools = [{"type": "function"} | tool["function"] for tool in TOOLS["tools"]]
    call = ResponsesBody.call(ASKED | {"tools": tools, "tool_choice": "required"}, engine, "toy")
    assert (
        call.requests[0].grammar == chat(SAID | TOOLS | {"tool_choice": "required"}, engine, "toy").requests[0].grammar
    )


@pytest.mark.parametrize("seed", range(20))
def test_calls_of_random_tokens_under_their_grammar_are_read_back(engine, prompted, seed):
    prompted("A<think></think>")
    schema = {
        "type": "object",
        "properties": {
            "a": {"enum": ["x", "3", "</tool_call>", "<arg_key>"]},
            "b": {"type": ["integer", "null"], "maximum": 99},
            "d": {"type": "array", "items": {"enum": ["</arg_value>", 1]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["a", "b", "d"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    call = chat(SAID | {"tools": [tool]} | FORCED, engine, "toy")
    text = drawn(engine, call.requests[0].grammar, random.Random(seed))
    (made,) = message_of(call, text)["tool_calls"]
    arguments = json.loads(made["function"]["arguments"])
    jsonschema.validate(arguments, schema)


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"properties": {"a": {"type": "integer", "minimum": "x"}}}, "Expected f64"),
        ({"properties": {"a": {"enum": ["x" * LARGEST]}}}, "schemas that take a grammar of at most 65,536 characters"),
        ({"properties": {str(n): {} for n in range(5000)}}, "schemas that take a grammar of at most 65,536 characters"),
        ({"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": CHAIN}, "references that lead on and on"),
        (
            {"properties": {"a": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}}},
            "at most 3 s and 64 MiB to compile, found one that takes more",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prompt", ["A<think>", "A<think></think>"])
def test_schemas_that_no_grammar_can_have_are_refused(engine, prompted, schema, found, prompt):
    """With any text before the call, a trial would only compile the first tokens of that text."""
    prompted(prompt)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(ApiError) as caught:
        chat(SAID | {"tools": [tool]} | FORCED, engine, "toy")
    assert (caught.value.status, caught.value.param) == (400, "tools")
    assert found in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        5, [1], {"properties": [1]}, {"properties": {"a": 5}}, {"required": "a"}, {"required": [1, "b"]},
        {"properties": {"a": {"type": "string", "pattern": 5, "minLength": "x", "maxLength": True}}},
        {"properties": {"a": {"enum": 5}}}, {"properties": {"a": {"anyOf": 5}}}, {"properties": {"a": {"allOf": [5]}}},
        {"properties": {"a": {"$ref": 5}}}, {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"allOf": [5, {"$ref": "#"}]},
        {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}]}}}, {"additionalProperties": 5},
        {"properties": {"\n\"\\\u2028": {"const": "\n\"\\\u2028\x00"}}}, {"properties": {"a": {"enum": []}}},
        {"properties": {str(n): {"anyOf": [{"$ref": "#"}] * 90} for n in range(170)}},
    ],
)  # fmt: skip
def test_odd_schemas_become_grammars_or_are_refused(engine, prompted, schema):
    prompted("A<think></think>")
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = asked(
        engine,
        Policy("toy", None, max_requests=4, max_body=1 << 20),
        "/v1/chat/completions",
        SAID | {"tools": [tool]} | FORCED,
    )
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "tools"
    else:
        (request,) = chat(SAID | {"tools": [tool]} | FORCED, engine, "toy").requests
        assert followed(engine, request.grammar, "<tool_call>f\n") == (True, False)


def test_a_name_that_the_dialect_cannot_write_is_refused(engine, prompted):
    prompted("A<think></think>")
    tool = {"type": "function", "function": {"name": "two words"}}
    with pytest.raises(ApiError, match="`tools`: expected names of letters, digits and"):
        chat(SAID | {"tools": [tool]}, engine, "toy")
