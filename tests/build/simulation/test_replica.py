"""A replica in simulated time makes the calls of the scheduler, and takes as long as they do."""

import random

import pytest
import simpy

from ling3export.artifacts.paddings import CALL
from ling3export.simulation.fleet import Fleet, simulate
from ling3export.simulation.replica import CallTimes, Replica, SimulatedRequest
from tests.support.scheduler_rig import Rig, prompt

TIMES = CallTimes({16: 2.0, 64: 5.0}, {1: 1.0, 4: 1.5}, 4)


class Told(Replica):
    """Notes its calls as the scheduler counts them."""

    def _advance(self):
        super()._advance()
        if self._call is not None:
            phase, size = self._call.cell
            padding = next(each for each in (2, 4) if size <= each) if phase == "decode" else size
            self.calls += [f"{phase}@{padding}"] * self._call.steps


@pytest.mark.parametrize("seed", range(20))
def test_the_calls_are_those_of_the_scheduler(seed):
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 40), rng.randint(1, 12)) for _ in range(rng.randint(1, 12))]
    rig = Rig(pages=1000)
    for tokens, limit in sizes:
        rig.submit(prompt(rng, tokens), limit)
    rig.run()
    expected = [f"{phase}@{padding}" for phase, padding in rig.backend.calls if phase != "sample"]
    env, ended = simpy.Environment(), []
    times = CallTimes({4: 4.0 + CALL, 16: 16.0 + CALL}, {2: 20.0, 4: 30.0}, 4, chunk=4)
    replica = Told(env, 0, times, lambda request: ended.append(request.output))
    replica.calls = []
    replica.take(*(SimulatedRequest(0.0, *size) for size in sizes))
    env.run()
    assert replica.calls == expected
    assert sorted(ended) == sorted(limit for _, limit in sizes)
    assert replica.seconds == env.now > 0


def test_one_request_takes_the_calls_of_its_prompt_and_its_answer():
    (request,) = simulate(Fleet(TIMES, both=1), [SimulatedRequest(3.0, 70, 11)]).ended
    assert (request.first, request.last) == (3.0 + 5 + 2, 3.0 + 5 + 2 + 10)


def test_a_prompt_that_comes_while_others_decode_waits_for_the_call_that_was_chosen_before():
    early, late = SimulatedRequest(0.0, 16, 50), SimulatedRequest(10.5, 16, 2)
    simulate(Fleet(TIMES, both=1), [early, late])
    # The step that runs ends at 11, the one that was chosen when it began at 12; then its prompt, and a step of both.
    assert (late.first, late.last) == (14.0, 15.5)
    assert early.last == 2.0 + 10 + 2 + 1.5 + (49 - 11)


def test_a_pool_that_is_full_lets_nobody_in():
    tight = CallTimes({16: 2.0}, {1: 1.0, 4: 1.0}, 4, tokens=40)
    first, second = SimulatedRequest(0.0, 16, 4), SimulatedRequest(0.0, 16, 10)
    simulate(Fleet(tight, both=1), [first, second])
    assert second.first == first.last + 2.0


def test_prompts_that_begin_alike_are_computed_once_where_they_meet():
    cached = CallTimes({16: 1.0, 64: 3.0}, {1: 1.0, 4: 1.0}, 4, prefixes=1)
    requests = [SimulatedRequest(20.0 * n, 64, 2, prefix, 50) for n, prefix in enumerate((7, 7, 8, 7))]
    simulate(Fleet(cached, both=1), requests)
    assert [request.cached for request in requests] == [0, 48, 0, 0]  # 8 took the place of 7
    assert [request.first - request.at for request in requests] == [3.0, 1.0, 3.0, 3.0]
    requests = [SimulatedRequest(20.0 * n, 64, 2, n % 2, 50) for n in range(6)]
    simulate(Fleet(cached, both=2), requests)
    assert [request.where for request in requests] == [0, 1] * 3
    assert [request.cached for request in requests] == [0, 0, 48, 48, 48, 48]


def test_prefill_and_decode_apart_meet_behind_the_handover():
    fleet = Fleet(TIMES, prefill=1, decode=1, handover=7.0, handover_token=0.5)
    requests = [SimulatedRequest(0.0, 16, 5), SimulatedRequest(100.0, 16, 1)]
    simulate(fleet, requests)
    assert (requests[0].first, requests[0].last) == (2.0 + 7 + 8, 2.0 + 7 + 8 + 4)
    assert [request.where for request in requests] == [1, 1]


def test_a_step_takes_as_long_as_that_of_the_next_larger_padding():
    assert TIMES.steps == [0.0, 1.0, 1.5, 1.5, 1.5]
