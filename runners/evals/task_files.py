"""Task files: YAML or JSON, one task or many. An error names the field and its line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ling3export.foundation.strict_json import parse_json
from ling3export.runners.evals.graders import grade
from ling3export.runners.evals.tasks import Predicates, Task
from ling3export.runners.evals.trials import EvalError, Outcome, Transcript

FieldPath = tuple[int | str, ...]  # names and indices that lead from a document's root to a field
YAML = (".yaml", ".yml")
MOST_VALUES = 1_000_000  # of a document in YAML, once its aliases are written out
LARGEST = 1 << 30  # bytes of a document in JSON: a data set may be one
PROBLEM_FIELDS = ("answer", "id", "prompt", "question", "target")


def load_tasks(path: str | Path, predicates: Predicates | None = None) -> list[Task]:
    """The tasks of a file: ``task:`` with one task, ``tasks:`` with a list, a list, or problems with prompts.

    Problems are ``{"prompt" | "question": …, "answer" | "target": …}``, in a list or in ``{"data": […]}``. Prompts
    are used verbatim, and answers are graded by the last number.

    Args:
        predicates: State checks call them by name: ``{"database": lambda arguments, outcome: …}``.

    Raises:
        EvalError: The file cannot be read, holds no task, or a field is wrong.
    """
    path = Path(path)
    text = _text(path)
    tasks: list[Task] = []
    for value, place in _items(_yaml(text, path) if path.suffix in YAML else _json(text, path)):
        try:
            if isinstance(value, dict) and "input" not in value and value.keys() & {"prompt", "question"}:
                value = _problem(value, f"{path.stem}-{len(tasks)}")
            if isinstance(value, dict) and value.get("suite") is None:
                value = {**value, "suite": path.stem}
            task = Task.model_validate(value, context={"predicates": predicates})
        except ValidationError as error:
            first = error.errors()[0]
            value = "" if isinstance(first["input"], (dict, list)) else f", found {first['input']!r}"
            message = first["msg"].removeprefix("Value error, ")
            name = next((part for part in reversed(first["loc"]) if isinstance(part, str)), "task")
            where = f"in {path.name} line {line_of(text, (*place, *first['loc']))}"
            raise EvalError(f"`{name}`: {message}{value}, {where}") from None
        except ValueError as error:
            raise EvalError(f"{error}, in {path.name} line {line_of(text, place)}") from None
        if not task.graders:
            where = f"in {path.name} line {line_of(text, place)}"
            raise EvalError(f"task `{task.id}`: it has no grader, {where}", "add graders: or expected_outcome:")
        tasks.append(task)
    if not tasks:
        raise EvalError(f"task file `{path.name}`: it has no task, in {path.parent}")
    check_unique(tasks, path.name)
    return tasks


def check_unique(tasks: list[Task], where: str) -> None:
    """Raises EvalError if two tasks have one id."""
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise EvalError(f"task id `{task.id}`: two tasks have it, in {where}")
        seen.add(task.id)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON file (a list, or ``{"data": […]}``), or of JSON lines."""
    text, records = _text(path), None
    if path.suffix == ".jsonl":
        records = [_json(line, path) for line in text.split("\n") if line.strip()]
    else:
        records = _json(text, path)
    if isinstance(records, dict) and set(records) == {"data"}:
        records = records["data"]
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise EvalError(f"file `{path.name}`: it is no list of objects, in {path.parent}")
    return records


def check_tasks(tasks: Sequence[Task]) -> list[str]:
    """The mistakes of tasks: each must be passed by its reference solution, and not by an empty answer."""
    mistakes = []
    for task in tasks:
        if task.reference_solution is None:
            mistakes.append(f"task `{task.id}`: it has no reference_solution, so nothing shows that it can be solved")
            continue
        failed = _failed(task, task.reference_solution)
        mistakes += [f"task `{task.id}`: its reference solution fails {text}" for text in failed]
        if not _failed(task, ""):
            mistakes.append(f"task `{task.id}`: an empty answer passes, so it grades nothing")
    return mistakes


def _failed(task: Task, text: str) -> list[str]:
    """The required graders that an answer does not pass."""
    grades, _ = grade(task, Transcript(text), Outcome({"text": text}))
    return [f"{result.name} ({result.explanation})" for result in grades if result.required and not result.passed]


def _problem(value: dict[str, Any], name: str) -> dict[str, Any]:
    """A problem with its prompt, as the JSON of a task that is graded by the last number."""
    if unknown := [field for field in value if field not in PROBLEM_FIELDS]:
        raise ValueError(f"problem: `{unknown[0]}` is none of {', '.join(PROBLEM_FIELDS)}")
    answers = [value[key] for key in ("answer", "target") if key in value]
    if len(answers) != 1 or ("prompt" in value) == ("question" in value):
        raise ValueError(f"problem: give prompt or question, and answer or target; there is {', '.join(value)}")
    target = answers[0]
    if isinstance(target, (int, float)) and not isinstance(target, bool):
        target = str(target)
    prompt = value.get("prompt", value.get("question"))
    identity = str(value.get("id", name))
    return {"id": identity, "input": {"prompt": prompt}, "target": target, "graders": ["last_numeric"]}


def _items(document: Any) -> Iterator[tuple[Any, FieldPath]]:
    """The tasks of a document, each with its path."""
    key: FieldPath = ()
    if isinstance(document, dict) and len(document) == 1:
        (name,) = document
        if name in ("task", "tasks", "data"):
            document, key = document[name], (name,)
    if isinstance(document, list) and key != ("task",):
        yield from ((value, (*key, place)) for place, value in enumerate(document))
    elif document is not None:
        yield document, key


def line_of(text: str, field: FieldPath) -> int:
    """The line of a field in a YAML or JSON document; that of the last part of its path that is there."""
    try:
        node, line = yaml.compose(text.replace("\t", " "), yaml.SafeLoader), 1
    except (yaml.YAMLError, RecursionError):
        return 1
    for part in field:
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == str(part)]
            if not pairs:
                break
            line, node = pairs[-1][0].start_mark.line + 1, pairs[-1][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvalError(f"file `{path.name}`: it cannot be read: {error.strerror}, in {path.parent}") from error
    except UnicodeDecodeError as error:
        raise EvalError(f"file `{path.name}`: it is not UTF-8: {error}, in {path.parent}") from error


def _yaml(text: str, path: Path) -> Any:
    try:
        document = yaml.safe_load(text)
        _check_size(document)
        return parse_json(json.dumps(document, default=str).encode(), LARGEST)  # dates become texts
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise EvalError(f"file `{path.name}`: it is not YAML: {reason}, in {path.parent}") from None


def _json(text: str, path: Path) -> Any:
    try:
        return parse_json(text.encode(), LARGEST)
    except ValueError as error:
        raise EvalError(f"file `{path.name}`: it is not JSON: {error}, in {path.parent}") from error


def _check_size(document: object) -> None:
    """Raises ValueError if aliases of YAML stand for more than MOST_VALUES."""
    count, waiting = 0, [document]
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
