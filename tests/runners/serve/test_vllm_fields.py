"""Fields of vLLM's API that clients send: each follows vLLM's documentation, in Python and over HTTP."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Sampling
from ling3export.runners.engine.validation import generation_defaults
from ling3export.runners.serve.generation import chat, completions
from ling3export.runners.serve.responses import ResponsesBody
from tests.runners.serve.test_fields import CHAT, COMPLETIONS, IDS, POLICY, SAID, asked, call, chunks
from tests.support import serving
from tests.support.choosing import greedy
from tests.support.toy_artifact import logits

RESPONSES = "/v1/responses"
PLAIN = greedy(logits, [5, 9, 7], 12)
LONG = IDS | {"max_tokens": 12, "return_token_ids": True}
OPTIONS_OF_ENGINE = {"max_requests": 8}


def stopped(engine: Engine, **fields: Any) -> dict[str, Any]:
    (choice,) = asked(engine, COMPLETIONS, LONG | fields)["choices"]
    return dict(choice)


def text_of(engine: Engine, ids: list[int], **how: Any) -> str:
    stream = engine.files.tokenizer("test").stream(**how)
    return "".join(map(stream.push, ids)) + stream.finish()


def test_stop_token_ids_end_an_answer_despite_ignore_eos_and_are_not_in_its_text(engine):
    at = next(place for place, id in enumerate(PLAIN) if place > 2 and id not in PLAIN[:place])
    found = stopped(engine, stop_token_ids=[PLAIN[at], 1])
    assert (found["token_ids"], found["finish_reason"]) == (PLAIN[: at + 1], "stop")
    assert found["text"] == text_of(engine, PLAIN[:at])
    kept = stopped(engine, stop_token_ids=[PLAIN[at]], include_stop_str_in_output=True)
    assert kept["text"] == text_of(engine, PLAIN[: at + 1])
    request = engine.request([5, 9, 7], 12, ignore_eos=True, stop_token_ids=[PLAIN[at]])
    (done,) = engine.complete([request])
    assert (done.token_ids, done.stop_reason, done.text) == (PLAIN[: at + 1], "stop", found["text"])


def test_stop_token_ids_are_checked_where_they_enter(engine):
    for wrong, said in (([10**6], "expected stop_token_ids from 0 to"), (["a"], "stop_token_ids")):
        answer = call(engine, COMPLETIONS, LONG | {"stop_token_ids": wrong})
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    with pytest.raises(RequestError, match="stop_token_ids from 0 to"):
        engine.check(engine.request([5], 1, stop_token_ids=[-1]))
    assert stopped(engine, stop_token_ids=[])["token_ids"] == PLAIN


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_stands_in_the_text_only_if_asked_for(engine, stream):
    whole = text_of(engine, PLAIN)
    stop = whole[3:5]
    body = LONG | {"stop": [stop, whole[4:6]]}

    def text(fields: dict[str, Any]) -> str:
        if not stream:
            return str(asked(engine, COMPLETIONS, fields)["choices"][0]["text"])
        return "".join(chunk["choices"][0]["text"] for chunk in chunks(engine, COMPLETIONS, fields))

    before = whole[: whole.index(stop)]
    assert text(body) == text(body | {"include_stop_str_in_output": False}) == before
    assert text(body | {"include_stop_str_in_output": True}) == before + stop


def test_special_tokens_have_a_text_where_they_are_not_skipped(engine):
    tokenizer = engine.files.tokenizer("test")
    special = min(tokenizer.special_ids)
    ids = [PLAIN[0], special, PLAIN[1]]
    shown = text_of(engine, ids, skip_special=False)
    assert shown != text_of(engine, ids) and len(shown) > len(text_of(engine, ids))
    bias = {"logit_bias": {str(special): 100}, "max_tokens": 2}
    assert stopped(engine, **bias)["text"] == ""
    assert stopped(engine, **bias, skip_special_tokens=False)["text"] == text_of(
        engine, [special] * 2, skip_special=False
    )


def test_a_top_k_of_minus_1_keeps_all_tokens(engine):
    bodies = [LONG | {"temperature": 1.0, "seed": 3, "top_k": top_k} for top_k in (-1, 0)]
    first, second = (asked(engine, COMPLETIONS, body)["choices"] for body in bodies)
    assert first == second
    assert call(engine, COMPLETIONS, LONG | {"top_k": -2}).status_code == 400


def test_a_message_of_an_answer_is_taken_back_with_its_annotations(engine):
    """Regression: `annotations`, usually an empty list, was refused, although clients send it back as they got it."""
    said = {"role": "assistant", "content": "B", "annotations": [], "refusal": None, "audio": None}
    messages = [*SAID["messages"], said, {"role": "user", "content": "C"}]
    plain = [*SAID["messages"], {"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]
    found, expected = (chat(SAID | {"messages": each}, engine, "toy").requests[0] for each in (messages, plain))
    assert found.prompt_ids == expected.prompt_ids
    wrong = [*plain[:-1], plain[-1] | {"annotations": 3}]
    assert call(engine, CHAT, SAID | {"messages": wrong}).status_code == 400


def test_generation_config_gives_the_settings_that_a_body_does_not_name(engine):
    """Like vLLM's ``--generation-config auto``; null counts as not set."""
    policy = replace(POLICY, defaults=generation_defaults({"temperature": 0, "top_k": 20, "do_sample": True}))
    body = {name: value for name, value in LONG.items() if name != "temperature"}
    for given in (body, body | {"temperature": None}):
        answer = serving.asked(engine, policy, COMPLETIONS, given)
        assert answer.json()["choices"][0]["token_ids"] == PLAIN
    hot = serving.asked(engine, policy, COMPLETIONS, body | {"temperature": 2.0, "seed": 1, "top_k": 0}).json()
    assert hot["choices"][0]["token_ids"] != PLAIN


def test_generation_config_is_read_as_vllm_reads_it_and_refused_out_of_range():
    """vLLM samples whatever `do_sample` says: with false, it uses temperature 1 unless the file sets one."""
    taken = {"temperature": 0.6, "min_p": 0.05, "top_k": 20, "max_new_tokens": 2048}
    others = {"do_sample": False, "max_length": 9, "eos_token_id": 3, "top_p": None}
    assert generation_defaults(taken | others) == taken
    with pytest.raises(ArtifactError, match="`top_p`: expected a number above 0, at most 1, found 2"):
        generation_defaults({"top_p": 2})
    with pytest.raises(ArtifactError, match="`max_new_tokens`: expected a whole number from 1"):
        generation_defaults({"max_new_tokens": 0})


@pytest.mark.parametrize(("path", "limit"), [(CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens")])
def test_max_new_tokens_of_generation_config_is_a_default_and_no_bound(engine, path, limit):
    """Like vLLM; many checkpoints' default is larger than the rest of the context."""
    body = {"model": "toy", "temperature": 0, "ignore_eos": True}
    body |= {"messages": SAID["messages"]} if path == CHAT else {"input": "A"}

    def answered(default: int | None, **fields: Any) -> int:
        answer = serving.asked(engine, replace(POLICY, max_new_tokens=default), path, body | fields)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return int(usage.get("completion_tokens", usage.get("output_tokens")))

    left = answered(None)
    assert (answered(3), answered(3, **{limit: None}), answered(3, **{limit: 5}), answered(10**6)) == (3, 3, 5, left)


def test_a_completion_has_openais_16_tokens_despite_max_new_tokens(engine):
    body = {name: value for name, value in LONG.items() if name != "max_tokens"}
    answer = serving.asked(engine, replace(POLICY, max_new_tokens=3), COMPLETIONS, body).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_min_p_keeps_tokens_over_http_and_in_python_alike(engine):
    """It keeps tokens with at least this share of the largest probability at that temperature, as vLLM defines it."""
    body = LONG | {"temperature": 2.0, "max_tokens": 1}
    scaled = logits([5, 9, 7]) / 2.0
    kept = {*np.flatnonzero(scaled >= scaled.max() + np.log(0.4)).tolist()}
    assert 1 < len(kept) < len(scaled) / 2

    def drawn(**fields: Any) -> set[int]:
        answers = (asked(engine, COMPLETIONS, body | {"seed": seed} | fields)["choices"] for seed in range(60))
        return {choice["token_ids"][0] for (choice,) in answers}

    assert drawn(min_p=0.4) <= kept and not drawn() <= kept and not drawn(min_p=0) <= kept
    assert drawn(min_p=1) == {PLAIN[0]}
    assert (
        stopped(engine, temperature=2.0, min_p=0.4, seed=7)["token_ids"]
        == engine.generate([[5, 9, 7]], max_tokens=12, temperature=2.0, min_p=0.4, seed=7, ignore_eos=True)[0].token_ids
    )
    answer = call(engine, COMPLETIONS, body | {"min_p": 1.1})
    assert answer.json()["error"]["message"].startswith("`min_p`: expected a number from 0 to 1, found 1.1")


def delayed(ends: set[int], least: int, count: int) -> list[int]:
    """Greedy tokens after [5, 9, 7]; the first ``least`` are not in ``ends``, and the last one is."""
    found: list[int] = []
    while len(found) < count:
        row = logits([5, 9, 7, *found]).copy()
        row[list(ends) if len(found) < least else []] = -np.inf
        found.append(int(np.argmax(row)))
        if found[-1] in ends:
            break
    return found


@pytest.mark.parametrize("least", [0, 1, 3, 8, 12])
def test_min_tokens_keeps_stop_tokens_and_the_end_of_text_from_being_sampled(engine, least):
    ids, eos = set(PLAIN[:3]), set(engine.files.eos_token_ids())
    body = LONG | {"stop_token_ids": sorted(ids), "min_tokens": least, "logprobs": 1}
    expected = delayed(ids, least, 12)
    answer = asked(engine, COMPLETIONS, body)
    choice = answer["choices"][0]
    assert choice["token_ids"] == expected and len(choice["logprobs"]["tokens"]) == len(expected)
    assert answer["usage"]["completion_tokens"] == len(expected)
    assert choice["finish_reason"] == ("stop" if expected[-1] in ids else "length")
    streamed = [id for chunk in chunks(engine, COMPLETIONS, body) for id in chunk["choices"][0].get("token_ids", ())]
    assert streamed == expected
    # In Python, together with others, with the end-of-text token as the most likely.
    logprobs = Sampling(logit_bias={min(eos): 100.0})
    requests = [engine.request([5, 9, 7], 12, logprobs, min_tokens=each) for each in (least, 0)]
    found, first = engine.complete([*requests, engine.request([5, 9, 7], 12, ignore_eos=True, min_tokens=least)])[:2]
    assert first.token_ids == [min(eos)] and len(found.token_ids) == min(least + 1, 12)
    assert eos.isdisjoint(found.token_ids[:least]) and found.stop_reason == ("eos" if least < 12 else "length")


@pytest.mark.parametrize("least", [0, 1, 4, 7])
def test_min_tokens_keeps_stop_strings_from_ending_the_text(engine, least):
    """Stop strings are not searched in the text of the first tokens, but may begin there."""
    stream = engine.files.tokenizer("test").stream()
    texts = ["", *itertools.accumulate(map(stream.push, PLAIN))]  # the certain text after each token
    stops = [next(text for text in texts if text)[-1], texts[4][-1], texts[-1][-3:]]
    expected = texts[-1]
    for count in range(least + 1, 13):
        new = len(texts[count - 1])
        places = [texts[count].find(stop, max(0, new - len(stop) + 1)) for stop in stops]
        if any(place >= 0 for place in places):
            expected = texts[count][: min(place for place in places if place >= 0)]
            break
    body = LONG | {"stop": stops, "min_tokens": least}
    assert stopped(engine, **body)["text"] == expected
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks(engine, COMPLETIONS, body)) == expected


def test_min_tokens_lets_a_grammars_text_end(engine):
    body = LONG | {"ignore_eos": False, "min_tokens": 8}
    assert stopped(engine, **body, structured_outputs={"regex": "ab"})["text"] == "ab"
    bias = {str(min(engine.files.eos_token_ids())): 100}
    text = stopped(engine, **body, structured_outputs={"regex": "[ab]{1,9}"}, logit_bias=bias)
    assert len(text["token_ids"]) >= 8 and set(text["text"]) <= set("ab")


def test_min_tokens_and_priority_are_checked_where_they_enter(engine):
    for wrong, said in (
        ({"min_tokens": 13}, "`min_tokens`: expected at most 12, as the answer may have, found 13"),
        ({"min_tokens": -1}, "`min_tokens`: expected a whole number from 0"),
        ({"priority": 1.5}, "`priority`: expected a whole number from -2147483648 to 2147483647, found 1.5"),
        ({"priority": 1 << 31}, "`priority`: expected a whole number"),
    ):
        answer = call(engine, COMPLETIONS, LONG | wrong)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(said), answer.text
        assert answer.json()["error"]["param"] in wrong
        with pytest.raises(RequestError, match=f"{next(iter(wrong))}: expected a whole number"):
            engine.request([5], 12, **wrong)


def test_min_tokens_and_priority_reach_the_engine_from_every_endpoint(engine):
    fields = {"temperature": 0, "model": "toy", "min_tokens": 2, "priority": -3}
    for make, body in ((completions, {"prompt": [5]}), (chat, SAID), (ResponsesBody.call, {"input": "A"})):
        (request,) = make(body | fields, engine, "toy", 8).requests
        assert (request.min_tokens, request.priority) == (2, -3)
