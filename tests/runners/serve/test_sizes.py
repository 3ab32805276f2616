"""Sizes at which the server behaves differently, each below, at and above: bodies, fields, queues and pieces."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from ling3export.runners.engine.validation import BIASES, TOP_LOGPROBS
from ling3export.runners.serve.app import SMALL, application
from ling3export.runners.serve.schema import CHOICES, ELEMENTS, LEVELS, STOP_LENGTH, STOPS
from tests.runners.serve.test_fields import CHAT, COMPLETIONS, IDS, POLICY, SAID
from tests.support import serving
from tests.support.choosing import greedy
from tests.support.toy_artifact import CONTEXT, logits

MOST = 4 << 20  # bytes of a body in these tests
REQUESTS = CHOICES + 2
ONE = IDS | {"max_tokens": 1}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OPTIONS_OF_ENGINE = {"max_requests": REQUESTS}


# Each limit: the largest accepted size, a body of a given size, and the error for a larger one.
FIELDS: dict[str, tuple[int, Any, str]] = {
    "stop strings": (STOPS, lambda n: {"stop": ["qqqq"] * n}, "`stop`: expected"),
    "characters of a stop string": (STOP_LENGTH, lambda n: {"stop": ["q" * n]}, "`stop`: expected"),
    "stop tokens": (STOPS, lambda n: {"stop_token_ids": [1] * n}, "`stop_token_ids`: expected"),
    "biases": (BIASES, lambda n: {"logit_bias": {str(at): 0 for at in range(n)}}, "`logit_bias`: expected"),
    "choices": (CHOICES, lambda n: {"n": n}, "`n`: expected"),
    "log-probabilities": (int(TOP_LOGPROBS.high), lambda n: {"logprobs": n}, "`logprobs`: expected"),
    "tokens of a prompt": (CONTEXT - 1, lambda n: {"prompt": [3] * n}, "within the context of 64 tokens"),
    "prompts at once": (REQUESTS, lambda n: {"prompt": [[3]] * n}, f"at most {REQUESTS} prompts"),
    "elements in a row": (ELEMENTS, lambda n: {"prompt": [1, *[3] * (n - 1)]}, "body: expected"),
    "bytes of a body": (MOST, lambda n: {"user": "u" * (n - len(json.dumps(ONE | {"user": ""})))}, "body: expected"),
}
LATER = ("elements in a row",)  # accepted bodies of these are then refused by a lower limit


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("what", FIELDS)
def test_a_body_is_taken_up_to_each_size_and_refused_by_name_above(engine, what, step):
    most, body, said = FIELDS[what]
    policy = replace(POLICY, max_requests=REQUESTS, max_body=MOST)
    answer = serving.asked(engine, policy, COMPLETIONS, ONE | body(most + step))
    if step > 0:
        assert answer.status_code in (400, 413) and said in answer.json()["error"]["message"], answer.text[:300]
    elif what in LATER:
        assert answer.status_code == 400 and said not in answer.json()["error"]["message"], answer.text[:300]
    else:
        assert answer.status_code == 200, answer.text[:300]
        choices = answer.json()["choices"]
        assert len(choices) == ({"choices": most + step, "prompts at once": most + step}.get(what, 1))
    assert engine.stats()["live"] == 0


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_a_body_is_read_to_its_deepest_level_and_not_below(engine, step):
    deep = "[" * (LEVELS + step - 1) + "]" * (LEVELS + step - 1)
    data = json.dumps(ONE)[:-1] + f', "user": {deep}}}'
    answer = serving.asked(engine, POLICY, COMPLETIONS, data.encode())
    found = "levels" in answer.text
    assert (answer.status_code, found) == ((400, True) if step > 0 else (200, False)), answer.text


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_body_is_answered_alike_about_the_size_that_is_read_apart(engine, step, stream):
    body = ONE | {"max_tokens": 6, "stream": stream, "user": ""}
    body["user"] = "u" * (SMALL + step - len(json.dumps(body)))
    answer = serving.asked(engine, POLICY, COMPLETIONS, body)
    assert len(answer.request.content) == SMALL + step and answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line] if stream else [answer.text]
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]")
    tokens = greedy(logits, IDS["prompt"], 6)
    assert text.rstrip("\ufffd") == engine.files.tokenizer("test").decode(tokens).rstrip("\ufffd")


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_the_queue_takes_as_many_requests_as_it_may_and_not_one_more(engine, step):
    """Counts requests of bodies that arrive together; a body that does not fit is refused with a time to retry."""
    policy = replace(POLICY, max_requests=REQUESTS)
    slow = IDS | {"max_tokens": 12, "prompt": [3]}

    async def ask() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(application(engine, policy))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = asyncio.create_task(client.post(COMPLETIONS, json=slow | {"n": CHOICES}))
            while engine.stats()["live"] < CHOICES:
                await asyncio.sleep(0)
            second = await client.post(COMPLETIONS, json=slow | {"n": REQUESTS - CHOICES + step})
            return [await first, second]

    first, second = asyncio.run(ask())
    assert first.status_code == 200 and len(first.json()["choices"]) == CHOICES
    if step > 0:
        assert (second.status_code, second.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(second.headers["Retry-After"]) > 0
    else:
        assert second.status_code == 200 and len(second.json()["choices"]) == REQUESTS - CHOICES + step
    assert engine.stats()["live"] == 0


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("of", ["tools", "messages"])
def test_lists_of_a_chat_are_taken_up_to_their_size(engine, of, step):
    body = {
        "tools": lambda n: {"tools": [FUNCTION] * n, "tool_choice": "none"},
        "messages": lambda n: {"messages": [{"role": "user", "content": ""}] * n},
    }[of]
    most = CHOICES if of == "tools" else CONTEXT
    message = serving.asked(engine, POLICY, CHAT, SAID | body(most + step)).json().get("error", {}).get("message", "")
    assert (f"at most {most} " in message) == (step > 0), message
