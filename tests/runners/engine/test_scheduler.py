"""The scheduler with a fake model that reads a sequence only through slots and pages: tokens as without batching."""

import random

import numpy as np
import pytest

from ling3export.runners.engine.request import Sampling
from tests.support.fake_backend import VOCAB
from tests.support.scheduler_rig import Rig, prompt


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("stripes", [1, 2, 4])
@pytest.mark.parametrize("seed", range(9))
def test_random_arrivals_finishes_and_cancels(seed, stripes, ahead):
    """Includes pools that devices share, fewer rows than devices, and so few pages that sequences are pre-empted."""
    rng = random.Random(seed)
    pages, decode = stripes * rng.choice([20, 24, 60]), rng.choice([(1,), (2, 4), (4, 8)])
    rig = Rig(slots=rng.randint(1, 8), pages=pages, decode=decode, ahead=ahead, stripes=stripes)
    emitted = []
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 1, 3])):
            how, eos = Sampling(rng.choice([0.0, 1.0]), seed=rng.randrange(1 << 32)), {rng.randrange(VOCAB), 5}
            rig.submit(prompt(rng, rng.randint(1, 40)), rng.randint(1, 40), frozenset(eos), how)
        emitted += rig.step()
        if rig.sequences and rng.random() < 0.1:
            rig.cancel(rng.choice(rig.sequences))
    emitted += rig.run()
    rig.check()
    for sequence in rig.sequences:
        assert [e.token for e in emitted if e.sequence is sequence] == sequence.generated
        ended = "eos" if sequence.eos.intersection(sequence.generated) else "length"
        assert sequence.stop_reason in ("cancelled", ended)
    assert rig.counters.tokens_out == len(emitted) and not rig.core.busy


def test_the_preempted_sequence_has_a_page_on_the_full_device():
    """The youngest of the sequences with a page on the full device gives way, not the youngest of all."""
    rig = Rig(slots=4, pages=20, stripes=2, decode=(4,))
    for seed, (length, tokens) in enumerate(((17, 15), (22, 37), (25, 19), (2, 2))):
        rig.submit(prompt(random.Random(seed), length), tokens)
    while not rig.counters.preempted:
        rig.step()
    assert [s.number for s in rig.sequences if s.table is None and not s.finished] == [2]
    youngest = rig.sequences[3].table
    assert youngest is not None and len(youngest.pages) == 1, "its only page is on the other device"
    rig.run()
    rig.check()


def test_waiting_requests_start_in_order_of_priority_and_then_of_arrival():
    rig, priorities = Rig(slots=1), [0, 7, -1, 0, -1, 7]
    for seed, priority in enumerate(priorities):
        rig.submit(prompt(random.Random(seed), 5), 3, priority=priority)
    order = list(dict.fromkeys(e.sequence.number for e in rig.run()))
    assert order == [2, 4, 0, 3, 1, 5]
    rig.check()


def test_a_running_request_is_not_stopped_for_one_of_a_lower_priority_that_waits():
    rig = Rig(slots=1)
    rig.submit([1, 2, 3], 12)
    rig.run(3)
    rig.submit([4, 5], 3, priority=-5)
    assert [sequence.number for sequence in (rig.run(), rig.ended)[1]] == [0, 1] and not rig.counters.preempted
    rig.check()


@pytest.mark.parametrize("snapshots", [0, 3])
@pytest.mark.parametrize("priorities", [(0, 0, 0), (1, 0, 0), (0, -2, 5), (3, 2, 1)])
def test_the_pool_running_dry_preempts_the_highest_priority_and_changes_no_token(priorities, snapshots):
    rig = Rig(slots=3, pages=20, snapshots=snapshots, cache=False)
    for seed, priority in enumerate(priorities):
        rig.submit(prompt(random.Random(seed), 20), 50, priority=priority)
    gave, given = [], set()
    while rig.core.busy:
        rig.step()
        now = {s.number for s in rig.sequences if s.table is None and not s.finished}
        gave, given = [*gave, *sorted(now - given)], now
    rig.check()
    first = min(range(3), key=lambda number: (priorities[number], number))
    last = max(range(3), key=lambda number: (priorities[number], number))
    assert rig.counters.preempted > 0 and gave[0] == last and first not in gave
    assert rig.ended[0].number == first


def test_prefill_and_decode_take_turns():
    """An arriving long prompt delays a running sequence by one call at a time."""
    rig = Rig(context=200, pages=100, prefill=(16,))
    rig.submit([1, 2, 3], 12)
    rig.run(2)
    rig.submit(prompt(random.Random(1), 100), 4)
    rig.run()
    phases = [phase for phase, _ in rig.backend.calls if phase != "sample"]
    assert phases[2:14] == ["prefill", "decode"] * 6
    rig.check()


def test_the_smallest_padding_that_holds_the_work_is_taken():
    rig = Rig(slots=4, prefill=(4, 8, 16), decode=(1, 2, 4))
    for length in (3, 4):
        rig.submit(prompt(random.Random(length), length), 2)
    rig.run()
    assert rig.backend.calls == [("prefill", 8), ("sample", 2), ("decode", 2), ("sample", 2)]
    cells = rig.counters.cells
    assert (cells["prefill@8"].used, cells["prefill@8"].slots) == (7, 8)
    rig.check()


def test_more_running_than_the_largest_decode_padding_take_turns():
    rig = Rig(slots=5, decode=(2,), pages=60)
    for seed in range(5):
        rig.submit(prompt(random.Random(seed), 4), 20)
    counts: dict[int, int] = dict.fromkeys(range(5), 0)
    for event in rig.run():
        counts[event.sequence.number] += 1
        assert max(counts.values()) - min(counts.values()) <= 2
    rig.check()


def test_a_cancelled_request_gives_its_slot_to_the_next_while_its_step_is_in_flight():
    rig = Rig(slots=1)
    first, second = rig.submit([1, 2, 3], 30), rig.submit([4, 5], 5)
    rig.run(5)
    rig.cancel(first)
    rig.run()
    rig.check()
    assert second.stop_reason == "length"


def test_logits_rows_are_those_that_the_tokens_were_taken_from():
    rig = Rig(slots=3)
    for seed in range(3):
        rig.submit(prompt(random.Random(seed), 7), 6, logits=seed != 1)
    rig.run()
    for sequence in rig.sequences:
        if not sequence.request.logits:
            assert sequence.rows == []
            continue
        tokens = [*sequence.request.prompt_ids, *sequence.generated]
        expected = [[n, sum(tokens[:n])] for n in range(7, 13)]
        np.testing.assert_array_equal(sequence.completion().logits, expected)


def test_two_runs_of_the_same_inputs_make_the_same_calls():
    """Hosts replay the inputs of host 0, so that neither time nor chance may decide."""
    runs = []
    for _ in range(2):
        rng = random.Random(7)
        rig = Rig(pages=24)
        for _ in range(80):
            if rng.random() < 0.4:
                rig.submit(prompt(rng, rng.randint(1, 30)), rng.randint(1, 30))
            rig.step()
            if rig.sequences and rng.random() < 0.1:
                rig.cancel(rng.choice(rig.sequences))
        rig.run()
        runs.append((rig.backend.calls, rig.counters.cells))
    assert runs[0] == runs[1] and len(runs[0][0]) > 200


def test_a_long_prompt_in_the_middle_is_waited_for_call_by_call():
    """Chunks without a token are waited for, too: otherwise all of them would be dispatched at once."""
    rig = Rig(context=200, pages=100, prefill=(16,))
    rig.submit(prompt(random.Random(1), 100), 2)
    for step in range(1, 7):
        rig.step()
        assert len(rig.backend.calls) == step
        assert rig.backend.waited == max(0, step - 1)
    rig.run()
    rig.check()


def test_a_long_prompt_takes_shorter_calls_once_it_is_waited_for():
    for running, paddings in ((0, [512]), (1, [16, 128, 128, 128, 128])):
        rig = Rig(context=600, pages=400, prefill=(16, 128, 512))
        for _ in range(running):
            rig.submit(prompt(random.Random(1), 16), 20)
            rig.run(1)
        rig.submit(prompt(random.Random(2), 512), 3)
        rig.run()
        assert [padding for phase, padding in rig.backend.calls if phase == "prefill"] == paddings
        rig.check()


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize(
    ("marked", "found"),
    [(-1, "NaN or infinity"), (2147483647, f"token 2147483647 of {VOCAB}"), (VOCAB, "token 97 of 97")],
)
def test_a_sequence_that_samples_no_token_fails_and_the_others_go_on(ahead, marked, found):
    """Sample programs mark such rows with -1; older artifacts gave 2147483647, which was put into the answer."""
    rig = Rig(slots=3, ahead=ahead)
    rig.backend.poison, rig.backend.marked = 7, marked
    others = [rig.submit([n, n + 1], 9) for n in (1, 2, 3)]
    bad = rig.submit([1, 7], 9)
    rig.run()
    assert (bad.stop_reason, bad.generated, bad.finished) == ("failed", [], True)
    assert str(bad.error).startswith(
        f"logits of request: expected finite numbers, found {found}, at position 2\nhint: "
    )
    rig.sequences.remove(bad)
    rig.check()
    assert {other.stop_reason for other in others} == {"length"}
    assert sorted(each.number for each in rig.ended) == [0, 1, 2, 3]
    assert rig.counters.failed == 1


def test_tokens_of_prompts_count_once_they_are_prefilled():
    """Regression: prompts that were cancelled before any call counted. Those prefilled again must not count twice."""
    rig = Rig(slots=3, pages=20)
    for seed in range(3):
        rig.submit(prompt(random.Random(seed), 20), 50)
    waiting = rig.submit(prompt(random.Random(9), 30), 4)
    rig.run(2)
    rig.cancel(waiting)
    rig.run()
    rig.check()
    assert rig.counters.preempted > 0
    assert rig.counters.tokens_in == 3 * 20
