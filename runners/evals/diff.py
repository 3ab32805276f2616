"""Two runs of a suite, task by task: what one solves and the other does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling3export.runners.evals.folder import TASKS, read_lines, read_predictions, read_run
from ling3export.runners.evals.objects import EvalError
from ling3export.runners.evals.statistics import mcnemar
from ling3export.runners.evals.summary import Summary


@dataclass(frozen=True)
class Difference:
    """What changed from a run A to a run B.

    Attributes:
        broken: Tasks that A solves and B does not: regressions.
        fixed: Tasks that B solves and A does not.
        both: How many both solve.
        neither: How many neither solves.
        apart: Tasks that are in one run only, have another prompt, or no scored trial in one.
    """

    broken: list[str]
    fixed: list[str]
    both: int
    neither: int
    apart: list[str]

    @property
    def p(self) -> float:
        """McNemar's exact two-sided p."""
        return mcnemar(len(self.broken), len(self.fixed))


def diff(a: Path, b: Path) -> Difference:
    """Compares two finished runs, paired by task. A task counts as solved by its threshold in A.

    Raises:
        EvalError: A run is not finished, or they have no task in common.
    """
    records = [read_predictions(path) for path in (a, b)]
    everywhere = read_run(a)["config"]["threshold"]
    thresholds = {task["id"]: task["threshold"] if everywhere is None else everywhere for task in read_lines(a / TASKS)}
    prompts = [{record["task_id"]: record["prompt_sha256"] for record in run} for run in records]
    counts = [_scored(run) for run in records]
    common = [
        name for name in prompts[0] if prompts[0][name] == prompts[1].get(name) and all(name in run for run in counts)
    ]
    if not common:
        raise EvalError(f"runs `{a.name}` and `{b.name}`: expected tasks in common, found none with the same prompt")
    solved = [{name for name in common if run[name][1] >= thresholds.get(name, 1.0) * run[name][0]} for run in counts]
    return Difference(
        [name for name in common if name in solved[0] - solved[1]],
        [name for name in common if name in solved[1] - solved[0]],
        len(solved[0] & solved[1]),
        len(common) - len(solved[0] | solved[1]),
        sorted((prompts[0].keys() | prompts[1].keys()) - set(common)),
    )


def _scored(records: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Scored trials and passes by task, without tasks that have none."""
    counts = Summary([(record["task_id"], record["passed"]) for record in records]).by_task
    return {name: (n, c) for name, (n, c) in counts.items() if n}
