"""A replica in simulated time makes the calls of the scheduler, and takes as long as they do."""

import random

import pytest
import simpy

from ling3export.artifacts.paddings import CALL
from ling3export.simulation.fleet import Fleet, simulate
from ling3export.simulation.replica import Ask, Machine, Replica, Times
from tests.support.scheduler_rig import Rig, prompt

TIMES = Times({16: 2.0, 64: 5.0}, {1: 1.0, 4: 1.5}, 4)


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
    times = Times({4: 4.0 + CALL, 16: 16.0 + CALL}, {2: 20.0, 4: 30.0}, 4, chunk=4)
    replica = Told(env, 0, Machine(times), lambda ask, lost: ended.append((ask.output, lost)))
    replica.calls = []
    replica.take(*(Ask(0.0, *size) for size in sizes))
    env.run()
    assert replica.calls == expected
    assert sorted(ended) == sorted((limit, False) for _, limit in sizes)
    assert replica.seconds == env.now > 0


def test_one_request_takes_the_calls_of_its_prompt_and_its_answer():
    (ask,) = simulate(Fleet((TIMES,), both=1), [Ask(3.0, 70, 11)]).ended
    assert (ask.first, ask.last) == (3.0 + 5 + 2, 3.0 + 5 + 2 + 10)


def test_a_prompt_that_comes_while_others_decode_waits_for_the_call_that_was_chosen_before():
    early, late = Ask(0.0, 16, 50), Ask(10.5, 16, 2)
    simulate(Fleet((TIMES,), both=1), [early, late])
    # The step that runs ends at 11, the one that was chosen when it began at 12; then its prompt, and a step of both.
    assert (late.first, late.last) == (14.0, 15.5)
    assert early.last == 2.0 + 10 + 2 + 1.5 + (49 - 11)


@pytest.mark.parametrize("seed", range(10))
def test_steps_taken_together_are_the_steps_taken_one_by_one(seed):
    """A machine that replicas share is simulated step by step; its times are equal here however many run."""
    rng, at = random.Random(seed), 0.0
    asks = []
    for _ in range(60):
        at += rng.expovariate(0.05)
        asks.append((round(at, 3), rng.randint(1, 200), rng.randint(1, 90)))
    together, apart = (
        simulate(Fleet(times, both=2), [Ask(*ask) for ask in asks]) for times in ((TIMES,), (TIMES, TIMES))
    )
    assert together.events < apart.events
    assert len(together.ended) == len(apart.ended) == 60
    for one, other in zip(*(sorted(each.ended, key=lambda ask: ask.at) for each in (together, apart)), strict=True):
        assert (one.first, one.last) == (pytest.approx(other.first), pytest.approx(other.last))


def test_calls_take_longer_while_other_replicas_of_the_machine_run():
    slow = Times({16: 4.0}, {1: 3.0, 4: 3.0}, 4)
    found = simulate(Fleet((Times({16: 2.0}, {1: 1.0, 4: 1.0}, 4), slow), both=2), [Ask(0, 16, 3), Ask(1, 16, 2)])
    # Half of the first one's prompt is left when the other begins, and takes 2 s then; its steps take 3 s each. The
    # other ends at 8 s, when a third of the second of them is left.
    ends = [(ask.at, ask.first, pytest.approx(ask.last)) for ask in sorted(found.ended, key=lambda ask: ask.at)]
    assert ends == [(0, 3.0, 8 + 1 / 3), (1, 5.0, 8.0)]


def test_a_pool_that_is_full_lets_nobody_in():
    tight = Times({16: 2.0}, {1: 1.0, 4: 1.0}, 4, tokens=40)
    first, second = Ask(0.0, 16, 4), Ask(0.0, 16, 10)
    simulate(Fleet((tight,), both=1), [first, second])
    assert second.first == first.last + 2.0


def test_prompts_that_begin_alike_are_computed_once_where_they_meet():
    cached = Times({16: 1.0, 64: 3.0}, {1: 1.0, 4: 1.0}, 4, prefixes=1)
    asks = [Ask(20.0 * n, 64, 2, prefix, 50) for n, prefix in enumerate((7, 7, 8, 7))]
    simulate(Fleet((cached,), both=1), asks)
    assert [ask.cached for ask in asks] == [0, 48, 0, 0]  # 8 took the place of 7
    assert [ask.first - ask.at for ask in asks] == [3.0, 1.0, 3.0, 3.0]
    asks = [Ask(20.0 * n, 64, 2, n % 2, 50) for n in range(6)]
    simulate(Fleet((cached,), both=2, policy="cache_aware"), asks)
    assert [ask.where for ask in asks] == [0, 1] * 3
    assert [ask.cached for ask in asks] == [0, 0, 48, 48, 48, 48]


def test_prefill_and_decode_apart_meet_behind_the_handover():
    fleet = Fleet((TIMES,), prefill=1, decode=1, handover=7.0, handover_token=0.5)
    asks = [Ask(0.0, 16, 5), Ask(100.0, 16, 1)]
    simulate(fleet, asks)
    assert (asks[0].first, asks[0].last) == (2.0 + 7 + 8, 2.0 + 7 + 8 + 4)
    assert [ask.where for ask in asks] == [1, 1]


def test_a_router_does_one_thing_at_a_time():
    found = simulate(Fleet((TIMES,), both=8, router_call=1.0, router_token=0.5), [Ask(0.0, 16, 2) for _ in range(8)])
    assert sorted(ask.first - 2 for ask in found.ended) == [2.0 * n for n in range(1, 9)]
    assert found.router == pytest.approx(16 / found.seconds)


def test_a_failure_takes_what_its_replica_has_and_nothing_else():
    env, ended = simpy.Environment(), []
    replicas = [Replica(env, n, Machine(TIMES), lambda ask, lost: ended.append((ask.where, lost))) for n in range(2)]
    for n in range(6):
        replicas[n % 2].take(Ask(0.0, 20, 30))
    env.timeout(20.5).callbacks.append(lambda _: replicas[0].fail())
    env.run()
    assert ended == [(0, True)] * 3 + [(1, False)] * 3
    assert (replicas[0].up, replicas[0].load, len(replicas[0].machine.busy)) == (False, 0, 0)


def test_a_fleet_with_failures_loses_some_and_goes_on():
    fleet = Fleet((TIMES,), both=20, failures=300.0, restart=50.0)
    found, again = (simulate(fleet, [Ask(1.0 * n, 20, 30) for n in range(2000)]) for _ in range(2))
    assert 0 < found.lost < 600
    assert found.lost + len(found.ended) == 2000
    assert {ask.where for ask in found.ended} == set(range(20))
    assert all(ask.at < ask.first < ask.last for ask in found.ended)
    assert (again.lost, again.seconds) == (found.lost, found.seconds)


def test_steps_between_measured_counts():
    times = Times({16: 1.0}, {1: 1.0, 5: 3.0, 8: 4.5}, 6, interpolated=True)
    assert times.steps == [0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    assert TIMES.steps == [0.0, 1.0, 1.5, 1.5, 1.5]
