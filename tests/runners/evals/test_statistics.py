"""pass@k, pass^k and intervals against the tables of the specification."""

import pytest

from ling3export.runners.evals import statistics
from ling3export.runners.evals.trials import INFRA_ERROR, OK, Trial

TABLE = [
    (4, 3, 2, 1.0, 0.5),
    (4, 3, 3, 1.0, 0.25),
    (4, 3, 4, 1.0, 0.0),
    (10, 7, 3, 1 - 1 / 120, 35 / 120),
    (8, 6, 3, 1.0, 20 / 56),
]


@pytest.mark.parametrize(("n", "c", "k", "at", "hat"), TABLE)
def test_unbiased_figures(n, c, k, at, hat):
    assert statistics.pass_at_k(n, c, k) == pytest.approx(at, abs=1e-12)
    assert statistics.pass_hat_k(n, c, k) == pytest.approx(hat, abs=1e-12)


def test_fewer_trials_than_k_are_undefined():
    assert statistics.pass_at_k(2, 2, 3) is None
    assert statistics.pass_hat_k(2, 2, 3) is None
    assert statistics.macro_mean([1.0, None, 0.0]) == 0.5
    assert statistics.macro_mean([None]) is None
    assert statistics.macro_mean([]) is None


def test_wilson_interval():
    low, high = statistics.wilson(1121, 1319)
    assert (low, high) == pytest.approx((0.829595464, 0.868144990), abs=1e-9)  # scipy.stats.binomtest
    assert statistics.wilson(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert statistics.wilson(10, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)
    assert statistics.wilson(0, 0) is None


def summary_of(*results, **thresholds):
    status = {True: OK, False: OK, None: INFRA_ERROR}
    return statistics.Summary([Trial(name, 0, status[passed], passed) for name, passed in results], thresholds)


def test_summary_keeps_infrastructure_errors_apart():
    summary = summary_of(("a", True), ("a", False), ("b", None), ("b", True), a=0.5)
    assert (summary.total, summary.infra, summary.passed) == (4, 1, 2)
    assert summary.success_rate == 0.5
    assert summary.adjusted_success_rate == 2 / 3
    assert summary.infra_rate == 0.25
    assert summary.invalid()
    assert not summary.invalid(0.25)
    # b: 1 of 1 scored. At 2, only a counts, since b has one scored trial.
    assert [(rate.k, rate.tasks, rate.at_k) for rate in summary.rates(2)] == [(1, 2, 0.75), (2, 1, 1.0)]
    assert [(rate.k, rate.tasks, rate.at_k) for rate in summary.rates(3)] == [(1, 2, 0.75), (3, 0, None)]
    assert summary.solved == ["a", "b"]
    assert summary_of(("a", None)).adjusted_success_rate is None
    assert summary_of().success_rate is None


def test_completion_line():
    assert statistics.completion_line(1121, 1319) == "正确率: 1121/1319 = 0.8499"
    assert statistics.completion_line(1122, 1319) == "正确率: 1122/1319 = 0.8506"
    assert statistics.completion_line(5, 5) == "正确率: 5/5 = 1.0000"
