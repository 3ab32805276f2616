"""Ready suites: GSM8K, MMLU-Pro, the smoke test of the product, the demo; and any task file.

Data sets are the user's: none is downloaded, and the digests of the files that were read go into the run's record.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ling3export.errors import listed
from ling3export.runners.evals.demo import SEED, demo_records
from ling3export.runners.evals.folder import PARTIAL
from ling3export.runners.evals.graders import LETTERS, GraderSpec, Verdict
from ling3export.runners.evals.task_files import check_unique, load_tasks, read_records
from ling3export.runners.evals.tasks import Place, Task, task_from
from ling3export.runners.evals.trials import EvalError, Outcome

SHOTS = 4
SHORT, LONG = 5, 40  # tokens of the smoke test's prompts: 1, 2, 3, …, which any vocabulary has
MMLU_SHOTS = 5
STEP_BY_STEP = "Let's think step by step."
# Scores of the reference evaluation, with the published weights and the settings in REFERENCE_SETTINGS.
REFERENCE = {"gsm8k": 0.85, "mmlu-pro": 0.44}
REFERENCE_SETTINGS = {
    "tp": 16, "page_size": 256, "paddings": [16, 128, 512], "max_running": 64, "dtype": "bfloat16", "overlap": False,
    "memory_fraction": "0.6", "temperature": 0.0, "max_tokens": 2000, "stop": [],
}  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """Tasks that belong together.

    Attributes:
        name: What reports call it.
        tasks: In the order in which they are run.
        files: sha256 of every file that the tasks came from, by name.
        reference: Score of the reference evaluation.
        settings: Settings of the run (RunConfig) that this suite fixes.
        product: Whether its graders look at the product's own state, which is counters and files.
        notes: What a reader of the report should know.
    """

    name: str
    tasks: list[Task]
    files: dict[str, str] = field(default_factory=dict)
    reference: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    product: bool = False
    notes: tuple[str, ...] = ()


def load_suite(name: str, data: Path | None = None, limit: int | None = None) -> Suite:
    """A ready suite by its name, or the tasks of a file.

    Args:
        name: One of SUITES, or the path of a task file.
        data: The folder or the file of a data set.
        limit: Number of tasks to keep, the first ones; None keeps all.

    Raises:
        EvalError: There is no such suite; or its data is missing, or is something else.
    """
    if name in SUITES:
        suite = SUITES[name](data)
    elif data is not None:
        raise EvalError(f"--data `{data}`: expected one of the suites {', '.join(SUITES)}, found `{name}`")
    elif Path(name).is_file():
        path = Path(name)
        suite = Suite(path.stem, load_tasks(path), {path.name: sha256(path)})
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
    data = _given("gsm8k", data, "a folder with train.jsonl and test.jsonl, or a JSON file of prompts")
    if data.is_file() and data.suffix == ".json":
        return Suite("gsm8k", _renamed(load_tasks(data), "gsm8k"), {data.name: sha256(data)}, REFERENCE["gsm8k"])
    files = {name: _one(data, (f"{name}.jsonl", f"{name}.json")) for name in ("train", "test")}
    train, test = (read_records(file) for file in files.values())
    for name, records in (("train", train), ("test", test)):
        _need(records, ("question", "answer"), files[name])
    if len(train) < SHOTS:
        raise EvalError(f"gsm8k: expected {SHOTS} problems for shots, found {len(train)}, in {files['train']}")
    shots = "".join(f"Question: {item['question']}\nAnswer: {item['answer']}\n\n" for item in train[:SHOTS])
    tasks = [
        _task(
            f"gsm8k-{place}", "gsm8k", f"{shots}Question: {item['question']}\nAnswer:", "last_numeric",
            target=item["answer"],
        )
        for place, item in enumerate(test)
    ]  # fmt: skip
    return Suite("gsm8k", tasks, {file.name: sha256(file) for file in files.values()}, REFERENCE["gsm8k"])


def mmlu_pro(data: Path | None) -> Suite:
    """MMLU-Pro from the user's files: test, and validation for the five shots of each category.

    Records have question, options, answer (A … J) and category; those of validation cot_content too. Without
    validation there are no shots. A record with ``prompt`` is used verbatim.
    """
    data = _given("mmlu-pro", data, "a folder with test.jsonl and validation.jsonl, or a file")
    test = data if data.is_file() else _one(data, ("test.jsonl", "test.json"))
    files = [test]
    shots: dict[str, str] = {}
    notes: tuple[str, ...] = ("no validation file: 0 shots",)
    if data.is_dir() and any((data / name).is_file() for name in ("validation.jsonl", "validation.json")):
        files.append(_one(data, ("validation.jsonl", "validation.json")))
        examples = _need(read_records(files[1]), ("question", "options", "answer", "category", "cot_content"), files[1])
        shots, notes = _mmlu_shots(examples), ()
    tasks = []
    for place, item in enumerate(read_records(test)):
        _need([item], ("answer",) if "prompt" in item else ("question", "options", "answer"), test, place)
        category = str(item.get("category", ""))
        prompt = item.get("prompt")
        if prompt is None:
            prompt = f"{shots.get(category, '')}{_mmlu_question(item)}{STEP_BY_STEP}"
        name = f"mmlu-pro-{item.get('question_id', place)}"
        extra = {"choices": item["options"]} if "options" in item else {}
        extra |= {"category": category} if category else {}
        tasks.append(_task(name, "mmlu-pro", prompt, "choice_letter", target=item["answer"], **extra))
    check_unique(tasks, test.name)
    return Suite("mmlu-pro", tasks, {file.name: sha256(file) for file in files}, REFERENCE["mmlu-pro"], notes=notes)


def product_smoke(data: Path | None) -> Suite:
    """Four tasks whose graders look at counters and files only, never at what the model said."""
    return Suite(
        "product-smoke", _smoke_tasks(), settings={"batch": 1, "max_tokens": 8, "transcripts": True}, product=True
    )


def demo(data: Path | None) -> Suite:
    """Problems that were kept from the demo checkpoint's training, behind four worked problems that were not."""
    tasks = [
        _task(f"demo-{place}", "demo", f"{shots}Question: {problem.question}\nAnswer:", "last_numeric",
              target=problem.answer)
        for place, (shots, problem) in enumerate(demo_records())
    ]  # fmt: skip
    notes = (f"generated: seed {SEED}; names and pairs of numbers that training never saw",)
    return Suite("demo", tasks, settings={"max_tokens": 32, "stop": ("\n\n",)}, notes=notes)


SUITES: dict[str, Callable[[Path | None], Suite]] = {
    "gsm8k": gsm8k, "mmlu-pro": mmlu_pro, "product-smoke": product_smoke, "demo": demo,
}  # fmt: skip


def sha256(path: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _task(name: str, suite: str, prompt: Any, grader: str, **fields: Any) -> Task:
    record = {"id": name, "input": {"prompt": prompt}, "graders": [grader], **fields}
    return task_from(record, Place(where=lambda path: f"in record {name}"), suite=suite)


def _renamed(tasks: list[Task], suite: str) -> list[Task]:
    for task in tasks:
        task.suite = suite
    return tasks


def _given(suite: str, data: Path | None, wanted: str) -> Path:
    if data is None or not data.exists():
        found = "none" if data is None else f"nothing at {data}"
        raise EvalError(f"suite `{suite}`: expected {wanted}, found {found}", "name it with --data")
    return data


def _one(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise EvalError(f"data `{names[0]}`: expected {' or '.join(names)}, found neither, in {folder}")


def _need(records: list[dict[str, Any]], fields: tuple[str, ...], file: Path, first: int = 0) -> list[dict[str, Any]]:
    for place, record in enumerate(records, first):
        missing = [name for name in fields if name not in record]
        if missing:
            raise EvalError(f"record {place}: expected {listed(list(fields))}, found no {listed(missing)}, in {file}")
    return records


def _mmlu_question(item: dict[str, Any]) -> str:
    options = "".join(f"{letter}. {option}\n" for letter, option in zip(LETTERS, item["options"], strict=False))
    return f"Question:\n{item['question']}\nOptions:\n{options}Answer: "


def _mmlu_shots(examples: list[dict[str, Any]]) -> dict[str, str]:
    """The first five worked examples of each category, in front of its questions."""
    shots: dict[str, list[str]] = {}
    for item in examples:
        worked = item["cot_content"].removeprefix("A: ")
        blocks = shots.setdefault(item["category"], [])
        if len(blocks) < MMLU_SHOTS:
            blocks.append(f"{_mmlu_question(item)}{worked}\n\n")
    intro = (
        "The following are multiple choice questions (with answers) about {}. Think step by step and then finish your "
        'answer with "the answer is (X)" where X is the correct letter choice.\n\n'
    )
    return {category: intro.format(category) + "".join(blocks) for category, blocks in shots.items()}


def _smoke_tasks() -> list[Task]:
    checks: tuple[tuple[str, int, tuple[Callable[[dict[str, Any]], str], ...]], ...] = (
        ("short-prompt", SHORT, (_nothing_compiles, _tokens_out, _one_prefill)),
        ("long-prompt", LONG, (_nothing_compiles, _tokens_out)),
        ("cells-again", SHORT, (_nothing_compiles, _one_prefill)),
        ("records-on-disk", SHORT, (_records,)),
    )
    return [
        Task(
            id=f"product-smoke-{name}",
            suite="product-smoke",
            input={"prompt_ids": list(range(1, length + 1))},
            graders=[_spec(check) for check in (_tokens_in(length), *looks)],
        )
        for name, length, looks in checks
    ]


def _spec(check: Callable[[dict[str, Any]], str]) -> GraderSpec:
    """A state check from a function that says what is wrong, or nothing."""

    def function(task: Task, transcript: object, outcome: Outcome) -> Verdict:
        wrong = check(outcome.state)
        return {"passed": not wrong, "explanation": wrong or "as it should be"}

    return GraderSpec("state_check", check.__name__.strip("_"), {}, function)


def _tokens_in(length: int) -> Callable[[dict[str, Any]], str]:
    def tokens_in(state: dict[str, Any]) -> str:
        return _differs("tokens in", length, state["delta"]["tokens_in"])

    return tokens_in


def _tokens_out(state: dict[str, Any]) -> str:
    return _differs("tokens out", state["output"], state["delta"]["tokens_out"])


def _nothing_compiles(state: dict[str, Any]) -> str:
    return _differs("compile events", 0, state["delta"]["compile_events"])


def _one_prefill(state: dict[str, Any]) -> str:
    calls = sum(cell["calls"] for name, cell in state["delta"]["cells"].items() if name.startswith("prefill@"))
    return _differs("prefill calls", 1, calls)


def _records(state: dict[str, Any]) -> str:
    return _differs("lines in the predictions file", state["records"], state["files"].get(PARTIAL, {}).get("lines"))


def _differs(what: str, wanted: object, found: object) -> str:
    return "" if wanted == found else f"{what}: expected {wanted}, found {found}"
