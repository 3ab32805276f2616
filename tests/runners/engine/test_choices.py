"""Penalties, biases, grammars and log-probabilities with a real engine of the toy, against numpy."""

import re
from unittest.mock import Mock

import llguidance
import pytest

from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request, Sampling
from tests.support import toy_artifact
from tests.support.choosing import greedy, log_softmax, most_likely
from tests.support.toy_artifact import logits

PROMPT = [5, 9, 7]


def ask(count: int = 12, prompt: list[int] = PROMPT, **fields) -> Request:
    sampling = Sampling(**fields.pop("how", {}))
    return Request(tuple(prompt), count, sampling, ignore_eos=fields.pop("ignore_eos", True), **fields)


@pytest.mark.parametrize(
    ("how", "oracle"),
    [
        ({"presence_penalty": 2.0}, {"presence": 2}),
        ({"frequency_penalty": 1.5}, {"frequency": 1.5}),
        ({"frequency_penalty": -2.0}, {"frequency": -2}),
        ({"repetition_penalty": 1.7}, {"repetition": 1.7}),
        ({"logit_bias": {3: 2.0, 5: -100.0}}, {"bias": {3: 2.0, 5: -100.0}}),
        (
            {"presence_penalty": 1.0, "frequency_penalty": 0.25, "repetition_penalty": 0.6, "logit_bias": {11: 1.5}},
            {"presence": 1, "frequency": 0.25, "repetition": 0.6, "bias": {11: 1.5}},
        ),
    ],
)
def test_penalties_and_biases_change_what_numpy_says(engine, how, oracle):
    (found,) = engine.complete([ask(30, how=how)])
    assert found.token_ids == greedy(logits, PROMPT, 30, **oracle)


def test_a_plain_request_keeps_its_tokens_next_to_one_with_settings(engine):
    plain, beside = ask(20, name="plain"), ask(20, how={"frequency_penalty": 2.0}, logprobs=3)
    alone = engine.complete([plain])[0]
    found = engine.complete([beside, plain, ask(20, how={"logit_bias": {7: 100.0}})])
    assert found[1].token_ids == alone.token_ids == greedy(logits, PROMPT, 20)
    assert found[1].logprobs is None
    assert found[0].token_ids == greedy(logits, PROMPT, 20, frequency=2)
    assert found[2].token_ids == [7] * 20


def test_log_probabilities_are_the_models_whatever_was_changed(engine):
    for how, oracle in (({}, {}), ({"logit_bias": {7: 100.0}}, {"bias": {7: 100.0}})):
        (found,) = engine.complete([ask(6, how=how, logprobs=20)])
        assert found.token_ids == greedy(logits, PROMPT, 6, **oracle)
        for at, logprobs in enumerate(found.logprobs):
            row = logits([*PROMPT, *found.token_ids[:at]])
            expected = log_softmax(row)
            assert abs(logprobs.logprob - expected[found.token_ids[at]]) < 1e-5
            assert [token for token, _ in logprobs.top] == most_likely(row, 20)
            assert all(abs(logprob - expected[token]) < 1e-5 for token, logprob in logprobs.top)
    (found,) = engine.complete([ask(3, logprobs=0)])
    assert [logprobs.top for logprobs in found.logprobs] == [()] * 3


def test_a_grammar_that_is_cut_says_length(engine):
    (found,) = engine.complete([ask(4, grammar=("regex", "[0-9]{30}"), ignore_eos=False)])
    assert (found.stop_reason, len(found.text)) == ("length", 4)


def test_an_impossible_grammar_is_refused_with_the_reason(engine):
    """Over HTTP a schema may have fewer levels; serve/test_fields.py has the table of reasons."""
    for text, found in (("{", "grammar"), ('{"items":' * 200 + "{}" + "}" * 200, "recursion limit")):
        with pytest.raises(RequestError, match=found):
            engine.submit(ask(grammar=("json", text)))


def test_a_grammar_is_compiled_once_however_many_requests_have_it(engine, monkeypatch):
    """Regression: it was compiled to check a request, and again in the engine's thread, where all others waited."""
    compiled = Mock(wraps=llguidance.LLMatcher)
    monkeypatch.setattr(llguidance, "LLMatcher", compiled)
    done = engine.complete([ask(9, name=name, grammar=("regex", "[b-d]{7}"), ignore_eos=False) for name in "ab"])
    assert all(re.fullmatch("[b-d]{7}", each.text) for each in done)
    assert compiled.call_count == 1


def test_an_invalid_grammar_is_refused():
    for grammar in (("xml", "a"), ("regex",), 5, ("regex", 7), "regex"):
        with pytest.raises(RequestError, match="expected a grammar"):
            ask(grammar=grammar)
    with pytest.raises(RequestError, match="at most 65,536 characters, found 70,000"):
        ask(grammar=("regex", "a" * 70_000))


def test_penalties_hold_where_a_sequence_starts_again():
    """Two sequences do not fit into the pool together: one gives its pages back, and continues with the same tokens."""
    with Engine(toy_artifact.shared(), overlap=False, report=lambda text: None) as engine:
        requests = [ask(40, [token] * 20, how={"frequency_penalty": 1.0}) for token in (3, 4, 5)]
        done = engine.complete(requests)
    for request, found in zip(requests, done, strict=True):
        assert found.token_ids == greedy(logits, list(request.prompt_ids), 40, frequency=1)
