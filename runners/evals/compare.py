"""Two finished runs, compared task by task and token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ling3export.runners.evals.run_file import Prediction, read_run
from ling3export.runners.evals.statistics import Summary, mcnemar
from ling3export.runners.evals.trials import EvalError


@dataclass(frozen=True)
class Divergence:
    """The first place at which the tokens of a trial differ in two runs."""

    trial: str
    pos: int
    id_a: int | None  # A's token there; None if A's answer ended before
    id_b: int | None


@dataclass(frozen=True)
class Difference:
    """The changes from a run A to a run B."""

    broken: list[str]  # tasks that A solves and B does not: regressions
    fixed: list[str]  # tasks that B solves and A does not
    both: int  # number of tasks that both solve
    neither: int  # number of tasks that neither solves
    apart: list[str]  # tasks that are not compared: in one run only, with another prompt, or without a scored trial
    trials: int  # number of trials that both have
    divergences: list[Divergence]  # the trials with other tokens

    @property
    def p(self) -> float:
        """Exact two-sided p of McNemar's test."""
        return mcnemar(len(self.broken), len(self.fixed))


def diff(a: Path, b: Path) -> Difference:
    """Compares two finished runs, paired by task. In both, a task counts as solved by its threshold in A.

    Raises:
        EvalError: A run is not finished, or they have no task in common.
    """
    runs = [read_run(path) for path in (a, b)]
    thresholds = runs[0].summary.thresholds
    prompts = [{record.task_id: record.prompt_sha256 for record in run.trials} for run in runs]
    counts = [_scored(run.trials) for run in runs]
    common = [
        name for name in prompts[0] if prompts[0][name] == prompts[1].get(name) and all(name in run for run in counts)
    ]
    if not common:
        raise EvalError(f"runs `{a.name}` and `{b.name}`: no task has the same prompt in both")
    solved = [{name for name in common if run[name][1] >= thresholds.get(name, 1.0) * run[name][0]} for run in counts]
    others = {record.pair: record for record in runs[1].trials}
    pairs = [
        (record, others[record.pair]) for record in runs[0].trials if record.task_id in common and record.pair in others
    ]
    return Difference(
        [name for name in common if name in solved[0] - solved[1]],
        [name for name in common if name in solved[1] - solved[0]],
        len(solved[0] & solved[1]),
        len(common) - len(solved[0] | solved[1]),
        sorted((prompts[0].keys() | prompts[1].keys()) - set(common)),
        len(pairs),
        [_divergence(*pair) for pair in pairs if pair[0].output_token_ids != pair[1].output_token_ids],
    )


def _scored(records: Sequence[Prediction]) -> dict[str, tuple[int, int]]:
    """The scored trials and the passes of each task, without tasks that have no scored trial."""
    counts = Summary([(record.task_id, record.passed) for record in records]).by_task
    return {name: (n, c) for name, (n, c) in counts.items() if n}


def _divergence(first: Prediction, second: Prediction) -> Divergence:
    a, b = first.output_token_ids, second.output_token_ids
    place = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    id_a, id_b = (ids[place] if place < len(ids) else None for ids in (a, b))
    return Divergence(first.label, place, id_a, id_b)
