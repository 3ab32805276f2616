"""Sizes at which scheduling and the prefix cache behave differently, each below, at and above, on the fake model."""

from random import Random

import pytest

from ling3export.runners.state.prefix_cache import REMEMBERED
from tests.runners.state.test_prefix_cache import Tree
from tests.support.scheduler_rig import CHUNK, Rig, prompt

PAGE, EVERY, PREFILL, DECODE, SLOTS, PAGES, CONTEXT = 4, 16, (4, 16), (2, 4), 4, 60, 80
# For each size: its value, and requests of that size: prompt tokens, answer tokens, and how many at once.
SIZES = {
    "a chunk, and the smaller padding of prefill": (CHUNK, lambda n: (n, 3, 1)),
    "the larger padding of prefill": (PREFILL[1], lambda n: (n, 3, 1)),
    "chunks that share a call of prefill": (PREFILL[1] // CHUNK, lambda n: (CHUNK, 3, n)),
    "two calls of prefill": (2 * PREFILL[1], lambda n: (n, 3, 1)),
    "a block of the cache that a prompt fills": (3 * PAGE, lambda n: (n, 1, 1)),
    "a block that an answer fills": (3 * PAGE, lambda n: (5, n - 5, 1)),
    "the first snapshot of a prompt": (EVERY, lambda n: (n, 2, 1)),
    "the second one": (2 * EVERY, lambda n: (n, 2, 2)),
    "a snapshot at the end of an answer": (EVERY, lambda n: (6, n - 6, 1)),
    "the smaller padding of decode": (DECODE[0], lambda n: (3, 9, n)),
    "slots, and the larger padding of decode": (SLOTS, lambda n: (3, 9, n)),
    "requests that wait for a slot": (2 * SLOTS, lambda n: (9, 5, n)),
    "pages that all grow into": (PAGES // SLOTS, lambda n: (10, PAGE * n - 10, SLOTS)),
    "the whole context": (CONTEXT - 1, lambda n: (n - 1, 9, 1)),
}


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("snapshots", [0, 2, 8])
@pytest.mark.parametrize("what", SIZES)
def test_answers_are_right_below_at_and_above_each_size_and_hit_what_they_can(what, snapshots, step):
    """Runs each prompt twice. A single prompt then hits up to its last multiple of EVERY, or up to a later block."""
    size, shape = SIZES[what]
    length, count, many = shape(size + step)
    rig = Rig(SLOTS, PAGES, PAGE, PREFILL, DECODE, CONTEXT, snapshots=snapshots, every=EVERY)
    rng = Random(size)
    prompts = [prompt(rng, length) for _ in range(many)]
    for _ in range(2):
        for ids in prompts:
            rig.submit(ids, count)
        rig.run()
    last = rig.sequences[-1]
    if many == 1 and snapshots == 8:
        assert (length - 1) // EVERY * EVERY <= last.num_cached_tokens <= (length - 1) // PAGE * PAGE
        assert last.num_cached_tokens % PAGE == 0
    if not snapshots:
        assert last.num_cached_tokens == 0
    rig.check()


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_as_many_evicted_blocks_are_known_as_may_be_and_the_first_is_forgotten_with_one_more(step):
    tree = Tree(snapshots=1, pages=1, block=2)
    for number in range(REMEMBERED + step):
        tree.add(range(2 * number, 2 * number + 2), 2)
        while tree.cache.evict():
            pass
    assert tree.look_up([0, 1, 2]).reason == ("no_match" if step > 0 else "evicted")
    assert tree.look_up([2, 3, 4]).reason == "evicted"
    assert (tree.blocks.free_pages, tree.blocks.free_snapshots) == (1, 1)
