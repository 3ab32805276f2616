"""Statistics of a run: rates with infrastructure errors apart, pass@k and pass^k, Wilson's interval."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import NamedTuple

from ling3export.runners.evals.trials import MAX_INFRA, Trial

KS = (1, 3, 5, 10)


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Probability that at least one of ``k`` trials drawn from ``n`` with ``c`` passes, passed.

    ``1 - C(n-c, k) / C(n, k)``: unbiased (Chen et al. 2021). None if ``n < k``, where it is undefined.
    """
    return None if n < k else 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """Probability that all of ``k`` trials drawn from ``n`` with ``c`` passes, passed.

    ``C(c, k) / C(n, k)``: unbiased (tau-bench). None if ``n < k``, where it is undefined.
    """
    return None if n < k else comb(c, k) / comb(n, k)


def macro_mean(values: Iterable[float | None]) -> float | None:
    """The mean over the tasks for which a figure is defined; None if it is defined for none."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def wilson(passed: int, total: int) -> tuple[float, float] | None:
    """Wilson's 95 % score interval of the rate ``passed / total``; None without trials."""
    from scipy.stats import binomtest  # comes with jax; on demand, since it takes a second to load

    if total == 0:
        return None
    interval = binomtest(passed, total).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


class Rate(NamedTuple):
    """Unbiased figures at one k, as means over tasks; None where a figure is undefined."""

    k: int  # number of trials drawn
    tasks: int  # how many tasks have k scored trials or more
    at_k: float | None  # pass@k
    hat_k: float | None  # pass^k


@dataclass(frozen=True)
class Summary:
    """Totals of a run."""

    trials: Sequence[Trial]
    # By task id, the share of scored trials that must pass for the task to count as solved; 1 by default.
    thresholds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of trials, N: tasks times tries."""
        return len(self.trials)

    @property
    def infra(self) -> int:
        """The number of trials that ended in an infrastructure error, I."""
        return sum(trial.passed is None for trial in self.trials)

    @property
    def passed(self) -> int:
        """The number of trials that passed, C."""
        return sum(trial.passed is True for trial in self.trials)

    @property
    def success_rate(self) -> float | None:
        """C / N: strict, an infrastructure error counts as a failure. None without trials."""
        return self.passed / self.total if self.total else None

    @property
    def adjusted_success_rate(self) -> float | None:
        """C / (N - I), the rate of the scored trials; None without any."""
        scored = self.total - self.infra
        return self.passed / scored if scored else None

    @property
    def infra_rate(self) -> float:
        """I / N; 0 without trials."""
        return self.infra / self.total if self.total else 0.0

    def invalid(self, max_infra: float = MAX_INFRA) -> bool:
        """Whether too many trials ended in infrastructure errors for the rate to mean something."""
        return self.infra_rate > max_infra

    @property
    def by_task(self) -> dict[str, tuple[int, int]]:
        """The scored trials n and the passes c of each task, in the run's order."""
        counts: dict[str, tuple[int, int]] = {}
        for trial in self.trials:
            n, c = counts.get(trial.task_id, (0, 0))
            counts[trial.task_id] = (n + (trial.passed is not None), c + (trial.passed is True))
        return counts

    @property
    def solved(self) -> list[str]:
        """Tasks whose share of passes reaches their threshold."""
        return [name for name, (n, c) in self.by_task.items() if n and c >= self.thresholds.get(name, 1.0) * n]

    def rates(self, most: int) -> list[Rate]:
        """The figures at each of KS up to ``most``, and at ``most``."""
        counts, rows = self.by_task.values(), []
        for k in sorted({*(k for k in KS if k <= most), most}):
            at, hat = (macro_mean(figure(n, c, k) for n, c in counts) for figure in (pass_at_k, pass_hat_k))
            rows.append(Rate(k, sum(n >= k for n, _ in counts), at, hat))
        return rows


def completion_line(passed: int, total: int) -> str:
    """The last line of a run, in a form for scripts: ``正确率: 1121/1319 = 0.8499``."""
    return f"正确率: {passed}/{total} = {passed / total:.4f}"
