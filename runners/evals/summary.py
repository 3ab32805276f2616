"""What a run came to: rates with infrastructure errors apart, pass@k and pass^k, tasks solved."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ling3export.runners.evals.config import MAX_INFRA
from ling3export.runners.evals.objects import Trial
from ling3export.runners.evals.statistics import macro_mean, pass_at_k, pass_hat_k, plug_in, wilson

KS = (1, 3, 5, 10)


@dataclass(frozen=True)
class Summary:
    """Totals of a run.

    Attributes:
        results: (task id, passed) of every trial; None for one that ended in an infrastructure error.
        thresholds: By task: the share of its scored trials that must pass for it to count as solved; 1 by default.
        trials: The trials themselves, where they are at hand.
    """

    results: list[tuple[str, bool | None]]
    thresholds: dict[str, float] = field(default_factory=dict)
    trials: Sequence[Trial] = ()

    @property
    def total(self) -> int:
        """N: tasks times trials."""
        return len(self.results)

    @property
    def infra(self) -> int:
        """I: trials that ended in an infrastructure error."""
        return sum(passed is None for _, passed in self.results)

    @property
    def passed(self) -> int:
        """C: trials that passed."""
        return sum(passed is True for _, passed in self.results)

    @property
    def success_rate(self) -> float | None:
        """C / N: strict, an infrastructure error counts as a failure. None without trials."""
        return self.passed / self.total if self.total else None

    @property
    def adjusted_success_rate(self) -> float | None:
        """C / (N - I); None where no trial was scored."""
        scored = self.total - self.infra
        return self.passed / scored if scored else None

    @property
    def infra_rate(self) -> float:
        """I / N."""
        return self.infra / self.total if self.total else 0.0

    def invalid(self, max_infra: float = MAX_INFRA) -> bool:
        """Whether too many trials ended in infrastructure errors for the rate to mean something."""
        return self.infra_rate > max_infra

    @property
    def by_task(self) -> dict[str, tuple[int, int]]:
        """Scored trials n and passes c of each task, in order."""
        counts: dict[str, tuple[int, int]] = {}
        for name, passed in self.results:
            n, c = counts.get(name, (0, 0))
            counts[name] = (n + (passed is not None), c + (passed is True))
        return counts

    def pass_at_k(self, k: int) -> float | None:
        """Macro mean over the tasks with ``k`` scored trials or more; None without any."""
        return macro_mean(pass_at_k(n, c, k) for n, c in self.by_task.values())

    def pass_hat_k(self, k: int) -> float | None:
        """Macro mean over the tasks with ``k`` scored trials or more; None without any."""
        return macro_mean(pass_hat_k(n, c, k) for n, c in self.by_task.values())

    @property
    def solved(self) -> list[str]:
        """Tasks whose share of passes reaches their threshold."""
        return [name for name, (n, c) in self.by_task.items() if n and c >= self.thresholds.get(name, 1.0) * n]

    def rates(self, most: int) -> list[dict[str, Any]]:
        """Rows of k up to ``most``: on how many tasks, unbiased pass@k and pass^k, plug-in figures of the mean rate."""
        rows = []
        mean = self.pass_at_k(1)
        for k in sorted({*(k for k in KS if k <= most), most}):
            plug = (None, None) if mean is None else plug_in(mean, k)
            rows.append(
                {
                    "k": k, "tasks": sum(n >= k for n, _ in self.by_task.values()), "pass@k": self.pass_at_k(k),
                    "pass^k": self.pass_hat_k(k), "1-(1-p)^k": plug[0], "p^k": plug[1],
                }
            )  # fmt: skip
        return rows

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "tasks": len(self.by_task), "trials": self.total, "passed": self.passed, "infra": self.infra,
            "success_rate": self.success_rate, "adjusted_success_rate": self.adjusted_success_rate,
            "infra_rate": self.infra_rate, "wilson95": wilson(self.passed, self.total), "solved": len(self.solved),
        }  # fmt: skip


def completion_line(passed: int, total: int) -> str:
    """The last line of a run, in the form that scripts look for: ``正确率: 1121/1319 = 0.8499``."""
    return f"正确率: {passed}/{total} = {passed / total:.4f}"
