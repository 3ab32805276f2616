"""Runs a suite on a backend, batch by batch in file order, and leaves a folder that tells the whole story."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import sha256_of
from ling3export.errors import Ling3Error
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.engine.request import Completion, Sampling
from ling3export.runners.evals.answers import choice_letter, extract_answer
from ling3export.runners.evals.backend import Ask, Backend
from ling3export.runners.evals.config import RunConfig
from ling3export.runners.evals.folder import RunFolder, open_folder, prediction, run_record
from ling3export.runners.evals.harness import graded
from ling3export.runners.evals.objects import (
    EvalError,
    InfraError,
    Outcome,
    RankDivergence,
    Step,
    Transcript,
    Trial,
    tokens_digest,
    trial_seed,
)
from ling3export.runners.evals.ranks import check_digests
from ling3export.runners.evals.report import report
from ling3export.runners.evals.smoke import product_state
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.summary import Summary
from ling3export.runners.evals.tasks import Task


@dataclass(frozen=True)
class Item:
    """A trial to be run: the task, its place in the suite, and which trial."""

    place: int
    task: Task
    trial: int


def run_suite(
    suite: Suite, backend: Backend, folder: Path, config: RunConfig, *, force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:  # fmt: skip
    """Runs a suite on the process that leads, or goes on where an earlier run of the same record ended.

    Args:
        suite: At least one task.
        backend: Answers prompts.
        folder: Where the run is written.
        config: Settings.
        force: Begin anew whatever is in the folder.
        progress: Told finished and all trials.

    Raises:
        EvalError: The suite is empty, or the folder holds another run.
        GraderError: A grader failed; the run can be resumed.
        RankDivergence: Processes sampled different tokens; nothing of that batch is kept.
        EngineStopped: The engine ended; the run can be resumed.
        Ling3Error: Every prompt of the first batch was refused.
    """
    if not suite.tasks:
        raise EvalError(f"suite `{suite.name}`: expected at least one task, found none")
    config = replace(config, **suite.settings)
    items = [Item(p, task, trial) for p, task in enumerate(suite.tasks) for trial in range(config.trials)]
    run = run_record(_suite_record(suite), json.loads(json.dumps(asdict(config))), backend.environment())
    with open_folder(folder, run, suite.tasks, force=force) as opened:
        runner = _Runner(suite, backend, config, opened)
        try:
            for batch in _batches(items, config.batch):
                runner.run([item for item in batch if (item.task.id, item.trial) not in opened.done])
                if progress:
                    progress(len(opened.done), len(items))
        except EngineStopped as error:
            kept = f"{len(opened.done)} of {len(items)} trials are kept: the same command goes on from there"
            raise EngineStopped(error.message, kept) from error
        records = [opened.done[item.task.id, item.trial] for item in items]
        summary = summary_of(records, suite.tasks, config.threshold)
        run["totals"] = {**summary.record(), "invalid": summary.invalid(config.max_infra)}
        opened.finish(run, report(run, records, summary, suite.tasks))
    return summary


def summary_of(records: Sequence[dict[str, Any]], tasks: Sequence[Task], threshold: float | None = None) -> Summary:
    """Totals of the records of a run."""
    thresholds = {task.id: task.threshold if threshold is None else threshold for task in tasks}
    return Summary([(record["task_id"], record["passed"]) for record in records], thresholds)


class _Runner:
    """Runs batches of trials and writes their records."""

    def __init__(self, suite: Suite, backend: Backend, config: RunConfig, folder: RunFolder) -> None:
        self._suite = suite
        self._backend = backend
        self._config = config
        self._folder = folder
        self._worked = bool(folder.done)

    def run(self, items: list[Item]) -> None:
        if not items:
            return
        trials = [
            Trial(i.task.id, i.trial, trial_seed(self._config.seed, i.task.id, i.trial)) for i in items
        ]  # fmt: skip
        asks = [self.ask(item, trial) for item, trial in zip(items, trials, strict=True)]
        before = self._backend.stats() if self._suite.product else {}
        completions, refusal = complete(self._backend, asks, trials, self._config.retry)
        if not self._worked and refusal is not None and not any(completions):
            raise refusal  # all of the first batch refused: no accident, but a wrong set-up
        self._worked = True
        check_digests(self._backend.digests())
        after = self._backend.stats() if self._suite.product else {}
        for item, trial, completion in zip(items, trials, completions, strict=True):
            if completion is None:
                trial.status = "infra_error"
            else:
                outcome = self.outcome(item.task, completion, before, after)
                graded(trial, item.task, transcript_of(completion), outcome)
            if self._config.transcripts:
                self.write_transcript(item, trial)
            self._folder.add(prediction(item.place, item.task, trial))

    def ask(self, item: Item, trial: Trial) -> Ask:
        config = self._config
        sampling = Sampling(config.temperature, config.top_k, config.top_p, trial.seed)
        return Ask(f"task `{item.task.id}`", item.task.prompt, config.max_tokens, sampling, config.stop)

    def outcome(self, task: Task, completion: Completion, before: dict[str, Any], after: dict[str, Any]) -> Outcome:
        text = completion.text or ""
        extracted = extract_answer(text) if task.choices is None else choice_letter(text, len(task.choices))
        state = {"text": text, "extracted": extracted, "tokens_digest": tokens_digest(completion.token_ids)}
        if self._suite.product:
            folder = self._folder
            output = len(completion.token_ids)
            state |= product_state(before, after, folder.path, len(folder.done), output)
        return Outcome(state)

    def write_transcript(self, item: Item, trial: Trial) -> None:
        folder = self._folder.path / "transcripts"
        folder.mkdir(exist_ok=True)
        record = {
            "task_id": trial.task_id, "trial": trial.trial, "seed": trial.seed, "status": trial.status,
            "attempts": [attempt.record() for attempt in trial.attempts],
            "transcript": asdict(trial.transcript) if trial.transcript else None,
            "outcome": trial.outcome.state if trial.outcome else None,
            "grades": [asdict(grade) for grade in trial.grades], "passed": trial.passed, "score": trial.score,
        }  # fmt: skip
        path = folder / f"{item.place}-{item.trial}.json"
        path.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def complete(
    backend: Backend, asks: Sequence[Ask], trials: Sequence[Trial], retry: int
) -> tuple[list[Completion | None], Ling3Error | None]:
    """Completes a batch; after an error its halves, down to those trials alone that are at fault.

    Returns:
        A completion or None a trial, and the last refusal with a message for the user, if there was one.
    """
    done, error = _attempt(backend, asks)
    if error is None:
        return list(done), None
    for trial in trials:
        trial.attempts.append(InfraError.of(error))
    # The failure of a batch says nothing yet about any one of its trials: each gets another attempt in any case.
    tries = retry if len(asks) == 1 else max(retry, 1)
    found = _halved(backend, list(zip(asks, trials, strict=True)), tries, error)
    refusals = [error for completion, error in found if completion is None and isinstance(error, Ling3Error)]
    return [completion for completion, _ in found], refusals[-1] if refusals else None


def _halved(
    backend: Backend, pairs: list[tuple[Ask, Trial]], tries: int, error: Exception
) -> list[tuple[Completion | None, Exception]]:
    """For a failed batch: of each trial its completion, or None, and the last error."""
    if len(pairs) > 1:
        middle, found = len(pairs) // 2, []
        for half in (pairs[:middle], pairs[middle:]):
            if len(half) == 1:
                found += _halved(backend, half, tries, error)
                continue
            done, again = _attempt(backend, [ask for ask, _ in half])
            found += [(one, error) for one in done] if again is None else _halved(backend, half, tries, again)
        return found
    ((ask, trial),) = pairs
    for _ in range(tries):
        done, again = _attempt(backend, [ask])
        if again is None:
            return [(done[0], error)]
        error = again
        trial.attempts.append(InfraError.of(error))
    return [(None, error)]


def _attempt(backend: Backend, asks: Sequence[Ask]) -> tuple[list[Completion], Exception | None]:
    try:
        done = backend.generate(asks)
    except (RankDivergence, EngineStopped):
        raise
    except Exception as error:
        return [], error
    if len(done) != len(asks):
        raise EvalError(f"backend: expected {len(asks)} completions, found {len(done)}")
    return done, None


def transcript_of(completion: Completion) -> Transcript:
    """What was said in a completion."""
    return Transcript(
        completion.text or "", list(completion.prompt_ids), list(completion.token_ids), completion.stop_reason,
        [Step(step.t_ms, step.kind, step.padding, step.tokens) for step in completion.steps],
        ttft_ms=completion.ttft_ms, e2e_ms=completion.e2e_ms,
    )  # fmt: skip


def _batches(items: list[Item], size: int) -> Iterator[list[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _suite_record(suite: Suite) -> dict[str, Any]:
    return {
        "name": suite.name, "tasks": len(suite.tasks), "files": suite.files, "notes": list(suite.notes),
        "reference": suite.reference, "tasks_sha256": sha256_of([task.record() for task in suite.tasks]),
    }  # fmt: skip
