"""``ling3-runner bench`` with an engine of toy programs and with servers: tables, lines of JSON, exit codes."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.artifacts.manifest import read_manifest
from ling3export.runners.bench_serving.measure import EngineClient, Settings, measure
from ling3export.runners.bench_serving.table import check
from ling3export.runners.cli.main import main
from ling3export.runners.load.programs import Programs
from tests.support import toy_artifact
from tests.support.fake_openai import serving, whole, words
from tests.support.limits import file_size_limit

DATA = Path(__file__).parents[2] / "data"
SMALL = ["--num-prompts", 6, "--input-len", 12, "--output-len", 8]


@pytest.fixture(scope="module")
def artifact():
    return toy_artifact.shared()


def bench(*arguments, **more):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)], prog_name="ling3-runner", **more)


def test_an_engine_in_this_process_is_measured(artifact, tmp_path):
    line = tmp_path / "runs.jsonl"
    done = bench("serve", artifact, *SMALL, "--output", line, "--save-raw", "--max-concurrency", 2)
    assert (done.exit_code, done.stderr) == (0, f"{artifact.name}: unsigned\n")
    assert check(done.stdout) == []
    (record,) = map(json.loads, line.read_text().splitlines())
    figures, requests = record["figures"], record["requests"]
    assert f"Total generated tokens:                  {figures['output_tokens']}" in done.stdout
    assert (record["compiles"], figures["completed"], len(requests)) == (0, 6, 6)
    assert record["artifact"]["sha256"] == read_manifest(artifact).sha256
    assert all(len(request["times"]) == request["tokens"] > 0 for request in requests)


def test_a_full_disk_is_named_with_the_file(artifact, tmp_path):
    """Regression: the error had no path: "output: expected to be readable or writable"."""
    size, output = 1 << 20, tmp_path / "runs.jsonl"
    output.write_bytes(b"\n" * size)
    with serving(words) as (url, _), file_size_limit(size):
        done = bench("serve", artifact, "--url", url, *SMALL, "--text", "--output", output)
    found = f"found a file-size limit of {size:,} bytes, in {tmp_path}"
    assert (done.exit_code, f"write `runs.jsonl`: expected room, {found}" in done.stderr) == (1, True)


def test_programs_are_loaded_before_requests_are_sent(artifact, monkeypatch):
    order = []

    def noted(owner, name):
        before = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: (order.append(name), before(*given, **named))[1])

    noted(Programs, "settle")
    noted(EngineClient, "prepare")
    measure(Settings(artifact=artifact, num_prompts=2, input_len=4, output_len=2))
    assert order[0] == "settle" and order.count("prepare") >= 2


def test_the_same_seed_measures_the_same_requests(artifact):
    runs = [
        measure(Settings(artifact=artifact, num_prompts=3, input_len=9, output_len=4, seed=seed)) for seed in (1, 1, 2)
    ]
    texts = [sorted(result.text for result in run.run.results) for run in runs]
    assert texts[0] == texts[1] != texts[2]


def test_a_server_is_measured_with_the_artifacts_tokenizer(artifact):
    with serving(words) as (url, bodies):
        done = bench("serve", artifact, "--url", url, *SMALL, "--text")
    assert done.exit_code == 0, done.output
    assert check(done.stdout) == []
    assert "Backend:                                 openai" in done.stdout
    assert all(isinstance(body["prompt"], str) for body in bodies)


def test_a_server_that_answers_nothing_gives_zeros_and_exit_code_1():
    first = []

    def answer(body):
        first.append(body)
        return words(body) if len(first) == 1 else [whole({"error": {"message": "busy"}}, "503 Busy")]

    with serving(answer) as (url, _):
        done = bench("serve", "--url", url, "--tokenizer", toy_artifact.shared(), *SMALL)
    assert done.exit_code == 1
    assert "Mean E2E Latency (ms):                   0.00" in done.stdout
    assert "nan" not in done.stdout
    assert "warning: 6 requests failed and do not count; the first: ValueError: status 503: busy" in done.stderr
    assert done.stderr.endswith("error: bench: no request was answered\n")


def test_compiling_during_a_run_is_an_error(artifact, monkeypatch):
    counts = iter((0, 2))

    async def compiles(self):
        return next(counts)

    monkeypatch.setattr(EngineClient, "compiles", compiles)
    done = bench("serve", artifact, *SMALL)
    assert done.exit_code == 1
    assert "expected no program to be compiled during the run, found 2" in done.stderr


def test_a_suite_is_a_workload(artifact):
    with serving(words) as (url, bodies):
        suite = ["--workload", "suite", "--suite", "gsm8k", "--data", DATA / "gsm8k"]
        done = bench("serve", artifact, "--url", url, *suite, "--num-prompts", 3, "--output-len", 5)
    assert done.exit_code == 0, done.output
    assert len({body["prompt"] for body in bodies}) == 3
    assert all(body["max_tokens"] == 5 for body in bodies)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["serve"], 2, "expected ARTIFACT or --url, found neither"),
        (["serve", "ARTIFACT", "--workload", "suite"], 2, "--suite and --workload suite belong together"),
        (["serve", "ARTIFACT", "--workload", "jsonl"], 1, "name the data set"),
        (["serve", "ARTIFACT", "--input-len", "64"], 1, "expected prompt and answer within the context of 64 tokens"),
        (
            ["serve", "ARTIFACT", "--url", "nowhere", "--input-len", "9", "--output-len", "9"],
            1,
            "url: expected http://HOST:PORT, found nowhere",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_loaded(arguments, code, message, artifact):
    done = bench(*(artifact if each == "ARTIFACT" else each for each in arguments))
    assert (done.exit_code, done.stdout) == (code, "")
    assert message in done.stderr


def test_tables_are_checked_from_files_and_stdin(tmp_path):
    table = DATA / "serving_tables" / "table-3.txt"
    assert bench("check", table).stdout == "the figures agree within their rounding\n"
    wrong = table.read_text().replace("2.64", "2.74")
    done = bench("check", "-", input=wrong)
    assert done.exit_code == 1
    assert "`Request throughput (req/s)` 2.74: expected" in done.stderr


def test_prefixes_of_a_data_set(tmp_path, artifact):
    dialogs = [[("human", f"What is {name}?"), ("gpt", "It is.")] for name in "AB"] + [
        [("human", "你好吗"), ("gpt", "好")]
    ]
    file = tmp_path / "d.json"
    file.write_text(json.dumps([{"conversations": [{"from": f, "value": v} for f, v in turns]} for turns in dialogs]))
    done = bench("prefixes", file, "--longer", 4)
    assert done.exit_code == 0, done.output
    assert "ratio:          0.3333\n" in done.stdout and '     2  "What is "\n' in done.stdout
    gsm8k = DATA / "gsm8k"
    done = bench("prefixes", gsm8k, "--suite", "gsm8k", "--tokenizer", artifact, "--least", 100, "--block", 16)
    found = dict(re.findall(r"^(\w+): +([\d.]+)$", done.stdout, re.MULTILINE))
    assert (found["dialogs"], found["prefixes"], found["coverage"]) == ("100", "1", "1.0000")
    assert 0.5 < float(found["cached_share"]) < 1
    assert "expected a text in `nothing`, found NoneType" in bench("prefixes", file, "--field", "nothing").stderr
