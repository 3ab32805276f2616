"""Graders: code that gives a verdict on a transcript and an outcome, and how verdicts add up to a trial's.

A grader is a callable ``(task, transcript, outcome) -> {"passed": bool, …}``, or one of KINDS by name. A model-based
rubric is a callable that the user passes; there is none here.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ling3export.errors import Ling3Error
from ling3export.runners.evals.answers import LETTERS, choice_letter, extract_answer, gold_answer, same_number
from ling3export.runners.evals.objects import GraderError, GraderResult, Outcome, text_of

if TYPE_CHECKING:
    from ling3export.runners.evals.tasks import Task

Verdict = Mapping[str, Any]
Grader = Callable[..., Verdict]
STATE, TOOL_CALL, TRANSCRIPT, RUBRIC = range(4)  # when graders disagree, the lower one says why
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "equals": operator.eq, "at_least": operator.ge, "at_most": operator.le, "contains": operator.contains,
}  # fmt: skip
_PATH = re.compile(r"\.([A-Za-z_]\w*)|\['([^']*)'\]|\[(\d+)\]")


@dataclass(frozen=True)
class GraderSpec:
    """A grader of a task.

    Attributes:
        kind: One of KINDS, or ``callable``.
        name: What reports call it.
        arguments: Of the kind.
        function: The callable, for ``callable``, and for a state check that is one.
        required: Whether a trial can pass without it.
        weight: Of its score in the trial's.
    """

    kind: str
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    function: Grader | None = None
    required: bool = True
    weight: float = 1.0

    @property
    def authority(self) -> int:
        """STATE, TOOL_CALL, TRANSCRIPT or RUBRIC."""
        return RUBRIC if self.kind == "callable" else KINDS[self.kind].authority


def last_numeric(task: "Task", transcript: object, outcome: object) -> Verdict:
    """The last number of the text equals the target's."""
    answer, gold = extract_answer(text_of(transcript)), gold_answer(task.target)
    return {"passed": same_number(answer, gold), "answer": answer, "explanation": f"expected {gold}, found {answer}"}


def choice(task: "Task", transcript: object, outcome: object) -> Verdict:
    """The letter that the text settles on is the target."""
    answer = choice_letter(text_of(transcript), len(LETTERS) if task.choices is None else len(task.choices))
    return _compared(answer == task.target.strip(), task.target, answer)


def exact(task: "Task", transcript: object, outcome: object) -> Verdict:
    """The text is the target, but for white space around."""
    answer = text_of(transcript).strip()
    return _compared(answer == task.target.strip(), task.target.strip(), answer)


def regex(task: "Task", transcript: object, outcome: object, pattern: str) -> Verdict:
    """The text has a match of ``pattern``."""
    match = re.search(pattern, text_of(transcript))
    return _compared(match is not None, pattern, match and match.group())


def response_contains(task: "Task", transcript: object, outcome: object, value: str | list[str]) -> Verdict:
    """The text has ``value``, or every one of several."""
    missing = [item for item in _strings(value) if item not in text_of(transcript)]
    return {"passed": not missing, "explanation": f"missing: {missing}" if missing else "all there"}


def transcript_constraints(
    task: "Task", transcript: object, outcome: object, max_turns: int | None = None,
    must_not_contain: list[str] | None = None, must_contain: list[str] | None = None,
) -> Verdict:  # fmt: skip
    """Limits on the transcript: how often the model was asked, what its text must have and must not have."""
    text, turns = text_of(transcript), getattr(transcript, "turns", 1)
    wrong = [f"{item!r} is there" for item in must_not_contain or () if item in text]
    wrong += [f"{item!r} is missing" for item in must_contain or () if item not in text]
    if max_turns is not None and turns > max_turns:
        wrong.append(f"{turns} turns, at most {max_turns} allowed")
    return {"passed": not wrong, "explanation": "; ".join(wrong)}


def steps_required(
    task: "Task", transcript: object, outcome: object, steps: list[str], ordered: bool = False
) -> Verdict:
    """The transcript has every named step (a tool call by its name), in this order if ``ordered``."""
    names = [step.name or step.kind for step in getattr(transcript, "steps", ())]
    missing = [step for step in steps if step not in names]
    if not missing and ordered:
        rest = iter(names)
        missing = [step for step in steps if step not in rest]  # each looks behind the one before
    return {"passed": not missing, "explanation": f"missing: {missing}, found {names}" if missing else ""}


def state_check(task: "Task", transcript: object, outcome: object, path: str, **comparison: Any) -> Verdict:
    """The outcome's value at ``path`` (``$.counters['prefill@16'].calls``) is there, and compares as asked."""
    state = outcome.state if isinstance(outcome, Outcome) else outcome
    try:
        found = value_at(state, path)
    except LookupError:
        return {"passed": False, "explanation": f"{path}: not in the outcome"}
    for name, wanted in comparison.items():
        if not COMPARISONS[name](found, wanted):
            return {"passed": False, "explanation": f"{path}: expected {name} {wanted!r}, found {found!r}"}
    return {"passed": True, "explanation": f"{path} = {found!r}"}


def value_at(state: Any, path: str) -> Any:
    """The value at a JSON path of names, quoted names and indices.

    Raises:
        LookupError: There is none.
        ValueError: The path is no such path.
    """
    for name, quoted, index in parse_path(path):
        if not isinstance(state, list if index else dict):
            raise LookupError(path)
        key: Any = int(index) if index else name or quoted
        state = state[key]
    return state


def parse_path(path: str) -> list[tuple[str, str, str]]:
    """The parts of a JSON path: (name, quoted name, index), one of them filled.

    Raises:
        ValueError: Another syntax.
    """
    rest = path.removeprefix("$")
    parts = list(_PATH.finditer(rest))
    if not path.startswith("$") or "".join(part.group() for part in parts) != rest:
        raise ValueError(f"expected a path such as $.files[0] or $.cells['prefill@16'], found {path!r}")
    return [(part.group(1) or "", part.group(2) or "", part.group(3) or "") for part in parts]


@dataclass(frozen=True)
class Kind:
    """A grader that task files can name: its function, the arguments it must have and may have, its authority."""

    function: Grader
    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    authority: int = TRANSCRIPT


KINDS = {
    "last_numeric": Kind(last_numeric),
    "choice_letter": Kind(choice),
    "exact": Kind(exact),
    "regex": Kind(regex, frozenset({"pattern"})),
    "response_contains": Kind(response_contains, frozenset({"value"})),
    "state_check": Kind(state_check, frozenset({"path"}), frozenset(COMPARISONS), STATE),
    "transcript_constraints": Kind(
        transcript_constraints, takes=frozenset({"max_turns", "must_not_contain", "must_contain"})
    ),
    "steps_required": Kind(steps_required, frozenset({"steps"}), frozenset({"ordered"}), TOOL_CALL),
}


def grade(task: "Task", transcript: object, outcome: object) -> tuple[list[GraderResult], bool, float]:
    """Grades a trial.

    Returns:
        The grades, most authoritative first; whether all required ones passed; the weighted mean of the scores.

    Raises:
        GraderError: A grader raised, or its verdict is none; or the task has no grader.
    """
    if not task.graders:
        raise GraderError(f"task `{task.id}`: expected at least one grader, found none")
    specs = sorted(task.graders, key=lambda spec: spec.authority)
    grades = [_result(spec, task, transcript, outcome) for spec in specs]
    weight = sum(item.weight for item in grades)
    score = sum(item.score * item.weight for item in grades) / weight if weight else 0.0
    return grades, all(item.passed for item in grades if item.required), score


def _result(spec: GraderSpec, task: "Task", transcript: object, outcome: object) -> GraderResult:
    function = spec.function or KINDS[spec.kind].function
    where = f"grader `{spec.name or spec.kind}` of task `{task.id}`"
    try:
        verdict = function(task, transcript, outcome, **spec.arguments)
    except Ling3Error:
        raise
    except Exception as error:
        raise GraderError(f"{where}: expected a verdict, found {type(error).__name__}: {error}") from error
    if not isinstance(verdict, Mapping) or not isinstance(verdict.get("passed"), bool):
        raise GraderError(f'{where}: expected {{"passed": bool, …}}, found {verdict!r}')
    score = float(verdict.get("score", verdict["passed"]))
    if not 0 <= score <= 1:
        raise GraderError(f"{where}: expected a score from 0 to 1, found {score}")
    answer = verdict.get("answer")
    return GraderResult(
        str(verdict.get("name", spec.name or spec.kind)), score, verdict["passed"],
        None if answer is None else str(answer), str(verdict.get("explanation", "")), spec.required, spec.weight,
    )  # fmt: skip


def _compared(passed: bool, wanted: str, answer: str | None) -> Verdict:
    return {"passed": passed, "answer": answer, "explanation": f"expected {wanted}, found {answer}"}


def _strings(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
