"""Every malformed request gets a 4xx with a reason in OpenAI's shape; the application runs in this process."""

import asyncio
import collections
import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from msgspec import structs

from ling3export.artifacts.manifest import file_record, read_manifest, write_manifest
from ling3export.foundation.errors import Ling3Error
from ling3export.runners.cli.main import main
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import EngineStalled, EngineStopped, RequestHandle, wake
from ling3export.runners.engine.request import BYTES_A_TOKEN, Request
from ling3export.runners.engine.sequence import SequenceOutput
from ling3export.runners.serve.answers import ChoicesAnswer, events
from ling3export.runners.serve.app import Policy, application
from ling3export.runners.serve.generation import ChatBody, CompletionsBody, GenerationCall, chat, completions
from ling3export.runners.serve.metrics import Metrics
from ling3export.runners.serve.run import api_key
from ling3export.runners.serve.schema import LABELS, NEUTRAL, ApiError, parse, validated
from ling3export.runners.text.vocabulary import Tokenizer
from tests.support import toy_artifact
from tests.support.refusals import refusal
from tests.support.serving import Server, answered, asked, error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
POLICY = Policy("toy", None, max_requests=4, max_body=5000)
IDS: dict[str, Any] = {"model": "toy", "prompt": [1, 2, 3]}
SAID: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "A"}]}
WORDS = 'a list of messages, [{"role": TEXT, "content": TEXT}, ...]'
PROMPT = "a text, a list of texts, a list of token ids or a list of lists of token ids"
STOP = "a text or a list of at most 16 texts of 1 to 1000 characters"
OPTIONS_OF_ENGINE = {"max_requests": 4}


@pytest.fixture(scope="module")
def wordless(tmp_path_factory):
    """An engine without a tokenizer."""
    folder = shutil.copytree(toy_artifact.shared(), tmp_path_factory.mktemp("wordless") / "toy.ling3")
    write_manifest(folder, structs.replace(read_manifest(folder), tokenizer=()))
    with Engine(folder, report=lambda text: None) as engine:
        yield engine


def test_a_server_reports_no_tokenizer_where_only_settings_of_generation_are_there(tmp_path):
    """Regression: it printed nothing: only requests showed that it accepts and returns only token ids."""
    folder = shutil.copytree(toy_artifact.shared(), tmp_path / "toy.ling3")
    (folder / "tokenizer" / "generation_config.json").write_text('{"temperature": 0.5}')
    record = file_record(folder, "tokenizer/generation_config.json")
    write_manifest(folder, structs.replace(read_manifest(folder), tokenizer=(record,)))
    with Server(folder) as server:
        said = server.said()
    assert "serve: no tokenizer: prompts and answers are token ids\n" in said
    assert "temperature 0.5, as generation_config.json says" in said


def call(engine: Engine, path: str, body: Any, *, policy: Policy = POLICY, **how: str) -> httpx2.Response:
    return asked(engine, policy, path, body, **how)


def refused(answer: httpx2.Response, status: int) -> tuple[str, str | None, str | None]:
    """Message, param and code of an error."""
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    kind = {404: "not_found_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    assert error["type"] == kind
    return error["message"], error["param"], error["code"]


WRONG = [
    ({"prompt": None}, f"`prompt`: expected {PROMPT}, found none"),
    ({"prompt": ""}, "prompt: expected a prompt of at least one token, found an empty one"),
    ({"prompt": []}, f"`prompt`: expected {PROMPT}, found []"),
    ({"prompt": [[1], []]}, "prompt 1: expected a prompt of at least one token, found an empty one"),
    ({"prompt": ["a", ""]}, "prompt 1: expected a prompt of at least one token, found an empty one"),
    ({"prompt": 7}, f"`prompt`: expected {PROMPT}, found 7"),
    ({"prompt": {}}, f"`prompt`: expected {PROMPT}, found {{}}"),
    ({"prompt": [1, "a"]}, f'`prompt`: expected {PROMPT}, found "a" at place 1'),
    ({"prompt": ["a", 1]}, f"`prompt`: expected {PROMPT}, found 1 at place 1"),
    ({"prompt": ["a", [1]]}, f"`prompt`: expected {PROMPT}, found [1] at place 1"),
    ({"prompt": [1, True]}, f"`prompt`: expected {PROMPT}, found true at place 1"),
    ({"prompt": [True, 1]}, f"`prompt`: expected {PROMPT}, found true at place 0"),
    ({"prompt": [1.5]}, f"`prompt`: expected {PROMPT}, found 1.5 at place 0"),
    ({"prompt": [[1, [2]]]}, f"`prompt`: expected {PROMPT}, found [1, [2]] at place 0"),
    ({"prompt": [[1]] * 5}, "`prompt`: expected at most 4 prompts, found 5"),
    ({"prompt": [1, 320]}, "prompt: expected token ids from 0 to 319, found 320 at place 1"),
    ({"prompt": [-1]}, "prompt: expected token ids from 0 to 319, found -1 at place 0"),
    ({"prompt": [10**30]}, f"prompt: expected token ids from 0 to 319, found {10**30} at place 0"),
    ({"prompt": [1] * 64},
     "prompt: expected prompt and answer within the context of 64 tokens, found a "
     "prompt of 64 tokens + 1 = 65\nhint: shorten the prompt, or build the artifact with a larger --context"),
    ({"prompt": [1] * 65}, "`prompt`: expected at most 64 token ids, found 65"),
    ({"prompt": [[1], [1] * 65]}, "`prompt`: expected at most 64 token ids, found 65"),
    ({"prompt": "\ud800"}, "prompt: expected text in Unicode, found half a character (a lone surrogate)"),
    ({"model": None}, "`model`: expected a text, found none"),
    ({"model": 5}, "`model`: expected a text, found 5"),
    ({"max_tokens": 0}, "`max_tokens`: expected a whole number from 1 to 2147483647, found 0"),
    ({"max_tokens": -3}, "`max_tokens`: expected a whole number from 1 to 2147483647, found -3"),
    ({"max_tokens": 2.5}, "`max_tokens`: expected a whole number from 1 to 2147483647, found 2.5"),
    ({"max_tokens": "9"}, '`max_tokens`: expected a whole number from 1 to 2147483647, found "9"'),
    ({"max_tokens": True}, "`max_tokens`: expected a whole number from 1 to 2147483647, found true"),
    ({"max_tokens": 3, "max_completion_tokens": 4},
     "`max_tokens`: expected the same as `max_completion_tokens`, 4, found 3"),
    ({"temperature": -0.1}, "`temperature`: expected a number from 0 to 2, found -0.1"),
    ({"temperature": 2.1}, "`temperature`: expected a number from 0 to 2, found 2.1"),
    ({"temperature": "hot"}, '`temperature`: expected a number from 0 to 2, found "hot"'),
    ({"temperature": True}, "`temperature`: expected a number from 0 to 2, found true"),
    ({"temperature": [1]}, "`temperature`: expected a number from 0 to 2, found [1]"),
    ({"top_p": 0}, "`top_p`: expected a number above 0, at most 1, found 0"),
    ({"top_p": 1.01}, "`top_p`: expected a number above 0, at most 1, found 1.01"),
    ({"top_k": -2}, "`top_k`: expected a whole number from 0 to 2147483647, found -2"),
    ({"seed": 1 << 64}, "`seed`: expected a whole number of 64 bits, found 18446744073709551616"),
    ({"seed": 0.5}, "`seed`: expected a whole number of 64 bits, found 0.5"),
    ({"n": 5}, "`n`: expected at most 4 answers, found 5"),
    ({"n": True}, "`n`: expected a whole number from 1 to 128, found true"),
    ({"logprobs": 21}, "`logprobs`: expected a whole number from 0 to 20, found 21"),
    ({"logprobs": True}, "`logprobs`: expected a whole number from 0 to 20, found true"),
    ({"presence_penalty": 2.5}, "`presence_penalty`: expected a number from -2 to 2, found 2.5"),
    ({"repetition_penalty": 1e-38}, "`repetition_penalty`: expected a number from 0.01 to 10, found 1e-38"),
    ({"logit_bias": {"x": 1}},
     '`logit_bias`: expected an object of at most 1024 token ids with a number from -100 to 100, found "x"'),
    ({"logit_bias": {"5": 101}},
     "`logit_bias`: expected an object of at most 1024 token ids with a number from -100 to 100, found 101"),
    ({"logit_bias": {"5": 1, "05": 2}}, "sampling `logit_bias`: expected each token once, found one twice"),
    ({"response_format": {"type": "xml"}},
     '`response_format`: expected a type of text, json_object or json_schema, found "xml"'),
    ({"response_format": {"type": "json_schema"}},
     "`response_format`: expected a json_schema with a schema, an object, found none"),
    ({"structured_outputs": {"regex": "(a"}},
     "structured_outputs: expected a regex grammar that some text fits, found at 1(8): "
     'invalid regex "(a" (in regex): regex parse error: (a ^ error: unclosed group 1 | start: /(a/ ^'),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {
     "type": "integer", "minimum": 5, "maximum": 3}}}},
     "response_format: expected a json grammar that some text fits, found Unsatisfiable schema: minimum (5) "
     "is greater than maximum (3)"),
    ({"echo": True, "logprobs": 2},
     "`echo`: expected a whole answer and at most 1 log-probability with `logprobs`, found 2 log-probabilities"),
    ({"stop": ""}, f'`stop`: expected {STOP}, found ""'),
    ({"stop": 5}, f"`stop`: expected {STOP}, found 5"),
    ({"stop": ["a", 5]}, f"`stop`: expected {STOP}, found 5 at place 1"),
    ({"stop": ["a"] * 17}, f"`stop`: expected {STOP}, found [" + '"a", ' * 11 + '"a",…'),
    ({"stop": "\ud800"}, f'`stop`: expected {STOP}, found "\\ud800"'),
    ({"stop": "a" * 1001}, f'`stop`: expected {STOP}, found "{"a" * 59}…'),
    ({"stream": "yes"}, '`stream`: expected true or false, found "yes"'),
    ({"stream_options": {}}, "`stream_options`: expected it with `stream: true` only, found it without"),
    ({"ignore_eos": 1}, "`ignore_eos`: expected true or false, found 1"),
    ({"cache_salt": 3}, "`cache_salt`: expected a text, found 3"),
    ({"return_token_ids": "x"}, '`return_token_ids`: expected true or false, found "x"'),
]  # fmt: skip
NAMED_OTHERWISE = [
    ({"logit_bias": {"320": 1}}, "prompt", "prompt: expected logit_bias of token ids from 0 to 319, found 320"),
    ({"stream": True, "stream_options": 1}, "stream_options", "`stream_options`: expected an object, found 1"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "include_usage",
        "`include_usage`: expected true or false, found 1",
    ),
]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [*((change, next(iter(change)), message) for change, message in WRONG), *NAMED_OTHERWISE],
)
def test_a_wrong_value_is_named(engine, change, param, message):
    assert refused(call(engine, COMPLETIONS, IDS | change), 400) == (message, param, "invalid_value")
    assert engine.stats()["live"] == 0


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("best_of", 3, "1, found 3"),
        ("suffix", "z", '"", found "z"'),
        ("functions", [{}], "[], found [{}]"),
        ("spaces_between_special_tokens", False, "true, found false"),
        ("return_hidden_states", True, "false, found true"),
        ("chat_template_kwargs", {"a": 1}, '{}, found {"a": 1}'),
        ("continue_final_message", True, "false, found true"),
        ("service_tier", "flex", '"auto" or "default", found "flex"'),
        ("use_beam_search", True, "false, found true"),
    ],
)
def test_unsupported_values_are_named(engine, field, value, wanted):
    message = f"`{field}`: expected it left out or {wanted}: not supported here"
    for path, body in ((COMPLETIONS, IDS), (CHAT, SAID)):
        if path == COMPLETIONS or field not in ChatBody.model_fields:
            assert refused(call(engine, path, body | {field: value}), 400) == (message, field, "unsupported_parameter")


@pytest.mark.parametrize("field", ["max_token", "prompts", "mirostat", "\ud800", "x" * 100])
def test_an_unknown_field_is_named(engine, field):
    """The error lists similar fields, or else all fields."""
    message, *rest = refused(call(engine, COMPLETIONS, IDS | {field: 1}), 400)
    assert rest == [field[:60], "unsupported_parameter"]
    assert message.startswith(f"`{field[:60]}`: expected one of the fields ") and message.endswith(", found another")
    assert ("max_tokens" if field == "max_token" else "prompt") in message


def test_fields_that_ask_for_nothing_are_taken(engine):
    body = IDS | {
        "n": 1,
        "logprobs": None,
        "echo": False,
        "tools": [],
        "presence_penalty": 0.0,
        "user": "me",
        "logit_bias": {},
        "temperature": 0,
        "max_tokens": 5,
        "ignore_eos": True,
        "cache_salt": "mine",
        "return_token_ids": True,
    }
    (choice,) = call(engine, COMPLETIONS, body).json()["choices"]
    assert choice["token_ids"] == toy_artifact.answer([1, 2, 3], 5)[0]


def test_sixteen_tokens_where_none_are_asked_for_and_a_chat_to_the_end(engine):
    for path, body, total in ((COMPLETIONS, IDS, 3 + 16), (CHAT, SAID, 64)):
        answer = call(engine, path, body | {"ignore_eos": True, "temperature": 0})
        assert answer.json()["usage"]["total_tokens"] == total
        assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (None, f"{WORDS}, found none"),
        ([], f"{WORDS}, found []"),
        ("hello", f'{WORDS}, found "hello"'),
        ([5], f"{WORDS}, found 5 at place 0"),
        ([{"role": "user"}], f"{WORDS}, found no `content` at place 0"),
        ([{"content": "a"}], f"{WORDS}, found no `role` at place 0"),
        ([{"role": "user", "content": None}], f"{WORDS}, found no `content` at place 0"),
        ([{"role": 1, "content": "a"}], f"{WORDS}, found `role` 1 at place 0"),
        ([{"role": "user", "content": "a", "tool_calls": [1]}], f"{WORDS}, found `tool_calls` 1 at place 0"),
        ([{"role": "user", "content": "a", "\ud800": 1}], f"{WORDS}, found `\\ud800` 1 at place 0"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            'content of text alone, found a part of type "image_url" at place 0',
        ),
        ([{"role": "user", "content": ["a"]}], 'content of text alone, found a part of type "a" at place 0'),
    ],
)
def test_wrong_messages_are_named(engine, messages, found):
    answer = call(engine, CHAT, SAID | {"messages": messages})
    assert refused(answer, 400) == (f"`messages`: expected {found}", "messages", "invalid_value")


VALUES = [
    True, False, 0, 1, -1, 2, 3.5, 1.0, -0.5, 2**31, 2**32, 10**30, 1e308, "", "a", "toy", "none", "\ud800", "x" * 1001,
    [], {}, [1], [1, 2], ["a"], ["a", "b"], [[1], [2]], [[1], []], [None], [True], [1, "a"], ["a", 1], [[1], "a"],
    [1.5], [[[1]]], {"a": 1}, {"\ud800": 1}, {"include_usage": True}, {"include_usage": 1}, {"type": "text"}, ["text"],
    None,
    *([{"role": "user", **fields}] for fields in (
        {}, {"content": "hi"}, {"content": None}, {"content": ["a"]}, {"content": [{"type": "text", "text": "x"}]},
        {"content": [{"type": "text"}]}, {"content": "x", "name": 5}, {"content": "x", "\ud800": 1},
    )),
]  # fmt: skip
FIELDS = [*ChatBody.model_fields, "prompt", *NEUTRAL, *LABELS, "unknown", "\ud800"]


@pytest.mark.parametrize(("seed", "words"), [(0, True), (1, True), (2, True), (1, False)])
def test_any_body_is_answered_or_refused_by_name(request, seed, words):
    """Thousands of bodies with wrong values in valid places: each becomes requests, or an error that can be sent.

    Regression: without a tokenizer, `logprobs` and `echo` were neither.
    """
    engine = request.getfixturevalue("engine" if words else "wordless")
    draw, refusals = random.Random(seed), []
    for _ in range(2000):
        body = dict(draw.choice((IDS, SAID)))
        for name in draw.choices(FIELDS, k=draw.choice((1, 1, 2, 3))):
            body[name] = draw.choice(VALUES)
        data = json.dumps(body).encode()
        try:
            if "messages" in body:
                made = chat(parse(data), engine, "toy")
            else:
                made = completions(parse(data), engine, "toy", 4)
        except ApiError as error:
            refusals.append(error)
        else:
            assert len(made.requests) <= 4 and (made.requests or made.echo)
    for error in refusals:
        assert error.status in (400, 404) and json.loads(json.dumps(error.body()))["error"]["message"]
        assert error.param is not None and error.param in error.message
    ends = collections.Counter(error.code for error in refusals)
    ends["taken"] = 2000 - len(refusals)
    more = set() if words else {"no_tokenizer", "no_chat_template"}
    assert set(ends) == {"taken", "invalid_value", "unsupported_parameter", "model_not_found"} | more


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", "body: expected JSON, found Expecting value: line 1 column 1 (char 0)"),
        (b"{", "body: expected JSON, found Expecting property name"),
        (b'{"model": NaN}', "body: expected JSON, found the number NaN"),
        (b'{"temperature": -Infinity}', "body: expected JSON, found the number -Infinity"),
        (b"\xff", "body: expected JSON, found 'utf-8' codec can't decode byte 0xff"),
        (b'{"seed": ' + b"9" * 4900 + b"}", "body: expected JSON, found Exceeds the limit"),
        (b"[" * 4900, "body: expected JSON, found more than 128 levels of objects and lists"),
        (b'{"n": 1, "n": 2}', 'body: expected each key once, found "n" twice'),
        (b"[1]", "body: expected an object, found [1]"),
        (b"null", "body: expected an object, found null"),
    ],
)
def test_bodies_that_are_no_json_object_are_refused(engine, body, found):
    message, param, code = refused(call(engine, COMPLETIONS, body), 400)
    assert message.startswith(found)
    assert (param, code) == (None, "invalid_json")


def test_errors_of_http_itself(engine):
    found = refused(call(engine, COMPLETIONS, IDS, Content_Type="text/plain"), 415)
    assert found[0] == "`Content-Type`: expected application/json, found text/plain"
    assert call(engine, COMPLETIONS, IDS, Content_Type="Application/JSON; charset=utf-8").status_code == 200
    found = refused(call(engine, COMPLETIONS, b" " * 5001), 413)
    assert found == ("body: expected at most 5000 bytes, found 5001 or more", None, "body_too_large")
    found = refused(call(engine, "/v1/embeddings", IDS), 404)
    assert found[0].startswith("path: expected one of /v1/completions, /v1/chat/completions, /v1/responses, ")
    assert found[0].endswith(", found /v1/embeddings")
    found = refused(call(engine, COMPLETIONS, b"", method="GET"), 405)
    assert found[0] == "/v1/completions: expected POST, found GET"
    found = refused(call(engine, COMPLETIONS, IDS | {"model": "gpt\ud800"}), 404)
    assert found == ('`model`: expected "toy", found "gpt\\ud800"', "model", "model_not_found")


def test_without_a_tokenizer(wordless):
    """Token ids in, token ids out; text, stop strings and messages are refused.

    Regression: `logprobs` and `echo` were answered with 500.
    """
    answer = call(wordless, COMPLETIONS, IDS | {"temperature": 0, "max_tokens": 6, "ignore_eos": True})
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", toy_artifact.answer([1, 2, 3], 6)[0])
    found = refused(call(wordless, COMPLETIONS, IDS | {"prompt": "a"}), 400)
    assert found == ("`prompt`: expected token ids, found text: this model has no tokenizer", "prompt", "no_tokenizer")
    for name, value in (("stop", "a"), ("logprobs", 0), ("echo", True)):
        found = refused(call(wordless, COMPLETIONS, IDS | {name: value}), 400)
        message = f"`{name}`: expected it left out, found it requested: this model has no tokenizer"
        assert found == (message, name, "no_tokenizer")
    found = refused(call(wordless, "/tokenizer_info", b"", method="GET"), 404)
    assert found == ("this model has no tokenizer: it takes token ids", None, "no_tokenizer")
    found = refused(call(wordless, CHAT, SAID), 400)
    message = "`messages`: this model has no chat template: use /v1/completions"
    assert found == (message, "messages", "no_chat_template")


def test_an_engine_that_ended_answers_503(caplog):
    with Engine(toy_artifact.shared(), report=lambda text: None) as engine:
        assert call(engine, "/health", b"", method="GET").json() == {"status": "ok"}
    for path, method in (("/health", "GET"), (COMPLETIONS, "POST"), (COMPLETIONS, "POST")):
        answer = call(engine, path, IDS, method=method)
        assert answer.status_code == 503
        error = error_of("engine: expected it running, found it stopped", "server_error", "engine_stopped")
        assert answer.json()["error"] == error
    assert caplog.messages == ["engine: expected it open, found it closed"] * 2


def test_health_names_the_program_that_did_not_return():
    message = "engine: expected `decode@16` to return within 3 s, found it still running"
    engine = SimpleNamespace(stopped=EngineStalled(message), shared_states=None)
    answer = answered(application(engine, POLICY), "GET", "/health")
    error = {"error": error_of(message, "server_error", "engine_stalled")}
    assert (answer.status_code, answer.json()) == (503, error)


def test_a_stream_whose_engine_fails_ends_with_the_error(engine, caplog):
    """There is no ``[DONE]``; the cause is only in the log."""
    handle = RequestHandle(Request((1, 2), 9), 0, lambda index: None)
    call = GenerationCall(validated(CompletionsBody, IDS, "toy"), [handle.request], ((1, 2),))

    async def read() -> list[str]:
        source = events([handle], ChoicesAnswer(call, "toy"), Metrics(engine))
        handle.update(SequenceOutput([5], "five"))
        found = [await anext(source)]
        handle.finish(EngineStopped("engine: the device caught fire"))
        wake([handle])
        return [*found, *[event async for event in source]]

    first, last = (json.loads(event.removeprefix("data: ")) for event in asyncio.run(read()))
    assert first["choices"][0]["text"] == "five"
    assert last["error"]["message"] == "engine: expected it running, found it stopped"
    assert caplog.messages == ["engine: the device caught fire"]


@pytest.mark.parametrize("content", [b"", b" \n", b"a b", b"a\nb", b"\xff\xfe", "schlüssel".encode()])
def test_a_bad_key_is_refused(tmp_path, monkeypatch, content):
    """If the key cannot be read, the server does not start without one."""
    file = tmp_path / "key"
    file.write_bytes(content)
    wanted = "the key must be printable ASCII without blanks"
    with pytest.raises(Ling3Error, match=wanted):
        api_key(file)
    if content in (b"", b"a b"):
        monkeypatch.setenv("LING3_API_KEY", content.decode())
        with pytest.raises(Ling3Error, match=f"^`LING3_API_KEY`: {wanted}"):
            api_key(None)


def test_the_file_goes_before_the_variable(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("LING3_API_KEY", raising=False)
    assert api_key(None) is None
    monkeypatch.setenv("LING3_API_KEY", "variable")
    assert api_key(None) == "variable"
    (tmp_path / "key").write_text(" file\n")
    assert api_key(tmp_path / "key") == "file"


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    """So does every command that needs an extra."""
    missing, found = ("uvicorn", "pydantic", "lm_eval"), "ling3export.foundation.extras.find_spec"
    monkeypatch.setattr(found, lambda name: None if name in missing else name)
    for command, packages in (("serve", "uvicorn, pydantic"), ("lm-eval", "lm_eval")):
        assert refusal(main, command, "any") == (
            f"error: {command}: expected the packages of the extra `{command}`, found no {packages}\n"
            f"hint: in the checkout: pip install '.[{command}]'\n"
        )


def test_a_client_hears_how_the_checkout_installs_structured_output(monkeypatch):
    """Regression: the message named `ling3export[structured]`, which is not on any index of this project."""
    monkeypatch.setattr("ling3export.foundation.extras.find_spec", lambda name: None)
    with Engine(toy_artifact.shared(), report=lambda text: None) as engine:
        message, _, _ = refused(call(engine, COMPLETIONS, IDS | {"structured_outputs": {"regex": "a"}}), 400)
    assert "found no llguidance" in message and "in the checkout: pip install '.[structured]'" in message


HIDDEN = """import sys
from ling3export.foundation import extras
seen = extras.find_spec
extras.find_spec = lambda name: None if name == "llguidance" else seen(name)
from ling3export.runners.cli.main import main
main(prog_name="ling3-runner")
"""


def test_serve_says_at_its_start_what_a_missing_extra_takes_away():
    """Regression: only clients noticed, one by one."""
    line = (
        "serve: no answers that follow a schema, a regex or a grammar; in the checkout: pip install '.[structured]'\n"
    )
    with Server(toy_artifact.shared(), runner=[sys.executable, "-c", HIDDEN]) as server:
        assert server.said().count(line) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenized(engine, monkeypatch, path):
    """Regression: 4 MB of text for a small context took 15 s, and no other request was served meanwhile."""
    tokenized: list[int] = []
    encode = Tokenizer.encode

    def noted(self, text, *, special=True):
        tokenized.append(len(text))
        return encode(self, text, special=special)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    most, policy = engine.limits.context * BYTES_A_TOKEN, replace(POLICY, max_body=5_000_000)

    def body(size: int) -> dict[str, Any]:
        if path == COMPLETIONS:
            return {"model": "toy", "prompt": "a" * size}
        return {"model": "toy", "messages": [{"role": "user", "content": "a" * size}]}

    around = 0 if path == COMPLETIONS else len(engine.files.render_chat([{"role": "user", "content": ""}]))
    name = "prompt" if path == COMPLETIONS else "messages"
    for size in (4_000_000, most - around + 1):
        wanted = f"{name}: expected text within the context of 64 tokens of at most 1024 bytes, found "
        message, param, _ = refused(call(engine, path, body(size), policy=policy), 400)
        assert (param, message.partition("\n")[0]) == (name, f"{wanted}{size + around:,} bytes")
    assert tokenized == []
    message, _, _ = refused(call(engine, path, body(most - around), policy=policy), 400)
    assert f"{name}: expected prompt and answer within the context of 64 tokens, found a prompt of " in message
    assert tokenized == [most]


@pytest.mark.parametrize("body", [IDS | {"prompt": ["a", "b"]}, SAID])
def test_a_full_queue_refuses_before_a_prompt_is_tokenized(monkeypatch, body):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    with Engine(toy_artifact.shared(), max_requests=0, report=lambda text: None) as engine:
        answer = call(engine, COMPLETIONS if "prompt" in body else CHAT, body)
    count = 2 if "prompt" in body else 1
    message = f"engine: expected at most 0 requests at once, found 0 + {count} new ones"
    assert refused(answer, 429) == (message, None, "queue_full")
    assert answer.headers["retry-after"] == "1"
