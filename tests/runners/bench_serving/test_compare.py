"""``ling3-runner bench compare``: the same requests to several servers, in one table."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest
from click.testing import CliRunner

from ling3export.foundation.processes import environment
from ling3export.runners.bench_serving.metrics import RequestResult, figures
from ling3export.runners.bench_serving.table import side_by_side
from ling3export.runners.cli.main import main
from tests.support import toy_artifact
from tests.support.builds import SCRIPT
from tests.support.fake_openai import serving, whole, words
from tests.support.serving import Server
from tests.support.waiting import until


def compare(*arguments):
    return CliRunner().invoke(main, ["bench", "compare", *map(str, arguments)], prog_name="ling3-runner")


def record_of(name, ttft, **fields):
    result = RequestResult(0.0, [ttft, ttft + 0.01], 4, 2, **fields)
    return {"name": name, "figures": asdict(figures([result], 0.5))}


def test_runs_stand_side_by_side_with_ratios_to_the_first():
    lines = side_by_side([record_of("one", 0.02), record_of("two", 0.04, cached=3)]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[0].split() == ["one", "two"]
    cells = {row[0]: row[1:] for row in (re.split(r" {2,}", line.strip()) for line in lines)}
    assert cells["Successful requests"] == ["1", "1 (1.00×)"] and cells["Failed requests"] == ["0", "0"]
    assert cells["Mean TTFT (ms)"] == ["20.00", "40.00 (2.00×)"]
    assert cells["Cache hit rate (%)"] == ["-", "75.00"]
    assert "hit rate" not in side_by_side([record_of("mine", 0.02)])  # a server does not report it


def test_servers_are_sent_the_same_requests(tmp_path):
    line, toy = tmp_path / "runs.jsonl", toy_artifact.shared()
    with Server(toy) as ours, serving(words) as (theirs, bodies):
        urls = ["--url", f"ours={ours.url}", "--url", f"theirs={theirs}"]
        done = compare(toy, *urls, "--num-prompts", 4, "--input-len", 12, "--output-len", 4, "--output", line)
    assert done.exit_code == 0, done.output
    assert re.search(r"^ +ours +theirs$", done.stdout, re.MULTILINE)
    records = [json.loads(text) for text in line.read_text().splitlines()]
    assert [(record["name"], record["figures"]["completed"], record["compiles"]) for record in records] == [
        ("ours", 4, 0),
        ("theirs", 4, None),
    ]
    assert len({record["workload_sha256"] for record in records}) == 1
    assert len(bodies) == 5  # the first one is a warm-up


def test_a_server_that_fails_ends_the_run_and_what_was_measured_is_printed():
    with serving(words) as (url, _), serving(lambda body: [whole({"error": {"message": "busy"}}, "503 Busy")]) as bad:
        urls = ["--url", f"a={url}", "--url", f"b={bad[0]}", "--url", f"c={url}"]
        done = compare("--tokenizer", toy_artifact.shared(), *urls, "--num-prompts", 2, "--input-len", 5)
    assert done.exit_code == 1 and re.search(r"^ +a$", done.stdout, re.MULTILINE)
    assert "not measured: b, c\n" in done.stderr
    assert "warm-up: expected an answer to the first request, found ValueError: status 503: busy" in done.stderr


@pytest.mark.parametrize("urls", [[], ["a=http://h:1"], ["a=http://h:1", "http://h:2"], ["a=http://h:1", "=http://h"]])
def test_fewer_than_two_named_servers_are_a_usage_error(urls):
    done = compare(toy_artifact.shared(), *(word for url in urls for word in ("--url", url)))
    assert (done.exit_code, "expected --url NAME=URL twice or more." in done.stderr) == (2, True)


def test_ctrl_c_prints_what_was_measured():
    def slow(body):
        return words(body, gap=0.05)

    with serving(slow) as (url, bodies):
        arguments = ["--tokenizer", str(toy_artifact.shared()), "--url", f"a={url}", "--url", f"b={url}"]
        command = ["bench", "compare", *arguments, "--num-prompts", "500", "--max-concurrency", "2", "--text"]
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", SCRIPT, "0", "ling3export.runners.cli", *command],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        until(lambda: len(bodies) >= 5, of=process)
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert re.search(r"^ +a$", output, re.MULTILINE)
    assert re.search(r"interrupted: \d+ of 500 requests had not ended", errors) and "not measured: b" in errors
