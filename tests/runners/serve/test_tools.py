"""Tools, thoughts and forms of an answer in one call: the grammar of an answer, and how the answer is parsed."""

from typing import Any

import pytest

from ling3export.runners.engine.request import Completion
from ling3export.runners.serve.generation import ChatMessage, GenerationCall, chat, conversation
from ling3export.runners.serve.responses import ResponsesAnswer, ResponsesBody
from ling3export.runners.serve.schema import ApiError
from ling3export.runners.text.grammar import Grammar
from ling3export.runners.text.tokenizer import TokenizerFiles
from tests.support.matching import followed, message_of
from tests.support.serving import prompting

SAID: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "A"}]}
ASKED: dict[str, Any] = {"model": "toy", "input": "A"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}]}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
TEMPLATE = "{{ tools }}<think></think><tool_call></tool_call>"


@pytest.fixture
def prompted(monkeypatch):
    """Gives the model a template that knows tools and thoughts, and that writes this prompt."""
    return prompting(monkeypatch, TEMPLATE)


def grammar_of(call: GenerationCall) -> Grammar:
    (request,) = call.requests
    assert request.grammar is not None
    return request.grammar


@pytest.mark.parametrize(
    "guide", [FORM, {"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "[a-z]+"}}]
)
@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"tool_choice": "required"}, '`tool_choice`: expected "auto" or "none" with `{}`, found "re'),
        ({"tool_choice": NAMED}, '`tool_choice`: expected "auto" or "none" with `{}`, found {{"type'),
    ],
)
def test_required_calls_are_refused_together_with_another_form(engine, prompted, guide, choice, message):
    """Regression: calls were dropped without an error: the answer had the form, and never a call."""
    prompted("A")
    with pytest.raises(ApiError) as caught:
        chat(SAID | TOOLS | guide | choice, engine, "toy")
    assert (caught.value.status, [caught.value.param]) == (400, [*choice])
    assert caught.value.message.startswith(message.format(*guide))


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "none"}, {"parallel_tool_calls": False}])
def test_optional_calls_are_accepted_together_with_another_form(engine, prompted, choice):
    prompted("A")
    assert grammar_of(chat(SAID | TOOLS | FORM | choice, engine, "toy")).kind == "json"


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'


@pytest.mark.parametrize("blanks", ["", "\n", "\n\n"])
@pytest.mark.parametrize(
    ("fields", "answer", "wrong"),
    [
        (FORM, '{"n": 1}', '{"n": 3'),
        ({"structured_outputs": {"regex": "a/b[}]"}}, "a/b}", "a/c"),
        ({"structured_outputs": {"grammar": 'start: before\nbefore: "left" | /x[}]/'}}, "x}", "right"),
        (TOOLS | {"tool_choice": "required"}, CALL, "so"),
        (TOOLS | {"tool_choice": NAMED}, CALL, '<tool_call>\n{"name": "g"'),
    ],
)
def test_a_grammar_begins_after_the_thought_that_the_template_began(engine, prompted, fields, answer, wrong, blanks):
    """Regression: except for tools' grammars, structured output became `reasoning_content`, and content was empty."""
    prompted("A<think>\n")
    call = chat(SAID | fields, engine, "toy")
    thought = "so <tool_call> {</think>" + blanks
    assert followed(engine, grammar_of(call), thought + answer) == (True, True)
    assert followed(engine, grammar_of(call), thought + wrong) == (False, False)
    said = message_of(call, thought + answer)
    assert said["reasoning_content"] == "so <tool_call> {"
    if answer == CALL:
        assert [each["function"] for each in said["tool_calls"]] == [{"name": "f", "arguments": '{"a": "b"}'}]
    else:
        assert said["content"] == answer


def test_a_response_with_a_form_has_a_message_after_the_thought(engine, prompted):
    """Regression: it had only a reasoning item, and no text."""
    prompted("A<think>")
    call = ResponsesBody.call(
        ASKED | {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}, engine, "toy"
    )
    text = 'hm</think>\n\n{"n": 2}'
    assert followed(engine, grammar_of(call), text) == (True, True)
    ids = engine.files.tokenizer("test").encode(text, special=False)
    items = ResponsesAnswer(call, "toy").whole([Completion([1], ids, text, "eos", 0, 0)])["output"]
    assert [item["content"][0]["text"] for item in items] == ["hm", '{"n": 2}']


def test_a_grammar_begins_at_once_where_the_thought_is_over(engine, prompted):
    prompted("A<think>\n</think>")
    call = chat(SAID | FORM, engine, "toy")
    assert followed(engine, grammar_of(call), '{"n": 1}') == (True, True)
    assert message_of(call, '{"n": 1}')["content"] == '{"n": 1}'


def test_an_invalid_grammar_after_a_thought_names_its_field(engine, prompted):
    """A trial compiles a text's first tokens, which may be anything inside a thought."""
    prompted("A<think>\n")
    too_large = "structured_outputs: expected a regex grammar that"
    for pattern, found in (("(a", "unclosed group"), ("a{1000000}", too_large)):
        with pytest.raises(ApiError) as caught:
            chat(SAID | {"structured_outputs": {"regex": pattern}}, engine, "toy")
        assert (caught.value.status, caught.value.param) == (400, "structured_outputs")
        assert found in caught.value.message


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ({"name": "f", "arguments": '{"a": '}, 'call of "f" with a JSON object as its arguments, found "{\\"a\\": "'),
        ({"name": "f", "arguments": "[1]"}, 'call of "f" with a JSON object as its arguments, found "[1]"'),
        ({"name": "f", "arguments": 5}, 'call of "f" with a JSON object as its arguments, found 5'),
        ({"arguments": "{}"}, "expected calls of functions, {"),
        (None, "expected calls of functions, {"),
    ],
)
def test_an_earlier_call_that_is_malformed_is_the_messages_fault(engine, made, found):
    """Regression: the error blamed the chat template, which could not write the call."""
    call = {"id": "1", "type": "function", "function": made}
    messages = [*SAID["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(ApiError) as caught:
        chat(SAID | {"messages": messages}, engine, "toy")
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert found in caught.value.message


@pytest.mark.parametrize("arguments", [{}, {"arguments": ""}, {"arguments": None}, {"arguments": "{}"}])
def test_an_earlier_call_without_arguments_has_an_empty_object(arguments):
    """A client sends an empty text for a function without parameters. Regression: the template got that text."""
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", **arguments}}]}
    (told,) = conversation([ChatMessage.model_validate(message)])
    assert told["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("template", "lacks"), [("{{ messages }}", "tools"), ("{{ tools }}", "calls between these marks")]
)
def test_the_error_names_what_a_template_lacks(engine, monkeypatch, template, lacks):
    """Regression: the error was `found another: this model has none`."""
    monkeypatch.setattr(TokenizerFiles, "template_text", template)
    with pytest.raises(ApiError, match=f"found this model's, which has no {lacks}$"):
        chat(SAID | TOOLS, engine, "toy")
