"""Sizes at which the engine changes its way, each below, at and above: a buffer, a page, a padding, a pool, a limit."""

import pytest

from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.request import Request
from tests.support.toy_artifact import CONTEXT, PAGE, PAGES, SLOTS, VOCAB, answer

CHUNK, PREFILL, DECODE = 16, 16, (2, 4)
# What changes, the size, and requests of that size: tokens of a prompt, tokens of its answer, how many at once.
SIZES = {
    "a chunk of a prompt, and the padding of prefill": (PREFILL, lambda n: (n, 3, 1)),
    "two calls of prefill": (2 * PREFILL, lambda n: (n, 3, 1)),
    "a page that a prompt fills": (PAGE, lambda n: (n, 1, 1)),
    "a page that an answer fills": (PAGE, lambda n: (5, n - 5, 1)),
    "the last page of the context": (CONTEXT - PAGE, lambda n: (n - 8, 8, 1)),
    "the smaller padding of decode": (DECODE[0], lambda n: (3, 9, n)),
    "slots": (SLOTS, lambda n: (3, 9, n)),
    "the larger padding of decode": (DECODE[1], lambda n: (3, 9, n)),
    "pages of the pool, where all grow into them": (PAGES // SLOTS, lambda n: (10, PAGE * n - 10, SLOTS)),
}


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("what", SIZES)
def test_tokens_are_right_below_at_and_above_each_size(engine, what, step):
    size, shape = SIZES[what]
    length, count, many = shape(size + step)
    prompts = [[(7 * place + number) % VOCAB for place in range(length)] for number in range(many)]
    count = min(count, CONTEXT - length)
    found = engine.complete([Request(tuple(each), count, ignore_eos=True) for each in prompts])
    assert [done.token_ids for done in found] == [answer(each, count)[0] for each in prompts]
    stats = engine.stats()
    assert (stats["live"], stats["free"]) == (0, stats["pools"])


def test_a_prompt_takes_the_whole_context_but_for_one_token_and_no_more(engine):
    for length, room in ((CONTEXT - 2, 2), (CONTEXT - 1, 1)):
        (done,) = engine.complete([Request((1,) * length, 99, ignore_eos=True)])
        assert done.token_ids == answer([1] * length, room)[0] and done.stop_reason == "length"
    with pytest.raises(RequestError, match=f"{CONTEXT}"):
        engine.complete([Request((1,) * CONTEXT, 1)])
