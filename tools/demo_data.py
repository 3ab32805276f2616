"""Training rows of the demo: token ids, what each token weighs in the loss, and which are part of an answer.

Every row of a step is decided by the seed and the step's number, so training can stop and go on anywhere.
"""

import numpy as np
from tokenizers import Tokenizer

from ling3export.runners.evals.demo import SEED, SHOTS, Problems, text, value

END_ID = 0
QUESTION_WEIGHT = 0.05  # most of a question cannot be foretold

Batch = dict[str, np.ndarray]


class Rows:
    """Makes batches of one length.

    Args:
        tokenizer: Of the demo.
        length: Token slots of a row; what does not fit is left out by whole problems.
    """

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self._tokenizer, self._length = tokenizer, length

    def training(self, step: int, count: int, drills: int) -> Batch:
        """``count`` rows of ``SHOTS + 1`` problems; ``drills`` of them hold steps of such problems alone."""
        problems = Problems(f"{SEED} step {step}", kept=False)
        rows = [self._drill(problems) for _ in range(drills)]
        return self._batch(rows + [self._problems(problems) for _ in range(count - drills)])

    def held_out(self, count: int) -> Batch:
        """Rows of the kind that the suite has, but other ones; only the kept problem's answer counts."""
        shown, asked = Problems(f"{SEED} check shots", kept=False), Problems(f"{SEED} check", kept=True)
        rows = []
        for _ in range(count):
            shots = self._ids(shown.shots())
            ids, answer = self._problem(text(asked.next()), last=True)
            rows.append((shots + ids, [0.0] * (len(shots) + len(ids)), [False] * len(shots) + answer))
        return self._batch(rows)

    def _ids(self, of: str) -> list[int]:
        return self._tokenizer.encode(of).ids

    def _problem(self, of: str, last: bool) -> tuple[list[int], list[bool]]:
        """Ids, and which are the answer and what ends it. Cut where a prompt ends, so that no token spans the cut."""
        question, answer = of.split("\nAnswer:")
        asked = self._ids(f"{question}\nAnswer:")
        given = [*self._ids(answer), END_ID] if last else self._ids(f"{answer}\n\n")
        return asked + given, [False] * len(asked) + [True] * len(given)

    def _problems(self, problems: Problems) -> tuple[list[int], list[float], list[bool]]:
        ids: list[int] = []
        answers: list[bool] = []
        for place in range(SHOTS + 1):
            more, answer = self._problem(text(problems.next()), last=place == SHOTS)
            ids += more
            answers += answer
        return ids, [1.0 if answer else QUESTION_WEIGHT for answer in answers], answers

    def _drill(self, problems: Problems) -> tuple[list[int], list[float], list[bool]]:
        ids: list[int] = []
        answers: list[bool] = []
        while len(ids) <= self._length:
            for left, sign, right in problems.steps(problems.kind()):
                asked, given = self._ids(f"{left}{sign}{right}="), self._ids(f"{value(left, sign, right)}\n")
                ids += asked + given
                answers += [False] * len(asked) + [True] * len(given)
        return ids, [float(answer) for answer in answers], answers

    def _batch(self, rows: list[tuple[list[int], list[float], list[bool]]]) -> Batch:
        """Cut or filled with ends of text that weigh nothing; weights stand where a token is foretold."""
        batch = {
            "tokens": np.full((len(rows), self._length + 1), END_ID, np.int32),
            "weight": np.zeros((len(rows), self._length), np.float32),
            "answer": np.zeros((len(rows), self._length), bool),
        }
        for place, (ids, weights, answers) in enumerate(rows):
            batch["tokens"][place, : len(ids)] = ids[: self._length + 1]
            batch["weight"][place, : len(ids) - 1] = weights[1 : self._length + 1]
            batch["answer"][place, : len(ids) - 1] = answers[1 : self._length + 1]
        return batch
