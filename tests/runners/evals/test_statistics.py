"""pass@k, pass^k, intervals and tests against the tables of the specification."""

import pytest

from ling3export.runners.evals import statistics

TABLE = [
    (4, 3, 2, 1.0, 0.5),
    (4, 3, 3, 1.0, 0.25),
    (4, 3, 4, 1.0, 0.0),
    (10, 7, 3, 1 - 1 / 120, 35 / 120),
    (8, 6, 3, 1.0, 20 / 56),
]
DESIGN = [(1, 0.75, 0.75), (3, 0.984375, 0.421875), (5, 0.9990234375, 0.2373046875), (10, 0.99999905, 0.05631351)]


@pytest.mark.parametrize(("n", "c", "k", "at", "hat"), TABLE)
def test_unbiased_figures(n, c, k, at, hat):
    assert statistics.pass_at_k(n, c, k) == pytest.approx(at, abs=1e-12)
    assert statistics.pass_hat_k(n, c, k) == pytest.approx(hat, abs=1e-12)


@pytest.mark.parametrize(("k", "at", "hat"), DESIGN)
def test_plug_in_figures(k, at, hat):
    assert statistics.plug_in(0.75, k) == pytest.approx((at, hat), abs=1e-8)


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


def test_mcnemar_exact_p():
    assert statistics.mcnemar(0, 0) == 1.0
    assert statistics.mcnemar(1, 9) == pytest.approx(2 * 11 / 1024, abs=1e-12)
    assert statistics.mcnemar(9, 1) == statistics.mcnemar(1, 9)
    assert statistics.mcnemar(3, 3) == 1.0


def test_summary_keeps_infrastructure_errors_apart():
    summary = statistics.Summary([("a", True), ("a", False), ("b", None), ("b", True)], {"a": 0.5})
    assert (summary.total, summary.infra, summary.passed) == (4, 1, 2)
    assert summary.success_rate == 0.5
    assert summary.adjusted_success_rate == 2 / 3
    assert summary.infra_rate == 0.25
    assert summary.invalid()
    assert not summary.invalid(0.25)
    # b: 1 of 1 scored; at 2 of a alone, since b has one scored trial.
    assert [(rate.k, rate.tasks, rate.at_k) for rate in summary.rates(2)] == [(1, 2, 0.75), (2, 1, 1.0)]
    assert [(rate.k, rate.tasks, rate.at_k) for rate in summary.rates(3)] == [(1, 2, 0.75), (3, 0, None)]
    assert summary.solved == ["a", "b"]
    assert statistics.Summary([("a", None)]).adjusted_success_rate is None
    assert statistics.Summary([]).success_rate is None


def test_completion_line():
    assert statistics.completion_line(1121, 1319) == "正确率: 1121/1319 = 0.8499"
    assert statistics.completion_line(1122, 1319) == "正确率: 1122/1319 = 0.8506"
    assert statistics.completion_line(5, 5) == "正确率: 5/5 = 1.0000"
