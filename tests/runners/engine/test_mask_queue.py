"""Masks of all grammars together may delay a step by a few milliseconds; rows whose masks do not fit skip steps."""

import random
import time
from typing import Any

import numpy as np
import pytest

from ling3export.runners.engine import mask_queue
from ling3export.runners.engine.core import StepInputs
from ling3export.runners.engine.handle import GrammarFailed
from ling3export.runners.engine.logits_processor import LogitsProcessorState
from ling3export.runners.engine.mask_queue import SHARE, STEP_SECONDS
from ling3export.runners.engine.request import Request
from ling3export.runners.engine.sequence import Sequence
from tests.support.fake_backend import FakeBackend, answer
from tests.support.scheduler_rig import Rig, Wire, prompt

SLOW = 3 * STEP_SECONDS


class Matcher:
    """A slow grammar that allows every token."""

    error, over = "", False

    def __init__(self, seconds: float = SLOW, accepting: float = 0.0) -> None:
        self.seconds, self.accepting, self.fills = seconds, accepting, 0

    def fill(self, mask: np.ndarray) -> None:
        time.sleep(self.seconds)
        self.fills += 1
        mask[:] = -1

    def accept(self, token: int) -> None:
        time.sleep(self.accepting)


class Backend(FakeBackend):
    """Leaves logits unchanged, since the oracle knows no grammar."""

    def adjust(self, logits: Any, count: int, fields: Any, edits: Any, mask: Any) -> dict[str, Any]:
        return {"logits": logits}


def restricted(rig: Rig, tokens: list[int], count: int, matcher: Any) -> Sequence:
    request = Request(tuple(tokens), count, name=f"request {len(rig.sequences)}")
    processor = LogitsProcessorState(request, matcher)
    return rig.add(Sequence(request, len(rig.sequences)).prepare(count, frozenset(), None, processor))


def test_slow_grammars_of_all_other_rows_slow_a_plain_sequence_by_a_mask_or_two_a_step():
    """Regression: a request of 854 bytes with n=40 filled 40 masks one after the other in each step."""
    rig = Rig(slots=16, pages=160, decode=(4, 16), backend=Backend)
    matchers = [Matcher() for _ in range(15)]
    for number, matcher in enumerate(matchers):
        restricted(rig, [number, 1], 8, matcher)
    plain = rig.submit([5, 6, 7], 20)
    fills, most = 0, 0
    while plain.stop_reason is None:
        rig.step()
        now = sum(matcher.fills for matcher in matchers)
        most, fills = max(most, now - fills), now
    assert most <= 2  # the oldest one, and one with unknown time
    assert fills < 60  # instead of 15 a step; it takes part in 20 calls, including prefill
    rig.run()
    rig.check()
    assert [matcher.fills for matcher in matchers] == [8] * 15


@pytest.mark.parametrize("accepting", [False, True])
def test_grammars_take_a_share_of_the_time_while_others_run(accepting: bool):
    """Regression: each step filled a mask or more, and accept() had no limit: 40 rows slowed plain calls 11 times."""
    rig = Rig(slots=16, pages=160, decode=(4, 16), backend=Backend)
    seconds = 0.0 if accepting else SLOW
    matchers = [Matcher(seconds, SLOW - seconds) for _ in range(15)]
    for number, matcher in enumerate(matchers):
        restricted(rig, [number, 1], 40, matcher)
    for _ in range(4):
        rig.step()
    plain = rig.submit([5, 6, 7], 50)
    begun, before = time.monotonic(), sum(matcher.fills for matcher in matchers)
    while plain.stop_reason is None:
        rig.step()
    spent = SLOW * (sum(matcher.fills for matcher in matchers) - before)
    in_flight = 16 * SLOW if accepting else 2 * SLOW  # tokens that are accepted at once, or the masks of a step
    assert spent <= SHARE * (time.monotonic() - begun) + STEP_SECONDS + in_flight
    for sequence in rig.sequences:
        rig.cancel(sequence)
    rig.run()
    rig.check()


def test_masks_that_fit_are_filled_in_the_step_of_their_rows():
    rig = Rig(slots=16, pages=160, decode=(4, 16), backend=Backend)
    for number in range(16):
        restricted(rig, [number, 1, 2, 3], 8, Matcher(0.0))
    rig.run()
    rig.check()
    assert sum(phase == "decode" for phase, _ in rig.backend.calls) < 40  # 8 on a quiet machine, 112 one by one


def test_a_cheap_grammar_waits_for_no_slow_one():
    rig = Rig(slots=16, pages=160, decode=(4, 16), backend=Backend)
    for number in range(10):
        restricted(rig, [number, 1], 12, Matcher())
    for _ in range(40):  # all have filled a mask
        rig.step()
    cheap = restricted(rig, [50], 8, Matcher(0.0))
    steps = 0
    while cheap.stop_reason is None:
        rig.step()
        steps += 1
    assert steps < 60  # 18 on a quiet machine, 86 if it waits for them
    rig.run()
    rig.check()


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_wait_keep_their_logits_through_preemption_and_cancelling(seed):
    rng = random.Random(seed)
    rig = Rig(slots=6, pages=14, decode=(2, 6), backend=Backend, snapshots=rng.choice([0, 3]))
    for number in range(14):
        tokens = prompt(rng, rng.randrange(1, 12))
        matcher = Matcher(rng.choice([0.0, 0.0, STEP_SECONDS / 2, SLOW]))
        if rng.random() < 0.3:
            rig.submit(tokens, rng.randrange(1, 16))
        else:
            restricted(rig, tokens, rng.randrange(1, 16), matcher)
        for _ in range(rng.randrange(4)):
            rig.step()
        if number % 5 == 4:
            rig.cancel(rng.choice(rig.sequences))
    rig.run(2000)
    rig.check()


def test_logits_of_few_calls_are_kept():
    """Each array takes [rows, vocab] of device memory."""
    rig = Rig(slots=16, pages=160, decode=(4, 16), backend=Backend)
    for number in range(16):
        restricted(rig, [number], 8, Matcher())
    plain = rig.submit([7], 4)
    while plain.stop_reason is None:
        rig.step()
        waiting = sum(sequence.awaits_mask for sequence in rig.sequences)
        assert waiting <= 16
    decoded = [rows for phase, rows in rig.backend.calls if phase == "decode"]
    assert len(decoded) < 40
    rig.run()
    rig.check()


def test_a_mask_that_waits_too_long_fails_its_request_and_no_other(monkeypatch):
    monkeypatch.setattr(mask_queue, "DEADLINE", 0.05)
    rig = Rig(slots=8, pages=80, decode=(8,), backend=Backend)
    slow = [restricted(rig, [number], 4, Matcher(0.03)) for number in range(6)]
    plain = rig.submit([9, 9], 12)
    rig.run()
    failed = [sequence for sequence in slow if sequence.stop_reason == "failed"]
    assert failed and plain.generated == answer([9, 9], 12)
    for sequence in failed:
        assert isinstance(sequence.error, GrammarFailed)
        wanted = f"{sequence.request.name}: the grammar's allowed tokens took over 0.05 s"
        assert (sequence.error.message, bool(sequence.error.hint)) == (wanted, True)
    assert (rig.blocks.free_slots, rig.blocks.free_pages) == rig.size


def test_all_hosts_sample_the_rows_whose_masks_fit_on_host_0():
    """Times decide which masks fit, and hosts that sampled other rows would make different calls."""
    shared: list[bytes] = []
    wires = Wire(0, shared), Wire(1, shared)
    lead, follower = (Rig(slots=8, pages=80, decode=(8,), backend=Backend, channel=wire) for wire in wires)
    for number in range(6):
        restricted(lead, [number, 2], 6, Matcher())
        restricted(follower, [number, 2], 6, Matcher(0.0))
    for rig in (lead, follower):
        rig.submit([8], 9)
    while lead.core.busy:
        lead.ended += lead.core.step(StepInputs()).ended
        follower.ended += follower.core.received(wires[0].sent[-1]).ended
        assert follower.backend.calls == lead.backend.calls
    assert not follower.core.busy and not shared
    for rig in (lead, follower):
        rig.check()
