"""Ready suites: GSM8K, MMLU-Pro, the demo; and any task file.

Data sets are the user's: none is downloaded, and the digests of the files that were read go into the run's record.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ling3export.foundation.errors import listed
from ling3export.runners.evals.graders import LETTERS
from ling3export.runners.evals.task_files import check_unique, load_tasks, read_records
from ling3export.runners.evals.tasks import Task
from ling3export.runners.evals.trials import EvalError

SHOTS = 4
STEP_BY_STEP = "Let's think step by step."
DEMO = Path(__file__).with_name("demo.jsonl")  # written by tools/demo_problems.py
KEPT = "names and pairs of numbers that training never saw"


@dataclass(frozen=True)
class Suite:
    """Tasks that belong together."""

    name: str
    tasks: list[Task]
    files: dict[str, str] = field(default_factory=dict)  # sha256 of every file that the tasks came from, by name
    settings: dict[str, Any] = field(default_factory=dict)  # settings of the run (RunConfig) that this suite fixes
    notes: tuple[str, ...] = ()  # for readers of the report


def load_suite(name: str, data: Path | None = None, limit: int | None = None) -> Suite:
    """A ready suite by its name, or the tasks of a file; with ``limit``, the first of them."""
    if name in SUITES:
        suite = SUITES[name](data)
    elif data is not None:
        raise EvalError(f"--data `{data}`: expected one of the suites {', '.join(SUITES)}, found `{name}`")
    elif Path(name).is_file():
        path = Path(name)
        suite = Suite(path.stem, load_tasks(path), {path.name: hashlib.sha256(path.read_bytes()).hexdigest()})
    else:
        raise EvalError(f"suite `{name}`: expected a task file, or one of {', '.join(SUITES)}, found neither")
    if limit is None:
        return suite
    return replace(suite, tasks=suite.tasks[:limit], notes=(*suite.notes, f"only the first {limit} tasks"))


def gsm8k(data: Path | None) -> Suite:
    """GSM8K: 4-shot prompts from the published train split, or prompts that are ready in a JSON file.

    The shots are the first four problems of the train split, as published (``<<48/2=24>>`` and ``####`` included);
    blocks are ``Question: …``, ``Answer: …`` with an empty line between. The answer is the last number.
    """
    data = _existing("gsm8k", data, "a folder with train.jsonl and test.jsonl, or a JSON file of prompts")
    if data.is_file() and data.suffix == ".json":
        return _suite("gsm8k", load_tasks(data), [data])
    train_file, test_file = _file(data, "train"), _file(data, "test")
    train = _records(train_file, ("question", "answer"))
    if len(train) < SHOTS:
        raise EvalError(f"gsm8k: expected {SHOTS} problems for shots, found {len(train)}, in {train_file}")
    shots = "".join(f"Question: {item['question']}\nAnswer: {item['answer']}\n\n" for item in train[:SHOTS])
    tasks = [
        _task(f"gsm8k-{place}", f"{shots}Question: {item['question']}\nAnswer:", "last_numeric", target=item["answer"])
        for place, item in enumerate(_records(test_file, ("question", "answer")))
    ]
    return _suite("gsm8k", tasks, [train_file, test_file])


def mmlu_pro(data: Path | None) -> Suite:
    """MMLU-Pro from the user's file, without shots.

    Records have question, options, answer (A … J) and category. A record with ``prompt`` is used verbatim.
    """
    data = _existing("mmlu-pro", data, "a folder with test.jsonl, or a file")
    file = data if data.is_file() else _file(data, "test")
    tasks = []
    for place, item in enumerate(read_records(file)):
        _need(item, ("answer",) if "prompt" in item else ("question", "options", "answer"), file, place)
        name, choices = f"mmlu-pro-{item.get('question_id', place)}", item.get("options")
        prompt = item["prompt"] if "prompt" in item else _mmlu_question(item)
        fields = {"target": item["answer"], "choices": choices, "category": item.get("category")}
        tasks.append(_task(name, prompt, "choice_letter", **fields))
    check_unique(tasks, file.name)
    return _suite("mmlu-pro", tasks, [file])


def demo(data: Path | None) -> Suite:
    """Problems that were kept from the demo checkpoint's training, after four worked problems that were not."""
    tasks = [
        _task(f"demo-{place}", item["prompt"], "last_numeric", target=item["answer"])
        for place, item in enumerate(read_records(DEMO))
    ]
    return _suite("demo", tasks, [DEMO], settings={"max_tokens": 32, "stop": ("\n\n",)}, notes=(KEPT,))


SUITES: dict[str, Callable[[Path | None], Suite]] = {"gsm8k": gsm8k, "mmlu-pro": mmlu_pro, "demo": demo}


def _suite(name: str, tasks: list[Task], files: Sequence[Path] = (), **more: Any) -> Suite:
    """A ready suite: its name goes to its tasks, too."""
    for task in tasks:
        task.suite = name
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return Suite(name, tasks, digests, **more)


def _task(name: str, prompt: Any, grader: str, **fields: Any) -> Task:
    try:
        return Task.model_validate({"id": name, "input": {"prompt": prompt}, "graders": [grader], **fields})
    except ValidationError as error:
        first = error.errors()[0]
        raise EvalError(f"`{first['loc'][-1]}`: {first['msg']}, in record {name}") from None


def _existing(suite: str, data: Path | None, wanted: str) -> Path:
    if data is None or not data.exists():
        place = "none" if data is None else f"nothing at {data}"
        raise EvalError(f"suite `{suite}`: expected {wanted}, found {place}", "name it with --data")
    return data


def _files(folder: Path, name: str) -> list[Path]:
    return [path for end in ("jsonl", "json") if (path := folder / f"{name}.{end}").is_file()]


def _file(folder: Path, name: str) -> Path:
    if not (files := _files(folder, name)):
        raise EvalError(f"data `{name}.jsonl`: expected {name}.jsonl or {name}.json, found neither, in {folder}")
    return files[0]


def _records(file: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    records = read_records(file)
    for place, record in enumerate(records):
        _need(record, fields, file, place)
    return records


def _need(record: dict[str, Any], fields: Sequence[str], file: Path, place: int) -> None:
    if missing := [name for name in fields if name not in record]:
        raise EvalError(f"record {place}: expected {listed(list(fields))}, found no {listed(missing)}, in {file}")


def _mmlu_question(item: dict[str, Any]) -> str:
    options = "".join(f"{letter}. {option}\n" for letter, option in zip(LETTERS, item["options"], strict=False))
    return f"Question:\n{item['question']}\nOptions:\n{options}Answer: {STEP_BY_STEP}"
