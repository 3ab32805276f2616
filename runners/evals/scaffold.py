"""The loop of test-driven work on a task: a scaffold to fill in, and the proof that a task can be solved and failed."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ling3export.runners.evals.files import YAML
from ling3export.runners.evals.graders import grade
from ling3export.runners.evals.objects import EvalError, Outcome, Transcript
from ling3export.runners.evals.tasks import Task

YAML_TEXT = """\
task:
  id: {name}
  category: ""
  input:
    prompt: "Question: How many legs do 3 cats have?\\nAnswer:"
  target: "12"
  graders:  # last_numeric, choice_letter, exact, regex, response_contains, state_check, transcript_constraints, …
    - kind: last_numeric
  grading:
    threshold: 1.0  # share of the trials that must pass
  reference_solution: "3 cats have 3 * 4 = 12 legs."
"""


def new_task(path: Path, *, force: bool = False) -> None:
    """Writes a task that ``check`` accepts, to be changed: YAML or JSON by the name of the file.

    Raises:
        EvalError: The file is there, or its name says neither.
    """
    if path.suffix not in (*YAML, ".json"):
        raise EvalError(f"task file `{path.name}`: expected a name that ends in .yaml, .yml or .json")
    if not path.parent.is_dir():
        raise EvalError(f"task file `{path.name}`: expected an existing folder, found none, at {path.parent}")
    text = YAML_TEXT.format(name=json.dumps(path.stem))
    if path.suffix == ".json":
        text = json.dumps({"task": _template(path.stem)}, ensure_ascii=False, indent=2) + "\n"
    try:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
        with open(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        hint = "choose another name, or replace it with --force"
        raise EvalError(f"task file `{path.name}`: expected no such file, found one, in {path.parent}", hint) from error


def check_tasks(tasks: Sequence[Task]) -> list[str]:
    """What is wrong with tasks: each must be passed by its reference solution, and not by an empty answer.

    Raises:
        GraderError: A grader failed.
    """
    wrong = []
    for task in tasks:
        if task.reference_solution is None:
            wrong.append(f"task `{task.id}`: expected a reference_solution, found none: nothing shows it can be solved")
            continue
        failed = _failed(task, task.reference_solution)
        wrong += [f"task `{task.id}`: expected its reference solution to pass, found: {text}" for text in failed]
        if not _failed(task, ""):
            wrong.append(f"task `{task.id}`: expected an empty answer to fail, found that it passes: it grades nothing")
    return wrong


def _failed(task: Task, text: str) -> list[str]:
    """Required graders that an answer does not pass."""
    grades, _, _ = grade(task, Transcript(text), Outcome({"text": text}))
    return [f"{item.name} ({item.explanation})" for item in grades if item.required and not item.passed]


def _template(name: str) -> dict[str, object]:
    return {
        "id": name,
        "input": {"prompt": "Question: How many legs do 3 cats have?\nAnswer:"},
        "target": "12",
        "graders": [{"kind": "last_numeric"}],
        "grading": {"threshold": 1.0},
        "reference_solution": "3 cats have 3 * 4 = 12 legs.",
    }
