"""Task files: YAML or JSON, one task or many; every mistake is named with its line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ling3export.errors import Ling3Error
from ling3export.runners.evals.objects import EvalError
from ling3export.runners.evals.tasks import Path as FieldPath
from ling3export.runners.evals.tasks import Predicates, Task, task_from

YAML = (".yaml", ".yml")
PROBLEM_FIELDS = {"id", "prompt", "question", "answer", "target"}
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def load_tasks(path: str | Path, predicates: Predicates | None = None) -> list[Task]:
    """The tasks of a file: ``task:`` with one of them, ``tasks:`` with a list, a list, or problems with prompts.

    Problems are ``{"prompt" | "question": …, "answer" | "target": …}``, in a list or in ``{"data": […]}``: their
    prompts are used verbatim, and graded by the last number.

    Args:
        path: YAML needs the extra ``eval``.
        predicates: What state checks call by name.

    Raises:
        EvalError: The file cannot be read, holds no task, or a field is wrong.
    """
    path = Path(path)
    text = read_text(path)
    if path.suffix in YAML:
        document, line_of = _yaml(text, path)
    else:
        document, line_of = _json(text, path)

    def where(field: FieldPath) -> str:
        return f"in {path.name} line {line_of(field)}"

    tasks: list[Task] = []
    for value, field in _items(document):
        if isinstance(value, dict) and "input" not in value and value.keys() & {"prompt", "question"}:
            made = problem(value, f"{path.stem}-{len(tasks)}", where, field)
            tasks.append(task_from(made, suite=path.stem, where=_always(where(field))))
            continue
        tasks.append(task_from(value, field, suite=path.stem, predicates=predicates, where=where))
    if not tasks:
        raise EvalError(f"task file `{path.name}`: expected at least one task, found none, in {path.parent}")
    check_unique(tasks, path.name)
    return tasks


def problem(value: dict[str, Any], name: str, where: Any, field: FieldPath = ()) -> dict[str, Any]:
    """A problem with its prompt, as a task that is graded by the last number.

    Raises:
        EvalError: A field is unknown or missing.
    """
    for key in value:
        if key not in PROBLEM_FIELDS:
            wanted = ", ".join(sorted(PROBLEM_FIELDS))
            raise EvalError(f"key `{key}`: expected one of {wanted}, found `{key}`, {where((*field, key))}")
    answers = [value[key] for key in ("answer", "target") if key in value]
    if len(answers) != 1 or ("prompt" in value) == ("question" in value):
        raise EvalError(
            f"problem: expected prompt or question, and answer or target, found {', '.join(value)}, {where(field)}"
        )
    target = answers[0]
    if isinstance(target, (int, float)) and not isinstance(target, bool):
        target = str(target)
    prompt = value.get("prompt", value.get("question"))
    return {
        "id": str(value.get("id", name)),
        "input": {"prompt": prompt},
        "target": target,
        "graders": ["last_numeric"],
    }


def check_unique(tasks: list[Task], where: str) -> None:
    """Refuses two tasks of one id.

    Raises:
        EvalError: There are such.
    """
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise EvalError(f"task id `{task.id}`: expected it once, found it again, in {where}")
        seen.add(task.id)


def read_text(path: Path) -> str:
    """Text of a UTF-8 file.

    Raises:
        EvalError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvalError(
            f"file `{path.name}`: expected a readable file, found {error.strerror}, in {path.parent}"
        ) from error
    except UnicodeDecodeError as error:
        raise EvalError(f"file `{path.name}`: expected UTF-8, found {error}, in {path.parent}") from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON file (a list, or ``{"data": […]}``), or of JSON lines.

    Raises:
        EvalError: The file is something else.
    """
    text = read_text(path)
    records: Any
    try:
        if path.suffix == ".jsonl":
            records = [_parsed(line) for line in text.split("\n") if line.strip()]
        else:
            records = _parsed(text)
    except ValueError as error:
        raise EvalError(f"file `{path.name}`: expected JSON, found {error}, in {path.parent}") from error
    if isinstance(records, dict) and set(records) == {"data"}:
        records = records["data"]
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise EvalError(f"file `{path.name}`: expected a list of objects, found something else, in {path.parent}")
    return records


def _always(text: str) -> Callable[[FieldPath], str]:
    return lambda path: text


def _items(document: Any) -> list[tuple[Any, FieldPath]]:
    """What a document holds, each with its path."""
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


def _yaml(text: str, path: Path) -> tuple[Any, Any]:
    try:
        import yaml
    except ImportError as error:
        raise Ling3Error(
            f"task file `{path.name}`: expected PyYAML to read it, found it is not installed",
            "pip install 'ling3export[eval]', or write the file as JSON",
        ) from error
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        document = None if root is None else loader.construct_document(root)
        document = _parsed(json.dumps(document, default=str))  # dates as texts
    except (yaml.YAMLError, ValueError) as error:
        raise EvalError(f"task file `{path.name}`: expected YAML, found {' '.join(str(error).split())}") from error

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


def _parsed(text: str) -> Any:
    """A JSON text's value, without NaN and without halves of characters.

    Raises:
        ValueError: It is no such JSON.
    """
    value = json.loads(text)
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    return value


def _json(text: str, path: Path) -> tuple[Any, Any]:
    try:
        document = _parsed(text)
    except ValueError as error:
        raise EvalError(f"task file `{path.name}`: expected JSON, found {error}, in {path.parent}") from error

    def line_of(field: FieldPath) -> int:
        return json_lines(text).get(field, 1)

    return document, line_of


def json_lines(text: str) -> dict[FieldPath, int]:
    """The line of every field and item of a valid JSON text, by its path."""
    lines: dict[FieldPath, int] = {}
    stack: list[list[Any]] = []  # of open containers: [the current key or index, whether an object]
    key_next = False
    line, counted = 1, 0
    for token in _TOKEN.finditer(text):
        word = token.group()
        line, counted = line + text.count("\n", counted, token.start()), token.start()
        if key_next and word.startswith('"'):
            stack[-1][0] = json.loads(word)
            lines[tuple(part for part, _ in stack)] = line
            key_next = False
            continue
        if word == ",":
            key_next = stack[-1][1]
            if not key_next:
                stack[-1][0] += 1
        elif word in "}]":
            stack.pop()
            key_next = False
        elif word != ":":
            lines.setdefault(tuple(part for part, _ in stack), line)
            if word in "{[":
                key_next = word == "{"
                stack.append([None if key_next else 0, key_next])
    return lines
