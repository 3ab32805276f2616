"""Our server measured by ``ling3-runner bench serve`` and by aiperf, and other servers by ``bench serve``.

``make witness`` installs aiperf, builds llama.cpp's server and measures. All runs of a round have the same requests:
texts of words, greedy, of one length. transformers does not support a query projection of low rank, so the checkpoint
has none. Other clients see a token only by its text, so every token that the model writes has text: no special token,
no part of a character, no id without a token.
"""

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from bench.inputs import CACHE, artifact, last_line, run
from bench.peers import gguf, read_once
from bench.report import machine, medians, say, show, table
from bench.servers import foreign, served
from ling3export.checkpoint.synth import INDEX, synthesize
from ling3export.foundation.processes import LOOPBACK, free_port
from ling3export.runners.bench_serving.measure import open_tokenizer
from ling3export.runners.bench_serving.metrics import RequestResult, figures
from ling3export.runners.bench_serving.workloads import SampleRequest

LAYERS, AT_ONCE, COUNT = 24, 4, 40
PROMPT, ANSWER = 48, 64  # tokens
WORDS = "amber bridge castle dragon ember forest garden harbor island jasmine kettle lantern meadow oasis".split()
HEAD = "lm_head.weight"
# Measurements of our server: our client by token ids, our client by pieces with text, and aiperf.
BY_ID, BY_TEXT, AIPERF = CLIENTS = ("bench serve", "bench serve, text", "aiperf")
OURS, LLAMA, TRANSFORMERS = SERVERS = ("ours", "llama.cpp", "transformers")  # by our client, from pieces with text
# (name of a row, its value in `bench serve`, its value in aiperf)
ROWS = (
    ("requests/s", ("request_throughput",), ("request_throughput", "avg")),
    ("tokens/s", ("output_throughput",), ("output_token_throughput", "avg")),
    ("first token, mean ms", ("ttft", "mean"), ("time_to_first_token", "avg")),
    ("first token, median ms", ("ttft", "median"), ("time_to_first_token", "p50")),
    ("gap, mean ms", ("itl", "mean"), ("inter_chunk_latency", "avg")),
    ("time of a token, mean ms", ("tpot", "mean"), ("inter_token_latency", "avg")),
    ("request, mean ms", ("e2e", "mean"), ("request_latency", "avg")),
)
Flat = dict[str, float]


def at(values: Mapping[str, Any], place: Sequence[str]) -> float:
    """The value at a path of nested objects."""
    value: Any = values
    for name in place:
        value = value[name]
    return float(value)


def plain_checkpoint() -> Path:
    """``small`` without a query projection of low rank; all its tokens have text."""
    folder = CACHE / f"small-{LAYERS}-text"
    if not folder.exists():
        part = folder.with_suffix(".part")
        CACHE.mkdir(parents=True, exist_ok=True)
        synthesize(part, "small", 0, layers=LAYERS, overrides={"q_lora_rank": None}, force=True)
        silence(part)
        part.rename(folder)
    return folder


def silence(folder: Path) -> None:
    """Gives tokens without text a logit of 0. Among thousands of random logits it is never the largest."""
    tokenizer = open_tokenizer(folder)
    with (folder / json.loads((folder / INDEX).read_text())["weight_map"][HEAD]).open("r+b") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start, (begin, end), rows = file.tell(), header[HEAD]["data_offsets"], header[HEAD]["shape"][0]
        width = (end - begin) // rows
        for token in range(rows):
            text = tokenizer.decode([token])
            if not text or "\N{REPLACEMENT CHARACTER}" in text:
                file.seek(start + begin + token * width)
                file.write(bytes(width))


def renamed(source: Path, folder: Path) -> Path:
    """The checkpoint under the name that transformers has for the model, which is not the published one."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    fields = json.loads((source / "config.json").read_text()) | {"architectures": ["BailingHybridForCausalLM"]}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def requests(folder: Path, tokens: Path, count: int) -> tuple[Path, list[SampleRequest]]:
    """The workload as a file for ``bench serve``, and as a list: words in random order, at most PROMPT tokens."""
    tokenizer, rng = open_tokenizer(tokens), random.Random(0)
    asks = []
    for _ in range(count):
        words = rng.choices(WORDS, k=PROMPT)
        while len(tokenizer.encode(" ".join(words))) > PROMPT:
            words.pop()
        asks.append(SampleRequest(" ".join(words), ANSWER))
    file = folder / "requests.jsonl"
    lines = (json.dumps({"prompt": ask.prompt, "output_len": ask.output}) + "\n" for ask in asks)
    file.write_text("".join(lines))
    return file, asks


def ours(url: str, data: Path, tokens: Path, count: int, *more: str) -> tuple[Flat, Flat]:
    """Our client's figures for a server: by its tokens, and by its pieces with text, from the same events."""
    with tempfile.TemporaryDirectory(prefix="ling3-witness-") as folder:
        line = Path(folder) / "run.jsonl"
        what = ["--workload", "jsonl", "--data", data, "--num-prompts", count, "--max-concurrency", AT_ONCE]
        where = ["--url", url, "--tokenizer", tokens, "--output", line, "--save-raw", *more]
        run(["ling3export.runners.cli", "bench", "serve", *what, *where])
        record = last_line(line.read_text())
    assert record["figures"]["completed"] == count, record["figures"]
    known = {entry.name for entry in fields(RequestResult)}
    kept = [{name: value for name, value in entry.items() if name in known} for entry in record["requests"]]
    heard = [RequestResult(**entry | {"times": entry["pieces"]}) for entry in kept]
    by_text = asdict(figures(heard, record["figures"]["duration"]))
    counts = {"tokens": float(by_text["output_tokens"]), "pieces": float(sum(len(entry.pieces) for entry in heard))}
    flat = [{row: at(values, place) for row, place, _ in ROWS} | counts for values in (record["figures"], by_text)]
    return flat[0], flat[1]


def aiperf(program: Path, url: str, asks: Sequence[SampleRequest], tokens: Path) -> Flat:
    """aiperf's figures for the model ``m`` of a server, with the bodies that our client sends."""
    fixed = {
        "model": "m",
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    sessions = [
        {"session_id": str(number), "payloads": [fixed | {"prompt": ask.prompt, "max_tokens": ask.output}]}
        for number, ask in enumerate(asks)
    ]
    with tempfile.TemporaryDirectory(prefix="ling3-aiperf-") as folder:
        inputs = Path(folder) / "inputs.json"
        inputs.write_text(json.dumps({"data": sessions}))
        command = [
            program, "profile", "--model", "m", "--url", url, "--endpoint-type", "completions", "--streaming",
            "--input-file", inputs, "--custom-dataset-type", "inputs_json", "--tokenizer", tokens,
            "--concurrency", AT_ONCE, "--request-count", len(asks), "--warmup-request-count", 1,
            "--connection-reuse-strategy", "never", "--use-server-token-count", "--workers-max", 1,
            "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none", "--output-artifact-dir", folder,
        ]  # fmt: skip
        say(f"$ {' '.join(map(str, command))}")
        # for its processes; the default of 30 s is too short on this machine
        patient = os.environ | {"AIPERF_SERVICE_REGISTRATION_TIMEOUT": "300"}
        done = subprocess.run(list(map(str, command)), cwd=folder, env=patient, capture_output=True, text=True)
        files = sorted(Path(folder).rglob("profile_export_aiperf.json"), key=lambda file: len(file.parts))
        if done.returncode or not files:
            raise SystemExit(f"aiperf: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        report = json.loads(files[0].read_text())
    return {row: at(report, place) for row, _, place in ROWS}


def llama_server(source: Path, sources: Path, threads: int, url: str) -> list[object]:
    """The command of llama.cpp's server. Its cache is off, since prompts repeat and our server runs without one."""
    command = [sources / "build" / "bin" / "llama-server", "-m", gguf(source, sources, "--vocab"), "-t", threads]
    command += ["-c", AT_ONCE * 1024, "--parallel", AT_ONCE, "--no-ui", "--offline", "--no-cache-prompt"]
    return [*command, "--cache-ram", 0, *_at(url)]


def transformers_server(checkpoint: Path, python: Path, url: str) -> list[object]:
    """The command of transformers' server."""
    command = [python.with_name("transformers"), "serve", checkpoint, "--device", "cpu", "--dtype", "bfloat16"]
    return [*command, *_at(url)]


def _at(url: str) -> list[object]:
    host, _, port = url.rpartition("/")[2].partition(":")
    return ["--host", host, "--port", port]


def measure(
    chosen: Path | None, rounds: int, count: int, program: Path | None, sources: Path | None, python: Path | None
) -> dict[str, Any]:
    """Every figure of every round, by arm; the first run of a server is dropped."""
    source, threads = chosen or plain_checkpoint(), len(os.sched_getaffinity(0))
    folder = artifact(source, "witness", ["--tp", 1, "--paddings", "16,128", "--max-running", 16])
    tokens = folder / "tokenizer"
    runs: dict[str, list[Flat]] = {}

    def keep(arm: str, figures: Flat) -> None:
        runs.setdefault(arm, []).append(figures)
        say(f"{arm}: {json.dumps(figures)}")

    with tempfile.TemporaryDirectory(prefix="ling3-witness-") as scratch:
        data, asks = requests(Path(scratch), tokens, count)
        for number in range(rounds):
            read_once(folder)
            if program is not None:
                with served(folder, apart=True) as url:
                    ours(url, data, tokens, count)
                    for arm, flat in zip((BY_ID, BY_TEXT), ours(url, data, tokens, count), strict=True):
                        keep(arm, flat)
                    keep(AIPERF, aiperf(program, url, asks, tokens))
            with served(folder) as url:
                ours(url, data, tokens, count)
                keep(OURS, ours(url, data, tokens, count)[1])
            url = f"http://{LOOPBACK}:{free_port()}"
            if sources is not None:
                with foreign(llama_server(source, sources, threads, url), url):
                    ours(url, data, tokens, count, "--model", "m")
                    keep(LLAMA, ours(url, data, tokens, count, "--model", "m")[1])
            if python is not None:
                named = renamed(source, Path(scratch) / f"round-{number}")
                alone = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
                with foreign(transformers_server(named, python, url), url, alone):
                    few = max(AT_ONCE, count // 5)  # it answers one request after the other
                    keep(TRANSFORMERS, ours(url, data, tokens, few, "--model", str(named), "--stop-at-eos")[1])
    return {"benchmark": "witness", "machine": machine(), "checkpoint": source.name, "rounds": rounds, "runs": runs}


def main(
    chosen: Path | None, rounds: int, count: int, program: Path | None, sources: Path | None, python: Path | None
) -> dict[str, Any]:
    """Measures and prints."""
    result = measure(chosen, rounds, count, program, sources, python)
    speeds = {arm: medians(values) for arm, values in result["runs"].items()}
    shape = speeds[OURS]
    show(
        f"{result['checkpoint']}, {count} requests, {AT_ONCE} at once, {ANSWER} tokens each ({shape['pieces']:.0f} of "
        f"{shape['tokens']:.0f} pieces have text), medians of {rounds}, load average "
        f"{result['machine']['load_average'][0]}; our server by its clients, which have half of the processors and it "
        "the other, then servers and our client on all of them",
        [compared(arms, speeds) for arms in (CLIENTS, SERVERS) if arms[0] in speeds],
        result,
    )
    return result


def compared(arms: Sequence[str], speeds: Mapping[str, Flat]) -> str:
    """A table of the measured arms, each also relative to the first of its kind."""
    measured = [arm for arm in arms if arm in speeds]
    first, others = (BY_TEXT, [AIPERF]) if BY_TEXT in measured else (OURS, measured[1:])
    rows = [
        [row, *(speeds[arm][row] for arm in measured), *(speeds[arm][row] / speeds[first][row] for arm in others)]
        for row, *_ in ROWS
    ]
    return table(["", *measured, *(f"{arm} / {first}" for arm in others)], rows)
