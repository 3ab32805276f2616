"""Texts with shared prefixes: the specification's tables, the tree against counts by hand, and a cache of blocks."""

import random

import pytest

from ling3export.foundation.errors import RequestError
from ling3export.runners.bench_serving.prefixes import cached_blocks, repetition, shared

D = ["What is A?", "What is B?", "What are you", "Who am I", "Who am U", "Why", "你好吗", "你好呀"]


@pytest.mark.parametrize(
    ("least", "longer", "prefixes", "ratio", "coverage"),
    [
        (2, 0, [("What is ", 2), ("Who am ", 2), ("你好", 2)], 0.375, 0.75),
        (2, 4, [("What is ", 2), ("Who am ", 2)], 0.25, 0.5),
        (2, 7, [("What is ", 2)], 0.125, 0.25),
        (3, 0, [("What ", 3)], 0.125, 0.375),
        (1, 0, [(text, 1) for text in sorted(D)], 1.0, 1.0),
    ],
)
def test_the_example(least, longer, prefixes, ratio, coverage):
    found = repetition(D, least, longer)
    assert (found.prefixes, found.ratio, found.coverage) == (prefixes, ratio, coverage)


def tree(texts, least, longer):
    """Counts every prefix separately."""
    counts = {}
    for text in texts:
        for end in range(1, len(text) + 1):
            counts[text[:end]] = counts.get(text[:end], 0) + 1
    kept = {text for text, count in counts.items() if count >= least}
    leaves = kept - {text[:-1] for text in kept}
    return sorted(((leaf, counts[leaf]) for leaf in leaves if len(leaf) > longer), key=lambda pair: (-pair[1], pair[0]))


def test_prefix_counts_equal_a_tree_on_small_alphabets():
    for seed in range(2000):
        rng = random.Random(seed)
        alphabet = ("ab", "abc", "aé你")[seed % 3]
        texts = ["".join(rng.choices(alphabet, k=rng.randint(0, 6))) for _ in range(rng.randint(1, 12))]
        least, longer = rng.randint(1, 4), rng.randint(0, 4)
        assert repetition(texts, least, longer).prefixes == tree(texts, least, longer), (texts, least, longer)


def test_token_ids_are_texts_too():
    assert repetition([(1, 2, 3), (1, 2, 4), (9,)], 2, 1).prefixes == [((1, 2), 2)]


def test_empty_texts_count_only_in_the_denominator():
    assert repetition(["", "", "ab", "ab"], 2, 0).ratio == 0.25
    with pytest.raises(RequestError, match="prefixes: the data set has no text"):
        repetition([])


def test_the_common_prefix_of_two_texts():
    rng = random.Random(1)
    for _ in range(500):
        one, other = ("".join(rng.choices("ab", k=rng.randint(0, 40))) for _ in range(2))
        other = rng.choice([other, one[: rng.randint(0, 40)] + other])
        plain = next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        assert shared(one, other) == plain


def test_a_cache_of_blocks_wins_what_earlier_prompts_had_up_to_a_blocks_end():
    rng = random.Random(2)
    prompts = [tuple(rng.choices((1, 2), k=rng.randint(0, 12))) for _ in range(200)]
    for block in (1, 2, 3, 5):
        found = 0
        for number, prompt in enumerate(prompts):
            most = max([shared(prompt, earlier) for earlier in prompts[:number]], default=0)
            found += min(most // block, (len(prompt) - 1) // block) * block if prompt else 0
        assert cached_blocks(prompts, block) == (found, sum(map(len, prompts)))
