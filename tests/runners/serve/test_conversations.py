"""The conversation of the public checkpoints with a scripted model: one test for each rule.

The right prompts and answers come from tests/support/conversations.py, which is independent of the product.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from ling3export.checkpoint.synth_tokenizer import CHAT_TEMPLATE
from tests.support.conversations import (
    CALL,
    GIVEN,
    NOT_THINKING,
    WEATHER,
    Answer,
    Call,
    Function,
    Parameter,
    answer,
    broken,
    conversation,
    joined,
    prose,
)
from tests.support.scripted import CHAT, HI, RESPONSES, Talk, answers, function_calls, streamed, talking

COUNT = 150  # number of random conversations and answers


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    with talking(tmp_path_factory.mktemp("scripted")) as talk:
        yield talk


# --- from a conversation to a prompt ---


def test_a_turn_is_its_role_its_content_and_role_end(talk):
    messages = [*HI, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "A"}]
    assert talk.prompt(messages=messages) == (
        "<role>SYSTEM</role>detailed thinking on<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>\n<think></think>Yes?<|role_end|><role>HUMAN</role>A<|role_end|>"
        "<role>ASSISTANT</role>\n<think>"
    )


def test_the_first_turn_is_the_callers_text_then_the_tools_then_the_line_of_thinking(talk):
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    tool = json.dumps(WEATHER.tool, ensure_ascii=False)
    listed = f'<tools>\n{tool}\n{tool[:-1]}, "x": 1}}\n</tools>'
    assert talk.prompt(messages=messages, tools=[WEATHER.tool, WEATHER.tool | {"x": 1}]).startswith(
        f"<role>SYSTEM</role>Be brief.\n{listed}\ndetailed thinking on<|role_end|>"
    )


@pytest.mark.parametrize("word", ["on", "off"])
def test_a_system_text_that_already_says_whether_to_think_keeps_it(talk, word):
    messages = [{"role": "system", "content": f"detailed thinking {word}\nBe brief."}, *HI]
    kwargs = {"enable_thinking": word == "on"}
    begin = f"<role>SYSTEM</role>detailed thinking {word}\nBe brief.<|role_end|>"
    assert talk.prompt(messages=messages, chat_template_kwargs=kwargs).startswith(begin)


def test_earlier_turns_keep_their_thoughts_and_history_only_grows(talk):
    """An answer that a client sends back becomes exactly the text that the model wrote."""
    messages, written = list(HI), "Let me see.</think>" + CALL
    message = talk.said(written, messages=messages, tools=[WEATHER.tool])
    before = talk.runner.prompts[-1]
    call = message["tool_calls"][0]["id"]
    messages += [message, {"role": "tool", "tool_call_id": call, "content": "sunny"}]
    again = talk.said("Aha.</think>It is sunny.", messages=messages, tools=[WEATHER.tool])
    grown = (
        f"{before}{written}<|role_end|><role>OBSERVATION</role>\n<tool_response>\nsunny\n</tool_response><|role_end|>"
    )
    assert talk.runner.prompts[-1] == f"{grown}<role>ASSISTANT</role>\n<think>"
    last = talk.prompt(messages=[*messages, again, *HI], tools=[WEATHER.tool])
    assert last.startswith(f"{grown}<role>ASSISTANT</role>\n<think>Aha.</think>It is sunny.<|role_end|>")


def test_random_conversations_become_the_prompts_that_the_writer_says(talk):
    engine, runner, model = talk.engine, talk.runner, talk.lines
    model.texts, runner.prompts[:] = [""] * COUNT, []
    asked = [conversation(Random(seed)) for seed in range(COUNT)]
    for found in answers(engine, CHAT, [each.body | {"max_tokens": 1} for each in asked]):
        assert found.status_code == 200, found.text
    lacking = Counter(each.prompt for each in asked) - Counter(runner.prompts)
    assert list(lacking)[:1] == [] and len(runner.prompts) == COUNT


def test_the_template_of_synthetic_checkpoints_renders_the_same_but_for_blanks_around_calls(tmp_path):
    """Also except for results that follow each other, which that template puts into one turn."""
    next_turn = "</tool_response><|role_end|><role>OBSERVATION</role>"
    with talking(tmp_path, template=CHAT_TEMPLATE.read_text()) as talk:
        for seed in range(60):
            asked = conversation(Random(seed))
            assert joined(talk.prompt(**asked.body)) == joined(asked.prompt).replace(next_turn, "</tool_response>")


# --- from a generated text to an answer ---


def test_the_answer_begins_inside_the_thought(talk):
    found = talk.said("Hm, <b>.</think>Yes.")
    assert found == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm, <b>."}


def test_a_thought_that_does_not_end_is_no_content(talk):
    found = talk.said("Hm")
    assert (found["reasoning_content"], found["content"] or "") == ("Hm", "")


def test_without_thinking_all_is_content(talk):
    found = talk.said("Yes.", **NOT_THINKING)
    assert (found.get("reasoning_content") or "", found["content"]) == ("", "Yes.")


def test_an_end_of_turn_that_the_model_spells_ends_the_answer(talk):
    """Regression: the public model sometimes writes it as plain text. The answer continued, and contained the mark."""
    for streams in (False, True):
        found = talk.ask("Hm.</think>Yes.<|role_end|><role>HUMAN</role>No.", stream=streams)
        if streams:
            message, reason = streamed(found)
        else:
            message, reason = (found["choices"][0][name] for name in ("message", "finish_reason"))
        assert (message["reasoning_content"], message["content"], reason) == ("Hm.", "Yes.", "stop")
    (item,) = talk.ask("Yes.<|role_end|>", RESPONSES, **NOT_THINKING)["output"]
    assert item["content"][0]["text"] == "Yes."
    assert talk.said("A<|role_end|>B", ignore_eos=True, max_tokens=14, **NOT_THINKING)["content"] == "A<|role_end|>B"


@pytest.fixture(scope="module")
def spoken() -> list[Answer]:
    return [answer(Random(seed)) for seed in range(COUNT)]


def bodies(spoken: Sequence[Answer], **more: Any) -> list[dict[str, Any]]:
    found = []
    for number, each in enumerate(spoken):
        messages = [{"role": "user", "content": f"answer {number}"}]
        found.append({"messages": messages} | each.offered | ({} if each.thinks else NOT_THINKING) | more)
    return found


def tell(talk: Talk, spoken: Sequence[Answer]) -> None:
    talk.lines.texts = [each.text for each in spoken]


def checked(spoken: Sequence[Answer], messages: Sequence[dict[str, Any]]) -> None:
    """Names all that are wrong."""
    wrong = []
    for number, (each, message) in enumerate(zip(spoken, messages, strict=True)):
        try:
            each.assert_read(message)
        except AssertionError:
            wrong.append((number, each.text, message))
    assert wrong[:1] == [], f"{len(wrong)} of {len(spoken)}"


def test_random_answers_are_read_back(talk, spoken):
    tell(talk, spoken)
    found = answers(talk.engine, CHAT, bodies(spoken))
    assert {each.status_code for each in found} == {200}
    choices = [each.json()["choices"][0] for each in found]
    checked(spoken, [each["message"] for each in choices])
    assert [each["finish_reason"] for each in choices] == ["tool_calls" if each.calls else "stop" for each in spoken]
    ids = [call["id"] for each in choices for call in each["message"].get("tool_calls") or []]
    assert len(ids) == len(set(ids)) == sum(len(each.calls) for each in spoken)


def test_a_stream_says_the_same_and_hands_out_a_call_once(talk, spoken):
    tell(talk, spoken)
    found = [streamed(each.text) for each in answers(talk.engine, CHAT, bodies(spoken, stream=True))]
    checked(spoken, [message for message, _ in found])
    assert [reason for _, reason in found] == ["tool_calls" if each.calls else "stop" for each in spoken]


def of_items(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that the items of a response add up to."""
    text = {"message": "content", "reasoning": "reasoning_content"}
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for item in items:
        if item["type"] == "function_call":
            message["tool_calls"].append({"function": {"name": item["name"], "arguments": item["arguments"]}})
        else:
            message[text[item["type"]]] += "".join(part["text"] for part in item["content"])
    return message


def asked_of_responses(spoken: Sequence[Answer], **more: Any) -> list[dict[str, Any]]:
    found = []
    for number, each in enumerate(spoken):
        tools = [{"type": "function", **tool["function"]} for tool in each.offered.get("tools", ())]
        off: dict[str, Any] = {} if each.thinks else {"reasoning": {"effort": "none"}}
        found.append({"input": f"answer {number}"} | ({"tools": tools} if tools else {}) | off | more)
    return found


def test_responses_read_the_same(talk, spoken):
    tell(talk, spoken)
    found = answers(talk.engine, RESPONSES, asked_of_responses(spoken))
    assert {each.status_code for each in found} == {200}
    checked(spoken, [of_items(each.json()["output"]) for each in found])


def test_a_stream_of_a_response_says_the_same(talk, spoken):
    tell(talk, spoken)
    ends = {"response.output_text.delta": "content", "response.reasoning_text.delta": "reasoning_content"}
    messages = []
    for found in answers(talk.engine, RESPONSES, asked_of_responses(spoken, stream=True)):
        message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        for line in found.text.splitlines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {"type": None}
            if event["type"] in ends:
                message[ends[event["type"]]] += event["delta"]
            if event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call":
                message["tool_calls"].append({"function": event["item"]})
            if event["type"] == "response.completed":
                whole = of_items(event["response"]["output"])
                assert [each["function"]["arguments"] for each in whole["tool_calls"]] == [
                    each["function"]["arguments"] for each in message["tool_calls"]
                ]
        messages.append(message)
    checked(spoken, messages)


@pytest.mark.parametrize("marks", ["added", "special"])
def test_marks_that_are_tokens_are_read_and_written_alike(tmp_path, spoken, marks):
    """Regression: grammars allowed no token `<NAME>`, so no thought could end.

    Special tokens had no text in answers.
    """
    few = spoken[:60]
    with talking(tmp_path, marks=marks) as talk:
        tokenizer = talk.engine.files.tokenizer("test")
        talk.lines.texts = [tokenizer.encode(each.text, special=False) for each in few]
        found = answers(talk.engine, CHAT, bodies(few))
        checked(few, [each.json()["choices"][0]["message"] for each in found])
        written = tokenizer.encode(f"Hm.</think>{CALL}", special=False)
        assert len(written) < len(CALL) - len("</arg_value>")
        found = talk.said(written, tools=[WEATHER.tool], tool_choice="required", max_tokens=200)
        assert (function_calls(found), talk.runner.refused) == ([("get_weather", GIVEN)], [])


def test_broken_calls_come_back_whole_as_text(talk):
    spoken = [broken(Random(seed)) for seed in range(COUNT)]
    tell(talk, spoken)
    found = answers(talk.engine, CHAT, bodies(spoken))
    assert {each.status_code for each in found} == {200}
    choices = [each.json()["choices"][0] for each in found]
    checked(spoken, [each["message"] for each in choices])
    assert {each["finish_reason"] for each in choices} == {"stop"}
    found = answers(talk.engine, CHAT, bodies(spoken, stream=True))
    checked(spoken, [streamed(each.text)[0] for each in found])


def rounds(rng: Random) -> Iterator[Answer]:
    """Answers that a client sends back in the form that the template writes."""
    for _ in range(4):
        calls = tuple(Call("get_weather", {"city": prose(rng, 3), "days": rng.randint(0, 9)}, "") for _ in range(2))
        thought, text = prose(rng, 4), prose(rng, 4)
        yield Answer(True, f"{thought}</think>{text}{''.join(call.written for call in calls)}", thought, text, calls)


def test_a_talk_of_many_rounds_is_prefixed_by_each_of_its_beginnings(talk):
    """So the prefix cache has all of it but the last turn."""
    rng, messages = Random(0), list(HI)
    so_far = ""
    for each in rounds(rng):
        message = talk.said(each.text, messages=messages, tools=[WEATHER.tool])
        each.assert_read(message)
        prompt = talk.runner.prompts[-1]
        assert prompt.startswith(so_far)
        so_far = prompt + each.text
        messages.append(message)
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": prose(rng, 3)})


# --- calls: how they are parsed, and the grammars that enforce them ---


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
    """The model's text is accepted where the dialect allows it; text in place of a call is not."""
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
