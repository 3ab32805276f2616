"""The minimal harness with a user's own agents: the specification's snippet, infrastructure errors, broken graders."""

import asyncio

import pytest

from ling3export.foundation.errors import RankDivergence
from ling3export.runners.evals.graders import GraderSpec
from ling3export.runners.evals.harness import MinimalEvalHarness
from ling3export.runners.evals.tasks import Task
from ling3export.runners.evals.trials import (
    EvalError,
    GraderError,
    InfraError,
    Outcome,
    Transcript,
    TranscriptStep,
    trial_seed,
)

HAS_OK = GraderSpec("response_contains", arguments={"value": "ok"})


def run(agent, *tasks, **settings):
    return asyncio.run(MinimalEvalHarness(agent, **settings).run_suite(tasks))


@pytest.mark.parametrize("transcript", [Transcript("Hi there"), "Hi there"])
def test_snippet_of_the_specification(transcript):
    """The specification's snippet verbatim; the transcript may be a plain string."""
    outcome = Outcome({"text": "Hi there"})

    async def main():
        async def my_agent(input, env):
            return transcript, outcome

        task = Task(
            id="test-001",
            input={"message": "Hello"},
            expected_outcome={"response_contains": "Hi"},
            grader=lambda t, trans, out: {"passed": "Hi" in trans},
        )
        return await MinimalEvalHarness(my_agent, n_trials=5).run_suite([task])

    summary = asyncio.run(main())
    assert (summary.passed, summary.total, summary.infra) == (5, 5, 0)
    assert [rate.hat_k for rate in summary.rates(5)] == [1.0, 1.0, 1.0]


def test_agent_sees_input_and_a_seed_of_its_own():
    seen = []

    async def agent(input, env):
        seen.append((input, env))
        return "42", {}

    run(agent, Task(id="a", input={"prompt": "?"}, target="42", graders=[GraderSpec("last_numeric")]), n_trials=2)
    assert [input for input, _ in seen] == [{"prompt": "?"}] * 2
    assert [env for _, env in seen] == [{"task_id": "a", "trial": n, "seed": trial_seed(0, "a", n)} for n in range(2)]
    assert trial_seed(0, "a", 0) != trial_seed(0, "a", 1) != trial_seed(1, "a", 1)
    assert trial_seed(7, "gsm8k-0", 3) == 3678809806  # sha256("7|gsm8k-0|3")


def test_errors_of_the_agent_are_tried_again_and_kept():
    calls = []

    async def agent(input, env):
        calls.append(env["task_id"])
        if env["task_id"] == "bad" or calls.count("late") == 1:
            raise MemoryError("RESOURCE_EXHAUSTED: 3 GiB")
        return "ok", {}

    tasks = [Task(id=name, input={"prompt": "?"}, graders=[HAS_OK]) for name in ("late", "bad")]
    summary = run(agent, *tasks, n_trials=1)
    late, bad = summary.trials
    assert (late.status, late.passed, len(late.attempts)) == ("ok", True, 1)
    assert (bad.status, bad.passed, bad.infra.kind, len(bad.attempts)) == ("infra_error", None, "oom", 2)
    assert summary.adjusted_success_rate == 1.0
    assert summary.success_rate == 0.5


def test_a_slow_agent_is_a_timeout():
    async def agent(input, env):
        await asyncio.sleep(60)

    summary = run(agent, Task(id="a", input={"prompt": "?"}, graders=[HAS_OK]), n_trials=1, timeout=0.01)
    assert summary.trials[0].infra.kind == "timeout"


def test_broken_graders_fail_the_run():
    async def agent(input, env):
        return "text", {}

    def raises(task, transcript, outcome):
        return 1 / 0

    with pytest.raises(GraderError, match="grader `raises` of task `a`: expected a verdict, found ZeroDivisionError"):
        run(agent, Task(id="a", input={"prompt": "?"}, grader=raises))
    with pytest.raises(GraderError, match=r"grader `<lambda>` of task `a`: expected {\"passed\": bool, …}, found None"):
        run(agent, Task(id="a", input={"prompt": "?"}, grader=lambda *_: None))
    with pytest.raises(GraderError, match="task `a`: it has no grader"):
        run(agent, Task(id="a", input={"prompt": "?"}))

    async def no_pair(input, env):
        return "text"

    with pytest.raises(GraderError, match=r"agent: it returned 'text', not \(transcript, outcome\), for task `a`"):
        run(no_pair, Task(id="a", input={"prompt": "?"}, grader=lambda *_: {"passed": True}))
    with pytest.raises(EvalError, match="n_trials: 0 is less than 1"):
        MinimalEvalHarness(agent, 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "oom"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"), "oom"),
        (TimeoutError(), "timeout"),
        (RuntimeError("DEADLINE_EXCEEDED: barrier"), "timeout"),
        (RuntimeError("UNAVAILABLE: connection reset"), "device_lost"),
        (RuntimeError("tokenizer.json: bad merge"), "tokenizer_error"),
        (FloatingPointError("nan"), "nan_logits"),
        (RankDivergence("ids"), "rank_divergence"),
        (ValueError("what"), "unknown"),
    ],
)
def test_classes_of_infrastructure_errors(error, kind):
    assert InfraError.of(error).kind == kind


def test_all_required_graders_decide():
    steps = Transcript(
        "text", steps=[TranscriptStep(0, "tool", name="verify"), TranscriptStep(1, "tool", name="refund")]
    )

    async def agent(input, env):
        return steps, Outcome({"rows": [{"status": "open"}]})

    graders = [
        lambda *_: {"passed": False, "score": 0.5},
        GraderSpec("steps_required", arguments={"steps": ["refund", "verify"]}),
        lambda task, transcript, outcome: {"passed": outcome.state["rows"][0]["status"] == "open"},
    ]
    task = Task(id="a", input={"prompt": "?"}, graders=graders)
    trial = run(agent, task, n_trials=1).trials[0]
    assert [(grade.name, grade.score) for grade in trial.grades] == [
        ("<lambda>", 0.5),
        ("steps_required", 1.0),
        ("<lambda>", 1.0),
    ]
    assert trial.passed is False
    task.graders[0] = GraderSpec("callable", "optional", {}, task.graders[0].function, required=False)
    assert run(agent, task, n_trials=1).trials[0].passed is True
    task.graders[1] = GraderSpec("steps_required", arguments={"steps": ["refund", "verify"], "ordered": True})
    assert run(agent, task, n_trials=1).trials[0].passed is False
