"""Damaged input of every kind, with the same cases in each run, and tests of the harness itself."""

import json
from random import Random

import pytest

from tests.fuzz.harness import Found, run
from tests.fuzz.mutations import SPELLINGS, json_text, mutated, mutated_bytes
from tests.fuzz.targets import EXTRAS, TARGETS

pytestmark = pytest.mark.fuzz
TREE = {"a": [1, 2.5, None, True, {"b": "text"}], "c": {"d": [], "e": "x"}, "f": -3}


@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_refused_in_clear_words_or_does_no_harm(name):
    """There is never a traceback, an abort, a hang, a wrong token or an escape sequence."""
    check(name, range(TARGETS[name][1]))


@pytest.mark.extras
@pytest.mark.parametrize("name", EXTRAS)
def test_more_damage_is_refused_or_does_no_harm(name):
    check(name, EXTRAS[name])


def check(name: str, cases: range) -> None:
    record = run(name, cases)
    assert not record.failures, "\n\n".join(map(str, record.failures[:5]))
    assert record.counts["accepted"] > 0
    assert record.counts.total() == len(cases)


def faulty(name: str, cases: int = 6, seed: int = 0, limit: float = 0.5) -> Found:
    return run(name, range(cases), seed, table="tests.fuzz.faulty", limit=limit)


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("raises", "traceback", "IndexError: list index out of range"),
        ("grows", "traceback", "MemoryError"),
        ("reveals", "wrong", "0."),
        ("exits", "abort", "ended with code 0"),
        ("aborts", "abort", "was killed by SIGABRT"),
        ("hangs", "hang", 'faulty.py"'),
    ],
)
def test_the_harness_finds(name, kind, told):
    found = faulty(name)
    assert 0 < found.counts[kind] == len(found.failures) == 6 - found.counts["accepted"]
    assert all(told in failure.text for failure in found.failures)


def test_accepted_and_refused_cases_are_no_failures():
    assert (faulty("fine").counts, faulty("refuses").counts) == ({"accepted": 6}, {"refused": 6})


def test_a_single_case_equals_the_case_of_the_run():
    """Also after a case that ended the process; another seed gives other cases."""
    whole = faulty("reveals").failures
    (alone,) = run("reveals", [4], 0, table="tests.fuzz.faulty").failures
    assert alone == whole[4]
    assert "--target reveals --seed 0 --case 4" in str(alone)
    assert faulty("reveals", seed=1).failures[4].text != alone.text
    aborted = {failure.case for failure in faulty("aborts").failures}
    assert [case in aborted for case in range(6)] == [
        bool(run("aborts", [n], 0, "tests.fuzz.faulty").failures) for n in range(6)
    ]


def test_damage_depends_on_the_seed_and_leaves_the_original_unchanged():
    before = json.dumps(TREE)
    texts = [json_text(mutated(Random(seed), TREE)) for seed in range(300)]
    assert texts == [json_text(mutated(Random(seed), TREE)) for seed in range(300)]
    assert len(set(texts)) > 250
    assert json.dumps(TREE) == before
    data = [mutated_bytes(Random(seed), bytes(100)) for seed in range(300)]
    assert data == [mutated_bytes(Random(seed), bytes(100)) for seed in range(300)]


def test_damage_has_what_a_writer_does_not_make():
    """Doubled keys, halves of characters, numbers beyond bounds, deep nesting and escape sequences."""
    texts = [json_text(mutated(Random(seed), TREE)) for seed in range(3000)]
    for spelling in SPELLINGS:
        assert any(spelling.encode() in text for text in texts), spelling
    assert any(b"\\ud800" in text for text in texts)
    assert any(text.count(b'"c"') == 2 for text in texts)
    assert any(b'"f": -3' not in text and b'"a": [1, 2.5' in text for text in texts)
