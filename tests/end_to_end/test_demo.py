"""The demo: its evaluation problems are not in the training data, its checkpoint, its score and its output."""

import contextlib
import hashlib
import json
import random
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from tokenizers import Tokenizer

from bench import demo as bench_demo
from bench.servers import asked, served
from ling3export.artifacts.records import canonical, to_json
from ling3export.checkpoint.reader import Checkpoint
from ling3export.compile.build import DEMO
from ling3export.model.parameters import expected_tensors
from ling3export.model.program import bind
from ling3export.runners.engine.validation import generation_defaults
from ling3export.runners.evals import suites
from ling3export.runners.evals.suites import load_suite
from ling3export.verify.reference import Reference
from tests.support.artifacts_fixture import run
from tests.support.direct import assemble, relative
from tests.support.tolerances import FLOAT32, MARGIN
from tools import demo_problems
from tools.demo_checkpoint import published
from tools.demo_data import KINDS, TOOL, Rows, turns_of
from tools.demo_loss import geometry, logits
from tools.demo_problems import NAMES, Problems, is_kept_pair, names, text

SCORE = 0.97
TALKS = 12  # conversations of each kind
# Least number of right conversations: the model sometimes copies a number of three digits wrongly.
SPOKEN = {"thought": 11, "plain": 11, "tool": 8}
STEP = re.compile(r"(\d+)([+-])(\d+)=(\d+)")


def pairs(of: str) -> list[tuple[int, int]]:
    """The numbers of every step in a text; checks that each result is right."""
    found = []
    for left, sign, right, result in STEP.findall(of):
        assert int(left) + int(right) * (1 if sign == "+" else -1) == int(result)
        found.append((int(left), int(right)))
    return found


def words(of: str) -> set[str]:
    return set(re.findall(r"[A-Z][a-z]+", of)) & set(NAMES)


def test_make_demo_prints_commands_to_copy_and_keeps_the_report_that_it_names(monkeypatch, capsys, tmp_path):
    """Regression: a command with a prompt was printed over two lines without quotes; the report was removed."""
    start = json.dumps({"compiles": 0, "token": 1, "seconds": {"whole": 1.0}})
    ran: list[list[str]] = []

    def spawned(command, environment, timeout=None):
        ran.append([str(word) for word in command[1:]])
        return "正确率: 1/1\n" if "eval" in command else start

    monkeypatch.setattr("bench.inputs.spawn", spawned)
    monkeypatch.setattr(bench_demo, "RUN", tmp_path / "build" / "run")
    monkeypatch.setattr(bench_demo, "served", lambda artifact: contextlib.nullcontext("url"))
    monkeypatch.setattr(bench_demo, "spoken", lambda url: "user: Hi!")
    bench_demo.main(tmp_path / "demo.ling3")
    told = capsys.readouterr().err.splitlines()
    commands = [line.removeprefix("$ python ") for line in told if line.startswith("$ ")]
    read = [subprocess.check_output(["bash", "-c", f"printf '%s\\0' {line}"], text=True) for line in commands]
    assert [each.split("\0")[:-1] for each in read] == ran
    assert str(tmp_path / "build" / "run") in ran[1] and (tmp_path / "build").is_dir()
    assert "minutes" in told[told.index("$ python " + commands[2]) - 1]


def test_problems_of_training_hold_nothing_that_is_kept():
    problems = Problems("any", kept=False)
    found = "".join(text(problems.next()) for _ in range(3000)) + "".join(shots for shots, _, _ in suite())
    assert len(pairs(found)) > 4500
    assert not any(is_kept_pair(*pair) for pair in pairs(found))
    assert words(found) == set(names(kept=False))


def test_problems_of_the_suite_hold_only_what_is_kept():
    for _, question, answer in suite():
        assert all(is_kept_pair(*pair) for pair in pairs(answer))
        assert len(pairs(answer)) == answer.count("\n")
        assert words(question) and words(question) <= set(names(kept=True))
    assert (len(names(kept=True)), len(names(kept=False))) == (15, 135)
    assert sum(is_kept_pair(a, b) for a in range(2, 50) for b in range(a, 50)) == 133  # 1176 in total


def suite() -> list[tuple[str, str, str]]:
    """Shots, question and answer of each task of the packaged suite."""
    tasks = load_suite("demo").tasks
    return [(*task.prompt.rsplit("Question: ", 1), task.target) for task in tasks]


def test_the_packaged_suite_is_the_generated_one():
    loaded = load_suite("demo")
    assert suites.DEMO.read_text() == demo_problems.suite_lines()
    assert (len(loaded.tasks), loaded.settings) == (200, {"max_tokens": 32, "stop": ("\n\n",)})
    assert loaded.tasks[1].prompt.count("Question:") == 5 and loaded.tasks[1].prompt.endswith("\nAnswer:")
    digest = hashlib.sha256(canonical(to_json([task.record() for task in loaded.tasks]))).hexdigest()
    assert digest == "c2a6c6555e03a6a9715e9690145251f7eb22008b095af301b743d773f882ed42"


def test_the_packaged_checkpoint_is_small_and_of_the_true_structure():
    checkpoint = Checkpoint.open(DEMO)
    config = checkpoint.config
    assert sum(int(np.prod(info.shape)) for info in expected_tensors(config).values()) == 1_506_736
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 5e6
    assert config.attention_kinds == ("kda", "kda", "mla") * 2
    assert (config.tp_shards, config.n_group, config.num_shared_experts, config.num_nextn_predict_layers) == (
        16,
        4,
        1,
        0,
    )
    assert generation_defaults(json.loads((DEMO / "generation_config.json").read_text())) == {"temperature": 0.1}
    for name in ("config.json", "generation_config.json"):  # transformers and guidellm refuse a list
        assert json.loads((DEMO / name).read_text())["pad_token_id"] == 0
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert tokenizer.encode("Tom has 149 pears").tokens[-6:] == ["Ġhas", "Ġ", "1", "4", "9", "Ġpears"]
    assert tokenizer.decode(tokenizer.encode("Łódź 17+8=25 🎉").ids) == "Łódź 17+8=25 🎉"


@pytest.fixture(scope="module")
def weights():
    """The packaged weights in the program's layout, fp32."""
    checkpoint = Checkpoint.open(DEMO)
    return checkpoint.config, assemble(checkpoint.config, checkpoint.tensor, "float32")


def test_the_published_layout_is_written_as_it_is_read(weights):
    config, tree = weights
    found, checkpoint = published(config, tree), Checkpoint.open(DEMO)
    assert found.keys() == expected_tensors(config).keys()
    for name, value in found.items():
        stored = checkpoint.tensor(name)
        assert value.dtype == stored.dtype
        assert value.tobytes() == stored.tobytes(), name


@pytest.mark.jit
def test_training_computes_what_the_reference_computes(weights):
    config, tree = weights
    rows = Rows(Tokenizer.from_file(str(DEMO / "tokenizer.json")), 64)
    tokens = rows.held_out(2)["tokens"][:, :64]
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",), axis_types=(AxisType.Auto,))
    P = PartitionSpec
    call = jax.shard_map(
        lambda tree, tokens: logits(bind(config, geometry(config))(tree), tokens),
        mesh=mesh,
        in_specs=(P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    found, load = jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})(tree, tokens)
    reference = Reference(config, Checkpoint.open(DEMO).tensor)
    expected = reference.logits_many([row.tolist() for row in tokens])
    assert min(reference.margins) > MARGIN
    assert max(relative(np.asarray(row), of) for row, of in zip(found, expected, strict=True)) < FLOAT32
    assert np.sum(load, axis=1).tolist() == [2 * 64 * config.num_experts_per_tok] * len(config.layers("moe"))


def test_the_demo_solves_what_was_kept_from_it(artifact, tmp_path):
    """With prebuilt programs in bf16, and four shots."""
    words = ["-m", "ling3export.runners.cli", "eval", "run", artifact("demo-tp1"), tmp_path / "run.jsonl"]
    done = run(sys.executable, *words, "--suite", "demo", "--limit", 40)
    passed, total, rate = re.fullmatch(r"正确率: (\d+)/(\d+) = (0\.\d{4}|1\.0000)\n", done.stdout).groups()
    assert (total, rate) == ("40", f"{int(passed) / 40:.4f}")
    assert float(rate) >= SCORE
    header = json.loads((tmp_path / "run.jsonl").read_text().partition("\n")[0])
    assert header["environment"]["verdicts"] == ["OPTIMAL"]


def test_the_demo_speaks_the_dialect_that_it_was_trained_on(artifact):
    """Problems that were not in the training data, through the server: with a thought, without, with tool calls."""
    right = dict.fromkeys(KINDS, 0)
    with served(artifact("demo-tp1")) as url:
        for kind in KINDS:
            problems, chance = Problems(f"spoken {kind}", kept=True), random.Random(kind)
            for _ in range(TALKS):
                right[kind] += as_written(url, turns_of(problems.next(), kind, kind == "thought", chance), kind)
        assert bench_demo.spoken(url).endswith("\nassistant: The answer is 52.")
    assert all(right[kind] >= least for kind, least in SPOKEN.items()), right


def as_written(url, turns, kind):
    """Whether the served demo writes every turn of the assistant as the conversation has it."""
    asks = {"tools": [TOOL]} if kind == "tool" else {}
    asks["chat_template_kwargs"] = {"enable_thinking": kind == "thought"}
    for place, turn in enumerate(turns):
        if turn["role"] == "assistant":
            body = {"model": "m", "messages": turns[:place], "seed": 0, "max_tokens": 64, **asks}
            found = json.loads(asked(url, "/v1/chat/completions", body))["choices"][0]["message"]
            calls = [json.loads(call["function"]["arguments"]) for call in found.get("tool_calls") or ()]
            if (found["content"] or "", found.get("reasoning_content") or "", calls) != wanted(turn):
                return False
        for call in turn.get("tool_calls", ()):
            call["id"], turns[place + 1]["tool_call_id"] = "call", "call"
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return True


def wanted(turn):
    """Content, thought and arguments of calls in a turn of the conversation."""
    calls = [call["function"]["arguments"] for call in turn.get("tool_calls", ())]
    return turn["content"], turn["reasoning_content"], calls
