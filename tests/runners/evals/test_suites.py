"""Packaged suites, from a seeded subset of GSM8K's published files and from hand-written files."""

import hashlib
import json
from pathlib import Path

import pytest

from ling3export.runners.evals.graders import grade
from ling3export.runners.evals.suites import load_suite
from ling3export.runners.evals.trials import EvalError

GSM8K = Path(__file__).parents[2] / "data/gsm8k"


def test_gsm8k_builds_four_shots_from_the_published_files():
    suite = load_suite("gsm8k", GSM8K)
    train = [json.loads(line) for line in (GSM8K / "train.jsonl").read_text().splitlines()]
    test = [json.loads(line) for line in (GSM8K / "test.jsonl").read_text().splitlines()]
    assert len(suite.tasks) == 100
    prompt = suite.tasks[7].prompt
    blocks = prompt.split("\n\n")
    assert blocks == [f"Question: {x['question']}\nAnswer: {x['answer']}" for x in train] + [
        f"Question: {test[7]['question']}\nAnswer:"
    ]
    assert suite.files["test.jsonl"] == hashlib.sha256((GSM8K / "test.jsonl").read_bytes()).hexdigest()
    assert all(grade(task, record["answer"], None)[1] for task, record in zip(suite.tasks, test, strict=True))


def test_gsm8k_takes_prompts_that_are_ready(tmp_path):
    file = tmp_path / "gsm_8k.json"
    file.write_text(json.dumps([{"prompt": "Question: 1+1?\nAnswer:", "answer": "2"}]))
    (task,) = load_suite("gsm8k", file).tasks
    assert (task.prompt, task.target, task.suite) == ("Question: 1+1?\nAnswer:", "2", "gsm8k")


QUESTION = {
    "question_id": 70,
    "question": "Which?",
    "options": ["one", "two", "three"],
    "answer": "B",
    "category": "law",
}


def test_mmlu_pro_takes_records_and_prompts(tmp_path):
    ready = {"prompt": "Which one?", "answer": "A"}
    (tmp_path / "test.jsonl").write_text(f"{json.dumps(QUESTION)}\n{json.dumps(ready)}\n")
    question = "Question:\nWhich?\nOptions:\nA. one\nB. two\nC. three\nAnswer: Let's think step by step."
    task, other = load_suite("mmlu-pro", tmp_path).tasks
    assert (task.prompt, other.prompt) == (question, "Which one?")
    assert (task.id, task.category, task.choices) == ("mmlu-pro-70", "law", ["one", "two", "three"])
    assert grade(task, "So the answer is (B).", None)[1]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("gsm8k", None, "suite `gsm8k`: expected a folder with train.jsonl and test.jsonl, .*, found none"),
        ("gsm8k", "missing", "found nothing at "),
        ("gsm8k", ".", "data `train.jsonl`: expected train.jsonl or train.json, found neither"),
        ("nothing", None, "suite `nothing`: expected a task file, or one of gsm8k, .*, found neither"),
        ("nothing", ".", "--data `.*`: expected one of the suites gsm8k, .*, found `nothing`"),
    ],
)
def test_unknown_suites_are_refused(tmp_path, name, data, message):
    with pytest.raises(EvalError, match=message):
        load_suite(name, None if data is None else tmp_path / data)


def test_records_without_their_fields_are_named(tmp_path):
    (tmp_path / "test.jsonl").write_text(json.dumps(QUESTION) + '\n{"question": "?"}\n')
    with pytest.raises(EvalError, match="record 1: expected question, options, answer, found no options, answer, in "):
        load_suite("mmlu-pro", tmp_path)


def test_limit_takes_the_first_tasks():
    suite = load_suite("gsm8k", GSM8K, 3)
    assert [task.id for task in suite.tasks] == ["gsm8k-0", "gsm8k-1", "gsm8k-2"]
    assert suite.notes == ("only the first 3 tasks",)
