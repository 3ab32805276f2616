"""The smallest harness, for use from Python: tasks go through an agent, which is any coroutine function."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ling3export.foundation.errors import RequestError
from ling3export.runners.evals.graders import grade
from ling3export.runners.evals.statistics import Summary
from ling3export.runners.evals.tasks import Task
from ling3export.runners.evals.trials import (
    INFRA_ERROR,
    OK,
    REFUSED,
    EvalError,
    GraderError,
    InfraError,
    Transcript,
    Trial,
    text_of,
    trial_seed,
)

Agent = Callable[[dict[str, Any], dict[str, Any]], Awaitable[tuple[Any, Any]]]


class MinimalEvalHarness:
    """Runs tasks through an agent, one trial after the other, in order.

    Args:
        agent: ``async (input, env) -> (transcript, outcome)``; ``env`` has task_id, trial and seed. An exception of the
            agent is an infrastructure error, not an answer.
        retry: Further attempts at a trial after an infrastructure error.
        timeout: Seconds that one attempt may take; None for any time.
    """

    def __init__(
        self, agent: Agent, n_trials: int = 5, *, seed: int = 0, retry: int = 1, timeout: float | None = None
    ) -> None:
        if n_trials < 1:
            raise EvalError(f"n_trials: {n_trials} is less than 1")
        self.agent, self.n_trials, self.seed, self.retry, self.timeout = agent, n_trials, seed, retry, timeout

    async def run_suite(self, tasks: Sequence[Task]) -> Summary:
        """Runs every task ``n_trials`` times. Raises GraderError: a grader failed, or the agent returned no pair."""
        trials = [await self.run_trial(task, number) for task in tasks for number in range(self.n_trials)]
        return Summary(trials, {task.id: task.threshold for task in tasks})

    async def run_trial(self, task: Task, number: int) -> Trial:
        """Runs one trial, and again after an infrastructure error."""
        env = {"task_id": task.id, "trial": number, "seed": trial_seed(self.seed, task.id, number)}
        errors: list[InfraError] = []
        for _ in range(1 + self.retry):
            try:
                answer = await asyncio.wait_for(self.agent(task.input.record(), env), self.timeout)
            except RequestError as error:
                return Trial(task.id, number, REFUSED, False, attempts=(*errors, InfraError(REFUSED, error.message)))
            except Exception as error:
                errors.append(InfraError.of(error))
                continue
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise GraderError(f"agent: it returned {answer!r}, not (transcript, outcome), for task `{task.id}`")
            return graded(task, number, *answer, tuple(errors))
        return Trial(task.id, number, INFRA_ERROR, attempts=tuple(errors))


def graded(
    task: Task, number: int, transcript: Any, outcome: Any, attempts: tuple[InfraError, ...], *, details: bool = False
) -> Trial:
    """The trial of an answer. Details need an Outcome; otherwise both may be the agent's own objects."""
    grades, passed = grade(task, transcript, outcome)
    seen = transcript if isinstance(transcript, Transcript) else Transcript(text_of(transcript))
    kept = (
        {"prompt_token_ids": seen.prompt_token_ids, "steps": seen.steps, "outcome": outcome.state} if details else None
    )
    return Trial(
        task.id,
        number,
        OK,
        passed,
        next((item.answer for item in grades if item.answer is not None), None),
        seen.text,
        tuple(seen.output_token_ids),
        seen.stop_reason,
        len(seen.prompt_token_ids),
        seen.ttft_ms,
        seen.e2e_ms,
        attempts,
        tuple(grades),
        kept,
    )
