"""Tasks: what is asked, and how the answer is graded. A task comes from a file or a suite, or is written in Python.

Every message names the field that is wrong and where it stands.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, cast

from ling3export.artifacts.records import canonical
from ling3export.errors import listed
from ling3export.runners.evals.graders import KINDS, Grader, GraderSpec, Verdict, parse_path
from ling3export.runners.evals.trials import EvalError

FieldPath = tuple[str | int, ...]  # names and indices that lead from a document's root to a field
Prompt = str | list[int] | list[dict[str, str]]
Predicates = Mapping[str, Callable[..., Any]]

PROMPTS = ("prompt", "messages", "prompt_ids", "message", "user_message")
FIELDS = (
    "id", "suite", "input", "target", "choices", "graders", "metadata", "difficulty", "category", "grading",
    "reference_solution", "expected_outcome",
)  # fmt: skip
EXPECTED = ("response_contains", "state_checks", "tool_calls_required", "transcript_constraints")


def in_code(path: FieldPath) -> str:
    """Where a field stands that comes from no file."""
    return "in `" + ".".join(map(str, path)) + "`" if path else "in the task"


@dataclass(frozen=True)
class Place:
    """Where a field stands. Its text ends a message: ``in tasks.yaml line 7``.

    Attributes:
        path: The field's path in its document.
        where: Says where a path stands.
    """

    path: FieldPath = ()
    where: Callable[[FieldPath], str] = in_code

    def at(self, *parts: str | int) -> "Place":
        """The place of a field below this one."""
        return Place((*self.path, *parts), self.where)

    def __str__(self) -> str:
        return self.where(self.path)


@dataclass
class Task:
    """One thing to be done, with what tells whether it was done.

    Attributes:
        id: Unique within a suite.
        input: One of ``prompt``, ``prompt_ids``, ``messages``, ``message`` and ``user_message``, and ``context``.
        suite: The suite's name; for tasks of a file, by default the file's name.
        target: The right answer, in the form that the graders read.
        choices: The options of a multiple-choice question.
        graders: GraderSpec, or callables; at least one, those made from ``expected_outcome`` and ``grader`` included.
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

    def __post_init__(
        self, expected_outcome: dict[str, Any] | None, grader: Grader | None, predicates: Predicates | None
    ) -> None:
        _check_input(self.input, Place(("input",)))
        _check_grading(self.grading, Place(("grading",)))
        self.graders = [_named(grader) if callable(grader) else grader for grader in self.graders]
        if expected_outcome is not None:
            self.graders += _expected_graders(expected_outcome, predicates or {}, Place(("expected_outcome",)))
        if grader is not None:
            self.graders.append(_named(grader))

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
        """Digest of the prompt: of a text's UTF-8, else of the prompt's canonical JSON."""
        prompt = self.prompt
        return hashlib.sha256(prompt.encode() if isinstance(prompt, str) else canonical(prompt)).hexdigest()

    def record(self) -> dict[str, Any]:
        """What decides the task's result, as JSON; callables by name."""
        graders = [
            {"kind": g.kind, "name": g.name, "arguments": g.arguments, "required": g.required, "weight": g.weight}
            for g in self.graders
        ]
        fields = {name: getattr(self, name) for name in ("id", "suite", "input", "target", "choices", "category")}
        return {**fields, "threshold": self.threshold, "graders": graders}


def prompt_of(fields: dict[str, Any]) -> Prompt:
    """What the model gets of a task's input: a text, token ids, or messages. A context follows a text as JSON."""
    value = next(fields[name] for name in PROMPTS if name in fields)
    if "context" in fields:
        value = f"{value}\n\n{canonical(fields['context']).decode()}"
    return cast("Prompt", value)


def task_from(value: object, place: Place, *, suite: str = "", predicates: Predicates | None = None) -> Task:
    """A task from JSON.

    Raises:
        EvalError: A field is missing or unknown, or has the wrong type.
    """
    fields = _object(value, place)
    _known(fields, FIELDS, place)
    for name in ("id", "input"):
        if name not in fields:
            raise EvalError(f"task `{fields.get('id', '?')}`: expected the field {name}, found none, {place}")
    texts = {}
    for name in ("id", "suite", "target", "difficulty", "category", "reference_solution"):
        if fields.get(name) is not None:
            texts[name] = _typed(fields[name], str, "a text", place.at(name))
    if not texts.get("id"):
        raise EvalError(f"task id: expected a text, found an empty one, {place.at('id')}")
    _check_input(fields["input"], place.at("input"))
    choices = fields.get("choices")
    if choices is not None:
        choices = _texts(choices, place.at("choices"))
    graders = [
        _grader(item, place.at("graders", number))
        for number, item in enumerate(_typed(fields.get("graders", []), list, "a list", place.at("graders")))
    ]
    expected = fields.get("expected_outcome")
    if expected is not None:
        graders += _expected_graders(expected, predicates or {}, place.at("expected_outcome"))
    if not graders:
        hint = "add graders: or expected_outcome:"
        raise EvalError(f"task `{texts['id']}`: expected at least one grader, found none, {place}", hint)
    return Task(
        input=fields["input"], choices=choices, graders=graders,
        metadata=_object(fields.get("metadata", {}), place.at("metadata")),
        grading=_check_grading(fields.get("grading", {}), place.at("grading")), **{"suite": suite, **texts},
    )  # fmt: skip


def _grader(value: object, place: Place) -> GraderSpec:
    """A grader from JSON: the name of a kind, or an object with ``kind`` and its arguments."""
    fields = {"kind": value} if isinstance(value, str) else dict(_object(value, place))
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise EvalError(f"grader: expected one of {', '.join(KINDS)}, found {kind!r}, {place}")
    name = _typed(fields.pop("name", kind), str, "a text", place.at("name"))
    required = _typed(fields.pop("required", True), bool, "true or false", place.at("required"))
    weight = _typed(fields.pop("weight", 1.0), (int, float), "a number", place.at("weight"))
    if weight < 0:
        raise EvalError(f"`weight`: expected 0 or more, found {weight}, {place.at('weight')}")
    _check_arguments(kind, fields, place)
    return GraderSpec(kind, name, fields, None, required, float(weight))


def _expected_graders(value: object, predicates: Predicates, place: Place) -> list[GraderSpec]:
    """The graders that ``expected_outcome`` stands for."""
    fields = _object(value, place)
    _known(fields, EXPECTED, place)
    graders = []
    checks = _typed(fields.get("state_checks", []), list, "a list", place.at("state_checks"))
    for number, check in enumerate(checks):
        graders.append(_state_check(check, predicates, place.at("state_checks", number)))
    if "tool_calls_required" in fields:
        steps = _texts(fields["tool_calls_required"], place.at("tool_calls_required"))
        graders.append(GraderSpec("steps_required", "tool_calls_required", {"steps": steps}))
    if "transcript_constraints" in fields:
        here = place.at("transcript_constraints")
        arguments = _object(fields["transcript_constraints"], here)
        _check_arguments("transcript_constraints", arguments, here)
        graders.append(GraderSpec("transcript_constraints", arguments=arguments))
    if "response_contains" in fields:
        arguments = {"value": fields["response_contains"]}
        _check_arguments("response_contains", arguments, place)
        graders.append(GraderSpec("response_contains", arguments=arguments))
    return graders


def _state_check(value: object, predicates: Predicates, place: Place) -> GraderSpec:
    fields = _object(value, place)
    if "path" in fields:
        _check_arguments("state_check", fields, place)
        return GraderSpec("state_check", f"state_check {fields['path']}", fields)
    if len(fields) != 1:
        raise EvalError(
            f"state check: expected path:, or one predicate by name, found {listed(list(fields))}, {place}"
        )  # fmt: skip
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


def _check_arguments(kind: str, arguments: dict[str, Any], place: Place) -> None:
    needs, takes = KINDS[kind].needs, KINDS[kind].takes
    _known(arguments, (*sorted(needs), *sorted(takes)), place)
    for name in sorted(needs - arguments.keys()):
        raise EvalError(f"grader `{kind}`: expected {name}, found none, {place}")
    for name, value in arguments.items():
        here = place.at(name)
        if name in ("must_contain", "must_not_contain", "steps") or (name == "value" and not isinstance(value, str)):
            _texts(value, here)
        elif name == "max_turns":
            _typed(value, int, "a whole number", here)
        elif name == "ordered":
            _typed(value, bool, "true or false", here)
        elif name in ("pattern", "path"):
            try:
                (re.compile if name == "pattern" else parse_path)(_typed(value, str, "a text", here))
            except (ValueError, re.error) as error:
                raise EvalError(f"`{name}`: {error}, {here}") from error


def _check_input(value: object, place: Place) -> None:
    fields = _object(value, place)
    _known(fields, (*PROMPTS, "context"), place)
    given = [name for name in PROMPTS if name in fields]
    if len(given) != 1:
        raise EvalError(f"input: expected one of {', '.join(PROMPTS)}, found {' and '.join(given) or 'none'}, {place}")
    name, prompt, here = given[0], fields[given[0]], place.at(given[0])
    if name == "prompt_ids":
        for item in _typed(prompt, list, "a list of token ids", here):
            _typed(item, int, "a list of token ids", here)
    elif name == "messages":
        for item in _typed(prompt, list, "a list of messages", here):
            if not isinstance(item, dict) or not {"role", "content"} <= item.keys():
                raise EvalError(f"`messages`: expected objects with role and content, found {item!r}, {here}")
    else:
        _typed(prompt, str, "a text", here)
    if "context" in fields and name in ("prompt_ids", "messages"):
        raise EvalError(f"`context`: expected it beside a text, found it beside {name}, {place.at('context')}")


def _named(grader: Grader) -> GraderSpec:
    return GraderSpec("callable", getattr(grader, "__name__", "grader"), {}, grader)


def _check_grading(value: object, place: Place) -> dict[str, float]:
    fields = _object(value, place)
    _known(fields, ("threshold",), place)
    here = place.at("threshold")
    threshold = _typed(fields.get("threshold", 1.0), (int, float), "a number", here)
    if not 0 < threshold <= 1:
        raise EvalError(f"`threshold`: expected a number above 0, at most 1, found {threshold}, {here}")
    return fields


def _known(fields: dict[str, Any], names: tuple[str, ...], place: Place) -> None:
    for name in fields:
        if name not in names:
            raise EvalError(f"key `{name}`: expected one of {', '.join(names)}, found `{name}`, {place.at(name)}")


def _object(value: object, place: Place) -> dict[str, Any]:
    return cast("dict[str, Any]", _typed(value, dict, "an object", place))


def _texts(value: object, place: Place) -> list[str]:
    for item in _typed(value, list, "a list of texts", place):
        _typed(item, str, "a list of texts", place)
    return cast("list[str]", value)


def _typed(value: Any, kind: type | tuple[type, ...], wanted: str, place: Place) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name = next((str(part) for part in reversed(place.path) if isinstance(part, str)), "task")
        raise EvalError(f"`{name}`: expected {wanted}, found {value!r}, {place}")
    return value
