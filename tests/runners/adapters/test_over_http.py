"""lm-eval and inspect-ai evaluate an artifact offline through a server on loopback; results equal those in process."""

import gc
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from ling3export.runners.engine.engine import Engine
from tests.support import toy_artifact
from tests.support.serving import Server

pytestmark = pytest.mark.extras

COUNT, TOKENS = 4, 12
QUESTIONS = [f"{'the of and to '[: 3 + 3 * number]}?" for number in range(COUNT)]


@pytest.fixture(scope="module")
def toy():
    with Server(toy_artifact.shared(), "--model", "toy") as server:
        yield server


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """The engine's own greedy answers."""
    with Engine(toy_artifact.shared(), report=lambda text: None) as engine:
        asked = [engine.request([{"role": "user", "content": text}], TOKENS) for text in QUESTIONS]
        return [done.text or "" for done in engine.complete(asked)]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    opened: list[Engine] = []

    def opening(*args: Any, **options: Any) -> Engine:
        opened.append(Engine(*args, **options))
        return opened[-1]

    with warnings.catch_warnings():  # the libraries' own warnings
        warnings.simplefilter("ignore")
        for name in ("lm_eval", "inspect_ai"):
            monkeypatch.setattr(f"ling3export.runners.adapters.{name}.Engine", opening)
        yield
        for engine in opened:  # neither tool closes its model
            engine.close()
        gc.collect()  # inspect-ai leaves streams open, which warn when they are collected


def lm_eval(folder: Path, rows: list[dict[str, Any]], task: dict[str, Any], model: str, **how: Any) -> dict[str, Any]:
    """Scores and samples of one task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from ling3export.runners.adapters.lm_eval import NAME

    assert model in (NAME, "local-completions", "local-chat-completions")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    task = {"task": "ours", "dataset_path": "json", "dataset_kwargs": source, "test_split": "test", **task}
    (folder / "ours.yaml").write_text(yaml.safe_dump(task))
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=["ours"],
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        **how,
    )
    samples = sorted(found["samples"]["ours"], key=lambda sample: sample["doc_id"])
    return {"scores": found["results"]["ours"], "answers": [sample["filtered_resps"] for sample in samples]}


def test_lm_eval_chats_as_in_process(toy: Server, texts: list[str], tmp_path: Path):
    rows = [{"question": text, "answer": texts[0]} for text in QUESTIONS]
    task = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    url = f"{toy.url}/v1/chat/completions"
    over = lm_eval(
        tmp_path,
        rows,
        task,
        "local-chat-completions",
        apply_chat_template=True,
        model_args={"model": "toy", "base_url": url, "eos_string": "<|endoftext|>"},
    )
    within = lm_eval(
        tmp_path, rows, task, "ling3", apply_chat_template=True, model_args={"artifact": toy_artifact.shared()}
    )
    assert over["answers"] == within["answers"] == [[text] for text in texts]
    assert over["scores"]["exact_match,none"] == within["scores"]["exact_match,none"] >= 1 / COUNT


def test_lm_eval_scores_choices_as_in_process(artifact, tmp_path: Path):
    """With token ids, the server's own tokenizer, and the log-probabilities of an echoed prompt."""
    rows = [{"question": f"Question: {n} + {n}\nAnswer:", "choices": [f" {n}", f" {2 * n}", " a"]} for n in range(4)]
    task = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 1,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    path = artifact("demo-tp1")
    within = lm_eval(tmp_path, rows, task, "ling3", model_args={"artifact": path})
    with Server(path, "--model", "demo") as server:
        how = {"model": "demo", "base_url": f"{server.url}/v1/completions", "tokenizer_backend": "remote"}
        over = lm_eval(tmp_path, rows, task, "local-completions", model_args=how | {"max_length": 1024})
    assert over["scores"]["acc,none"] == within["scores"]["acc,none"]
    for one, other in zip(over["answers"], within["answers"], strict=True):
        assert [(pytest.approx(score, abs=1e-9), greedy) for score, greedy in one] == [tuple(each) for each in other]


def test_inspect_scores_as_in_process(toy: Server, texts: list[str], tmp_path: Path):
    """With both of inspect's providers for such servers: /v1/chat/completions and /v1/responses.

    The provider `openai` takes an unknown name for a reasoning model of OpenAI's, and sends no temperature in a chat to
    such a model; the test sends it in `extra_body`.
    """
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import exact
    from inspect_ai.solver import generate

    samples = [
        Sample(input=text, target=own if number % 2 else "nothing")
        for number, (text, own) in enumerate(zip(QUESTIONS, texts, strict=True))
    ]
    greedy = GenerateConfig(max_tokens=TOKENS, temperature=0)
    task = Task(dataset=samples, solver=generate(), scorer=exact(), config=greedy)
    there = {"base_url": f"{toy.url}/v1", "api_key": "none"}
    found = {}
    for name, model in {
        "in process": get_model(f"ling3/{toy_artifact.shared()}"),
        "compatible": get_model("openai-api/ling3/toy", **there),
        "chat": get_model(
            "openai/toy", config=GenerateConfig(extra_body={"temperature": 0}), responses_api=False, **there
        ),
        "responses": get_model("openai/toy", responses_api=True, **there),
    }.items():
        (log,) = eval(task, model=model, display="none", log_dir=str(tmp_path), log_format="json")
        assert log.status == "success", log.error
        found[name] = [(sample.output.completion, sample.scores["exact"].value) for sample in log.samples]
    assert [text for text, _ in found["in process"]] == texts
    assert {score for _, score in found["in process"]} == {"C", "I"}
    assert found == dict.fromkeys(found, found["in process"])
