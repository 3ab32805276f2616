"""Tasks: what is asked, and how the answer is graded. A task comes from a file or a suite, or is written in Python.

Every message names the field that is wrong and where it stands.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, fields
from typing import Annotated, Any, cast

from ling3export.artifacts.records import Rule, Text, WrongRecordError, canonical, from_json, within
from ling3export.foundation.errors import listed
from ling3export.runners.evals.graders import KINDS, Grader, GraderSpec, Verdict, arguments_of, parse_path
from ling3export.runners.evals.trials import EvalError

FieldPath = tuple[object, ...]  # names and indices that lead from a task's root to a field
Prompt = str | list[int] | list[dict[str, str]]
Predicates = Mapping[str, Callable[..., Any]]
PROMPTS = ("prompt", "messages", "prompt_ids", "message", "user_message")
Message = Annotated[
    dict[str, Any], Rule("an object with role and content", lambda value: {"role", "content"} <= value.keys())
]


class FieldError(EvalError):
    """A field of a task is missing or unknown, or has a value that it cannot have.

    Attributes:
        what: The message without the place.
        path: Leads to the field.
    """

    def __init__(self, what: str, path: FieldPath = (), hint: str | None = None) -> None:
        super().__init__(f"{what}, in `{'.'.join(map(str, path))}`" if path else f"{what}, in the task", hint)
        self.what, self.path = what, path


@contextmanager
def _at(*path: object) -> Iterator[None]:
    """What goes wrong within is at this path."""
    try:
        yield
    except FieldError as error:
        raise FieldError(error.what, (*path, *error.path), error.hint) from None
    except WrongRecordError as error:
        whole = (*path, *reversed(error.path))
        if error.unknown is not None:
            found = f"key `{error.unknown}`: expected {error.expected}, found `{error.unknown}`"
            raise FieldError(found, (*whole, error.unknown)) from None
        name = next((each for each in reversed(whole) if isinstance(each, str)), "task")
        raise FieldError(f"`{name}`: expected {error.expected}, found {error.found}", whole) from None


@dataclass(frozen=True)
class TaskInput:
    """What an input may have: one of PROMPTS, and beside a text a context."""

    prompt: Text | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    message: Text | None = None
    user_message: Text | None = None
    context: Any | None = None


@dataclass(frozen=True)
class Grading:
    """What ``grading`` may have."""

    threshold: Annotated[float, Rule("a number above 0, at most 1", lambda value: 0 < value <= 1)] = 1.0


@dataclass(frozen=True)
class GraderFields:
    """What the object of a grader has beside its arguments."""

    kind: Text
    name: Text
    required: bool = True
    weight: Annotated[float, within(0, 2**53)] = 1.0


@dataclass(frozen=True)
class ExpectedOutcome:
    """What ``expected_outcome`` may have: shorthands of graders."""

    state_checks: tuple[dict[str, Any], ...] = ()
    tool_calls_required: tuple[Text, ...] | None = None
    response_contains: tuple[Text, ...] | Text | None = None
    transcript_constraints: dict[str, Any] | None = None


@dataclass(frozen=True)
class TaskRecord:
    """What decides a task's result, as a run keeps it; callables by name."""

    id: Text
    suite: Text
    input: dict[str, Any]
    target: Text
    choices: list[Text] | None
    category: Text | None
    threshold: float
    graders: list[dict[str, Any]]

    @property
    def prompt_sha256(self) -> str:
        """Digest of the prompt: of a text's UTF-8, else of its canonical JSON."""
        prompt = prompt_of(self.input)
        return hashlib.sha256(prompt.encode() if isinstance(prompt, str) else canonical(prompt)).hexdigest()


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

    Raises:
        FieldError: A field is missing or unknown, or has the wrong type.
    """

    id: Annotated[Text, Rule("a text that is not empty", bool)]
    input: dict[str, Any]
    suite: Text = ""
    target: Text = ""
    choices: list[Text] | None = None
    graders: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    difficulty: Text | None = None
    category: Text | None = None
    grading: dict[str, float] = field(default_factory=dict)
    reference_solution: Text | None = None
    expected_outcome: InitVar[dict[str, Any] | None] = None
    grader: InitVar[Grader | None] = None
    predicates: InitVar[Predicates | None] = None

    def __post_init__(self, expected_outcome: object, grader: Grader | None, predicates: Predicates | None) -> None:
        for each in fields(self):
            with _at(each.name):
                from_json(cast("type[Any]", each.type), getattr(self, each.name))
        with _at("input"):
            _check_input(self.input)
        with _at("grading"):
            from_json(Grading, self.grading)
        for number, each in enumerate(self.graders):
            with _at("graders", number):
                self.graders[number] = _grader(each)
        if expected_outcome is not None:
            with _at("expected_outcome"):
                self.graders += _expected_graders(expected_outcome, predicates or {})
        if grader is not None:
            with _at("grader"):
                self.graders.append(_grader(grader))

    @property
    def threshold(self) -> float:
        """Share of trials that must pass for the task to count as solved."""
        return self.grading.get("threshold", 1.0)

    @property
    def prompt(self) -> Prompt:
        """What the model gets."""
        return prompt_of(self.input)

    def record(self) -> TaskRecord:
        """What decides the task's result."""
        graders = [
            {"kind": g.kind, "name": g.name, "arguments": g.arguments, "required": g.required, "weight": g.weight}
            for g in self.graders
        ]
        return TaskRecord(
            self.id, self.suite, self.input, self.target, self.choices, self.category, self.threshold, graders
        )


def prompt_of(given: dict[str, Any]) -> Prompt:
    """What the model gets of a task's input: a text, token ids, or messages. A context follows a text as JSON."""
    value = next((given[name] for name in PROMPTS if name in given), None)
    if not isinstance(value, (str, list, tuple)):
        raise EvalError(f"task: expected a text, token ids or messages under one of {', '.join(PROMPTS)}, found none")
    if "context" in given:
        value = f"{value}\n\n{canonical(given['context']).decode()}"
    return cast("Prompt", value)


def task_from(value: object, suite: str, predicates: Predicates | None) -> Task:
    """A task from JSON. A field that is null counts as one that is not there.

    Raises:
        FieldError: A field is missing or unknown, or has the wrong type.
    """
    with _at():
        given = {name: each for name, each in from_json(dict[Text, Any], value).items() if each is not None}
    check_keys(given, [*(each.name for each in fields(Task)), "expected_outcome"])
    for name in ("id", "input"):
        if name not in given:
            raise FieldError(f"task `{given.get('id', '?')}`: expected the field {name}, found none")
    task = Task(**{"suite": suite, **given}, predicates=predicates)
    if not task.graders:
        hint = "add graders: or expected_outcome:"
        raise FieldError(f"task `{task.id}`: expected at least one grader, found none", (), hint)
    return task


def check_keys(given: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuses a field that has none of the names.

    Raises:
        FieldError: There is one.
    """
    for name in given:
        if name not in names:
            raise FieldError(f"key `{name}`: expected only the fields {', '.join(names)}, found `{name}`", (name,))


def _grader(value: object) -> GraderSpec:
    """A grader in any of the forms that ``Task.graders`` may have."""
    if isinstance(value, GraderSpec):
        return value
    if callable(value):
        return GraderSpec("callable", getattr(value, "__name__", "grader"), {}, value)
    arguments = {"kind": value} if isinstance(value, str) else dict(from_json(dict[Text, Any], value))
    kind = arguments.get("kind")
    if kind not in KINDS:
        raise FieldError(f"grader: expected one of {', '.join(KINDS)}, found {kind!r}")
    own = {each.name: arguments.pop(each.name) for each in fields(GraderFields) if each.name in arguments}
    given = from_json(GraderFields, {"name": kind, **own})
    for name, found in vars(from_json(arguments_of(kind), arguments)).items():
        if name in ("pattern", "path"):
            try:
                (re.compile if name == "pattern" else parse_path)(found)
            except (ValueError, re.error) as error:
                raise FieldError(f"`{name}`: {error}", (name,)) from error
    return GraderSpec(kind, given.name, arguments, None, given.required, given.weight)


def _expected_graders(value: object, predicates: Predicates) -> list[GraderSpec]:
    """The graders that ``expected_outcome`` stands for."""
    expected, graders = from_json(ExpectedOutcome, value), list[GraderSpec]()
    for number, check in enumerate(expected.state_checks):
        with _at("state_checks", number):
            graders.append(_state_check(check, predicates))
    for name, kind, arguments in (
        ("tool_calls_required", "steps_required", {"steps": _listed(expected.tool_calls_required)}),
        ("response_contains", "response_contains", {"value": _listed(expected.response_contains)}),
        ("transcript_constraints", "transcript_constraints", expected.transcript_constraints or {}),
    ):
        if getattr(expected, name) is not None:
            with _at(name):
                graders.append(_grader({"kind": kind, "name": name, **arguments}))
    return graders


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _state_check(check: dict[str, Any], predicates: Predicates) -> GraderSpec:
    if "path" in check:
        return _grader({"kind": "state_check", "name": f"state_check {check['path']}", **check})
    if len(check) != 1:
        raise FieldError(f"state check: expected path:, or one predicate by name, found {listed(list(check))}")
    name, arguments = next(iter(check.items()))
    if name not in predicates:
        raise FieldError(
            f"state check `{name}`: expected a predicate of this name, found "
            f"{listed(sorted(predicates)) or 'none at all'}",
            (name,),
            f'pass one: load_tasks(file, predicates={{"{name}": lambda arguments, outcome: ...}})',
        )
    predicate = predicates[name]

    def function(task: Task, transcript: object, outcome: object) -> Verdict:
        return {"passed": bool(predicate(arguments, outcome)), "explanation": f"{name} {arguments}"}

    return GraderSpec("state_check", f"state_check {name}", {}, function)


def _check_input(given: dict[str, Any]) -> None:
    from_json(TaskInput, {name: _listed(each) for name, each in given.items()})
    names = [name for name in PROMPTS if name in given]
    if len(names) != 1:
        raise FieldError(f"input: expected one of {', '.join(PROMPTS)}, found {' and '.join(names) or 'none'}")
    if "context" in given and names[0] in ("prompt_ids", "messages"):
        raise FieldError(f"`context`: expected it beside a text, found it beside {names[0]}", ("context",))
