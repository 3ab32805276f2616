"""Runs a suite on a backend, batch by batch in the order of its tasks, and writes each trial to the run's file."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.foundation.shards import WHOLE, Shard
from ling3export.runners.engine.follower import check_digests
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.evals.backend import EvalBackend, PromptRequest, PromptResult
from ling3export.runners.evals.harness import graded
from ling3export.runners.evals.run_file import Header, Run, RunFile, SuiteRecord, open_run, tasks_digest
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.trials import (
    INFRA_ERROR,
    REFUSED,
    EvalError,
    InfraError,
    Outcome,
    Pair,
    RunConfig,
    Transcript,
    Trial,
    trial_seed,
)


def run_suite(
    suite: Suite,
    backend: EvalBackend,
    path: Path,
    config: RunConfig,
    *,
    shard: Shard = WHOLE,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Runs a suite, or continues an earlier run with the same header. On several hosts, host 0 calls it.

    Args:
        shard: Every N-th batch; batches stay whole, because the company of a trial can decide the last bits of its
            logits. The returned run has the trials of the shard.
        progress: Called with the numbers of finished and of all trials, as trials end.

    Raises:
        EvalError: The suite is empty, or the file is that of another run.
        GraderError: A grader failed; the run can be continued.
        RankDivergence: Hosts sampled different tokens; no trial of that batch is kept.
        EngineStopped: The engine ended; the run can be continued.
        Ling3Error: Every prompt of the first batch was refused.
    """
    if not suite.tasks:
        raise EvalError(f"suite `{suite.name}`: it has no task")
    config = replace(config, **suite.settings)
    tasks = [task.record() for task in suite.tasks]
    record = SuiteRecord(suite.name, len(tasks), suite.files, list(suite.notes), tasks_digest(tasks))
    header = Header(1, record, config, backend.environment(), str(shard))
    pairs = header.pairs(tasks)
    batches = [pairs[start : start + config.batch] for start in range(0, len(pairs), config.batch)]
    batches = batches[shard.index :: shard.count]
    mine = [pair for batch in batches for pair in batch]
    with open_run(path, header, tasks, force=force) as file:
        todo = [[pair for pair in batch if pair not in file.done] for batch in batches]
        runner = _Runner(suite, backend, config, file, lambda done: progress(min(done, len(mine)), len(mine)))
        try:
            runner.run([batch for batch in todo if batch])
        except EngineStopped as error:
            kept = f"{len(file.done)} of {len(mine)} trials are kept: the same command goes on from there"
            raise EngineStopped(error.message, kept) from error
        return Run(header, tasks, [file.done[pair] for pair in mine])


class _Runner:
    """Runs batches of trials, and writes them."""

    def __init__(
        self, suite: Suite, backend: EvalBackend, config: RunConfig, file: RunFile, progress: Callable[[int], None]
    ) -> None:
        self._suite, self._backend, self._config, self._file, self._progress = suite, backend, config, file, progress
        self._tasks = {task.id: task for task in suite.tasks}
        self._ended = 0  # trials of the current batch; one that is tried again counts once more

    def trial_ended(self) -> None:
        """Counts a trial of the current batch."""
        self._ended += 1
        self._progress(len(self._file.done) + self._ended)

    def run(self, batches: Sequence[Sequence[Pair]]) -> None:
        self._backend.ended = self.trial_ended
        results = self._backend.answers((self._requests(batch) for batch in batches), self._config.retry)
        for batch in batches:
            self._write(batch, next(results))
            self._ended = 0
            self._progress(len(self._file.done))

    def _requests(self, batch: Sequence[Pair]) -> list[PromptRequest]:
        config = self._config
        return [
            PromptRequest(
                f"task `{name}`",
                self._tasks[name].prompt,
                config.max_tokens,
                config.sampling(trial_seed(config.seed, name, number)),
                config.stop,
            )
            for name, number in batch
        ]

    def _write(self, batch: Sequence[Pair], results: Sequence[PromptResult]) -> None:
        refusals = [result.outcome for result in results if isinstance(result.outcome, Ling3Error)]
        if not self._file.done and refusals and all(isinstance(result.outcome, Exception) for result in results):
            raise refusals[-1]  # all trials of the first batch were refused: the set-up is wrong
        check_digests(self._backend.digests())
        for pair, result in zip(batch, results, strict=True):
            attempts, answer = result.attempts, result.outcome
            if isinstance(answer, RequestError):
                trial = Trial(*pair, REFUSED, False, attempts=(*attempts, InfraError(REFUSED, answer.message)))
            elif isinstance(answer, Exception):
                trial = Trial(*pair, INFRA_ERROR, attempts=attempts)
            else:
                task = self._tasks[pair[0]]
                outcome = Outcome({"text": answer.text or ""})
                details = self._config.transcripts
                trial = graded(task, pair[1], Transcript.of(answer), outcome, attempts, details=details)
            self._file.add(trial)
