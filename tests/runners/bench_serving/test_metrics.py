"""Figures of a run: the specification's worked example, failed requests."""

import numpy as np
import pytest

from ling3export.runners.bench_serving.metrics import RequestResult, Spread, figures


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
