"""A slice of ``tests/support/structure_campaign.py``: texts of random schemas and regexes are what was asked for."""

import json

import pytest

from ling3export.runners.engine.engine import Engine
from ling3export.runners.text.grammar import Grammar
from tests.support import toy_artifact
from tests.support.structure_campaign import answers, check


@pytest.fixture(scope="module")
def engine():
    with Engine(toy_artifact.shared(), report=lambda text: None) as engine:
        yield engine


def test_a_models_json_has_the_blanks_of_python_alone(engine):
    """A model could write blanks without end: 148 of 667 random schemas did not come to theirs."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a", "b"],
    }
    grammar, encode = Grammar("json", json.dumps(schema)), engine.files.tokenizer("test").encode
    for text, fits in (
        ('{"a": 1, "b": " "}', True),
        ('{"a":1, "b": ""}', False),
        ('{ "a"', False),
        ('{"a": 1,  ', False),
    ):
        ids = encode(text, special=False)
        matcher = engine.files.grammars(engine.limits.vocab_size).matcher(grammar).inner
        assert (matcher.validate_tokens(ids) == len(ids)) is fits, text


@pytest.mark.parametrize("seed", [1])
def test_texts_that_end_are_what_was_asked_for(engine, seed):
    ended = 0
    for grammar, done in answers(engine, seed, range(12), 40, "the"):
        assert done.stop_reason in ("eos", "stop", "length")
        if done.stop_reason != "length":
            check(grammar, done.text)
            ended += 1
    assert ended >= 6
