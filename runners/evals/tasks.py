"""Tasks: what is asked, and how the answer is graded. A task comes from a file or a suite, or is written in Python.

Every message names the field that is wrong and where it stands.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import InitVar, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin

from ling3export.artifacts.records import canonical
from ling3export.foundation.errors import listed
from ling3export.runners.evals.graders import KINDS, Grader, GraderSpec, Verdict, arguments_of, parse_path
from ling3export.runners.evals.trials import EvalError

FieldPath = tuple[str | int, ...]  # names and indices that lead from a document's root to a field
Prompt = str | list[int] | list[dict[str, str]]
Predicates = Mapping[str, Callable[..., Any]]

RECORDED = ("id", "suite", "input", "target", "choices", "category", "threshold", "graders")  # in tasks.jsonl
PROMPTS = ("prompt", "messages", "prompt_ids", "message", "user_message")
WORDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
    list[str]: "a list of texts",
    list[int]: "a list of token ids",
}
# Fields of ``expected_outcome`` beside ``state_checks``: the grader that each stands for, and the argument that it is.
SHORTHANDS = {
    "tool_calls_required": ("steps_required", "steps"),
    "response_contains": ("response_contains", "value"),
    "transcript_constraints": ("transcript_constraints", None),
}


def in_code(path: FieldPath) -> str:
    """Where a field stands that comes from no file."""
    return "in `" + ".".join(map(str, path)) + "`" if path else "in the task"


@dataclass(frozen=True)
class FieldLocation:
    """Where a field stands. Its text ends a message: ``in tasks.yaml line 7``."""

    path: FieldPath = ()  # the field's path in its document
    where: Callable[[FieldPath], str] = in_code  # says where a path stands

    def at(self, *parts: str | int) -> "FieldLocation":
        """The place of a field below this one."""
        return FieldLocation((*self.path, *parts), self.where)

    def __str__(self) -> str:
        return self.where(self.path)


IN_CODE = FieldLocation()


@dataclass
class Task:
    """One thing to be done, with what tells whether it was done.

    Attributes:
        id: Unique within a suite.
        input: One of ``prompt``, ``prompt_ids``, ``messages``, ``message`` and ``user_message``, and ``context``.
        suite: The suite's name; for tasks of a file, by default the file's name.
        target: The right answer, in the form that the graders read.
        choices: The options of a multiple-choice question.
        graders: Each is a GraderSpec, a callable, the name of a kind, or an object with ``kind`` and its arguments. All
            are GraderSpec once the task is made, those of ``expected_outcome`` and ``grader`` included.
        metadata: Anything.
        difficulty: A word for reports.
        category: A word for reports, which count by it.
        grading: ``threshold``: share of the task's trials that must pass for it to count as solved; 1 by default.
        reference_solution: A text that passes all graders.

    Args:
        expected_outcome: Shorthand for graders.
        grader: Shorthand for one callable grader.
        predicates: What state checks call by name, such as ``database``: ``(arguments, outcome) -> bool``.
        place: Where the task stands, for messages.

    Raises:
        EvalError: A field is missing or unknown, or has the wrong type.
    """

    id: str
    input: dict[str, Any]
    suite: str = ""
    target: str = ""
    choices: list[str] | None = None
    graders: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    difficulty: str | None = None
    category: str | None = None
    grading: dict[str, float] = field(default_factory=dict)
    reference_solution: str | None = None
    expected_outcome: InitVar[dict[str, Any] | None] = None
    grader: InitVar[Grader | None] = None
    predicates: InitVar[Predicates | None] = None
    place: InitVar[FieldLocation] = IN_CODE

    def __post_init__(
        self, expected_outcome: object, grader: Grader | None, predicates: Predicates | None, place: FieldLocation
    ) -> None:
        for each in fields(self):
            _typed(getattr(self, each.name), each.type, place.at(each.name))
        if not self.id:
            raise EvalError(f"task id: expected a text, found an empty one, {place.at('id')}")
        _check_input(self.input, place.at("input"))
        known(self.grading, ["threshold"], place.at("grading"))
        here = place.at("grading", "threshold")
        if not 0 < _typed(self.threshold, float, here) <= 1:
            raise EvalError(f"`threshold`: expected a number above 0, at most 1, found {self.threshold}, {here}")
        self.graders = [_grader(each, place.at("graders", number)) for number, each in enumerate(self.graders)]
        if expected_outcome is not None:
            self.graders += _expected_graders(expected_outcome, predicates or {}, place.at("expected_outcome"))
        if grader is not None:
            self.graders.append(_grader(grader, place.at("grader")))

    @property
    def threshold(self) -> float:
        """Share of trials that must pass for the task to count as solved."""
        return self.grading.get("threshold", 1.0)

    @property
    def prompt(self) -> Prompt:
        """What the model gets."""
        return prompt_of(self.input)

    @property
    def prompt_sha256(self) -> str:
        """Digest of the prompt."""
        return prompt_sha256(self.input)

    def record(self) -> dict[str, Any]:
        """What decides the task's result, as JSON; callables by name."""
        graders = [
            {"kind": g.kind, "name": g.name, "arguments": g.arguments, "required": g.required, "weight": g.weight}
            for g in self.graders
        ]
        return {name: graders if name == "graders" else getattr(self, name) for name in RECORDED}


def prompt_of(fields: dict[str, Any]) -> Prompt:
    """What the model gets of a task's input: a text, token ids, or messages. A context follows a text as JSON."""
    value = next((fields[name] for name in PROMPTS if name in fields), None)
    if not isinstance(value, (str, list, tuple)):
        raise EvalError(f"task: expected a text, token ids or messages under one of {', '.join(PROMPTS)}, found none")
    if "context" in fields:
        value = f"{value}\n\n{canonical(fields['context']).decode()}"
    return cast("Prompt", value)


def prompt_sha256(fields: dict[str, Any]) -> str:
    """Digest of the prompt of a task's input: of a text's UTF-8, else of the prompt's canonical JSON."""
    prompt = prompt_of(fields)
    return hashlib.sha256(prompt.encode() if isinstance(prompt, str) else canonical(prompt)).hexdigest()


def task_from(value: object, place: FieldLocation, *, suite: str = "", predicates: Predicates | None = None) -> Task:
    """A task from JSON. A field that is null counts as one that is not there.

    Raises:
        EvalError: A field is missing or unknown, or has the wrong type.
    """
    given = {name: each for name, each in _typed(value, dict, place).items() if each is not None}
    known(given, [*(each.name for each in fields(Task)), "expected_outcome"], place)
    for name in ("id", "input"):
        if name not in given:
            raise EvalError(f"task `{given.get('id', '?')}`: expected the field {name}, found none, {place}")
    task = Task(**{"suite": suite, **given}, predicates=predicates, place=place)
    if not task.graders:
        hint = "add graders: or expected_outcome:"
        raise EvalError(f"task `{task.id}`: expected at least one grader, found none, {place}", hint)
    return task


def _grader(value: object, place: FieldLocation) -> GraderSpec:
    """A grader in any of the forms that ``Task.graders`` may have."""
    if isinstance(value, GraderSpec):
        return value
    if callable(value):
        return GraderSpec("callable", getattr(value, "__name__", "grader"), {}, value)
    given = {"kind": value} if isinstance(value, str) else dict(_typed(value, dict, place))
    kind = given.pop("kind", None)
    if kind not in KINDS:
        raise EvalError(f"grader: expected one of {', '.join(KINDS)}, found {kind!r}, {place}")
    name = _typed(given.pop("name", kind), str, place.at("name"))
    required = _typed(given.pop("required", True), bool, place.at("required"))
    weight = _typed(given.pop("weight", 1.0), float, place.at("weight"))
    if weight < 0:
        raise EvalError(f"`weight`: expected 0 or more, found {weight}, {place.at('weight')}")
    _check_arguments(kind, given, place)
    return GraderSpec(kind, name, given, None, required, float(weight))


def _expected_graders(value: object, predicates: Predicates, place: FieldLocation) -> list[GraderSpec]:
    """The graders that ``expected_outcome`` stands for."""
    fields = _typed(value, dict, place)
    known(fields, ("state_checks", *SHORTHANDS), place)
    here = place.at("state_checks")
    checks = _typed(fields.get("state_checks", []), list, here)
    graders = [_state_check(check, predicates, here.at(number)) for number, check in enumerate(checks)]
    for name, (kind, argument) in SHORTHANDS.items():
        if name in fields:
            arguments = {argument: fields[name]} if argument else _typed(fields[name], dict, place.at(name))
            _check_arguments(kind, arguments, place.at(name))
            graders.append(GraderSpec(kind, name, arguments))
    return graders


def _state_check(value: object, predicates: Predicates, place: FieldLocation) -> GraderSpec:
    fields = _typed(value, dict, place)
    if "path" in fields:
        _check_arguments("state_check", fields, place)
        return GraderSpec("state_check", f"state_check {fields['path']}", fields)
    if len(fields) != 1:
        found = listed(list(fields))
        raise EvalError(f"state check: expected path:, or one predicate by name, found {found}, {place}")
    name, arguments = next(iter(fields.items()))
    if name not in predicates:
        raise EvalError(
            f"state check `{name}`: expected a predicate of this name, found "
            f"{listed(sorted(predicates)) or 'none at all'}, {place.at(name)}",
            f'pass one: load_tasks(file, predicates={{"{name}": lambda arguments, outcome: ...}})',
        )
    predicate = predicates[name]

    def check(task: Task, transcript: object, outcome: object) -> Verdict:
        return {"passed": bool(predicate(arguments, outcome)), "explanation": f"{name} {arguments}"}

    return GraderSpec("state_check", f"state_check {name}", {}, check)


def _check_arguments(kind: str, arguments: dict[str, Any], place: FieldLocation) -> None:
    takes = arguments_of(kind)
    known(arguments, takes, place)
    for name, (type_, needed) in takes.items():
        if name not in arguments:
            if needed:
                raise EvalError(f"grader `{kind}`: expected {name}, found none, {place}")
            continue
        value = _typed(arguments[name], type_, place.at(name))
        try:
            if name in ("pattern", "path"):
                (re.compile if name == "pattern" else parse_path)(value)
        except (ValueError, re.error) as error:
            raise EvalError(f"`{name}`: {error}, {place.at(name)}") from error


def _check_input(fields: dict[str, Any], place: FieldLocation) -> None:
    known(fields, (*PROMPTS, "context"), place)
    given = [name for name in PROMPTS if name in fields]
    if len(given) != 1:
        raise EvalError(f"input: expected one of {', '.join(PROMPTS)}, found {' and '.join(given) or 'none'}, {place}")
    name, prompt, here = given[0], fields[given[0]], place.at(given[0])
    if name == "prompt_ids":
        _typed(prompt, list[int], here)
    elif name == "messages":
        for item in _typed(prompt, list, here):
            if not isinstance(item, dict) or not {"role", "content"} <= item.keys():
                raise EvalError(f"`messages`: expected objects with role and content, found {item!r}, {here}")
    else:
        _typed(prompt, str, here)
    if "context" in fields and name in ("prompt_ids", "messages"):
        raise EvalError(f"`context`: expected it beside a text, found it beside {name}, {place.at('context')}")


def known(fields: dict[str, Any], names: Collection[str], place: FieldLocation) -> None:
    """Refuses a field that has none of the names.

    Raises:
        EvalError: There is one; its line is named.
    """
    for name in fields:
        if name not in names:
            raise EvalError(f"key `{name}`: expected one of {', '.join(names)}, found `{name}`, {place.at(name)}")


def _typed(value: Any, kind: Any, place: FieldLocation) -> Any:
    """The value, if it is of the type ``kind``, which may be a union."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else [kind]
    wrong = [_wrong(value, each) for each in kinds]
    if all(wrong):
        name = next((str(part) for part in reversed(place.path) if isinstance(part, str)), "task")
        wanted = " or ".join(WORDS.get(each) or WORDS[get_origin(each)] for each in kinds if each is not NoneType)
        raise EvalError(f"`{name}`: expected {wanted}, found {wrong[0][0]!r}, {place}")
    return value


def _wrong(value: Any, kind: Any) -> list[Any]:
    """What is not of the type ``kind``: the value itself, or items of a list; nothing if all is right."""
    outer, items = get_origin(kind) or kind, get_args(kind)
    if outer is Any:
        return []
    types: Any = (int, float) if kind is float else outer
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, types):
        return [value]
    return [item for item in value if _wrong(item, items[0])] if outer is list and items else []
