"""Word problems: those that the demo checkpoint was trained on, and those that were held out.

``python -m tools.demo_problems > runners/evals/demo.jsonl`` writes the suite ``demo``. Python guarantees equal results
only of ``random()``, so only this method is used, and the same seed gives the same problems everywhere. Held out by
construction: an eighth of all pairs of numbers, chosen by a digest, and every tenth name. A problem of the suite has a
held-out name and in each step a held-out pair. Its four shots and the training data have neither.
"""

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

SEED = 20261121
SHOTS = 4
TASKS = 200
SMALLEST, LARGEST = 2, 49  # numbers of a problem
SMALL = 20  # numbers of a problem of two steps
KEPT_PAIRS, KEPT_NAMES = 8, 10  # one in 8 pairs and one in 10 names are held out

NAMES = (
    "Ada Adam Alan Alba Alma Amir Amy Ana Andy Anna Arlo Aron Asha Axel Bea Bella Ben Beth Bill Bob Bruno Cara Carl "
    "Cora Dan Dana Dara Dean Dina Dora Drew Ed Elena Eli Ella Ema Emil Enzo Erik Eva Ezra Fay Finn Flora Fred Gail Gia "
    "Gina Glen Hana Hank Hugo Ian Ida Ines Ira Iris Ivan Jack Jade Jan Jane Jim Jo Joan Joe John Joy Judy Kai Kara "
    "Karl Kate Kim Kira Kurt Lana Lara Lea Lee Lena Leo Lia Lily Lina Lisa Liv Lola Lou Luca Lucy Luis Luna Mara Mark "
    "Mary Max May Mia Mila Milo Mona Nadia Nan Neil Nell Nico Nina Noa Noel Nora Olga Olive Omar Oscar Otto Pam Paul "
    "Pia Ralf Raul Rita Rob Ron Rosa Rose Ruth Sam Sara Sean Sia Sofia Sue Tara Ted Theo Tia Tim Tina Tom Toni Una Uma "
    "Vera Vic Wes Will Yara Zara Zoe"
).split()
THINGS = "apples balls books boxes cards coins cups eggs keys nuts pears pens plums shells stamps toys".split()
GAINS = "buys finds gets wins".split()
LOSSES = "loses sells uses drops".split()
KINDS = ("gain", "loss", "together", "more", "gain and loss", "loss and gain")

T = TypeVar("T")
Steps = list[tuple[int, str, int]]  # left number, sign, right number


class Problem(NamedTuple):
    """A question and its answer, which has one line for each step and ends in ``#### N``."""

    question: str
    answer: str


def is_kept_pair(a: int, b: int) -> bool:
    """Whether the two numbers, in either order, are held out of every step of the training."""
    low, high = sorted((a, b))
    return hashlib.sha256(f"{SEED} {low} {high}".encode()).digest()[0] % KEPT_PAIRS == 0


def names(kept: bool) -> list[str]:
    """The names that are held out of training, or the others."""
    return [name for place, name in enumerate(NAMES) if (place % KEPT_NAMES == KEPT_NAMES - 1) == kept]


class Problems:
    """An endless row of problems. With ``kept``, their names and pairs are held out of training; otherwise none is."""

    def __init__(self, seed: str, kept: bool) -> None:
        self._random = random.Random(seed)
        self._kept = kept
        self._names = names(kept)

    def next(self) -> Problem:
        """The next problem; all kinds are equally likely."""
        kind = self.kind()
        name, things, gains, loses = (self._pick(row) for row in (self._names, THINGS, GAINS, LOSSES))
        other = self._pick([another for another in self._names if another != name])
        steps = self.steps(kind)
        a, b, c = steps[0][0], steps[0][2], steps[-1][2]
        question = {
            "gain": f"{name} has {a} {things} and {gains} {b} more. How many now?",
            "loss": f"{name} has {a} {things} and {loses} {b}. How many are left?",
            "together": f"{name} has {a} {things} and {other} has {b}. How many together?",
            "more": f"{name} has {a} {things} and {other} has {b}. How many more has {name}?",
            "gain and loss": f"{name} has {a} {things}, {gains} {b} and {loses} {c}. How many now?",
            "loss and gain": f"{name} has {a} {things}, {loses} {b} and {gains} {c}. How many now?",
        }[kind]
        lines = [f"{left}{sign}{right}={value(left, sign, right)}" for left, sign, right in steps]
        return Problem(question, "\n".join([*lines, f"#### {value(*steps[-1])}"]))

    def kind(self) -> str:
        """The kind of the next problem: one of KINDS."""
        return self._pick(KINDS)

    def shots(self, count: int = SHOTS) -> str:
        """The text of ``count`` worked problems, with an empty line after each."""
        return "".join(text(self.next()) + "\n\n" for _ in range(count))

    def steps(self, kind: str) -> Steps:
        """The steps of a problem, without a result below 1; their pairs are all held out of training, or all not."""
        signs = {"gain": "+", "loss": "-", "together": "+", "more": "-"}.get(kind)
        if signs is None:
            signs = "+-" if kind == "gain and loss" else "-+"
        most = LARGEST if len(signs) == 1 else SMALL
        while True:
            left, steps = self._number(most), []
            for sign in signs:
                steps.append((left, sign, self._number(most)))
                left = value(*steps[-1])
            if all(value(*step) > 0 and is_kept_pair(step[0], step[2]) == self._kept for step in steps):
                return steps

    def _number(self, most: int) -> int:
        return SMALLEST + int(self._random.random() * (most - SMALLEST + 1))

    def _pick(self, items: Sequence[T]) -> T:
        return items[int(self._random.random() * len(items))]


def value(left: int, sign: str, right: int) -> int:
    """The result of one step."""
    return left + right if sign == "+" else left - right


def text(problem: Problem) -> str:
    """A worked problem in the form that prompts have."""
    return f"Question: {problem.question}\nAnswer: {problem.answer}"


def suite_lines() -> str:
    """The packaged suite: in each line worked problems with a question, and the answer."""
    worked, problems = Problems(f"{SEED} shots", kept=False), Problems(f"{SEED} suite", kept=True)
    lines = []
    for _ in range(TASKS):
        shots, problem = worked.shots(), problems.next()
        record = {"prompt": f"{shots}Question: {problem.question}\nAnswer:", "answer": problem.answer}
        lines.append(json.dumps(record) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.stdout.write(suite_lines())
