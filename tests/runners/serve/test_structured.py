"""A slice of ``tests/support/structure_campaign.py``: texts of random schemas and regexes are what was asked for."""

import pytest

import toy_artifact
from ling3export.runners.engine.engine import Engine
from structure_campaign import answers, check


@pytest.fixture(scope="module")
def engine():
    with Engine(toy_artifact.shared(), report=lambda text: None) as engine:
        yield engine


@pytest.mark.parametrize("seed", [1])
def test_texts_that_end_are_what_was_asked_for(engine, seed):
    ended = 0
    for grammar, done in answers(engine, seed, range(12), 40, "the"):
        assert done.stop_reason in ("eos", "stop", "length")
        if done.stop_reason != "length":
            check(grammar, done.text)
            ended += 1
    assert ended >= 6
