"""lm-evaluation-harness and inspect-ai evaluate the demo artifact offline; the engine's own answers are the oracle.

Both libraries run through their own commands, in processes of their own; edge cases are tested in this process.
"""

import asyncio
import json
import math
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ling3export.artifacts.catalog.layout import OciLayout
from ling3export.artifacts.catalog.publish import Words, publish
from ling3export.artifacts.manifest import MANIFEST
from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.evals.suites import load_suite
from tests.support import toy_artifact
from tests.support.artifacts_fixture import DEMO, RECIPES, ROOT, digest_of, files_below
from tests.support.scripted import scripted
from tests.support.serving import RUNNER

pytestmark = pytest.mark.extras

COUNT = 6  # problems
TOKENS = 32
CONTEXT = RECIPES["demo-tp1"].context
STOP = "\n\n"
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str  # a number
    choices: list[str]
    right: int


def problems() -> list[Problem]:
    """Problems of the demo suite, each with its answer and three wrong ones of other lengths."""
    made = []
    for number, task in enumerate(load_suite("demo", limit=COUNT).tasks):
        wrong = [task.target.replace("\n####", tail + "\n####") for tail in ("0", "\n1+1=2", "9")]
        right = number % 4
        choices = [*wrong[:right], task.target, *wrong[right:]]
        answer = task.target.rpartition(" ")[2]
        made.append(Problem(task.prompt, answer, [f" {text}" for text in choices], right))
    return made


@dataclass(frozen=True)
class Own:
    """The engine's own answers."""

    path: Path
    texts: list[str]
    scores: list[list[tuple[float, bool]]]
    rolling: list[float]
    rows: int


@pytest.fixture(scope="module")
def own(artifact) -> Own:
    # Without the chat template: the prompt is completed, as lm-eval and the engine itself do.
    plain = artifact.kept(
        "demo-text",
        digest_of(files_below(DEMO)),
        lambda path: shutil.copytree(DEMO, path, ignore=shutil.ignore_patterns("chat_template.jinja")),
    )
    path = artifact.built("demo-text-tp1", plain, *RECIPES["demo-tp1"].options())
    asked = problems()
    with Engine(path, report=lambda text: None) as engine:
        texts = engine.generate([each.prompt for each in asked], max_tokens=TOKENS, stop=STOP)
        pairs = [(each.prompt, choice) for each in asked for choice in each.choices]
        scores = [(score.logprob, score.is_greedy) for score in engine.score(pairs)]
        encode = engine.files.tokenizer("test").encode
        eos = engine.manifest.eos_token_ids[0]
        rolling = engine.score([([eos], encode(each.prompt, special=False)) for each in asked])
        target = engine.manifest.targets[engine.target]
    rows = max(target.paddings("decode"))
    each = len(asked[0].choices)
    return Own(
        path,
        [done.text or "" for done in texts],
        [scores[at : at + each] for at in range(0, len(scores), each)],
        [score.logprob for score in rolling],
        rows,
    )


def run_offline(folder: Path, *command: object) -> str:
    """Runs a command in ``folder`` that cannot reach a network; returns its stdout."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ
        | OFFLINE
        | {"HF_HOME": str(folder / "hf"), "XDG_DATA_HOME": str(folder / "data"), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TASKS = {
    "words": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [STOP], "max_gen_toks": TOKENS, "do_sample": False},
        "filter_list": [
            {
                "name": "last",
                "filter": [{"function": "regex", "regex_pattern": "#### (-?[0-9]+)"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{"metric": "exact_match"}],
    },
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{prompt}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
}


def test_lm_eval_generates_and_scores(own: Own, tmp_path: Path):
    asked = problems()
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(vars(each)) + "\n" for each in asked))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **task}))
    words = (
        f"lm-eval run --model ling3 --model_args artifact={own.path} --log_samples --tasks {' '.join(TASKS)}".split()
    )
    run_offline(tmp_path, *RUNNER, *words, "--include_path", tmp_path, "--output_path", tmp_path / "out")
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    samples = {}
    for name in TASKS:
        (file,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        samples[name] = sorted(lines, key=lambda line: line["doc_id"])
    assert [line["resps"][0][0] for line in samples["words"]] == own.texts
    right = [text.rpartition("#### ")[2] == each.answer for text, each in zip(own.texts, asked, strict=True)]
    assert sum(right) >= COUNT - 1
    assert results["words"]["exact_match,last"] == pytest.approx(sum(right) / COUNT)
    for line, expected in zip(samples["choices"], own.scores, strict=True):
        assert [(float(sum_), greedy == "True") for ((sum_, greedy),) in line["resps"]] == expected
    best = [max(range(4), key=lambda n, row=row: row[n][0]) for row in own.scores]
    assert best == [each.right for each in asked]
    assert results["choices"]["acc,none"] == 1.0
    assert sum(row[each.right][1] for row, each in zip(own.scores, asked, strict=True)) >= COUNT - 1
    assert [float(line["resps"][0][0]) for line in samples["texts"]] == own.rolling
    size = sum(len(each.prompt.encode()) for each in asked)
    assert results["texts"]["byte_perplexity,none"] == pytest.approx(math.exp(-math.fsum(own.rolling) / size))


@pytest.fixture(scope="module")
def lm_eval_model(own: Own) -> Iterator[Any]:
    """The model in this process, without the warnings of its libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ling3export.runners.adapters.lm_eval import Ling3Model

        model = Ling3Model(artifact=str(own.path), max_gen_toks=9, batch_size=1, device="cuda:0")
    yield model
    model.engine.close()


def instance(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments, task_name="a task")


def test_lm_eval_edges(lm_eval_model: Any, caplog: pytest.LogCaptureFixture):
    """Empty contexts, texts longer than the context, texts in windows, settings."""
    model, engine = lm_eval_model, lm_eval_model.engine
    assert (model.rank, model.world_size) == (0, 1)
    assert model.max_length == CONTEXT
    encode = engine.files.tokenizer("test").encode
    eos = engine.manifest.eos_token_ids[0]
    long = problems()[0].prompt * 64
    ids = encode(long, special=False)
    assert len(ids) > 2 * (CONTEXT - 1)
    empty, cut = model.loglikelihood([instance("", " 5"), instance(long, " 5")], disable_tqdm=True)
    after = encode(long + " 5")[len(encode(long)) :]
    expected = engine.score([([eos], encode(" 5", special=False)), (encode(long)[-(CONTEXT - len(after)) :], after)])
    assert [empty, cut] == [(score.logprob, score.is_greedy) for score in expected]
    assert caplog.messages == [f"a context of {len(encode(long))} tokens is cut to its last {CONTEXT - len(after)}"]
    # Every token is scored once: first after the end-of-text token, all but one of the context; then in windows of the
    # whole context.
    windows = [([eos], ids[: CONTEXT - 1])]
    for start in range(CONTEXT - 1, len(ids), CONTEXT - 1):
        end = min(start + CONTEXT - 1, len(ids))
        windows.append((ids[end - CONTEXT : start], ids[start:end]))
    (found,) = model.loglikelihood_rolling([instance(long)])
    assert found == pytest.approx(sum(score.logprob for score in engine.score(windows)), rel=1e-12)
    (text,) = model.generate_until([instance("Question:", {"until": "?"})])
    (done,) = engine.generate(["Question:"], max_tokens=9, stop="?")
    assert text == done.text
    drawn = model.generate_until([instance("Question:", {"do_sample": True, "temperature": 2.0})] * 3)
    assert len(set(drawn)) > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_beams": 4},
            "generation setting `num_beams`: expected one of do_sample, max_gen_toks, temperature, top_k, top_p, "
            "until, found 4, in task a task",
        ),
        (
            {"max_gen_toks": CONTEXT},
            f"max_gen_toks: expected 1 to {CONTEXT - 1}, so that a context fits with the answer, found {CONTEXT}, "
            "in task a task",
        ),
    ],
)
def test_lm_eval_settings_that_are_refused(lm_eval_model: Any, settings: dict[str, Any], message: str):
    with pytest.raises(RequestError) as raised:
        lm_eval_model.generate_until([instance("Question:", settings)])
    assert raised.value.message == message
    with pytest.raises(RequestError) as raised:
        lm_eval_model.loglikelihood([instance("Question:", "")], disable_tqdm=True)
    assert raised.value.message == f"continuation '': expected 1 to {CONTEXT - 1} tokens, found 0, after 'Question:'"


@pytest.fixture(scope="module")
def inspect_model(own: Own) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ling3export.runners.adapters.inspect_ai import Ling3API

        model = Ling3API("a name", artifact=str(own.path))
    yield model
    model.close()


def test_both_models_pull_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: they accepted only folders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ling3export.runners.adapters import inspect_ai, lm_eval

    publish(toy_artifact.shared(), OciLayout(tmp_path / "store"), "toy", "1.0.0", Words())
    reference, given = f"oci:{tmp_path}/store/toy@1.0.0", list[Path]()
    monkeypatch.setenv("LING3_STORE", str(tmp_path / "kept"))

    def engine(artifact: Path, **options: Any) -> None:
        given.append(artifact)
        raise LookupError

    for adapter, model in (
        (lm_eval, lambda: lm_eval.Ling3Model(artifact=reference)),
        (inspect_ai, lambda: inspect_ai.Ling3API(reference)),
        (inspect_ai, lambda: inspect_ai.Ling3API("a name", artifact=reference)),
    ):
        monkeypatch.setattr(adapter, "Engine", engine)
        with pytest.raises(LookupError):
            model()
    assert len(given) == 3 and len(set(given)) == 1 and (given[0] / MANIFEST).is_file()


def test_inspect_edges(own: Own, inspect_model: Any):
    """Settings that the model does not have are refused by name; our tokenizer counts; each stop has a reason."""
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser, ContentImage, GenerateConfig
    from inspect_ai.tool import ToolInfo

    engine = inspect_model.engine
    user = ChatMessageUser(content="Question:")

    def ask(*messages: Any, tools: Sequence[Any] = (), **config: Any) -> Any:
        return asyncio.run(inspect_model.generate([*(messages or [user])], [*tools], "none", GenerateConfig(**config)))

    (done,) = engine.generate(["Question:"], max_tokens=5)
    output = ask(max_tokens=5)
    assert (output.completion, output.stop_reason) == (done.text, "max_tokens")
    assert inspect_model.max_connections() == own.rows
    assert (output.usage.input_tokens, output.usage.output_tokens) == (len(done.prompt_ids), 5)
    assert ask(stop_seqs=["?"]).stop_reason == "stop"
    whole = ask(ChatMessageUser(content="Question: 5 9" * 680), max_tokens=2000)
    assert (whole.stop_reason, whole.usage.total_tokens) == ("model_length", CONTEXT)
    same = [ask(max_tokens=9, temperature=2.0, seed=7).completion for _ in range(2)]
    assert same[0] == same[1] != ask(max_tokens=9, temperature=2.0, seed=8).completion
    encode = engine.files.tokenizer("test").encode
    assert asyncio.run(inspect_model.count_text_tokens("Question: 17")) == len(encode("Question: 17", special=False))
    refused = [
        (ask, (), {"tools": [ToolInfo(name="search", description="")]}, "tools: `search` cannot be called"),
        (ask, (), {"logprobs": True}, "setting `logprobs`: expected it unset, found True"),
        (ask, (), {"num_choices": 2}, "setting `num_choices`: expected 1, found 2"),
        (
            ask,
            (ChatMessageSystem(content="Be brief."), user),
            {},
            "messages: expected a single user message, for the artifact has no chat template, found system, user",
        ),
        (
            ask,
            (ChatMessageUser(content=[ContentImage(image="x.png")]),),
            {},
            "messages: expected text of system, user, assistant, found other content, of user",
        ),
    ]
    for call, messages, options, expected in refused:
        with pytest.raises(RequestError) as raised:
            call(*messages, **options)
        assert raised.value.message == expected


def test_a_thought_is_no_part_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: both returned `I add.</think>The answer is 29.`; inspect's next message repeated the thought."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from inspect_ai.model import ChatMessageUser, GenerateConfig

        from ling3export.runners.adapters import inspect_ai, lm_eval

    with scripted(tmp_path, lambda prompt: "I add.</think>The answer is 29.") as (engine, runner):
        for adapter in (inspect_ai, lm_eval):
            monkeypatch.setattr(adapter, "Engine", lambda *_, **__: engine)
        asked, model = [ChatMessageUser(content="18+11=?")], inspect_ai.Ling3API("a name")
        for _ in range(2):
            output = asyncio.run(model.generate(asked, [], "none", GenerateConfig()))
            assert output.completion == "The answer is 29."
            assert output.message.content[0].reasoning == "I add."
            asked = [*asked, output.message, ChatMessageUser(content="Sure?")]
        assert "<think>I add.</think>The answer is 29." in runner.prompts[-1]
        harness = lm_eval.Ling3Model(artifact="a name")
        prompt = harness.apply_chat_template([{"role": "user", "content": "18+11=?"}])
        assert harness.generate_until([instance(prompt, {"max_gen_toks": 99})]) == ["The answer is 29."]
