"""Tasks: what is asked, and how the answer is graded. A task comes from a file, from a suite, or is written in Python.

Every message names the field that is wrong and where it stands.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, cast

from ling3export.artifacts.manifest import canonical
from ling3export.errors import listed
from ling3export.runners.evals.graders import KINDS, Grader, GraderSpec, parse_path
from ling3export.runners.evals.objects import EvalError

Path = tuple[str | int, ...]  # of a field: names and indices from the root of a file
Prompt = str | list[int] | list[dict[str, str]]
Where = Callable[[Path], str]
Predicates = Mapping[str, Callable[..., Any]]

PROMPTS = ("prompt", "messages", "prompt_ids", "message", "user_message")
FIELDS = (
    "id", "suite", "input", "target", "choices", "graders", "metadata", "difficulty", "category", "grading",
    "reference_solution", "expected_outcome",
)  # fmt: skip
EXPECTED = ("response_contains", "state_checks", "tool_calls_required", "transcript_constraints")


def in_code(path: Path) -> str:
    """Where a field stands that comes from no file."""
    return "in `" + ".".join(map(str, path)) + "`" if path else "in the task"


@dataclass
class Task:
    """One thing to be done, with what tells whether it was.

    Attributes:
        id: Unique within a suite.
        input: One of ``prompt``, ``prompt_ids``, ``messages``, ``message`` or ``user_message``, and ``context``.
        suite: What it belongs to; the file's name by default.
        target: The right answer, as the graders read it.
        choices: Of a multiple-choice question.
        graders: GraderSpec, or callables; at least one, those made from ``expected_outcome`` and ``grader`` included.
        metadata: Anything.
        difficulty: For reports.
        category: For reports.
        grading: ``threshold``: share of a task's trials that must pass for the task to count as solved; 1 by default.
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
        _check_input(self.input, ("input",), in_code)
        _check_grading(self.grading, ("grading",), in_code)
        self.graders = [_named(grader) if callable(grader) else grader for grader in self.graders]
        if expected_outcome is not None:
            self.graders += expected_graders(expected_outcome, predicates or {}, ("expected_outcome",), in_code)
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
        """Digest of the prompt: of a text's UTF-8, else of the canonical JSON."""
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
    """What the model gets of a task's input: a text, token ids, or messages; a context stands behind a text as JSON."""
    value = next(fields[name] for name in PROMPTS if name in fields)
    if "context" in fields:
        value = f"{value}\n\n{canonical(fields['context']).decode()}"
    return cast("Prompt", value)


def task_from(
    value: object, path: Path = (), *, suite: str = "", predicates: Predicates | None = None, where: Where = in_code
) -> Task:
    """A task from JSON.

    Raises:
        EvalError: A field is missing or unknown, or has the wrong type.
    """
    fields = _object(value, path, where)
    _known(fields, FIELDS, path, where)
    for name in ("id", "input"):
        if name not in fields:
            raise EvalError(f"task `{fields.get('id', '?')}`: expected the field {name}, found none, {where(path)}")
    texts = {}
    for name in ("id", "suite", "target", "difficulty", "category", "reference_solution"):
        if fields.get(name) is not None:
            texts[name] = _typed(fields[name], str, "a text", (*path, name), where)
    if not texts.get("id"):
        raise EvalError(f"task id: expected a text, found an empty one, {where((*path, 'id'))}")
    _check_input(fields["input"], (*path, "input"), where)
    choices = fields.get("choices")
    if choices is not None:
        choices = _texts(choices, (*path, "choices"), where)
    graders = [
        grader_from(item, (*path, "graders", place), where)
        for place, item in enumerate(_typed(fields.get("graders", []), list, "a list", (*path, "graders"), where))
    ]
    expected = fields.get("expected_outcome")
    if expected is not None:
        graders += expected_graders(expected, predicates or {}, (*path, "expected_outcome"), where)
    if not graders:
        hint = "add graders: or expected_outcome:"
        raise EvalError(f"task `{texts['id']}`: expected at least one grader, found none, {where(path)}", hint)
    return Task(
        input=fields["input"], choices=choices, graders=graders,
        metadata=_object(fields.get("metadata", {}), (*path, "metadata"), where),
        grading=_check_grading(fields.get("grading", {}), (*path, "grading"), where), **{"suite": suite, **texts},
    )  # fmt: skip


def grader_from(value: object, path: Path, where: Where) -> GraderSpec:
    """A grader from JSON: the name of a kind, or an object with ``kind`` and its arguments."""
    fields = {"kind": value} if isinstance(value, str) else dict(_object(value, path, where))
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise EvalError(f"grader: expected one of {', '.join(KINDS)}, found {kind!r}, {where(path)}")
    name = _typed(fields.pop("name", kind), str, "a text", (*path, "name"), where)
    required = _typed(fields.pop("required", True), bool, "true or false", (*path, "required"), where)
    weight = _typed(fields.pop("weight", 1.0), (int, float), "a number", (*path, "weight"), where)
    if weight < 0:
        raise EvalError(f"`weight`: expected 0 or more, found {weight}, {where((*path, 'weight'))}")
    _check_arguments(kind, fields, path, where)
    return GraderSpec(kind, name, fields, None, required, float(weight))


def expected_graders(value: object, predicates: Predicates, path: Path, where: Where) -> list[GraderSpec]:
    """The graders that ``expected_outcome`` stands for."""
    fields = _object(value, path, where)
    _known(fields, EXPECTED, path, where)
    graders = []
    checks = _typed(fields.get("state_checks", []), list, "a list", (*path, "state_checks"), where)
    for place, check in enumerate(checks):
        graders.append(_state_check(check, predicates, (*path, "state_checks", place), where))
    if "tool_calls_required" in fields:
        steps = _texts(fields["tool_calls_required"], (*path, "tool_calls_required"), where)
        graders.append(GraderSpec("steps_required", "tool_calls_required", {"steps": steps}))
    if "transcript_constraints" in fields:
        here = (*path, "transcript_constraints")
        arguments = _object(fields["transcript_constraints"], here, where)
        _check_arguments("transcript_constraints", arguments, here, where)
        graders.append(GraderSpec("transcript_constraints", arguments=arguments))
    if "response_contains" in fields:
        arguments = {"value": fields["response_contains"]}
        _check_arguments("response_contains", arguments, path, where)
        graders.append(GraderSpec("response_contains", arguments=arguments))
    return graders


def _state_check(value: object, predicates: Predicates, path: Path, where: Where) -> GraderSpec:
    fields = _object(value, path, where)
    if "path" in fields:
        _check_arguments("state_check", fields, path, where)
        return GraderSpec("state_check", f"state_check {fields['path']}", fields)
    if len(fields) != 1:
        raise EvalError(
            f"state check: expected path:, or one predicate by name, found {listed(list(fields))}, {where(path)}"
        )
    name, arguments = next(iter(fields.items()))
    if name not in predicates:
        raise EvalError(
            f"state check `{name}`: expected a predicate of this name, found "
            f"{listed(sorted(predicates)) or 'none at all'}, {where((*path, name))}",
            f'pass one: load_tasks(file, predicates={{"{name}": lambda arguments, outcome: ...}})',
        )
    predicate = predicates[name]

    def check(task: Task, transcript: object, outcome: object) -> dict[str, Any]:
        return {"passed": bool(predicate(arguments, outcome)), "explanation": f"{name} {arguments}"}

    return GraderSpec("state_check", f"state_check {name}", {}, check)


def _check_arguments(kind: str, arguments: dict[str, Any], path: Path, where: Where) -> None:
    takes = KINDS[kind]
    _known(arguments, (*sorted(takes.needs), *sorted(takes.takes)), path, where)
    for name in sorted(takes.needs - arguments.keys()):
        raise EvalError(f"grader `{kind}`: expected {name}, found none, {where(path)}")
    for name, value in arguments.items():
        here = (*path, name)
        if name in ("must_contain", "must_not_contain", "steps") or (name == "value" and not isinstance(value, str)):
            _texts(value, here, where)
        elif name == "max_turns":
            _typed(value, int, "a whole number", here, where)
        elif name == "ordered":
            _typed(value, bool, "true or false", here, where)
        elif name in ("pattern", "path"):
            try:
                (re.compile if name == "pattern" else parse_path)(_typed(value, str, "a text", here, where))
            except (ValueError, re.error) as error:
                raise EvalError(f"`{name}`: {error}, {where(here)}") from error


def _check_input(value: object, path: Path, where: Where) -> None:
    fields = _object(value, path, where)
    _known(fields, (*PROMPTS, "context"), path, where)
    given = [name for name in PROMPTS if name in fields]
    if len(given) != 1:
        raise EvalError(
            f"input: expected one of {', '.join(PROMPTS)}, found {' and '.join(given) or 'none'}, {where(path)}"
        )
    name, prompt, here = given[0], fields[given[0]], (*path, given[0])
    if name == "prompt_ids":
        for item in _typed(prompt, list, "a list of token ids", here, where):
            _typed(item, int, "a list of token ids", here, where)
    elif name == "messages":
        for item in _typed(prompt, list, "a list of messages", here, where):
            if not isinstance(item, dict) or not {"role", "content"} <= item.keys():
                raise EvalError(f"`messages`: expected objects with role and content, found {item!r}, {where(here)}")
    else:
        _typed(prompt, str, "a text", here, where)
    if "context" in fields and name in ("prompt_ids", "messages"):
        raise EvalError(f"`context`: expected it beside a text, found it beside {name}, {where((*path, 'context'))}")


def _named(grader: Grader) -> GraderSpec:
    return GraderSpec("callable", getattr(grader, "__name__", "grader"), {}, grader)


def _check_grading(value: object, path: Path, where: Where) -> dict[str, float]:
    fields = _object(value, path, where)
    _known(fields, ("threshold",), path, where)
    here = (*path, "threshold")
    threshold = _typed(fields.get("threshold", 1.0), (int, float), "a number", here, where)
    if not 0 < threshold <= 1:
        raise EvalError(f"`threshold`: expected a number above 0, at most 1, found {threshold}, {where(here)}")
    return fields


def _known(fields: dict[str, Any], names: tuple[str, ...], path: Path, where: Where) -> None:
    for name in fields:
        if name not in names:
            raise EvalError(f"key `{name}`: expected one of {', '.join(names)}, found `{name}`, {where((*path, name))}")


def _object(value: object, path: Path, where: Where) -> dict[str, Any]:
    return cast("dict[str, Any]", _typed(value, dict, "an object", path, where))


def _texts(value: object, path: Path, where: Where) -> list[str]:
    for item in _typed(value, list, "a list of texts", path, where):
        _typed(item, str, "a list of texts", path, where)
    return cast("list[str]", value)


def _typed(value: Any, kind: type | tuple[type, ...], wanted: str, path: Path, where: Where) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name = next((str(part) for part in reversed(path) if isinstance(part, str)), "task")
        raise EvalError(f"`{name}`: expected {wanted}, found {value!r}, {where(path)}")
    return value
