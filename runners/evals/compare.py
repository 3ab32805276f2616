"""Comparisons: the same prompts run again, token by token (determinism), and two finished runs, task by task (diff)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ling3export.runners.evals.backend import EngineBackend, PromptRequest
from ling3export.runners.evals.folder import Prediction, read_predictions, read_run, read_tasks
from ling3export.runners.evals.statistics import Summary, mcnemar
from ling3export.runners.evals.trials import EvalError

SHOWN = 20  # divergences that are reported in detail


@dataclass(frozen=True)
class Divergence:
    """Where two answers to a prompt part."""

    task: str  # the prompt's name
    pos: int  # place of the first token that differs
    id_a: int | None  # the first answer's token there; None if that answer ended before
    id_b: int | None  # the other answer's token there; None if that answer ended before
    # The logit of ``id_a`` less that of ``id_b``, from a prompt that holds all tokens before. None if the backend gives
    # no logits, or if one of the answers ended before.
    logit_gap: float | None


@dataclass(frozen=True)
class Sameness:
    """How many prompts got the same answer twice.

    Attributes:
        identical: ``k/total``: k of so many prompts.
        first_divergence: Where the answers part, for at most SHOWN of the other prompts.
    """

    identical: str
    first_divergence: list[Divergence]


@dataclass(frozen=True)
class Determinism(Sameness):
    """The first run against all later ones, and against each prompt alone.

    Attributes:
        batch_invariance: The answers in the batch against those of prompts run alone; None if none was run alone. It is
            reported and not judged, since a program of another padding sums in another order.
    """

    batch_invariance: Sameness | None


def determinism(
    backend: EngineBackend,
    asks: Sequence[PromptRequest],
    *,
    runs: int = 2,
    batch: int = 256,
    alone: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Determinism:
    """Runs the same prompts several times in the same order and batches.

    Args:
        backend: Answers the prompts.
        asks: The prompts, at temperature 0.
        runs: How often they are run, 2 or more times.
        batch: Number of prompts that are given to the backend together.
        alone: Number of prompts, the first ones, that are also run each alone.
        progress: Called with the numbers of finished and of all prompts.

    Raises:
        EvalError: There is nothing to compare.
    """
    if runs < 2 or not asks:
        raise EvalError(f"determinism: expected 2 runs and a prompt or more, found {runs} and {len(asks)}")
    rounds = [(asks, batch)] * runs + [(asks[:alone], 1)]
    total = sum(len(asked) for asked, _ in rounds)
    answers: list[list[list[int]]] = []
    for asked, size in rounds:
        answers.append([])
        for start in range(0, len(asked), size):
            answers[-1] += [list(done.token_ids) for done in backend.generate(asked[start : start + size])]
            if progress:
                progress(sum(map(len, answers)), total)
    first, *others, singles = answers
    same = _sameness(backend, asks, first, others)
    invariance = _sameness(backend, asks, first, [singles]) if singles else None
    return Determinism(same.identical, same.first_divergence, invariance)


def _sameness(
    backend: EngineBackend,
    asks: Sequence[PromptRequest],
    first: Sequence[list[int]],
    runs: Sequence[Sequence[list[int]]],
) -> Sameness:
    """The answers of the first run against those of others, which may end after fewer prompts."""
    differing: dict[int, list[int]] = {}  # by the prompt's place, the first other answer that differs
    for run in runs:
        for place, ids in enumerate(run):
            if ids != first[place]:
                differing.setdefault(place, ids)
    total = len(runs[0])
    shown = [_divergence(backend, asks[place], first[place], ids) for place, ids in list(differing.items())[:SHOWN]]
    return Sameness(f"{total - len(differing)}/{total}", shown)


def _divergence(backend: EngineBackend, ask: PromptRequest, a: list[int], b: list[int]) -> Divergence:
    """Where two answers to a prompt part, and how close the model was there."""
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    id_a, id_b = (run[place] if place < len(run) else None for run in (a, b))
    gap = None
    if id_a is not None and id_b is not None:
        prompt = [*backend.generate([PromptRequest(ask.name, ask.prompt, 1)])[0].prompt_ids, *a[:place]]
        logits = backend.generate([PromptRequest(ask.name, prompt, 1, logits=True)])[0].logits
        gap = None if logits is None else float(logits[0][id_a]) - float(logits[0][id_b])
    return Divergence(ask.name, place, id_a, id_b, gap)


@dataclass(frozen=True)
class Difference:
    """What changed from a run A to a run B."""

    broken: list[str]  # tasks that A solves and B does not: regressions
    fixed: list[str]  # tasks that B solves and A does not
    both: int  # number of tasks that both solve
    neither: int  # number of tasks that neither solves
    # Tasks that are not compared: they are in one run only, have another prompt, or no scored trial in one.
    apart: list[str]

    @property
    def p(self) -> float:
        """Exact two-sided p of McNemar's test."""
        return mcnemar(len(self.broken), len(self.fixed))


def diff(a: Path, b: Path) -> Difference:
    """Compares two finished runs, paired by task. In both, a task counts as solved by its threshold in A.

    Args:
        a: Folder of the run A.
        b: Folder of the run B.

    Raises:
        EvalError: A run is not finished, or they have no task in common.
    """
    runs = [read_predictions(path) for path in (a, b)]
    everywhere = read_run(a).config.threshold
    thresholds = {task.id: everywhere or task.threshold for task in read_tasks(a)}
    prompts = [{record.task_id: record.prompt_sha256 for record in run} for run in runs]
    counts = [_scored(run) for run in runs]
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


def _scored(records: Sequence[Prediction]) -> dict[str, tuple[int, int]]:
    """The scored trials and the passes of each task, without tasks that have no scored trial."""
    counts = Summary([(record.task_id, record.passed) for record in records]).by_task
    return {name: (n, c) for name, (n, c) in counts.items() if n}
