"""The runner's command line: stdout contains only data; exit codes, prompt files, logits files."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ling3export.runners.cli.chat import chat
from ling3export.runners.cli.generate import generate, read_prompts
from ling3export.runners.cli.main import main
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.serve.schema import GenerationBody
from ling3export.runners.text.grammar import Grammar
from ling3export.runners.text.tokenizer import TokenizerFiles
from tests.support import toy_artifact


@pytest.fixture(scope="module")
def artifact():
    return toy_artifact.shared()


def run(*arguments):
    return CliRunner().invoke(main, ["generate", *map(str, arguments)], prog_name="ling3-runner", terminal_width=80)


def test_text_goes_to_stdout_and_nothing_else(artifact):
    done = run(artifact, "--prompt", "the time", "--max-tokens", 5, "--ignore-eos")
    assert done.exit_code == 0
    assert done.stderr == f"{artifact.name}: unsigned\n"
    assert done.stdout.endswith("\n")


def test_without_max_tokens_an_answer_ends_with_the_context_at_the_latest(artifact, engine):
    """Regression: `--max-tokens` was required, so that a new user's first command ended in a usage error."""
    done = run(artifact, "--prompt-ids", "1,2,3", "--ignore-eos", "--json")
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == min(256, engine.limits.context - 3)
    helped = " ".join(run("--help").stdout.split())
    assert "the end of the context ends an answer, too. [default: 256;" in helped


def test_a_json_line_has_the_fields_in_order(artifact):
    done = run(artifact, "--prompt-ids", "1,2,3", "--max-tokens", 6, "--ignore-eos", "--json")
    record = json.loads(done.stdout)
    assert list(record) == ["prompt_ids", "token_ids", "text", "stop_reason", "cached_tokens", "ttft_ms", "e2e_ms"]
    tokens, _ = toy_artifact.answer([1, 2, 3], 6)
    assert (record["prompt_ids"], record["token_ids"], record["stop_reason"]) == ([1, 2, 3], tokens, "length")
    assert 0 < record["ttft_ms"] <= record["e2e_ms"]


def test_a_prompt_file_runs_as_one_batch_in_order(artifact, tmp_path):
    prompts = [[1, 2, 3], [9] * 30, [4], [8, 8], [7]]
    lines = [json.dumps({"prompt_ids": prompt}) for prompt in prompts]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    out = tmp_path / "logits.npz"
    words = ("--max-tokens", 6, "--ignore-eos", "--json", "--logits", out, "--stats")
    done = run(artifact, "--prompt-file", tmp_path / "p.jsonl", *words)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["prompt_ids"] for record in records] == prompts
    with np.load(out) as arrays:
        assert sorted(arrays) == sorted(f"{name}.{i}" for i in range(5) for name in ("tokens", "logits"))
        for i, prompt in enumerate(prompts):
            tokens, logits = toy_artifact.answer(prompt, 6)
            assert records[i]["token_ids"] == arrays[f"tokens.{i}"].tolist() == tokens
            assert arrays[f"logits.{i}"].dtype == np.float32
            np.testing.assert_array_equal(arrays[f"logits.{i}"], logits)
    stats = json.loads(done.stderr.removeprefix(f"{artifact.name}: unsigned\nstats: "))
    assert stats["compile_events"] == 0
    assert (stats["tokens_in"], stats["tokens_out"], stats["requests"], stats["preempted"]) == (37, 30, 5, 0)
    assert set(stats["cells"]["prefill@16"]) == {"calls", "padding_waste"}
    assert (stats["live"], stats["free"]) == (0, stats["pools"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logits.npz", "p.jsonl"]


def test_generate_accepts_the_fields_of_the_api_by_name():
    """`chat` accepts them, too, except for the form of an answer and log-probabilities."""
    taken, talked = ({param.name for param in command.params} for command in (generate, chat))
    # Fields for one client among several, for the form of its answer, and fields that the commands have under other
    # names.
    http = {"model", "stream", "stream_options", "priority", "cache_salt", "structured_outputs", "response_format", "n"}
    http |= {"max_completion_tokens", "kv_transfer_params", "return_token_ids", "truncate_prompt_tokens"}
    http_only = {"skip_special_tokens", "include_stop_str_in_output", "min_tokens", "stop_token_ids"}
    fields = GenerationBody.model_fields.keys() - http - http_only - {"logit_bias"}
    assert fields <= taken
    assert taken >= {"json_schema", "regex", "grammar"}  # other names for the same options
    of_python = {"name", "score_from", "kv_transfer_params", "sampling"} | http_only
    assert {field.name for field in dataclasses.fields(Request)} - taken == of_python | http & {
        "priority",
        "cache_salt",
    }
    assert {field.name for field in dataclasses.fields(Sampling)} - {"logit_bias"} <= taken
    assert {"temperature", "top_k", "top_p", "min_p", "seed"} <= talked


def test_generate_has_the_stop_and_form_options_of_http(artifact, engine, tmp_path):
    """Regression: `generate` had none of these options."""
    prompt, how = [1, 2, 3], {"max_tokens": 12, "ignore_eos": True}
    plain = toy_artifact.answer(prompt, 12)[0]
    stop = engine.files.tokenizer("test").decode(plain)[3:5]
    ask = ("--prompt-ids", "1,2,3", "--max-tokens", 12, "--ignore-eos", "--json")
    (tmp_path / "schema").write_text('{"enum": ["yes", "no"]}')
    (tmp_path / "lark").write_text('start: "x" "y"')
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (
            ("--repetition-penalty", 0.1, "--presence-penalty", 1, "--frequency-penalty", 1),
            {"repetition_penalty": 0.1, "presence_penalty": 1, "frequency_penalty": 1},
        ),
        (("--temperature", 1.5, "--min-p", 0.3, "--seed", 4), {"temperature": 1.5, "min_p": 0.3, "seed": 4}),
        (("--regex", "[ab]{3}"), {"grammar": Grammar("regex", "[ab]{3}")}),
        (("--json-schema", tmp_path / "schema"), {"grammar": Grammar("json", '{"enum": ["yes", "no"]}')}),
        (("--grammar", tmp_path / "lark"), {"grammar": Grammar("lark", 'start: "x" "y"')}),
        (("--stop", "no such", "--stop", stop), {"stop": ["no such", stop]}),
        (("--logprobs", 2), {"logprobs": 2}),
    ]
    for arguments, settings in cases:
        done = run(artifact, *ask, *arguments)
        assert done.exit_code == 0, done.stderr
        found = json.loads(done.stdout)
        (expected,) = engine.generate([prompt], **how, **settings)
        assert (found["token_ids"], found["text"]) == (expected.token_ids, expected.text), arguments
        if "logprobs" not in settings:
            assert found["token_ids"] != plain
            continue
        assert expected.logprobs is not None
        for each, (logprob, top) in zip(found["logprobs"], expected.logprobs, strict=True):
            assert (each["logprob"], [tuple(pair) for pair in each["top"]]) == (logprob, list(top))


def test_generate_stays_greedy_whatever_generation_config_says(artifact, monkeypatch):
    """Its settings are defaults only for `serve` and `chat`."""
    monkeypatch.setattr(TokenizerFiles, "generation_config", lambda files: {"temperature": 2.0, "top_k": 20})
    done = run(artifact, "--prompt-ids", "1,2,3", "--max-tokens", 6, "--ignore-eos", "--json")
    assert json.loads(done.stdout)["token_ids"] == toy_artifact.answer([1, 2, 3], 6)[0]


def test_logits_of_one_prompt_have_no_number(artifact, tmp_path):
    run(artifact, "--prompt-ids", "5", "--max-tokens", 3, "--ignore-eos", "--logits", tmp_path / "out")
    with np.load(tmp_path / "out") as arrays:
        assert {name: arrays[name].shape for name in arrays} == {"tokens": (3,), "logits": (3, 320)}


def test_an_existing_logits_file_is_kept_unless_forced(tmp_path, artifact):
    out = tmp_path / "out.npz"
    out.write_text("precious")
    done = run(artifact, "--prompt-ids", "5", "--max-tokens", 3, "--logits", out)
    assert done.exit_code == 1
    assert done.stderr == f"error: --logits `{out}`: expected no such file, found one\nhint: replace it with --force\n"
    forced = run(artifact, "--prompt-ids", "5", "--max-tokens", 3, "--logits", out, "--force")
    assert (forced.exit_code, forced.stderr) == (
        1,
        f"error: --logits `{out}`: the file exists and does not hold logits of an earlier run\n"
        "hint: --force replaces only .npz files: choose another name\n",
    )
    assert out.read_text() == "precious"
    np.savez(out, old=np.zeros(1))
    assert run(artifact, "--prompt-ids", "5", "--max-tokens", 3, "--logits", out, "--force").exit_code == 0
    assert len(np.load(out)) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--max-tokens", "1"], 2, "expected one of --prompt, --prompt-ids and --prompt-file, found none."),
        (["--max-tokens", "1", "--prompt", "a", "--prompt-ids", "1"], 2, "--prompt-ids and --prompt-file, found 2."),
        (["--max-tokens", "1", "--prompt-ids", "1,x"], 2, "expected whole numbers with commas between, found '1,x'."),
        (["--prompt-ids", "1", "--regex", "a", "--grammar", __file__], 2, "--regex and --grammar, found 2."),
        (
            ["--prompt-ids", "1", "--json-schema", "no-such"],
            1,
            "form of the answer `no-such`: expected a readable file",
        ),
        (["--prompt-ids", "1", "--logprobs", "1"], 2, "--logprobs needs --json."),
        (["--max-tokens", "0", "--prompt-ids", "1"], 2, "0 is not in the range x>=1"),
        (["--max-tokens", "1", "--prompt-ids", "1", "--top-p", "0"], 2, "0.0 is not in the range 0<x<=1"),
        (["--max-tokens", "1", "--prompt-ids", "1", "--programs", "maybe"], 2, "'maybe' is not one of"),
        (["--max-tokens", "1", "--prompt-ids", "1", "--logits", "no/such/folder/x"], 1, "the folder does not exist"),
        (["--prompt", "a\udcff"], 1, "error: prompt: expected text in Unicode, found half a character"),
        (["--prompt", "a", "--logits", "/proc/out.npz"], 1, "error: write `out.npz`: expected a writable file"),
        (["--prompt", "a", "--logits", "/dev/null", "--force"], 1, "--logits `/dev/null`: expected a file, found a"),
        (["--prompt", "a", "--logits", "x" * 300], 1, "found File name too long"),
        (["--max-tokens", "1", "--prompt-ids", "320"], 1, "error: prompt: expected token ids from 0 to 319, found 320"),
        (["--max-tokens", "1", "--prompt", ""], 1, "error: prompt: expected a prompt of at least one token, found an"),
        (
            ["--max-tokens", "1", "--prompt-ids", "1", "--target", "tpu"],
            1,
            "target `tpu`: the artifact has only cpu-tp2",
        ),
        (["--max-tokens", "1", "--prompt-file", "no-such-file"], 1, "expected a readable file, found No such file"),
    ],
)
def test_bad_input_ends_with_a_code_and_a_reason(artifact, arguments, code, message):
    done = run(artifact, *arguments)
    assert done.exit_code == code, done.output
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "found no JSON: "),
        ("", "found no JSON: "),
        ("[1]", "found [1]"),
        ("{}", "found the fields none"),
        ('{"prompt": "a", "prompt_ids": [1]}', "found the fields prompt, prompt_ids"),
        ('{"text": "a"}', "found the fields text"),
        ('{"prompt": 1}', "found 1 for prompt"),
        ('{"messages": "hello"}', 'found "hello" for messages'),
        ('{"messages": [{"role": "user"}]}', "found no content at place 0"),
        ('{"prompt_ids": "1"}', 'found "1" for prompt_ids'),
        ('{"prompt_ids": [true]}', "expected token ids, found true at place 0"),
        ('{"prompt_ids": [320]}', "expected token ids from 0 to 319, found 320 at place 0"),
    ],
)
def test_a_bad_line_of_a_prompt_file_is_named(artifact, tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt_ids": [1]}}\n{line}\n{{"prompt_ids": [1]}}\n')
    done = run(artifact, "--prompt-file", path, "--max-tokens", 2, "--json")
    assert done.exit_code == 1
    said = done.stderr.removeprefix(f"{artifact.name}: unsigned\n")  # token ids are printed after the load
    assert said.startswith(f"error: prompt file `{path}` line 2: expected ")
    assert message in done.stderr
    assert done.stdout == ""


def test_prompt_files_take_both_kinds_of_lines(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "日本\\u2028x"}\n{"prompt_ids": [1, 2]}\n', encoding="utf-8")
    assert read_prompts(tmp_path / "p.jsonl") == ["日本\u2028x", (1, 2)]


def test_messages_go_through_the_chat_template(artifact, tmp_path):
    """The toy's tokenizer has every byte and the special tokens: 318 is <role>, 319 </role>, 317 <|role_end|>."""
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "A"}]}))
    done = run(artifact, "--prompt-file", path, "--max-tokens", 2, "--json")
    text = b"HUMAN"
    assert done.exit_code == 0, done.stderr
    ids = json.loads(done.stdout)["prompt_ids"]
    assert (ids[0], len(ids)) == (318, 2 + len(text) + 2 + 2 + len(b"ASSISTANT"))


def test_the_command_makes_its_own_devices_and_compiles_nothing(artifact, tmp_path):
    """In a fresh process without any setup: the runner prepares the environment."""
    code = "import sys; from ling3export.runners.cli.main import main; sys.argv[0] = 'ling3-runner'; main()"
    words = ("generate", artifact, "--prompt-ids", "1,2,3", "--max-tokens", "6", "--ignore-eos", "--json", "--stats")
    env = {"PYTHONPATH": ":".join(sys.path), "JAX_LOG_COMPILES": "1"}
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == toy_artifact.answer([1, 2, 3], 6)[0]
    assert done.stderr.count("\n") == 2, done.stderr
    said = done.stderr.removeprefix(f"{artifact.name}: unsigned\nstats: ")
    assert json.loads(said)["compile_events"] == 0
