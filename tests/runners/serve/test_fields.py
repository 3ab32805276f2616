"""Fields of OpenAI's clients beyond a text: choices, log-probabilities, penalties, structure, tools, thoughts."""

import itertools
import json
from typing import Any

import httpx2
import pytest

from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Completion
from ling3export.runners.serve import structure
from ling3export.runners.serve.answers import ChoicesAnswer
from ling3export.runners.serve.app import Policy
from ling3export.runners.serve.generation import ChatBody, CompletionsBody, GenerationCall, seed_of
from ling3export.runners.serve.schema import ApiError, validated
from ling3export.runners.text.answer import AnswerFormat
from tests.support import serving
from tests.support.choosing import greedy, log_softmax, most_likely
from tests.support.toy_artifact import logits
from tools import api_fields

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
IDS: dict[str, Any] = {"model": "toy", "prompt": [5, 9, 7], "temperature": 0, "ignore_eos": True, "max_tokens": 6}
SAID: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "A"}], "temperature": 0}
POLICY = Policy("toy", None, 8, 100_000)
# The shape of Ling's published templates, reduced to what the parser reads.
PUBLISHED = (
    "{% if tools %}<role>SYSTEM</role># Tools\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}\n</tools>"
    'For each call write <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    "<|role_end|>{% endif %}{% for message in messages %}<role>{{ message.role | upper }}</role>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    '{% for call in message.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|role_end|>{% endfor %}{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
OPTIONS_OF_ENGINE = {"max_requests": 8}


def call(engine: Engine, path: str, body: Any = None) -> httpx2.Response:
    return serving.asked(engine, POLICY, path, body, method="GET" if body is None else "POST")


def asked(engine: Engine, path: str, body: Any) -> dict[str, Any]:
    answer = call(engine, path, body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def chunks(engine: Engine, path: str, body: Any) -> list[dict[str, Any]]:
    answer = call(engine, path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_choices_have_seeds_of_their_own_that_can_be_repeated(engine):
    body = IDS | {"n": 3, "temperature": 1.0, "seed": 7, "return_token_ids": True, "prompt": [[5], [9, 7]]}
    first, again = (asked(engine, COMPLETIONS, body)["choices"] for _ in range(2))
    assert first == again
    assert [choice["index"] for choice in first] == list(range(6))
    assert len({tuple(choice["token_ids"]) for choice in first[:3]}) == 3
    alone = asked(engine, COMPLETIONS, body | {"n": 1, "prompt": [5]})
    assert alone["choices"][0]["token_ids"] == first[0]["token_ids"]
    counts = asked(engine, COMPLETIONS, body)["usage"]
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert counts == {"prompt_tokens": 3, "completion_tokens": 36, "total_tokens": 39} | details


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**32, 2**64 - 1])
def test_any_seed_of_64_bits_is_taken(engine, seed):
    body = IDS | {"temperature": 1.0, "seed": seed, "return_token_ids": True}
    first, again = (asked(engine, COMPLETIONS, body)["choices"][0]["token_ids"] for _ in range(2))
    assert first == again
    # the first bytes of sha256("-1")
    assert (seed_of(7), seed_of(2**32 - 1), seed_of(-1)) == (7, 2**32 - 1, 0x1BAD6B8C)
    assert len({seed_of(each, choice) for each in (-1, seed, 7) for choice in range(3)}) == (6 if seed == -1 else 9)


def test_penalties_and_biases_reach_the_engine(engine):
    body = IDS | {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": {"11": 2}}
    found = asked(engine, COMPLETIONS, body | {"return_token_ids": True, "max_tokens": 20})["choices"][0]["token_ids"]
    assert found == greedy(logits, [5, 9, 7], 20, presence=1, frequency=0.5, repetition=1.3, bias={11: 2})


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_completions(engine, stream):
    body = IDS | {"logprobs": 3, "return_token_ids": True}
    if stream:
        parts = [chunk["choices"][0] for chunk in chunks(engine, COMPLETIONS, body)]
        ids = [id for part in parts for id in part.get("token_ids", ())]
        said = {
            name: [each for part in parts if part["logprobs"] for each in part["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        (choice,) = asked(engine, COMPLETIONS, body)["choices"]
        ids, said = choice["token_ids"], choice["logprobs"]
    tokenizer = engine.files.tokenizer("test")
    assert ids == greedy(logits, [5, 9, 7], 6)
    for at, id in enumerate(ids):
        row = log_softmax(logits([5, 9, 7, *ids[:at]]))
        assert abs(said["token_logprobs"][at] - row[id]) < 1e-5
        best = most_likely(logits([5, 9, 7, *ids[:at]]), 3)
        assert sorted(said["top_logprobs"][at].values(), reverse=True) == pytest.approx(row[best], abs=1e-5)
        assert max(said["top_logprobs"][at].values()) == said["token_logprobs"][at]  # greedy, as in lm-eval's requests
    texts = [text.encode() if not text.startswith("bytes:") else None for text in said["tokens"]]
    assert all(text in (None, tokenizer.bytes_of(id)) for text, id in zip(texts, ids, strict=True))
    assert said["text_offset"] == [0, *itertools.accumulate(map(len, said["tokens"][:-1]))]


def test_log_probabilities_of_a_chat(engine):
    found = asked(engine, CHAT, SAID | {"logprobs": True, "top_logprobs": 2, "max_tokens": 5, "return_token_ids": True})
    (choice,) = found["choices"]
    for entry, id in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
        assert bytes(entry["bytes"]) == engine.files.tokenizer("test").bytes_of(id)
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert entry["top_logprobs"][0]["token"] == entry["token"]


def test_echo_is_the_prompt_and_no_token_need_follow(engine):
    (choice,) = asked(engine, COMPLETIONS, IDS | {"prompt": "the of", "echo": True})["choices"]
    assert choice["text"].startswith("the of") and len(choice["text"]) > len("the of")
    alone = asked(engine, COMPLETIONS, IDS | {"prompt": ["the of", "A"], "echo": True, "max_tokens": 0, "n": 2})
    assert [choice["text"] for choice in alone["choices"]] == ["the of", "the of", "A", "A"]
    assert {choice["finish_reason"] for choice in alone["choices"]} == {"length"}
    assert alone["usage"]["completion_tokens"] == 0 < alone["usage"]["prompt_tokens"]
    streamed = chunks(engine, COMPLETIONS, IDS | {"prompt": "the of", "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]


def test_echo_of_a_prompt_as_long_as_the_context_needs_no_room_for_an_answer(engine):
    context = engine.limits.context
    body = IDS | {"prompt": [3] * context, "echo": True, "max_tokens": 0}
    (choice,) = asked(engine, COMPLETIONS, body)["choices"]
    assert choice["text"] == engine.files.tokenizer("test").decode([3] * context)
    for wrong, found in (([3] * (context + 1), "token ids"), ([3, 1 << 20], "at place 1"), ([1 << 20], "at place 0")):
        answer = call(engine, COMPLETIONS, body | {"prompt": wrong})
        assert answer.status_code == 400 and found in answer.json()["error"]["message"]


def test_prompts_that_are_scored_count(engine):
    """Regression: if four requests may run at once, three prompts with echo and log-probabilities always got 429."""
    policy = Policy("toy", None, 4, 1 << 20)
    body = IDS | {"prompt": [[3, 4]] * 3, "echo": True, "logprobs": 1}
    answer = serving.asked(engine, policy, COMPLETIONS, body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "`n`: expected at most 4 answers, found 6")


def test_echo_with_log_probabilities_without_score_programs_is_refused_by_name(engine):
    answer = call(engine, COMPLETIONS, IDS | {"echo": True, "logprobs": 1})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("`echo`: scoring: target `cpu-tp2` has no score programs")
    assert "--score-paddings" in message


def test_a_stream_counts_at_its_end(engine):
    options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    *found, last = chunks(engine, COMPLETIONS, IDS | options)
    assert sum(len(chunk["choices"][0].get("token_ids", ())) for chunk in found) == 6
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"], last["choices"]) == (3, 6, [])
    assert all(chunk["usage"] is None for chunk in found)


@pytest.mark.parametrize(
    ("field", "check"),
    [
        ({"structured_outputs": {"regex": "[a-c]{5}"}}, lambda text: set(text) <= set("abc") and len(text) == 5),
        ({"structured_outputs": {"grammar": 'start: "left" | "right"'}}, lambda text: text in ("left", "right")),
        ({"structured_outputs": {"grammar": 'start: "b" | start "a"'}}, lambda text: set(text[1:]) <= {"a"}),
        ({"structured_outputs": {"choice": ['ja "so"', "nein"]}}, lambda text: text in ('ja "so"', "nein")),
        ({"structured_outputs": {"json": SCHEMA}}, lambda text: json.loads(text)["a"] in (1, 2)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, lambda text: json.loads(text)["a"] in (1, 2)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {
            "enum": ["red", 5, None]}}}}, lambda text: json.loads(text) in ("red", 5, None)),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {
            "n": {"type": "integer", "minimum": 3, "maximum": 8}}, "required": ["n"], "additionalProperties": False}}}},
         lambda text: 3 <= json.loads(text)["n"] <= 8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_has_the_form_that_was_asked_for(engine, path, field, check):
    body = (IDS if path == COMPLETIONS else SAID) | field | {"max_tokens": 40, "temperature": 1.0, "seed": 3, "n": 2}
    for choice in asked(engine, path, body | {"ignore_eos": False})["choices"]:
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert choice["finish_reason"] == "length" or check(text), text


def test_any_json_object_or_length(engine):
    (choice,) = asked(engine, CHAT, SAID | {"response_format": {"type": "json_object"}, "max_tokens": 30})["choices"]
    assert choice["message"]["content"].startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)
    for schema in ({"items": {}}, {"multipleOf": 0.05}):
        assert call(engine, COMPLETIONS, IDS | form_of(schema)).status_code == 200


def form_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


DEEP: dict[str, Any] = {}
for _ in range(80):
    DEEP = {"items": DEEP}
FORMS = [
    (form_of(None), "expected a json_schema with a schema"),
    (form_of("x" * 70_000), "expected a json_schema with a schema"),
    (form_of({"a": "x" * 70_000}), "at most 65,536 characters"),
    (form_of(DEEP), "at most 64 levels"),
    (form_of({"type": "nope"}), "Invalid type: nope"),
    (form_of({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable schema"),
    (form_of({"multipleOf": True}), "Expected f64 for 'multipleOf'"),
    (form_of({"multipleOf": 10**400}), "number out of range"),
    (form_of({"multipleOf": 999_983}), "found one that takes more "),
    (form_of(False), "schema is false"),
    (form_of({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no text fits it"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
     "expected it or structured_outputs, found both"),
    ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "at most 65,536"),
    ({"structured_outputs": {"regex": r"[^\x00-\x{10FFFF}]"}}, "that no text fits it"),
    ({"structured_outputs": {"regex": 3}}, "expected a text"),
    ({"structured_outputs": {"grammar": "start: ("}}, "expected a"),
    ({"structured_outputs": {"grammar": "a" * 70_000}}, "at most 65,536"),
    ({"structured_outputs": {"grammar": 'start: start "a"'}}, "that no text fits it"),
    ({"structured_outputs": {"grammar": "start: x"}}, 'unknown name: "x"'),
    ({"structured_outputs": {"json": "{"}}, "expected a JSON schema, an object or its text"),
    ({"structured_outputs": {"choice": []}}, "expected"),
    ({"structured_outputs": {"choice": ["a", 3]}}, "expected a list of texts"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "expected an object with one of"),
    ({"structured_outputs": {"xml": "a"}}, "expected an object with one of"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "found"), FORMS)
def test_a_form_that_cannot_be_taken_is_refused_by_its_field(engine, fields, found):
    """Regression: `param` was `prompt`."""
    answer = call(engine, COMPLETIONS, IDS | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, next(iter(fields))) and found in error["message"], error


def message_of(text: str, form: AnswerFormat | None, **fields: Any) -> dict[str, Any]:
    """The one choice of a complete answer."""
    call = GenerationCall(validated(ChatBody, SAID | fields, "toy"), [], ((1,),), format=form)
    (choice,) = ChoicesAnswer(call, "toy").whole([Completion([1], [2], text, "eos", 0, 0)])["choices"]
    return dict(choice)


def tools_of(**fields: Any) -> structure.Tools:
    return structure.tools(validated(ChatBody, SAID | {"tools": [TOOL]} | fields, "toy"), PUBLISHED)


def test_a_call_that_is_required_is_one_of_a_function_that_was_offered(engine):
    named = {"type": "function", "function": {"name": "f"}}
    assert (tools_of().grammars(), tools_of().offered) == ([], [TOOL])
    assert tools_of(parallel_tool_calls=False).grammars() == []
    assert tools_of(tool_choice="none").offered is None
    for choice in ("required", named):
        tools = tools_of(tool_choice=choice)
        request = engine.request([5], 62, grammar=tools.grammars()[0])
        (done,) = engine.complete([request])
        said = message_of(done.text, AnswerFormat.of(PUBLISHED, "", tools.functions))["message"]
        assert done.stop_reason in ("stop", "eos")
        (made,) = said["tool_calls"]
        assert made["function"]["name"] == "f"
        assert 0 <= json.loads(made["function"]["arguments"])["a"] <= 9
        assert said["content"] is None


def test_tools_that_cannot_be_taken_are_refused_by_name(engine):
    for fields, found in (
        ({"tools": [{"type": "web"}]}, "`tools`: expected functions"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, '`tool_choice`: expected "auto", "none"'),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "`tool_choice`: expected"),
        ({"tool_choice": "required"}, "`tool_choice`: expected `tools` with required"),
        ({"tools": [TOOL]}, "`tools`: expected a chat template that writes tools"),
    ):
        answer = call(engine, CHAT, SAID | fields)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(found)


ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("parallel", [True, False])
def test_without_parallel_calls_only_the_first_call_is_returned(parallel):
    form = AnswerFormat(False, False, {"f": None})
    said = message_of(f"so {ONE}\n{ONE}{ONE}", form, parallel_tool_calls=parallel)
    assert (said["message"]["content"], said["finish_reason"]) == ("so ", "tool_calls")
    assert len(said["message"]["tool_calls"]) == (3 if parallel else 1)


def test_a_client_can_tokenize_as_the_server_does(engine):
    """lm-eval's remote tokenizer reads the names of special tokens and the template from the server."""
    answer = call(engine, "/tokenizer_info")
    assert answer.status_code == 200
    files = engine.files
    assert answer.json() == {"eos_token": None} | files.named_tokens | {"chat_template": files.template_text}
    assert answer.json()["eos_token"] and "messages" in answer.json()["chat_template"]


def test_texts_and_messages_become_tokens_and_texts_again(engine):
    body = {"prompt": "the of A", "model": "toy"}
    found = asked(engine, "/tokenize", body)
    ids = list(engine.request("the of A", 1).prompt_ids)
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": 64}
    assert asked(engine, "/detokenize", {"tokens": found["tokens"]}) == {"prompt": "the of A"}
    told = asked(engine, "/tokenize", {"messages": SAID["messages"]})
    assert told["tokens"] == list(engine.request(SAID["messages"], 1).prompt_ids)
    begun = asked(engine, "/tokenize", {"messages": SAID["messages"], "continue_final_message": True})
    assert begun["tokens"] == told["tokens"][: begun["count"]] and 0 < begun["count"] < told["count"]
    for path, wrong, said in (
        ("/tokenize", {}, "`prompt`: expected it or `messages`, found none"),
        ("/tokenize", body | {"messages": SAID["messages"]}, "`prompt`: expected it or `messages`, found both"),
        ("/tokenize", {"prompt": 5}, "`prompt`: expected a text, found 5"),
        ("/detokenize", {"tokens": [320]}, "`tokens`: expected token ids from 0 to 319, found 320"),
        ("/detokenize", {}, "`tokens`: expected a list of token ids, found none"),
    ):
        answer = call(engine, path, wrong)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


def test_the_page_has_the_table_of_all_fields():
    """After a change, run ``python -m tools.api_fields``."""
    assert api_fields.BETWEEN.search(api_fields.PAGE.read_text()).group() == api_fields.table()
    assert ("`prompt`", "taken", "refused", "refused") in api_fields.rows()
    assert {"echo", "logprobs", "n"} <= CompletionsBody.model_fields.keys()


# The body that vllm-router 0.1.17 makes of {"model": "toy", …, "max_tokens": 4}.
ADDED = {
    "stream": False,
    "logprobs": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
}


def test_the_fields_that_a_router_adds_ask_for_nothing():
    """Regression: the server refused every call through vllm-router: unsupported_parameter, `no_stop_trim`."""
    plain, routed = (validated(ChatBody, body, "toy") for body in (SAID, SAID | ADDED))
    assert routed == plain
    for name in ("no_stop_trim", "return_hidden_states"):
        with pytest.raises(ApiError, match=f"`{name}`: expected it left out or false"):
            validated(ChatBody, SAID | {name: True}, "toy")
