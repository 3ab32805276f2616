"""Graders: code that gives verdicts on a transcript and an outcome, and the verdict on a trial that follows from them.

A grader is a callable ``(task, transcript, outcome) -> {"passed": bool, …}``, or one of KINDS by name. A model-based
rubric is a callable that the user passes; none is shipped.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.evals.trials import GraderError, GraderResult, text_of

if TYPE_CHECKING:
    from ling3export.runners.evals.tasks import Task

Verdict = Mapping[str, Any]
Grader = Callable[..., Verdict]
LETTERS = "ABCDEFGHIJ"

_DASHES = str.maketrans("\u2212\u2013", "--")
# Marks between groups of three digits other than a comma: `1{,}234` and `1\,234` in LaTeX, `1'234`, narrow spaces.
_OTHER_GROUPING = re.compile(r"(?<=\d)(?:\{,\}|\\[,;: ]|['’\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9_])_+(?=[^\s_])")  # `_18_`, but not the 1 of `x_1`
# `3½` is 3.5. Numbers without a finite decimal form and powers are not computed: `3⅓`, `10²`, `10^2`, `10^{2}`.
_FRACTION = re.compile(r"(?:(\d+) ?)?([¼½¾⅒⅕⅖⅗⅘⅛⅜⅝⅞])")
_THIRD = re.compile("[⅐⅑⅓⅔⅙⅚]")
_POWER = re.compile(r"[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+|\^\{?[-−]?\d+\}?")
_GROUPING = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# A minus before a blank is a sign after a mark, or at the begin of a text of one line. After a word it is a dash, and
# at the begin of one of several lines the mark of an item.
_SPACED_MINUS = re.compile(r"([=:≈(<>|{#][ \t]*|(?<!\d)[$*]|\A\s*(?=[^\n]*\s*\Z))-[ \t]+(?=[$¥€£]?\.?\d)")
_NUMBER = re.compile(r"(?<![A-Za-z0-9_)\].])-?[$¥€£]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?![A-Za-z0-9]))?(\^?)")
_CURRENCY = re.compile(r"[$¥€£]")
# `\boxed{C}` and `\boxed{\text{C}}` are `(C)`. An I that thinks is nobody's choice.
_BOXED = re.compile(r"\\boxed\{\s*(?:\\\w+\{\s*)?\(?([A-J])\)?\s*\}+")
_SPEAKER = re.compile(r"\bI(?=['’]|\s+(?:also|am|believe|can|cannot|do|guess|have|need|suppose|think|will|would)\b)")
# The first stage that matches wins, and its last match counts. Only the letter itself must be upper case.
_STAGES = (
    re.compile(r"(?i:answer\s+is)[\s:*]*\(?([A-J])\)?(?![A-Za-z])"),
    re.compile(r"(?i:answer|答案)[\s*]*[:：是为][\s*]*\(?([A-J])\)?(?![A-Za-z])"),
    re.compile(r"\(([A-J])\)|^[^A-Za-z\n]*([A-J])[^A-Za-z\n]*$", re.MULTILINE),
)


@dataclass(frozen=True)
class GraderSpec:
    """A task's grader."""

    kind: str  # one of KINDS, or ``callable``
    name: str = ""  # for reports; the kind by default
    arguments: dict[str, Any] = field(default_factory=dict)  # of the kind's function
    function: Grader | None = None  # of a ``callable``, and of a state check that is a callable
    required: bool = True  # a trial passes only if all required graders pass


def extract_answer(text: str) -> str | None:
    """The last number in a text, without currency sign and grouping marks; None if there is none.

    A minus after a digit, a letter or a closing bracket is no sign. Nothing is computed: the last number of ``3/4`` is
    4, by definition, and a text whose last number has an exponent (``10²``) has no answer.
    """
    text = _EMPHASIS.sub("", _POWER.sub("^", _OTHER_GROUPING.sub(",", text)))
    text = _FRACTION.sub(lambda mixed: (mixed[1] or "0") + f"{unicodedata.numeric(mixed[2]):g}"[1:], text)
    plain = unicodedata.normalize("NFKC", _THIRD.sub("0^", text)).translate(_DASHES)
    matches = list(_NUMBER.finditer(_GROUPING.sub("", _SPACED_MINUS.sub(r"\1-", plain))))
    return _CURRENCY.sub("", matches[-1].group()) if matches and not matches[-1].group(1) else None


def gold_answer(target: str) -> str | None:
    """The number of a published answer: the one after its last ``####``, if it has that mark."""
    return extract_answer(target.rpartition("####")[2])


def same_number(answer: str | None, gold: str | None) -> bool:
    """Whether two extracted numbers are equal as decimals, so that ``18`` is ``18.00``. None equals nothing."""
    return answer is not None and gold is not None and Decimal(answer) == Decimal(gold)


def choice_letter(text: str, choices: int = len(LETTERS)) -> str | None:
    """The letter that a text settles on among the first ``choices`` letters of A … J; None if there is none.

    There is no random guess: a text without a letter is a wrong answer.
    """
    text = _SPEAKER.sub("i", _BOXED.sub(r"(\1)", text))
    for stage in _STAGES:
        letters = [next(filter(None, match.groups())) for match in stage.finditer(text)]
        letters = [letter for letter in letters if LETTERS.index(letter) < choices]
        if letters:
            return letters[-1]
    return None


def last_numeric(task: "Task", transcript: object, outcome: object) -> Verdict:
    """The text's last number equals the target's."""
    answer, gold = extract_answer(text_of(transcript)), gold_answer(task.target)
    return _compared(same_number(answer, gold), gold, answer)


def choice(task: "Task", transcript: object, outcome: object) -> Verdict:
    """The letter that the text settles on is the target."""
    answer = choice_letter(text_of(transcript), len(LETTERS) if task.choices is None else len(task.choices))
    return _compared(answer == task.target.strip(), task.target, answer)


def response_contains(task: "Task", transcript: object, outcome: object, value: list[str] | str) -> Verdict:
    """The text contains ``value``, or all of several values."""
    wanted = [value] if isinstance(value, str) else value
    missing = [item for item in wanted if item not in text_of(transcript)]
    return {"passed": not missing, "explanation": f"missing: {missing}" if missing else "all there"}


def transcript_constraints(
    task: "Task",
    transcript: object,
    outcome: object,
    max_turns: int | None = None,
    must_not_contain: list[str] | None = None,
    must_contain: list[str] | None = None,
) -> Verdict:
    """The transcript keeps its limits: its turns, and the words that it must and must not contain."""
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
        missing = [step for step in steps if step not in rest]  # each search goes on after the step before
    return {"passed": not missing, "explanation": f"missing: {missing}, found {names}" if missing else ""}


# The graders of task files, which give the arguments of a function after its first three parameters.
_NAMED = (last_numeric, response_contains, transcript_constraints, steps_required)
KINDS: dict[str, Grader] = {"choice_letter": choice, **{function.__name__: function for function in _NAMED}}


def grade(task: "Task", transcript: object, outcome: object) -> tuple[list[GraderResult], bool]:
    """The verdicts of a task's graders on a trial, and whether all required ones pass.

    Raises:
        GraderError: A grader raised, or returned no verdict; or the task has no grader.
    """
    if not task.graders:
        raise GraderError(f"task `{task.id}`: it has no grader")
    grades = [_result(spec, task, transcript, outcome) for spec in task.graders]
    return grades, all(item.passed for item in grades if item.required)


def _result(spec: GraderSpec, task: "Task", transcript: object, outcome: object) -> GraderResult:
    function, name = spec.function or KINDS[spec.kind], spec.name or spec.kind
    where = f"grader `{name}` of task `{task.id}`"
    try:
        verdict = function(task, transcript, outcome, **spec.arguments)
    except Ling3Error:
        raise
    except Exception as error:
        raise GraderError(f"{where}: expected a verdict, found {type(error).__name__}: {error}") from error
    if not isinstance(verdict, Mapping) or not isinstance(verdict.get("passed"), bool):
        raise GraderError(f'{where}: expected {{"passed": bool, …}}, found {verdict!r}')
    score, answer = float(verdict.get("score", verdict["passed"])), verdict.get("answer")
    if not 0 <= score <= 1:
        raise GraderError(f"{where}: expected a score from 0 to 1, found {score}")
    explanation = str(verdict.get("explanation", ""))
    return GraderResult(
        name, score, verdict["passed"], None if answer is None else str(answer), explanation, spec.required
    )


def _compared(passed: bool, wanted: str | None, answer: str | None) -> Verdict:
    return {"passed": passed, "answer": answer, "explanation": f"expected {wanted}, found {answer}"}
