"""Figures of a run: the specification's worked example, failed requests, phases."""

import numpy as np
import pytest

from ling3export.runners.bench_serving.metrics import PHASES, RequestResult, Spread, figures


def result(ttft, *gaps, start=0.0, **fields):
    times = np.cumsum([start + ttft, *gaps]).tolist()
    return RequestResult(start, times, tokens=len(times), **fields)


WORKED = [result(0.10, 0.02, 0.03), result(0.20), result(0.05, 0.05, 0.01, 0.04)]


def test_the_worked_example():
    found = figures(WORKED, 0.5)
    assert (found.ttft.mean, found.ttft.median, found.ttft.p99) == pytest.approx((116.67, 100, 198), abs=5e-3)
    assert (found.tpot.mean, found.tpot.median, found.tpot.p99) == pytest.approx((29.17, 29.17, 33.25), abs=5e-3)
    assert (found.itl.mean, found.itl.median, found.itl.p99) == pytest.approx((30, 30, 49.6), abs=5e-3)
    assert (found.e2e.mean, found.e2e.median) == pytest.approx((166.67, 150), abs=5e-3)
    assert (found.output_tokens, found.output_throughput, found.concurrency) == pytest.approx((8, 16, 1))


def test_without_an_answer_every_figure_is_zero_and_none_is_nan():
    found = figures([RequestResult(0.0, error="refused")], 0.0)
    assert (found.completed, found.failed) == (0, 1)
    assert {found.e2e, found.ttft, found.tpot, found.itl} == {Spread()}
    assert found.request_throughput == found.concurrency == 0


def test_a_failed_request_counts_as_failed_alone():
    failed = result(9.0, 9.0, prompt_tokens=100, error="cut short")
    assert figures([*WORKED, failed], 0.5).failed == 1
    assert figures([*WORKED, failed], 0.5).e2e == figures(WORKED, 0.5).e2e
    assert figures([*WORKED, failed], 0.5).input_tokens == 0


def test_what_servers_tell_and_the_way_to_them_make_up_the_time_to_the_first_token():
    one, two = result(0.5, 0.1), result(0.4, 0.3)
    one.take({"phases_ms": {"queue": 200, "prefill": 250.0}})
    phases = {"queue": 200, "prefill": 50, "save": 10, "transfer": 20, "decode": 5, "another": 7}
    two.take({"phases_ms": phases, "transfer_bytes": 3_000_000})
    assert one.phases == pytest.approx({"queue": 0.2, "prefill": 0.25, "http": 0.05, "decode": 0.1})
    parts = {"queue": 0.2, "prefill": 0.05, "save": 0.01, "transfer": 0.02, "first": 0.005, "http": 0.115}
    assert two.phases == pytest.approx(parts | {"decode": 0.3})
    found = figures([one, two, result(0.1)], 1.0)
    assert found.phases is not None and [*found.phases] == [*PHASES]
    assert found.phases["save"].mean == pytest.approx(5) and found.phases["queue"].median == pytest.approx(200)
    assert (found.remote_prefill_share, found.transfer_bytes) == (pytest.approx(1 / 3), 3_000_000)
    assert found.moving_share == pytest.approx(0.03 / 0.4)
    assert found.transfer_speed == pytest.approx(3_000_000 / 0.02)
    nothing = figures(WORKED, 0.5)
    assert nothing.phases is nothing.remote_prefill_share is nothing.transfer_speed is None


@pytest.mark.parametrize(
    "said", [{"phases_ms": {"queue": None}}, {"phases_ms": {"queue": "x"}}, {"transfer_bytes": []}]
)
def test_times_of_another_form_are_refused(said):
    with pytest.raises((TypeError, ValueError)):
        result(0.5).take(said)
