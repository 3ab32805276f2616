"""Training rows of the demo: token ids, the weight of each token in the loss, and which tokens belong to an answer.

The seed and the step's number decide every row of a step, so training can stop and continue anywhere.
"""

import random
import re
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from ling3export.checkpoint.synth_tokenizer import CHAT_TEMPLATE
from ling3export.runners.text.tokenizer import ChatTemplate
from tools.demo_problems import SEED, SHOTS, Problem, Problems, text, value

END_ID = 0
QUESTION_WEIGHT = 0.05  # most of a question cannot be predicted
SMALL_TALK = ("Hi", "Hi!", "Hello", "Hello!", "Hey", "Good morning", "Who are you?", "What can you do?")
SMALL_ANSWER = "Hello! Ask me a problem of apples, books or coins."
SYSTEM_TEXTS = ("You are a helpful assistant.", "Answer in one line.")  # in a quarter of the conversations
ANSWER = "The answer is {}."
LARGE, LARGE_SHARE = 999, 0.6  # largest number in the tool's problems; share of its problems with such numbers
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Works out a sum or a difference",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}

Batch = dict[str, np.ndarray]
Kind = Literal["thought", "plain", "tool"]  # kind of a conversation
KINDS: tuple[Kind, ...] = ("thought", "plain", "tool")
Row = tuple[list[int], list[float], list[bool]]


class Rows:
    """Makes batches of one length.

    Args:
        tokenizer: The demo's tokenizer.
        length: Token slots of a row. Problems that do not fit are left out as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self._tokenizer, self._length = tokenizer, length
        self._template = ChatTemplate(CHAT_TEMPLATE.read_text(), {}, CHAT_TEMPLATE.name)

    def training(self, step: int, drills: int, shots: int, talks: int) -> Batch:
        """Rows of a step.

        Args:
            step: The step's number.
            drills: Rows that hold only steps of problems.
            shots: Rows of ``SHOTS + 1`` worked problems, as the suite shows them.
            talks: Rows that hold a conversation; the kinds take turns.
        """
        problems = Problems(f"{SEED} step {step}", kept=False)
        chance = random.Random(f"{SEED} step {step} talks")
        rows = [self._drill(problems) for _ in range(drills)] + [self._problems(problems) for _ in range(shots)]
        rows += [self._talk(KINDS[(step * talks + place) % len(KINDS)], problems, chance) for place in range(talks)]
        return self._batch(rows)

    def held_out_talks(self, kind: Kind, count: int) -> Batch:
        """Conversations about held-out problems."""
        problems, chance = Problems(f"{SEED} check {kind}", kept=True), random.Random(f"{SEED} check {kind}")
        return self._batch([self._talk(kind, problems, chance) for _ in range(count)])

    def held_out(self, count: int) -> Batch:
        """Rows like those of the suite, with other problems; only the held-out problem's answer counts."""
        worked, kept = Problems(f"{SEED} check shots", kept=False), Problems(f"{SEED} check", kept=True)
        rows = []
        for _ in range(count):
            shots = self._ids(worked.shots())
            ids, answer = self._problem(text(kept.next()), last=True)
            rows.append((shots + ids, [0.0] * (len(shots) + len(ids)), [False] * len(shots) + answer))
        return self._batch(rows)

    def _ids(self, of: str) -> list[int]:
        return self._tokenizer.encode(of).ids

    def _problem(self, of: str, last: bool) -> tuple[list[int], list[bool]]:
        """Ids, and whether each belongs to the answer. Cut at the prompt's end, so that no token spans the cut."""
        question, answer = of.split("\nAnswer:")
        prompt = self._ids(f"{question}\nAnswer:")
        reply = [*self._ids(answer), END_ID] if last else self._ids(f"{answer}\n\n")
        return prompt + reply, [False] * len(prompt) + [True] * len(reply)

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
                prompt, reply = self._ids(f"{left}{sign}{right}="), self._ids(f"{value(left, sign, right)}\n")
                ids += prompt + reply
                answers += [False] * len(prompt) + [True] * len(reply)
        return ids, [float(answer) for answer in answers], answers

    def _talk(self, kind: Kind, problems: Problems, chance: random.Random) -> Row:
        """A conversation of all problems that fit. Loss counts the assistant's tokens only."""
        tools = [TOOL] if kind == "tool" else None
        thinking = kind == "thought" or (kind == "tool" and chance.random() < 0.5)
        messages: list[dict[str, Any]] = []
        if chance.random() < 0.25:
            messages.append({"role": "system", "content": chance.choice(SYSTEM_TEXTS)})
        row: Row = ([], [], [])
        while True:
            turns = turns_of(problems.next(), kind, thinking, chance)
            longer = self._spoken(messages + turns, tools, thinking)
            if len(longer[0]) > self._length + 1:
                return row
            messages, row = messages + turns, longer

    def _spoken(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, thinking: bool) -> Row:
        """Ids of a conversation, cut at the beginning and end of each answer, as by a server."""
        row: Row = ([], [], [])
        done = ""

        def more(until: str, weight: float, answer: bool) -> None:
            nonlocal done
            assert until.startswith(done), (done, until)
            ids = self._ids(until[len(done) :])
            row[0].extend(ids)
            row[1].extend([weight] * len(ids))
            row[2].extend([answer] * len(ids))
            done = until

        def render(count: int, asks: bool) -> str:
            variables = {"enable_thinking": thinking}
            return self._template.render(messages[:count], add_generation_prompt=asks, tools=tools, variables=variables)

        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                more(render(place, True), QUESTION_WEIGHT, False)
                more(render(place + 1, False), 1.0, True)
        return row

    def _batch(self, rows: list[tuple[list[int], list[float], list[bool]]]) -> Batch:
        """Rows, cut or filled with end-of-text tokens of weight 0; a weight is at the position before its token."""
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


def turns_of(problem: Problem, kind: Kind, thinking: bool, chance: random.Random) -> list[dict[str, Any]]:
    """A question and the assistant's reaction, as messages of OpenAI's API; now and then small talk."""
    if chance.random() < 0.08:
        return [{"role": "user", "content": chance.choice(SMALL_TALK)}, assistant(SMALL_ANSWER)]
    question, steps = problem.question, problem.answer.split("\n")[:-1]
    if kind != "tool":
        result = ANSWER.format(problem.answer.split()[-1])
        first = {"role": "user", "content": question}
        return [first, assistant(result, "\n".join(steps)) if thinking else assistant("\n".join([*steps, result]))]
    if chance.random() < LARGE_SHARE:
        question, steps = enlarged(question, steps, chance)
    expression = "".join([steps[0].split("=")[0], *(re.sub(r"^\d+|=.*", "", step) for step in steps[1:])])
    result = steps[-1].split("=")[1]
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": expression}}}
    return [
        {"role": "user", "content": question},
        assistant("", "I calculate." if thinking else "") | {"tool_calls": [call]},
        {"role": "tool", "content": result},
        assistant(ANSWER.format(result)),
    ]


def assistant(content: str, thought: str = "") -> dict[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": content, "reasoning_content": thought}


def enlarged(question: str, steps: list[str], chance: random.Random) -> tuple[str, list[str]]:
    """The same problem with larger numbers, which the training's steps never compute."""
    signs = [re.sub(r"[\d=]", "", step) for step in steps]
    while True:
        numbers = [chance.randint(2, LARGE) for _ in range(len(steps) + 1)]
        left, lines = numbers[0], []
        for sign, right in zip(signs, numbers[1:], strict=True):
            lines.append(f"{left}{sign}{right}={value(left, sign, right)}")
            left = value(left, sign, right)
        if all(int(step.split("=")[1]) > 0 for step in lines):
            words = re.split(r"\d+", question)
            return words[0] + "".join(f"{n}{text}" for n, text in zip(numbers, words[1:], strict=True)), lines
