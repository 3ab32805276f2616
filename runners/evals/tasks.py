"""Tasks: a prompt, and the graders of its answers. A task comes from a file or a suite, or is written in Python."""

from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationInfo,
    create_model,
    model_validator,
)

from ling3export.foundation.errors import listed
from ling3export.runners.evals.graders import KINDS, Grader, GraderSpec, Verdict
from ling3export.runners.evals.run_file import PROMPTS, Prompt, TaskRecord, prompt_of

Predicates = Mapping[str, Callable[..., Any]]


class Fields(BaseModel):
    """An object that has only its own fields."""

    model_config = ConfigDict(extra="forbid")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if not {"role", "content"} <= message.keys():
        raise ValueError("a message needs role and content")
    return message


class TaskInput(Fields):
    """One of PROMPTS; a text can have a context."""

    prompt: StrictStr | None = None
    prompt_ids: list[StrictInt] | None = None
    messages: list[Annotated[dict[str, Any], AfterValidator(_message)]] | None = None
    message: StrictStr | None = None
    user_message: StrictStr | None = None
    context: Any = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "TaskInput":
        names = [name for name in PROMPTS if getattr(self, name) is not None]
        if len(names) != 1:
            raise ValueError(f"give one of {', '.join(PROMPTS)}; there is {' and '.join(names) or 'none'}")
        if self.context is not None and names[0] in ("prompt_ids", "messages"):
            raise ValueError(f"a context goes with a text, not with {names[0]}")
        return self

    def record(self) -> dict[str, Any]:
        """The fields that are set, as JSON."""
        return self.model_dump(exclude_none=True)


class Grading(Fields):
    """How a task counts: the share of its trials that must pass for it to be solved."""

    threshold: float = Field(default=1.0, gt=0, le=1)


class _GraderFields(Fields):
    kind: StrictStr
    name: StrictStr
    required: StrictBool = True


@cache
def _arguments_model(kind: str) -> type[BaseModel]:
    """The arguments of a kind in a task file: those of its function after the first three."""
    fields: dict[str, Any] = {}
    for argument in list(signature(KINDS[kind]).parameters.values())[3:]:
        default = ... if argument.default is argument.empty else argument.default
        fields[argument.name] = (argument.annotation, default)
    return create_model(kind, __base__=Fields, **fields)


def _grader(value: object) -> GraderSpec:
    """A grader: a GraderSpec, a callable, the name of a kind, or an object with ``kind`` and its arguments."""
    if isinstance(value, GraderSpec):
        return value
    if callable(value):
        return GraderSpec("callable", getattr(value, "__name__", "grader"), {}, value)
    arguments = {"kind": value} if isinstance(value, str) else dict(value) if isinstance(value, dict) else {}
    kind = arguments.get("kind")
    if kind not in KINDS:
        raise ValueError(f"a grader is one of {', '.join(KINDS)}")
    own = {name: arguments.pop(name) for name in _GraderFields.model_fields if name in arguments}
    fields = _GraderFields.model_validate({"name": kind, **own})
    _arguments_model(kind).model_validate(arguments)
    return GraderSpec(kind, fields.name, arguments, None, fields.required)


def _state_check(check: Any, info: ValidationInfo) -> GraderSpec:
    """A predicate of the caller by its name, with its arguments."""
    if not isinstance(check, dict) or len(check) != 1:
        raise ValueError("a state check is one predicate by name")
    predicates: Predicates = (info.context or {}).get("predicates") or {}
    name, arguments = next(iter(check.items()))
    if name not in predicates:
        names = listed(sorted(predicates)) or "none"
        example = f'pass one: load_tasks(file, predicates={{"{name}": lambda arguments, outcome: ...}})'
        raise ValueError(f"no predicate `{name}`, there is {names}; {example}")
    predicate = predicates[name]

    def function(task: Task, transcript: object, outcome: object) -> Verdict:
        return {"passed": bool(predicate(arguments, outcome)), "explanation": f"{name} {arguments}"}

    return GraderSpec("state_check", f"state_check {name}", {}, function)


def _constraints(value: Any) -> GraderSpec:
    return _grader({"kind": "transcript_constraints", "name": "transcript_constraints", **value})


class ExpectedOutcome(Fields):
    """Shorthands of graders."""

    state_checks: list[Annotated[InstanceOf[GraderSpec], BeforeValidator(_state_check)]] = []
    tool_calls_required: list[StrictStr] | None = None
    response_contains: list[StrictStr] | StrictStr | None = None
    transcript_constraints: Annotated[InstanceOf[GraderSpec], BeforeValidator(_constraints)] | None = None

    @property
    def graders(self) -> list[GraderSpec]:
        """The graders that this stands for."""
        calls, texts, constraints = self.tool_calls_required, self.response_contains, self.transcript_constraints
        return [
            *self.state_checks,
            *([] if calls is None else [GraderSpec("steps_required", "tool_calls_required", {"steps": calls})]),
            *([] if texts is None else [GraderSpec("response_contains", "response_contains", {"value": texts})]),
            *([] if constraints is None else [constraints]),
        ]


class Task(Fields):
    """A prompt, and the graders of its answers; pydantic.ValidationError if a field is wrong.

    A grader is a GraderSpec, a callable, the name of a kind, or an object with ``kind`` and its arguments.
    """

    id: StrictStr = Field(min_length=1)  # unique within a suite
    input: TaskInput
    suite: StrictStr = ""  # for tasks of a file, by default the file's name
    target: StrictStr = ""  # the right answer, in the form that the graders read
    choices: list[StrictStr] | None = None  # the options of a multiple-choice question
    graders: list[Annotated[InstanceOf[GraderSpec], BeforeValidator(_grader)]] = []  # pydantic copies it
    metadata: dict[str, Any] = {}
    difficulty: StrictStr | None = None
    category: StrictStr | None = None
    grading: Grading = Grading()
    reference_solution: StrictStr | None = None  # a text that passes all graders
    # Shorthands of graders, which ``graders`` includes once the task is made.
    expected_outcome: ExpectedOutcome | None = Field(default=None, exclude=True)
    grader: Grader | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        return {name: field for name, field in value.items() if field is not None} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _all_graders(self) -> "Task":
        self.graders += self.expected_outcome.graders if self.expected_outcome else []
        self.graders += [_grader(self.grader)] if self.grader else []
        return self

    @property
    def threshold(self) -> float:
        """Share of trials that must pass for the task to count as solved."""
        return self.grading.threshold

    @property
    def prompt(self) -> Prompt:
        """The model's input."""
        return prompt_of(self.input.record())

    def record(self) -> TaskRecord:
        """All that decides the task's result."""
        names = ("kind", "name", "arguments", "required")
        graders = [{name: getattr(grader, name) for name in names} for grader in self.graders]
        return TaskRecord(self.id, self.suite, self.input.record(), self.target, self.choices, self.threshold, graders)
