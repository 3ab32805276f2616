"""Runs a suite on a backend, batch by batch in the order of its tasks, and leaves a folder that tells all about it."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.foundation.shards import WHOLE, Shard
from ling3export.runners.engine.follower import check_digests
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.engine.request import Completion
from ling3export.runners.evals.backend import EvalBackend, PromptRequest, PromptResult
from ling3export.runners.evals.folder import Prediction, RunFolder, RunRecord, SuiteRecord, open_folder, tasks_digest
from ling3export.runners.evals.graders import choice_letter, extract_answer
from ling3export.runners.evals.harness import graded
from ling3export.runners.evals.report import report
from ling3export.runners.evals.statistics import Summary
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.tasks import Task, TaskRecord
from ling3export.runners.evals.trials import (
    EvalError,
    Outcome,
    RunConfig,
    Transcript,
    TranscriptStep,
    Trial,
    tokens_digest,
    trial_seed,
)


def run_suite(
    suite: Suite,
    backend: EvalBackend,
    folder: Path,
    config: RunConfig,
    *,
    shard: Shard = WHOLE,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Runs a suite, or goes on where an earlier run with the same record ended. On several hosts, host 0 calls it.

    Args:
        suite: A suite with at least one task.
        backend: Answers the prompts.
        folder: Where the run is written.
        config: The run's settings.
        shard: Which share of the batches is run.
        force: Begin anew, whatever run is in the folder.
        progress: Called with the numbers of finished and of all trials, as trials end.

    Returns:
        The totals of the trials that were run.

    Raises:
        EvalError: The suite is empty, or the folder holds another run.
        GraderError: A grader failed; the run can be resumed.
        RankDivergence: Hosts sampled different tokens; nothing of that batch is kept.
        EngineStopped: The engine ended; the run can be resumed.
        Ling3Error: Every prompt of the first batch was refused.
    """
    if not suite.tasks:
        raise EvalError(f"suite `{suite.name}`: expected at least one task, found none")
    config = replace(config, **suite.settings)
    tasks = [task.record() for task in suite.tasks]
    recorded = SuiteRecord(suite.name, len(tasks), suite.files, list(suite.notes), suite.reference, tasks_digest(tasks))
    run = RunRecord.of(recorded, config, backend.environment(), shard)
    trials = [Trial(*pair, trial_seed(config.seed, *pair)) for pair in run.trials(tasks)]
    with open_folder(folder, run, tasks, force=force) as opened:
        runner = _Runner(suite, backend, config, opened)
        try:
            starts = range(0, len(trials), config.batch)
            batches = [[each for each in trials[n : n + config.batch] if each.pair not in opened.done] for n in starts]
            if progress:
                count = _Count(opened, len(trials), progress)
                backend.ended = count.one
            for _ in runner.run([batch for batch in batches if batch]):
                if progress:
                    count.batch()
        except EngineStopped as error:
            kept = f"{len(opened.done)} of {len(trials)} trials are kept: the same command goes on from there"
            raise EngineStopped(error.message, kept) from error
        return concluded(opened, run, tasks)


def concluded(folder: RunFolder, run: RunRecord, tasks: Sequence[TaskRecord]) -> Summary:
    """Ends a run all of whose trials have a record; returns their totals. Those of a shard are written nowhere."""
    records = [folder.done[pair] for pair in run.trials(tasks)]
    everywhere = run.config.threshold
    thresholds = {task.id: task.threshold if everywhere is None else everywhere for task in tasks}
    summary = Summary([(record.task_id, record.passed) for record in records], thresholds)
    run = replace(run, status="complete")
    if run.shard != str(WHOLE):
        folder.finish(run, None)
        return summary
    run = replace(run, totals={**summary.record(), "invalid": summary.invalid(run.config.max_infra)})
    folder.finish(run, report(run, records, summary, tasks))
    return summary


class _Count:
    """How many trials have ended: those that are written, and those of the batch that runs."""

    def __init__(self, folder: RunFolder, total: int, progress: Callable[[int, int], None]) -> None:
        self._folder, self._total, self._progress, self._running = folder, total, progress, 0

    def one(self) -> None:
        """A trial of the batch has ended; one that is tried again counts once more, up to all."""
        self._running += 1
        self._progress(min(self._total, len(self._folder.done) + self._running), self._total)

    def batch(self) -> None:
        """The batch is written."""
        self._running = 0
        self._progress(len(self._folder.done), self._total)


class _Runner:
    """Writes the records of batches of trials."""

    def __init__(self, suite: Suite, backend: EvalBackend, config: RunConfig, folder: RunFolder) -> None:
        self._suite, self._backend, self._config, self._folder = suite, backend, config, folder
        self._tasks = {task.id: (place, task) for place, task in enumerate(suite.tasks)}
        self._worked = bool(folder.done)

    def run(self, batches: Sequence[Sequence[Trial]]) -> Iterator[None]:
        """Runs batches, in order; stops behind each, whose records are then written."""
        answers = self._backend.answers((self._asked(batch) for batch in batches), self._config.retry)
        for batch in batches:
            before = self._counters()
            self._write(batch, next(answers), before)
            yield

    def _asked(self, batch: Sequence[Trial]) -> list[PromptRequest]:
        config = self._config
        tasks = [self._tasks[trial.task_id][1] for trial in batch]
        return [
            PromptRequest(f"task `{task.id}`", task.prompt, config.max_tokens, config.sampling(trial.seed), config.stop)
            for task, trial in zip(tasks, batch, strict=True)
        ]

    def _write(self, trials: Sequence[Trial], answers: Sequence[PromptResult], before: dict[str, Any]) -> None:
        refusals = [each.said for each in answers if isinstance(each.said, Ling3Error)]
        if not self._worked and refusals and all(isinstance(each.said, Exception) for each in answers):
            raise refusals[-1]  # all trials of the first batch were refused: that is no accident, but a wrong set-up
        self._worked = True
        check_digests(self._backend.digests())
        after = self._counters()
        for trial, answer in zip(trials, answers, strict=True):
            place, task = self._tasks[trial.task_id]
            trial.attempts += answer.attempts
            if isinstance(answer.said, RequestError):
                trial.refuse(answer.said)
            elif isinstance(answer.said, Exception):
                trial.status = "infra_error"
            else:
                graded(trial, task, transcript_of(answer.said), self._outcome(task, answer.said, before, after))
            if self._config.transcripts:
                text = json.dumps(trial.record(), ensure_ascii=False, indent=1) + "\n"
                self._folder.keep_transcript(place, trial.trial, text.encode())
            self._folder.add(Prediction.of(place, task, trial))

    def _counters(self) -> dict[str, Any]:
        return self._backend.stats() if self._suite.product else {}

    def _outcome(self, task: Task, completion: Completion, before: dict[str, Any], after: dict[str, Any]) -> Outcome:
        """What came of a trial; with what it left behind, for suites whose graders look at the product."""
        text, ids = completion.text or "", completion.token_ids
        extracted = extract_answer(text) if task.choices is None else choice_letter(text, len(task.choices))
        state: dict[str, Any] = {"text": text, "extracted": extracted, "tokens_digest": tokens_digest(ids)}
        if self._suite.product:
            contents = {path.name: path.read_bytes() for path in self._folder.path.iterdir() if path.is_file()}
            files = {name: {"bytes": len(data), "lines": data.count(b"\n")} for name, data in sorted(contents.items())}
            state |= {"counters": after, "delta": _grown(before, after), "files": files, "output": len(ids)}
            state["records"] = len(self._folder.done)
        return Outcome(state)


def transcript_of(completion: Completion) -> Transcript:
    """The transcript of a completion."""
    return Transcript(
        completion.text or "",
        list(completion.prompt_ids),
        list(completion.token_ids),
        completion.stop_reason,
        [TranscriptStep(step.t_ms, step.kind, step.padding, step.tokens) for step in completion.steps],
        ttft_ms=completion.ttft_ms,
        e2e_ms=completion.e2e_ms,
    )


def _grown(before: Any, after: Any) -> Any:
    """How much counters grew: each field of an object, the difference of whole numbers, and None for all else."""
    if isinstance(after, dict):
        old = before if isinstance(before, dict) else {}
        grown = {name: _grown(old.get(name), value) for name, value in after.items()}
        return {name: value for name, value in grown.items() if value is not None}
    if isinstance(after, int) and not isinstance(after, bool):
        return after - (before if isinstance(before, int) else 0)
    return None
