"""Runs a suite on a backend, batch by batch in the order of its tasks, and leaves a folder that tells all about it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.records import sha256_of
from ling3export.errors import Ling3Error, RankDivergence, RequestError
from ling3export.runners.engine.follower import check_digests
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.engine.request import Completion
from ling3export.runners.evals.backend import Ask, Backend
from ling3export.runners.evals.folder import Prediction, RunFolder, RunRecord, TaskRecord, open_folder
from ling3export.runners.evals.graders import choice_letter, extract_answer
from ling3export.runners.evals.harness import graded
from ling3export.runners.evals.report import report
from ling3export.runners.evals.statistics import Summary
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.tasks import Task
from ling3export.runners.evals.trials import (
    EvalError,
    InfraError,
    Outcome,
    RunConfig,
    Step,
    Transcript,
    Trial,
    tokens_digest,
    trial_seed,
)
from ling3export.shards import WHOLE, Shard


def run_suite(
    suite: Suite, backend: Backend, folder: Path, config: RunConfig, *, shard: Shard = WHOLE, force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:  # fmt: skip
    """Runs a suite, or goes on where an earlier run with the same record ended. On several hosts, host 0 calls it.

    Args:
        suite: A suite with at least one task.
        backend: Answers the prompts.
        folder: Where the run is written.
        config: The run's settings.
        shard: Which share of the batches is run.
        force: Begin anew, whatever run is in the folder.
        progress: Called with the numbers of finished and of all trials.

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
    run = RunRecord.of(_suite_record(suite), config, backend.environment(), shard)
    trials = [Trial(*pair, trial_seed(config.seed, *pair)) for pair in run.pairs([task.id for task in suite.tasks])]
    tasks = [task.record() for task in suite.tasks]
    with open_folder(folder, run, tasks, force=force) as opened:
        runner = _Runner(suite, backend, config, opened)
        try:
            for start in range(0, len(trials), config.batch):
                runner.run([each for each in trials[start : start + config.batch] if each.pair not in opened.done])
                if progress:
                    progress(len(opened.done), len(trials))
        except EngineStopped as error:
            kept = f"{len(opened.done)} of {len(trials)} trials are kept: the same command goes on from there"
            raise EngineStopped(error.message, kept) from error
        return concluded(opened, run, tasks)


def concluded(folder: RunFolder, run: RunRecord, tasks: Sequence[TaskRecord]) -> Summary:
    """Ends a run all of whose trials have a record; returns their totals. Those of a shard are written nowhere."""
    records = [folder.done[pair] for pair in run.pairs([task["id"] for task in tasks])]
    everywhere = run.config["threshold"]
    thresholds = {task["id"]: task["threshold"] if everywhere is None else everywhere for task in tasks}
    summary = Summary([(record.task_id, record.passed) for record in records], thresholds)
    run = replace(run, status="complete")
    if run.shard != str(WHOLE):
        folder.finish(run, None)
        return summary
    run = replace(run, totals={**summary.record(), "invalid": summary.invalid(run.config["max_infra"])})
    folder.finish(run, report(run, records, summary, tasks))
    return summary


class _Runner:
    """Runs batches of trials and writes their records."""

    def __init__(self, suite: Suite, backend: Backend, config: RunConfig, folder: RunFolder) -> None:
        self._suite = suite
        self._tasks = {task.id: (place, task) for place, task in enumerate(suite.tasks)}
        self._backend = backend
        self._config = config
        self._folder = folder
        self._worked = bool(folder.done)

    def run(self, trials: list[Trial]) -> None:
        if not trials:
            return
        before = self._counters()
        answers = self._answers(trials)
        refusals = [each for each in answers if isinstance(each, Ling3Error)]
        if not self._worked and refusals and all(isinstance(each, Exception) for each in answers):
            raise refusals[-1]  # all trials of the first batch were refused: that is no accident, but a wrong set-up
        self._worked = True
        check_digests(self._backend.digests())
        after = self._counters()
        for trial, answer in zip(trials, answers, strict=True):
            place, task = self._tasks[trial.task_id]
            if isinstance(answer, RequestError):
                trial.refuse(answer)
            elif isinstance(answer, Exception):
                trial.status = "infra_error"
            else:
                graded(trial, task, transcript_of(answer), self.outcome(task, answer, before, after))
            if self._config.transcripts:
                text = json.dumps(trial.record(), ensure_ascii=False, indent=1) + "\n"
                self._folder.keep_transcript(place, trial.trial, text.encode())
            self._folder.add(Prediction.of(place, task, trial))

    def _answers(self, trials: list[Trial]) -> Sequence[Completion | Exception]:
        """For each trial its completion, or the error that ended it. Prompts that are refused are left out first."""
        refused: dict[int, RequestError] = {}
        served: list[tuple[Ask, Trial]] = []
        for place, trial in enumerate(trials):
            ask = self.ask(trial)
            try:
                self._backend.check(ask)
                served.append((ask, trial))
            except RequestError as error:
                refused[place] = error
        done = iter(_answers(self._backend, served, self._config.retry) if served else ())
        return [refused[place] if place in refused else next(done) for place in range(len(trials))]

    def _counters(self) -> dict[str, Any]:
        return self._backend.stats() if self._suite.product else {}

    def ask(self, trial: Trial) -> Ask:
        task, config = self._tasks[trial.task_id][1], self._config
        return Ask(f"task `{task.id}`", task.prompt, config.max_tokens, config.sampling(trial.seed), config.stop)

    def outcome(self, task: Task, completion: Completion, before: dict[str, Any], after: dict[str, Any]) -> Outcome:
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


def _answers(backend: Backend, pairs: list[tuple[Ask, Trial]], retry: int) -> Sequence[Completion | Exception]:
    """Completes a batch. After an error it tries the halves, down to the trials that are at fault, each alone.

    Returns:
        For each trial its completion, or the error that ended it.
    """
    found = _attempt(backend, [ask for ask, _ in pairs])
    if not isinstance(found, Exception):
        return found
    if not isinstance(found, RequestError):  # then nothing was started, and it is said of one prompt alone
        for _, trial in pairs:
            trial.attempts.append(InfraError.of(found))
    # The failure of a batch says nothing yet about any one of its trials: each gets another attempt in any case.
    return _halved(backend, pairs, retry if len(pairs) == 1 else max(retry, 1), found)


def _halved(
    backend: Backend, pairs: list[tuple[Ask, Trial]], tries: int, error: Exception
) -> Sequence[Completion | Exception]:
    """Tries the halves of a batch that failed with ``error``; a trial alone is tried ``tries`` times."""
    found: Sequence[Completion] | Exception
    if len(pairs) == 1:
        ((ask, trial),) = pairs
        for _ in range(tries):
            found = _attempt(backend, [ask])
            if not isinstance(found, Exception):
                return found
            error = found
            if isinstance(error, RequestError):
                break
            trial.attempts.append(InfraError.of(error))
        return [error]
    answers: list[Completion | Exception] = []
    for half in (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]):
        found = error if len(half) == 1 else _attempt(backend, [ask for ask, _ in half])
        answers += _halved(backend, half, tries, found) if isinstance(found, Exception) else found
    return answers


def _attempt(backend: Backend, asks: Sequence[Ask]) -> list[Completion] | Exception:
    """The completions of a batch, or the error that it ended with, unless that ends the run."""
    try:
        done = backend.generate(asks)
    except (RankDivergence, EngineStopped):
        raise
    except Exception as error:
        return error
    if len(done) != len(asks):
        raise EvalError(f"backend: expected {len(asks)} completions, found {len(done)}")
    return done


def transcript_of(completion: Completion) -> Transcript:
    """The transcript of a completion."""
    return Transcript(
        completion.text or "", list(completion.prompt_ids), list(completion.token_ids), completion.stop_reason,
        [Step(step.t_ms, step.kind, step.padding, step.tokens) for step in completion.steps],
        ttft_ms=completion.ttft_ms, e2e_ms=completion.e2e_ms,
    )  # fmt: skip


def _suite_record(suite: Suite) -> dict[str, Any]:
    return {
        "name": suite.name, "tasks": len(suite.tasks), "files": suite.files, "notes": list(suite.notes),
        "reference": suite.reference, "tasks_sha256": sha256_of([task.record() for task in suite.tasks]),
    }  # fmt: skip


def _grown(before: Any, after: Any) -> Any:
    """How much counters grew: each field of an object, the difference of whole numbers, and None for all else."""
    if isinstance(after, dict):
        old = before if isinstance(before, dict) else {}
        grown = {name: _grown(old.get(name), value) for name, value in after.items()}
        return {name: value for name, value in grown.items() if value is not None}
    if isinstance(after, int) and not isinstance(after, bool):
        return after - (before if isinstance(before, int) else 0)
    return None
