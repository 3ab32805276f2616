"""Two finished runs, compared task by task and token by token."""

from dataclasses import dataclass
from pathlib import Path

from ling3export.runners.evals.run_file import read_run
from ling3export.runners.evals.trials import EvalError, Trial


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


def diff(a: Path, b: Path) -> Difference:
    """Compares two finished runs, paired by task. In both, a task counts as solved by its threshold in A.

    Raises:
        EvalError: A run is not finished, or they have no task in common.
    """
    runs = [read_run(path) for path in (a, b)]
    thresholds = runs[0].summary.thresholds
    prompts = [{task.id: task.prompt_sha256 for task in run.tasks} for run in runs]
    counts = [run.summary.by_task for run in runs]
    common = [
        name for name in prompts[0] if prompts[0][name] == prompts[1].get(name) and all(run[name][0] for run in counts)
    ]
    if not common:
        raise EvalError(f"runs `{a.name}` and `{b.name}`: no task has the same prompt in both")
    solved = [{name for name in common if run[name][1] >= thresholds[name] * run[name][0]} for run in counts]
    others = {trial.pair: trial for trial in runs[1].trials}
    pairs = [
        (trial, others[trial.pair]) for trial in runs[0].trials if trial.task_id in common and trial.pair in others
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


def _divergence(first: Trial, second: Trial) -> Divergence:
    a, b = first.output_token_ids, second.output_token_ids
    place = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    id_a, id_b = (ids[place] if place < len(ids) else None for ids in (a, b))
    return Divergence(first.label, place, id_a, id_b)
