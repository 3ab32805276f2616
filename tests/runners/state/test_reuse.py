"""The scheduler with a prefix cache, on a fake model whose answers depend on every byte that the calls move."""

import random

import pytest

from ling3export.runners.state.prefix_cache import SnapshotCost
from tests.support.fake_backend import answer
from tests.support.scheduler_rig import Rig, prompt


def family(rng, heads, most=60):
    """A prompt that shares its beginning with others."""
    head = rng.choice(heads)
    return [*head[: rng.randint(0, len(head))], *prompt(rng, rng.randint(1, most - len(head)))]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_second_request_that_shares_a_beginning_makes_the_snapshot_and_the_third_hits(ahead):
    rig, rng = Rig(snapshots=8, every=64, pages=60, ahead=ahead), random.Random(1)
    head, cached = prompt(rng, 22), []
    for _ in range(3):
        sequence = rig.submit([*head, *prompt(rng, 9)], 3)
        rig.run()
        cached.append(sequence.completion().cached_tokens)
    assert cached == [0, 0, 20]
    assert rig.counters.misses == {"no_match": 1, "no_snapshot": 1}
    rig.check()


def test_snapshots_lie_at_multiples_and_prefill_ends_there():
    rig, rng = Rig(snapshots=8, every=16, pages=60), random.Random(2)
    ids = prompt(rng, 45)
    rig.submit(ids, 1)
    rig.run()
    calls = [call.tokens for call in rig.sequences[0].calls]
    assert [sum(calls[: n + 1]) for n in range(len(calls))] == [16, 32, 44, 45]
    cached = []
    for length in (45, 44, 33, 32, 17, 16, 5):
        sequence = rig.submit([*ids[:length]], 1)
        rig.run()
        cached.append(sequence.num_cached_tokens)
    assert cached == [44, 32, 32, 16, 16, 0, 0]
    rig.check()


def test_no_snapshot_is_kept_that_costs_more_than_to_make_it_again():
    """A snapshot costs as much as 20 tokens: no call of a prompt or an answer ends at 16 or 20."""
    rig, rng = Rig(snapshots=8, every=16, pages=60, cost=SnapshotCost(40.0, 2.0, "bytes")), random.Random(2)
    ids = prompt(rng, 45)
    rig.submit(ids, 1)
    rig.run()
    assert [call.tokens for call in rig.sequences[0].calls] == [16, 16, 12, 1]
    cached = []
    for length in (45, 33, 32, 21, 17):
        sequence = rig.submit([*ids[:length]], 1)
        rig.run()
        cached.append(sequence.num_cached_tokens)
    assert cached == [44, 32, 0, 0, 0]
    assert rig.cache.record()["snapshots"] == 2
    short = rig.submit(prompt(rng, 5), 16)
    rig.run()
    assert len(short.generated) == 16 and rig.cache.record()["snapshots"] == 2, "nothing is kept behind 8 to 20"
    assert rig.cache.record()["worth"] == {"keep": 40.0, "prefill_token": 2.0, "unit": "bytes", "least_tokens": 21}
    rig.check()


def test_the_next_turn_continues_after_the_answer():
    rig, rng = Rig(snapshots=4, every=64, pages=60), random.Random(3)
    first = rig.submit(prompt(rng, 6), 15)
    rig.run()
    second = rig.submit([*first.request.prompt_ids, *first.generated, *prompt(rng, 5)], 2)
    rig.run()
    assert second.num_cached_tokens == 20, "20 of the 20 that were stored: five blocks of four"
    assert rig.cache.record()["snapshots"] == 2, "each turn left its end alone"
    rig.check()


def test_salts_keep_requests_apart():
    rig, rng = Rig(snapshots=4, pages=60), random.Random(4)
    ids = prompt(rng, 40)
    cached = []
    for salt in ("a", "b", "a", ""):
        sequence = rig.submit(ids, 2, cache_salt=salt)
        rig.run()
        cached.append(sequence.num_cached_tokens)
    assert cached == [0, 0, 32, 0]
    rig.check()


def test_running_requests_take_the_pages_of_the_cache():
    """With pages for one sequence of 80 tokens, cached prefixes of others are evicted."""
    rig, rng = Rig(snapshots=4, pages=20), random.Random(5)
    for _ in range(4):
        rig.submit(prompt(rng, 60), 20)
        rig.run()
    assert rig.cache.evicted_pages > 30 and not rig.counters.preempted
    rig.check()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("cache", [True, False])
def test_a_preempted_sequence_continues_from_its_state(ahead, cache):
    """Regression: it began again from its prompt, and in bf16 its later tokens could differ."""
    rig, rng = Rig(slots=4, pages=20, snapshots=2, cache=cache, ahead=ahead), random.Random(6)
    for _ in range(4):
        rig.submit(prompt(rng, 15), 40)
    rig.run()
    counters = rig.counters
    assert counters.preempted == rig.backend.moved["fetch"] == rig.backend.moved["store"] > 0
    assert counters.tokens_in == 60, "no token of a prompt was computed twice"
    assert sum(call.tokens for s in rig.sequences for call in s.calls if call.kind == "prefill") == 60
    rig.check()


@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_the_same_with_the_cache_and_everything_comes_back(seed):
    rng = random.Random(seed)
    stripes = rng.choice([1, 1, 2, 4])
    rig = Rig(
        slots=rng.randint(1, 4),
        pages=stripes * rng.randint(-(-20 // stripes), -(-40 // stripes)),
        stripes=stripes,
        snapshots=rng.randint(1, 6),
        every=rng.choice([4, 8, 16, 32]),
        ahead=rng.randint(0, 1),
    )
    heads = [prompt(rng, rng.randint(4, 40)) for _ in range(3)]
    for _ in range(30):
        for _ in range(rng.randint(0, 3)):
            done = [s for s in rig.sequences if s.finished and len(s.request.prompt_ids) + len(s.generated) < 50]
            if done and rng.random() < 0.3:
                last = rng.choice(done)  # a next turn
                ids = [*last.request.prompt_ids, *last.generated, *prompt(rng, 3)]
            else:
                ids = family(rng, heads)
            rig.submit(ids, rng.randint(1, 20), eos=frozenset(prompt(rng, 2)), cache_salt=rng.choice(["", "", "x"]))
        for _ in range(rng.randint(0, 6)):
            rig.step()
        live = [s for s in rig.sequences if not s.finished]
        if live and rng.random() < 0.2:
            rig.cancel(rng.choice(live))
    rig.run()
    rig.check()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("poison", [20, 45])  # in the prompt, or the first token of the answer
def test_nobody_begins_from_a_state_that_is_not_finite(ahead, poison):
    """Regression: with rows selected by products, NaN spread to a prompt in the same call.

    A later request with that prompt got the NaN from the cache.
    """
    rig, rng = Rig(snapshots=8, every=16, pages=60, ahead=ahead), random.Random(2)
    ids, other = prompt(rng, 45), prompt(rng, 45)
    rig.submit(other, 1)
    rig.run()
    while (bad := [*ids, *answer(ids, 1)][poison]) in [*ids[:poison], *other, *answer(other, 1)]:
        ids = prompt(rng, 45)
    rig.backend.poison = bad
    rig.submit([*ids], 8)
    rig.run()
    assert rig.sequences.pop().stop_reason == "failed"
    rig.backend.poison, cached = None, []
    for each in (ids, [*ids, *other[:9]], other):
        cached.append(rig.submit([*each], 1))
        rig.run()
    assert [sequence.num_cached_tokens for sequence in cached] == [0, 44, 44]
    rig.check()
