"""Runs a suite on a backend, batch by batch in the order of its tasks, and leaves a folder that tells all about it."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.records import sha256_of
from ling3export.errors import Ling3Error, RankDivergence
from ling3export.runners.engine.follower import check_digests
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.engine.request import Completion
from ling3export.runners.evals.backend import Ask, Backend
from ling3export.runners.evals.folder import Prediction, RunFolder, RunRecord, open_folder
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


@dataclass(frozen=True)
class Item:
    """A trial to be run: the task's place in the suite, the task, and the number of the try."""

    place: int
    task: Task
    trial: int


def run_suite(
    suite: Suite, backend: Backend, folder: Path, config: RunConfig, *, force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:  # fmt: skip
    """Runs a suite, or goes on where an earlier run with the same record ended. On several hosts, host 0 calls it.

    Args:
        suite: A suite with at least one task.
        backend: Answers the prompts.
        folder: Where the run is written.
        config: The run's settings.
        force: Begin anew, whatever run is in the folder.
        progress: Called with the numbers of finished and of all trials.

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
    items = [Item(p, task, trial) for p, task in enumerate(suite.tasks) for trial in range(config.trials)]
    run = RunRecord.of(_suite_record(suite), config, backend.environment())
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
        thresholds = {task.id: task.threshold if config.threshold is None else config.threshold for task in suite.tasks}
        summary = Summary([(record.task_id, record.passed) for record in records], thresholds)
        totals = {**summary.record(), "invalid": summary.invalid(config.max_infra)}
        run = replace(run, totals=totals, status="complete")
        opened.finish(run, report(run, records, summary, suite.tasks))
    return summary


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
        completions, refusal = _complete(self._backend, asks, trials, self._config.retry)
        if not self._worked and refusal is not None and not any(completions):
            raise refusal  # all trials of the first batch were refused: that is no accident, but a wrong set-up
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
            self._folder.add(Prediction.of(item.place, item.task, trial))

    def ask(self, item: Item, trial: Trial) -> Ask:
        config = self._config
        sampling = config.sampling(trial.seed)
        return Ask(f"task `{item.task.id}`", item.task.prompt, config.max_tokens, sampling, config.stop)

    def outcome(self, task: Task, completion: Completion, before: dict[str, Any], after: dict[str, Any]) -> Outcome:
        text = completion.text or ""
        extracted = extract_answer(text) if task.choices is None else choice_letter(text, len(task.choices))
        state = {"text": text, "extracted": extracted, "tokens_digest": tokens_digest(completion.token_ids)}
        if self._suite.product:
            folder = self._folder
            output = len(completion.token_ids)
            state |= _product_state(before, after, folder.path, len(folder.done), output)
        return Outcome(state)

    def write_transcript(self, item: Item, trial: Trial) -> None:
        folder = self._folder.path / "transcripts"
        folder.mkdir(exist_ok=True)
        path = folder / f"{item.place}-{item.trial}.json"
        path.write_text(json.dumps(trial.record(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _complete(
    backend: Backend, asks: Sequence[Ask], trials: Sequence[Trial], retry: int
) -> tuple[list[Completion | None], Ling3Error | None]:
    """Completes a batch. After an error it tries the halves, down to the trials that are at fault, each alone.

    Returns:
        For each trial its completion or None; and the last refusal that has a message for the user, if there was one.
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
    """Tries the halves of a batch that failed: for each trial its completion or None, and the last error."""
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
    """The transcript of a completion."""
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


def _product_state(
    before: dict[str, Any], after: dict[str, Any], folder: Path, records: int, output: int
) -> dict[str, Any]:
    """The state that a trial left behind, for suites whose graders look at the product.

    Args:
        before: The backend's counters before the trial.
        after: The backend's counters after it.
        folder: The run's folder.
        records: Number of records that the run has written so far.
        output: Number of tokens that came back.
    """
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    files = {name: {"bytes": len(data), "lines": data.count(b"\n")} for name, data in contents.items()}
    return {"counters": after, "delta": _grown(before, after), "files": files, "records": records, "output": output}


def _grown(before: Any, after: Any) -> Any:
    """How much counters grew: each field of an object, the difference of whole numbers, and None for all else."""
    if isinstance(after, dict):
        old = before if isinstance(before, dict) else {}
        grown = {name: _grown(old.get(name), value) for name, value in after.items()}
        return {name: value for name, value in grown.items() if value is not None}
    if isinstance(after, int) and not isinstance(after, bool):
        return after - (before if isinstance(before, int) else 0)
    return None
