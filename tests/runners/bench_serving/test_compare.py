"""``ling3-runner bench compare``: what configurations mean, servers that start and end, phases of real servers."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.artifacts.manifest import read_manifest
from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.foundation.processes import command, environment
from ling3export.runners.bench_serving import server_process
from ling3export.runners.bench_serving.compare import ServingConfig, compared, parse_config, placements_of, running
from ling3export.runners.bench_serving.http_client import HttpClient
from ling3export.runners.bench_serving.measure import Settings
from ling3export.runners.bench_serving.metrics import RequestResult, figures
from ling3export.runners.bench_serving.server_process import RUNNER, ServerProcess
from ling3export.runners.bench_serving.table import side_by_side
from ling3export.runners.bench_serving.workloads import SampleRequest
from ling3export.runners.cli.main import main
from ling3export.runners.endpoint import Endpoint
from ling3export.runners.state.layout import layout_of
from tests.support import toy_artifact
from tests.support.builds import SCRIPT
from tests.support.waiting import until

FORM = "expected NxT (N engines of T devices each), nPmD (n devices that prefill, m that decode) or NAME=URL (a server)"
WAIT = 120.0  # seconds, for what takes a few


@pytest.fixture
def pids(monkeypatch):
    """Of every process that was started."""
    found, before = [], ServerProcess.__init__

    def noted(self, *given, **named):
        before(self, *given, **named)
        found.append(self.process.pid)

    monkeypatch.setattr(ServerProcess, "__init__", noted)
    return found


def running_among(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}/stat").exists()]


def test_configurations_have_three_forms():
    assert parse_config("1x16") == ServingConfig("1x16", decode=16)
    assert parse_config("3x2") == ServingConfig("3x2", decode=2, count=3)
    assert parse_config("4P8D") == ServingConfig("4P8D", prefill=4, decode=8)
    assert parse_config("a=http://h:1/v1?x=y") == ServingConfig("a", "http://h:1/v1?x=y")


@pytest.mark.parametrize(
    "text", ["", "4P", "P4D", "4p4d", "x4", "1x", "4P4D4P", "1x2x3", "-1x2", "1.5x2", "=http://h:1", "a=", "١x٢"]
)
def test_what_is_no_configuration_is_refused_with_what_one_is(text):
    with pytest.raises(RequestError) as error:
        parse_config(text)
    assert error.value.message == f"config `{text}`: {FORM}, found another"
    assert error.value.hint == "write 1x16, 2x8, 4P4D or mine=http://127.0.0.1:8000"
    with pytest.raises(RequestError, match="config `0P4D`: expected 1 or more of each, found 0"):
        parse_config("0P4D")


def test_artifacts_that_do_not_fit_are_refused_by_name(artifact):
    def refused(config, *names):
        paths = [each if isinstance(each, Path) else artifact(each) for each in names]
        with pytest.raises(RequestError) as error:
            placements_of(parse_config(config), {path: read_manifest(path) for path in paths})
        return error.value

    one, two = "micro-tp1-snapshots", "micro-tp2-snapshots"
    error = refused("1P4D", one, two)
    assert error.message == (
        "config `1P4D`: expected one target of TP=4 for this machine with programs that move states, found none among "
        "cpu-tp1 of micro-tp1-snapshots.ling3, cpu-tp2 of micro-tp2-snapshots.ling3"
    )
    assert error.hint is not None
    assert error.hint.endswith("ling3export build CHECKPOINT tp4.ling3 --tp 4 --snapshots 8 builds it")
    assert refused("1x4", one).hint.endswith("tp4.ling3 --tp 4 builds it")
    error = refused("1P2D", one, "micro-tp2")
    assert "with programs that move states, found none among cpu-tp1 of micro-tp1-snapshots.ling3" in error.message
    assert error.message.endswith("cpu-tp2 of micro-tp2.ling3")
    error = refused("1x2", two, "micro-tp2")
    assert error.message.endswith("found cpu-tp2 of micro-tp2-snapshots.ling3, cpu-tp2 of micro-tp2.ling3")
    (place,) = placements_of(parse_config("1x2"), {artifact(two): read_manifest(artifact(two))})
    assert (place.role, place.target) == ("both", "cpu-tp2")


def record_of(name, ttft, **said):
    result = RequestResult(0.0, [ttft, ttft + 0.01], 4, 2)
    result.take(said)
    return {"name": name, "figures": asdict(figures([result], 0.5))}


def test_runs_stand_side_by_side_with_ratios_to_the_first():
    one = record_of("1x4", 0.02, phases_ms={"queue": 4, "prefill": 15})
    phases = {"queue": 6, "prefill": 20, "save": 5, "transfer": 4, "decode": 0.5}
    two = record_of("2P2D", 0.04, phases_ms=phases, transfer_bytes=1_500_000)
    lines = side_by_side([one, two]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[0].split() == ["1x4", "2P2D"]
    cells = {row[0]: row[1:] for row in (re.split(r" {2,}", line.strip()) for line in lines)}
    assert cells["Successful requests"] == ["1", "1 (1.00×)"] and cells["Failed requests"] == ["0", "0"]
    assert cells["Mean TTFT (ms)"] == ["20.00", "40.00 (2.00×)"]
    assert cells["Mean prefill (ms)"] == ["15.00", "20.00 (1.33×)"]
    assert cells["Median save (ms)"] == ["-", "5.00"] and cells["Mean first decode (ms)"] == ["-", "0.50"]
    assert cells["Mean HTTP (ms)"] == ["1.00", "4.50 (4.50×)"]
    assert cells["States transferred (%)"] == ["0.00", "100.00"]
    assert cells["Save and transfer of TTFT (%)"] == ["-", "22.50"]
    assert cells["Mean bytes of a state (MB)"] == ["-", "1.500"] and cells["Transfer (GB/s)"] == ["-", "0.375"]
    assert "queue" not in side_by_side([record_of("mine", 0.02)])  # which a server does not tell


def metrics(url):
    _, data = asyncio.run(Endpoint(url, key=None, timeout=60.0).whole("GET", "/metrics"))
    lines = (line.rpartition(" ") for line in data.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def state_bytes(path, tokens):
    """What a state is by the artifact's layout."""
    manifest = read_manifest(path)
    return layout_of(next(iter(manifest.targets.values()))).nbytes(tokens)


@pytest.mark.parametrize("carrier", ["shm", "http", "file"])
def test_phases_of_every_request_add_up_to_what_both_servers_measured(artifact, carrier, pids):
    """What P and D count in /metrics are the phases within a millisecond; bytes are those
    that D's connector counted, and what the layout says."""
    one, two = artifact("micro-tp1-snapshots"), artifact("micro-tp2-snapshots")
    places = placements_of(parse_config("2P1D"), {path: read_manifest(path) for path in (one, two)})
    assert [(place.role, place.artifact) for place in places] == [("prefill", two), ("decode", one)]
    how, moved = Settings(num_prompts=4), 0
    with running("2P1D", places, how, carrier) as (url, (p, d)):
        client = HttpClient(url, model=None, key=None, ignore_eos=True)
        asyncio.run(client.open())
        for number, length in enumerate((1, 16, 50, 100)):
            before = [metrics(each)["ling3_first_token_seconds_sum"] for each in (p, d)]
            asked = client.prepare(SampleRequest(tuple(range(20 + number, 20 + number + length)), 3))
            result = asyncio.run(client.send(asked))
            after = [metrics(each)["ling3_first_token_seconds_sum"] for each in (p, d)]
            assert (result.error, result.tokens) == (None, 3)
            told = result.server_phases
            there, here = (last - first for first, last in zip(before, after, strict=True))
            assert told["queue"] + told["prefill"] == pytest.approx(there, abs=1e-3)
            assert told["transfer"] + told["first"] == pytest.approx(here, abs=1e-3)
            assert 0 < told["save"] < result.ttft - there - here
            phases = result.phases
            assert phases["http"] > 0 and min(phases.values()) >= 0
            first = sum(value for name, value in phases.items() if name != "decode")
            assert first == pytest.approx(result.ttft, abs=1e-3)
            assert phases["decode"] == pytest.approx(result.e2e - result.ttft)
            assert result.transfer_bytes == state_bytes(one, length)
            moved += result.transfer_bytes
        counted = metrics(d)
    assert counted['ling3_transfer_total{what="loaded_bytes"}'] == moved
    assert counted['ling3_transfer_total{what="loaded"}'] == 4
    assert len(pids) == 3 and not running_among(pids)


def test_configurations_of_every_kind_stand_side_by_side(artifact, tmp_path, pids):
    one, two = artifact("micro-tp1-snapshots"), artifact("micro-tp2-snapshots")
    line = tmp_path / "runs.jsonl"
    with ServerProcess("here", [*RUNNER, "serve", one, "--port", 0]) as server:
        arguments = [
            "compare", one, two, "--configs", f"1x2,1P2D,2x1,there={server.address()}", "--num-prompts", 4,
            "--input-len", 40, "--output-len", 4, "--output", line, "--save-raw",
        ]  # fmt: skip
        done = CliRunner().invoke(main, ["bench", *map(str, arguments)], prog_name="ling3-runner")
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.search(r"^ +1x2 +1P2D +2x1 +there$", done.stdout, re.MULTILINE)
    assert re.search(r"^  States transferred \(%\) +0\.00 +100\.00 +0\.00 +0\.00$", done.stdout, re.MULTILINE)
    records = [json.loads(text) for text in line.read_text().splitlines()]
    servers = [[(each["role"], each["tp"]) for each in record.get("servers", [])] for record in records]
    assert servers == [[("both", 2)], [("prefill", 1), ("decode", 2)], [("both", 1)] * 2, []]
    assert [record["compiles"] for record in records] == [0] * 4
    assert len({record["workload_sha256"] for record in records}) == 1
    for record in records:
        figures = record["figures"]
        assert (figures["completed"], figures["failed"], len(record["requests"])) == (4, 0, 4)
        parts = sum(each["mean"] for name, each in figures["phases"].items() if name != "decode")
        assert parts == pytest.approx(figures["ttft"]["mean"], abs=1e-3)
    apart = records[1]
    sizes = [request["transfer_bytes"] for request in apart["requests"]]
    assert sorted(sizes) == sorted(state_bytes(one, request["prompt_tokens"]) for request in apart["requests"])
    taking = sum(request["phases"]["transfer"] for request in apart["requests"])
    assert apart["figures"]["transfer_speed"] == pytest.approx(sum(sizes) / taking)
    assert {request["transfer_bytes"] for request in records[0]["requests"]} == {None}
    assert len(pids) == 8 and not running_among(pids)


def test_a_server_that_does_not_start_is_named_with_what_it_said_and_nothing_is_left(artifact, tmp_path, pids):
    one, two = artifact("micro-tp1-snapshots"), tmp_path / "bad.ling3"
    shutil.copytree(artifact("micro-tp2-snapshots"), two)
    for file in (two / "weights").iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.chmod(0o600)
        file.write_bytes(data)
    how = Settings(num_prompts=2, input_len=8, output_len=2)
    runs = compared(how, ["1P2D", "1x1"], [one, two], "shm", lambda name: nullcontext())
    with pytest.raises(Ling3Error) as error:
        next(runs)
    first, *said = error.value.message.split("\n")
    assert first.startswith(
        "config `1P2D`, decode (TP=2): expected the address at which it listens, found that it ended with code 1: "
    )
    assert "sha256" in "\n".join([first, *said])
    assert len(pids) == 2 and not running_among(pids)


async def _answering(pids, end):
    """Waits until the server that decodes has answered a few requests; the router's command line says where it is."""
    words = []
    while "route" not in words:  # it was forked, and becomes the command any moment
        assert time.monotonic() < end
        words = Path(f"/proc/{pids[-1]}/cmdline").read_text().split("\0")
    server, answered = Endpoint(words[words.index("--decode") + 1], key=None, timeout=WAIT), 0
    while answered < 5:  # the request before the run is one
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
        _, counters = await server.whole("GET", "/metrics")
        found = re.search(rb'ling3_http_responses_total{path="/v1/completions",status="200"} (\d+)', counters)
        answered = int(found[1]) if found else 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_run_that_is_ended_ends_what_it_started(artifact, tmp_path, number, code):
    one = artifact("micro-tp1-snapshots")
    words = f"bench compare {one} --configs 1P1D,1x1 --num-prompts 500 --input-len 60 --max-concurrency 2".split()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT, "0", "ling3export.runners.cli", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: len(children.read_text().split()) >= 3, of=process)  # two servers and the router
    found = [int(pid) for pid in children.read_text().split()]
    asyncio.run(_answering(found, time.monotonic() + WAIT))
    os.kill(process.pid, number)
    said, errors = process.communicate(timeout=WAIT)
    assert process.returncode == code, errors
    assert not running_among(found)
    if number == signal.SIGINT:
        assert re.search(r"^ +1P1D$", said, re.MULTILINE)
        assert re.search(r"interrupted: \d+ of 500 requests had not ended", errors) and "not measured: 1x1" in errors


def test_one_that_prints_nothing_is_given_up(monkeypatch, pids):
    monkeypatch.setattr(server_process, "WAIT", 0.2)
    silent = [*command("asyncio")[:1], "-c", "import time; time.sleep(100)"]
    with (
        pytest.raises(Ling3Error, match=r"silent one: expected the address .*, found none within 0.2 s: silent"),
        ServerProcess("silent one", silent) as process,
    ):
        process.address()
    assert not running_among(pids)


def test_the_toy_of_two_devices_is_compared_with_itself(pids):
    """An artifact without snapshots, and no tokenizer asked for."""
    how = Settings(num_prompts=3, input_len=12, output_len=4)
    found = list(compared(how, ["1x2", "1x2"], [toy_artifact.shared()], "shm", lambda name: nullcontext()))
    assert [each.figures.completed for each in found] == [3, 3]
    texts = [sorted(result.text for result in each.run.results) for each in found]
    assert texts[0] == texts[1]
    assert not running_among(pids)
