"""Task files: YAML or JSON, one task or many; every mistake is named with its line. Also the loop of writing a task.

``new_task`` writes a task to be changed; ``check_tasks`` proves that tasks can be solved, and failed.
"""

import json
import re
from bisect import bisect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import replace_file
from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.extras import install
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.evals.graders import KINDS, grade
from ling3export.runners.evals.tasks import FieldError, FieldPath, Predicates, Task, check_keys, task_from
from ling3export.runners.evals.trials import EvalError, Outcome, Transcript

YAML = (".yaml", ".yml")
MOST_VALUES = 1_000_000  # of a document in YAML, once its aliases are written out
LARGEST = 1 << 30  # bytes of a document in JSON: a data set may be one
PROBLEM_FIELDS = ("answer", "id", "prompt", "question", "target")
TEMPLATE = {
    "input": {"prompt": "Question: How many legs do 3 cats have?\nAnswer:"},
    "target": "12",
    "graders": ["last_numeric"],
    "grading": {"threshold": 1.0},
    "reference_solution": "3 cats have 3 * 4 = 12 legs.",
}
COMMENTS = {"graders": f"  # of {', '.join(KINDS)}", "grading": "  # share of the trials that must pass"}
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^\s{}\[\],:"]+')
LineOf = Callable[[FieldPath], int]


def load_tasks(path: str | Path, predicates: Predicates | None = None) -> list[Task]:
    """The tasks of a file: ``task:`` with one task, ``tasks:`` with a list, a list, or problems with prompts.

    Problems are ``{"prompt" | "question": …, "answer" | "target": …}``, in a list or in ``{"data": […]}``. Prompts
    are used verbatim, and answers are graded by the last number.

    Args:
        path: YAML needs the extra ``eval``.
        predicates: What state checks call by name.

    Raises:
        EvalError: The file cannot be read, holds no task, or a field is wrong.
    """
    path = Path(path)
    text = _text(path)
    document, line_of = _yaml(text, path) if path.suffix in YAML else _json(text, path)
    tasks: list[Task] = []
    for value, field in _items(document):
        try:
            if isinstance(value, dict) and "input" not in value and value.keys() & {"prompt", "question"}:
                value = _problem(value, f"{path.stem}-{len(tasks)}")
            tasks.append(task_from(value, path.stem, predicates))
        except FieldError as error:
            line = line_of((*field, *error.path))
            raise EvalError(f"{error.what}, in {path.name} line {line}", error.hint) from None
    if not tasks:
        raise EvalError(f"task file `{path.name}`: expected at least one task, found none, in {path.parent}")
    check_unique(tasks, path.name)
    return tasks


def check_unique(tasks: list[Task], where: str) -> None:
    """Refuses two tasks with one id.

    Raises:
        EvalError: There are two such tasks.
    """
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise EvalError(f"task id `{task.id}`: expected it once, found it again, in {where}")
        seen.add(task.id)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON file (a list, or ``{"data": […]}``), or of JSON lines.

    Raises:
        EvalError: The file is something else.
    """
    text, records = _text(path), None
    try:
        if path.suffix == ".jsonl":
            records = [parse_json(line.encode()) for line in text.split("\n") if line.strip()]
        else:
            records = parse_json(text.encode(), LARGEST)
    except ValueError as error:
        raise _refused(path, "JSON", error) from error
    if isinstance(records, dict) and set(records) == {"data"}:
        records = records["data"]
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise _refused(path, "a list of objects", "something else")
    return records


def new_task(path: Path, *, force: bool = False) -> None:
    """Writes a task that ``check_tasks`` accepts, to be changed: YAML or JSON by the file's name.

    Raises:
        EvalError: The file exists, or its name says neither.
    """
    if path.suffix not in (*YAML, ".json"):
        raise EvalError(f"task file `{path.name}`: expected a name that ends in .yaml, .yml or .json")
    if not path.parent.is_dir():
        raise EvalError(f"task file `{path.name}`: expected an existing folder, found none, at {path.parent}")
    task = {"id": path.stem, **TEMPLATE}
    if path.suffix == ".json":
        text = json.dumps({"task": task}, ensure_ascii=False, indent=2) + "\n"
    else:  # every JSON value is YAML, too
        lines = [f"  {name}: {json.dumps(each)}{COMMENTS.get(name, '')}\n" for name, each in task.items()]
        text = "".join(["task:\n", *lines])
    if path.exists() and not force:
        hint = "choose another name, or replace it with --force"
        raise EvalError(f"task file `{path.name}`: expected no such file, found one, in {path.parent}", hint)
    replace_file(path, text.encode())


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
    """The required graders that an answer does not pass."""
    grades, _, _ = grade(task, Transcript(text), Outcome({"text": text}))
    return [f"{item.name} ({item.explanation})" for item in grades if item.required and not item.passed]


def _problem(value: dict[str, Any], name: str) -> dict[str, Any]:
    """A problem with its prompt, as the JSON of a task that is graded by the last number."""
    check_keys(value, PROBLEM_FIELDS)
    answers = [value[key] for key in ("answer", "target") if key in value]
    if len(answers) != 1 or ("prompt" in value) == ("question" in value):
        raise FieldError(f"problem: expected prompt or question, and answer or target, found {', '.join(value)}")
    target = answers[0]
    if isinstance(target, (int, float)) and not isinstance(target, bool):
        target = str(target)
    return {
        "id": str(value.get("id", name)),
        "input": {"prompt": value.get("prompt", value.get("question"))},
        "target": target,
        "graders": ["last_numeric"],
    }


def _items(document: Any) -> list[tuple[Any, FieldPath]]:
    """The tasks of a document, each with its path."""
    key: tuple[str, ...] = ()
    if isinstance(document, dict) and len(document) == 1:
        (name,) = document
        if name == "task":
            return [(document["task"], ("task",))]
        if name in ("tasks", "data"):
            document, key = document[name], (name,)
    if not isinstance(document, list):
        return [] if document is None else [(document, key)]
    return [(value, (*key, place)) for place, value in enumerate(document)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _refused(path, "a readable file", error.strerror) from error
    except UnicodeDecodeError as error:
        raise _refused(path, "UTF-8", error) from error


def _refused(path: Path, expected: str, found: object) -> EvalError:
    return EvalError(f"file `{path.name}`: expected {expected}, found {found}, in {path.parent}")


def _check_size(document: object) -> None:
    """A ValueError if aliases of YAML stand for more than MOST_VALUES."""
    count, waiting = 0, [document]
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _yaml(text: str, path: Path) -> tuple[Any, LineOf]:
    try:
        import yaml
    except ImportError as error:
        raise Ling3Error(
            f"task file `{path.name}`: expected PyYAML to read it, found it is not installed",
            f"{install('eval')}, or write the file as JSON",
        ) from error
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        document = None if root is None else loader.construct_document(root)
        _check_size(document)
        document = parse_json(json.dumps(document, default=str).encode(), LARGEST)  # dates become texts
    except RecursionError:
        raise _refused(path, "YAML", "too many levels") from None
    except (yaml.YAMLError, ValueError) as error:
        raise _refused(path, "YAML", " ".join(str(error).split())) from error

    def line_of(field: FieldPath) -> int:
        node, line = root, 1
        for part in field:
            if isinstance(node, yaml.MappingNode):
                pairs = [(key, value) for key, value in node.value if key.value == str(part)]
                if not pairs:
                    break
                line, node = pairs[-1][0].start_mark.line + 1, pairs[-1][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                node = node.value[part]
                line = node.start_mark.line + 1
        return line

    return document, line_of


def _json(text: str, path: Path) -> tuple[Any, LineOf]:
    try:
        document = parse_json(text.encode(), LARGEST)
    except ValueError as error:
        raise _refused(path, "JSON", error) from error

    def line_of(field: FieldPath) -> int:
        lines = json_lines(text)
        while field not in lines:
            field = field[:-1]
        return lines[field]

    return document, line_of


def json_lines(text: str) -> dict[FieldPath, int]:
    """The line of every field and item of a valid JSON text, by its path."""
    lines: dict[FieldPath, int] = {}
    breaks = [place for place, character in enumerate(text) if character == "\n"]
    tokens = _TOKEN.finditer(text)  # without commas and colons

    def note(path: FieldPath, token: re.Match[str], start: int) -> None:
        lines[path] = bisect(breaks, start) + 1
        if token[0] == "{":
            while (key := next(tokens))[0] != "}":
                note((*path, json.loads(key[0])), next(tokens), key.start())
        elif token[0] == "[":
            number = 0
            while (item := next(tokens))[0] != "]":
                note((*path, number), item, item.start())
                number += 1

    note((), next(tokens), 0)
    return lines
