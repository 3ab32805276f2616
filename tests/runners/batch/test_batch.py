"""Batches: each line gets an answer, and shards and continued runs give the output of one run."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ling3export.foundation.errors import ArtifactError, Ling3Error, RequestError
from ling3export.foundation.shards import Shard
from ling3export.runners.batch.run import BatchError, run_batch
from ling3export.runners.cli.main import main
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import EngineStopped
from tests.support import toy_artifact
from tests.support.limits import file_size_limit
from tests.support.waiting import until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SETTINGS: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0, "seed": 5}


def request(url: str, custom_id: str = "mine", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path: Path, lines: list[Any]) -> Path:
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{line}\n" for line in text))
    return path


def numbered(path: Path, count: int) -> Path:
    return written(path, [{"prompt_ids": [1, 2, 3 + number % 5], "custom_id": f"n{number}"} for number in range(count)])


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(path: Path) -> str:
    """An output without its answers' timestamps."""
    return re.sub(r'"created": \d+', "", path.read_text())


def run(engine: Engine, source: Path, output: Path, shard: str = "0/1", **more: Any) -> Any:
    return run_batch(engine, source, output, model="toy", settings=SETTINGS, shard=Shard.parse(shard), **more)


def test_each_line_is_answered_in_order_with_what_the_engine_says(engine, tmp_path):
    source = written(
        tmp_path / "in.jsonl",
        [
            request(COMPLETIONS, "a", prompt=[1, 2, 3], max_tokens=3, temperature=0),
            {"prompt_ids": [4, 5]},
            request(CHAT, "c", messages=[{"role": "user", "content": "A"}], max_completion_tokens=2),
            {"messages": [{"role": "user", "content": "A"}], "custom_id": "d"},
            {"prompt": "AB"},
            request(RESPONSES, "f", input="A"),
            request(RESPONSES, "g", input=[{"role": "user", "content": "A"}], max_output_tokens=2),
        ],
    )
    summary = run(engine, source, tmp_path / "out.jsonl")
    assert (summary.answered, summary.refused, summary.earlier) == (7, 0, 0)
    found = answers(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in found] == ["a", "line-1", "c", "d", "line-4", "f", "g"]
    assert {line["response"]["status_code"] for line in found} == {200}
    assert len({line["id"] for line in found}) == 7
    *bodies, whole, short = [line["response"]["body"] for line in found]
    assert [(body["object"], body["usage"]["output_tokens"]) for body in (whole, short)] == [
        ("response", 4),
        ("response", 2),
    ]
    kinds = ["text_completion", "text_completion", "chat.completion", "chat.completion", "text_completion"]
    assert [body["object"] for body in bodies] == kinds
    assert [body["usage"]["completion_tokens"] for body in bodies] == [3, 4, 2, 4, 4]
    (greedy,) = engine.generate([[1, 2, 3]], max_tokens=3)
    (drawn,) = engine.generate([[4, 5]], max_tokens=4, temperature=1.0, seed=6)  # line 1 has the second seed
    assert [body["choices"][0]["text"] for body in bodies[:2]] == [greedy.text, drawn.text]
    assert not (tmp_path / "out.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("no JSON", "invalid_json", "line: expected JSON, found"),
        ("", "invalid_json", "line: expected JSON, found"),
        ("[" * 40, "invalid_json", "more than 16 levels"),
        ("[1]", "invalid_line", "found [1]"),
        ({"prompt": "A", "prompt_ids": [1]}, "invalid_line", "found prompt, prompt_ids"),
        (request(COMPLETIONS) | {"body": 3}, "invalid_line", "line: expected a request"),
        (request("/v1/embeddings", input="A"), "invalid_url", 'found "POST" "/v1/embeddings"'),
        (request([COMPLETIONS], prompt=[1]), "invalid_url", 'found "POST" ["'),
        (
            request(RESPONSES, input="A", max_tokens=3),
            "unsupported_parameter",
            "`max_tokens`: expected one of the fields",
        ),
        (request(COMPLETIONS, prompt=[1], stream=True), "invalid_value", "`stream`: expected false in a batch"),
        (request(COMPLETIONS, prompt=[1], model="other"), "model_not_found", 'expected "toy", found "other"'),
        (request(COMPLETIONS, prompt=[10**6]), "invalid_value", "1000000"),
        (request(CHAT, messages=[]), "invalid_value", "`messages`"),
        ({"prompt_ids": [1] * 5000}, "invalid_value", "expected"),
    ],
)
def test_a_line_that_cannot_be_served_is_answered_with_an_error_and_costs_the_others_nothing(
    engine, tmp_path, line, code, message
):
    source = written(tmp_path / "in.jsonl", [{"prompt_ids": [1]}, line, {"prompt_ids": [2]}])
    assert run(engine, source, tmp_path / "out.jsonl").refused == 1
    found = answers(tmp_path / "out.jsonl")
    assert [each["response"]["status_code"] for each in found][::2] == [200, 200]
    wrong = found[1]["response"]
    assert wrong["status_code"] in (400, 404)
    assert wrong["body"]["error"]["code"] == code
    assert message in wrong["body"]["error"]["message"]


def test_a_line_that_is_too_long_is_refused_and_the_next_one_is_read(engine, tmp_path):
    source = written(tmp_path / "in.jsonl", ['{"prompt": "' + "A" * (9 << 20) + '"}', {"prompt_ids": [2]}])
    assert run(engine, source, tmp_path / "out.jsonl").refused == 1
    found = answers(tmp_path / "out.jsonl")
    assert "more than 8,388,608 bytes" in found[0]["response"]["body"]["error"]["message"]
    assert found[1]["response"]["status_code"] == 200


@pytest.mark.parametrize("shards", [2, 9])
def test_the_outputs_of_shards_one_after_the_other_are_what_one_run_gives(engine, tmp_path, shards):
    """Nine shards of seven lines include two empty ones."""
    source = numbered(tmp_path / "in.jsonl", 7)
    run(engine, source, tmp_path / "whole")
    parts = [tmp_path / f"part{index}" for index in range(shards)]
    for index, part in enumerate(parts):
        run(engine, source, part, f"{index}/{shards}")
    assert "".join(map(timeless, parts)) == timeless(tmp_path / "whole")


def test_a_run_that_was_broken_off_goes_on(engine, tmp_path):
    """The run ends after three answers, in the middle of the fourth."""
    source, output = numbered(tmp_path / "in.jsonl", 9), tmp_path / "out"
    run(engine, source, tmp_path / "whole")

    def interrupt(done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(engine, source, output, progress=interrupt)
    assert not output.exists()
    with open(f"{output}.partial", "ab") as file:
        file.write(b'{"id": "batch')
    summary = run(engine, source, output)
    assert (summary.answered, summary.earlier) == (9, 3)
    assert timeless(output) == timeless(tmp_path / "whole")
    assert run(engine, source, output).earlier == 9  # nothing is left to do


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (["junk"] * 5, 1),
        ([{"id": "ID_0", "custom_id": "n0"}, {"id": "ID_2", "custom_id": "n2"}], 2),
        ([{"id": "ID_1", "custom_id": "n1"}], 1),
        ([{"id": f"ID_{number}", "custom_id": f"n{number}"} for number in range(4)], 4),
    ],
)
def test_lines_that_answer_others_are_not_gone_on_with(engine, tmp_path, lines, place):
    """Regression: five lines of junk counted as the answers to an input of three."""
    source, output = numbered(tmp_path / "in.jsonl", 3), tmp_path / "out"
    run(engine, source, output)
    name = answers(output)[0]["id"].removesuffix("_0")
    output.unlink()
    partial = Path(f"{output}.partial")
    partial.write_text("".join(json.dumps(line).replace("ID", name) + "\n" for line in lines))
    before = partial.read_bytes()
    with pytest.raises(BatchError, match=rf"out.partial`: line {place} answers another line, or the run of") as caught:
        run(engine, source, output)
    assert "--force" in str(caught.value)
    assert partial.read_bytes() == before
    assert run(engine, source, output, force=True).answered == 3


def test_a_finished_output_that_is_not_the_answers_is_not_taken_for_them(engine, tmp_path):
    """Regression: an output with missing or foreign lines counted as finished."""
    source, output = numbered(tmp_path / "in.jsonl", 3), tmp_path / "out"
    run(engine, source, output)
    lines = output.read_bytes().splitlines(keepends=True)
    for wrong, message in (
        (lines[:2], "it has 2 answers of 3"),
        ([b"junk\n"] * 5, "out`: line 1 answers another line"),
    ):
        output.write_bytes(b"".join(wrong))
        with pytest.raises(BatchError, match=message):
            run(engine, source, output)
        assert output.read_bytes() == b"".join(wrong)


def test_a_full_disk_is_named_with_the_file(engine, tmp_path):
    """Regression: the error was "output: expected to be readable or writable"."""
    source = numbered(tmp_path / "in.jsonl", 9)
    with (
        file_size_limit(1500),
        pytest.raises(ArtifactError, match=r"write `out\.partial`: expected room, found a file-size"),
    ):
        run(engine, source, tmp_path / "out")
    assert run(engine, source, tmp_path / "out").earlier > 0


def test_an_engine_that_ends_leaves_what_was_answered(tmp_path):
    source, output = numbered(tmp_path / "in.jsonl", 40), tmp_path / "out"
    with Engine(toy_artifact.shared(), report=lambda text: None) as engine, pytest.raises(EngineStopped):
        run(engine, source, output, progress=lambda done: engine.close() if done == 4 else None)
    kept = len(Path(f"{output}.partial").read_bytes().splitlines())
    assert kept >= 4
    with Engine(toy_artifact.shared(), report=lambda text: None) as engine:
        assert run(engine, source, output).earlier == kept
    assert len(answers(output)) == 40


def test_a_killed_command_goes_on_where_it_was(tmp_path):
    source, output = numbered(tmp_path / "in.jsonl", 400), tmp_path / "out"
    command = [sys.executable, "-m", "ling3export.runners.cli", "batch", toy_artifact.shared(), source, output]
    command += ["--max-tokens", "20", "--model", "toy"]
    process = subprocess.Popen([str(part) for part in command], stderr=subprocess.DEVNULL)
    partial = Path(f"{output}.partial")
    until(lambda: partial.exists() and partial.stat().st_size > 2000, of=process)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert not output.exists()
    done = CliRunner().invoke(main, [str(part) for part in command[3:]], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert re.search(r"400 lines of shard 0/1, [1-9]\d* of them by an earlier run", done.stderr)
    assert [line["custom_id"] for line in answers(output)] == [f"n{number}" for number in range(400)]


def test_another_run_is_not_mixed_in(engine, tmp_path):
    source, output = numbered(tmp_path / "in.jsonl", 3), tmp_path / "out"
    run(engine, source, output)
    with pytest.raises(BatchError, match="line 2 answers another line"):
        run(engine, source, output, "0/2")
    with pytest.raises(BatchError, match="or the run of another input, artifact or setting"):
        run_batch(engine, source, output, model="toy", settings=SETTINGS | {"seed": 6})
    numbered(source, 4)
    with pytest.raises(BatchError, match="or the run of another input, artifact or setting") as caught:
        run(engine, source, output)
    assert "--force" in str(caught.value)
    assert run(engine, source, output, force=True).answered == 4


def test_one_process_at_a_time_writes_an_output(engine, tmp_path):
    source, output = numbered(tmp_path / "in.jsonl", 3), tmp_path / "out"

    def meanwhile(done: int) -> None:
        with pytest.raises(BatchError, match="another process writes it"):
            run(engine, source, output)

    assert run(engine, source, output, progress=meanwhile).answered == 3


def test_an_input_that_is_not_there_is_named_before_anything_is_written(engine, tmp_path):
    with pytest.raises(RequestError, match=r"batch input `.*nothing`: expected a readable file, found No such file"):
        run(engine, tmp_path / "nothing", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_input_may_be_a_link_and_a_pipe_is_not_waited_for(engine, tmp_path):
    (tmp_path / "link").symlink_to(numbered(tmp_path / "in.jsonl", 2))
    assert run(engine, tmp_path / "link", tmp_path / "out").answered == 2
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match=r"batch input `.*pipe`: expected a readable file, found a pipe"):
        run(engine, tmp_path / "pipe", tmp_path / "other")


SLURM = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_STEP": "2"}


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("2/5", {}, "2/5"),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_COUNT": "4"}, "2/4"),
        ("auto/8", SLURM, "2/8"),
        ("auto/8", {"JOB_COMPLETION_INDEX": "7"}, "7/8"),
        ("auto", {"JOB_COMPLETION_INDEX": "7", "JOB_COMPLETIONS": "9"}, "7/9"),
    ],
)
def test_a_share_is_said_or_found(text, environment, expected):
    assert str(Shard.parse(text, environment)) == expected


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        ("5/5", {}),
        ("1", {}),
        ("-1/2", {}),
        ("0/0", {}),
        ("a/b", {}),
        ("auto", {}),
        ("auto/2", {}),
        ("auto/2", {"JOB_COMPLETION_INDEX": "2"}),
        ("auto", {"JOB_COMPLETION_INDEX": "1"}),
        ("auto/4", SLURM | {"SLURM_ARRAY_TASK_ID": "x"}),
        ("auto/4", SLURM | {"SLURM_ARRAY_TASK_STEP": "0"}),
        ("1/99999999999", {}),
    ],
)
def test_an_invalid_share_is_refused(text, environment):
    with pytest.raises(Ling3Error, match="--shard: expected a share I/N, found"):
        Shard.parse(text, environment)


def test_the_shares_of_a_work_are_all_of_it():
    shards = [Shard(index, 3) for index in range(3)]
    assert [[n for n in range(7) if shard.has(n)] for shard in shards] == [[0, 3, 6], [1, 4], [2, 5]]
