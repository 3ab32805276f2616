"""Backends and agents for the evaluation tests, without jax or an artifact. The program is a run to be killed."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ling3export.runners.engine.request import Completion
from ling3export.runners.evals.backend import EngineBackend, PromptRequest
from ling3export.runners.evals.graders import GraderSpec
from ling3export.runners.evals.run import run_suite
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.tasks import Task
from ling3export.runners.evals.trials import RunConfig

NUMERIC = GraderSpec("last_numeric")
ENVIRONMENT = {
    "artifact": "a" * 64,
    "weights": "b" * 64,
    "target": "fake",
    "tp": 16,
    "dtype": "bfloat16",
    "overlap": False,
    "paddings": [16, 128, 512],
    "page_size": 256,
    "max_running": 4,
    "memory_fraction": None,
}


class FakeBackend(EngineBackend):
    """Answers a prompt with a function; tokens are the text's code points, times are constant.

    Args:
        answer: Returns the answer to a prompt's text; an exception of it is raised for the whole batch.
        stop_reason: The stop reason of every completion.
        delay: Seconds for each batch.
    """

    def __init__(self, answer: Callable[[Any], str], stop_reason: str = "eos", delay: float = 0.0) -> None:
        self.answer = answer
        self.stop_reason = stop_reason
        self.delay = delay
        self.batches: list[list[PromptRequest]] = []

    def check(self, prompt: PromptRequest) -> None:
        pass

    def generate(self, prompts: Sequence[PromptRequest]) -> list[Completion]:
        self.batches.append(list(prompts))
        time.sleep(self.delay)
        return [self.complete(prompt) for prompt in prompts]

    def complete(self, ask: PromptRequest) -> Completion:
        shown = ask.prompt if isinstance(ask.prompt, str) else "".join(map(chr, ask.prompt))
        text, prompt = self.answer(shown), [ord(c) for c in shown]
        return Completion(prompt, [ord(c) for c in text][: ask.max_tokens], text, self.stop_reason, 10.0, 20.0)

    def digests(self) -> list[bytes]:
        return []

    def environment(self) -> dict[str, Any]:
        return dict(ENVIRONMENT)

    def __enter__(self) -> "FakeBackend":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def numbered(count: int, **fields: Any) -> list[Task]:
    """Tasks ``t0``, ``t1``, … with the prompts ``0``, ``1``, … and the answer 42."""
    common = {"target": "42", "graders": [NUMERIC], **fields}
    return [Task.model_validate({"id": f"t{n}", "input": {"prompt": str(n)}, **common}) for n in range(count)]


def half(prompt: str) -> str:
    """Answers 42 to even prompts, 41 to odd ones."""
    number = re.match(r"\d+", prompt)
    assert number, prompt
    return f"The answer is {42 if int(number.group()) % 2 == 0 else 41}."


def main() -> None:
    """``eval_fakes.py RUN DELAY`` runs 40 tasks in batches of one, slowly enough to be killed."""
    backend = FakeBackend(half, delay=float(sys.argv[2]))
    run_suite(Suite("slow", numbered(40)), backend, Path(sys.argv[1]), RunConfig(batch=1))


if __name__ == "__main__":
    main()
