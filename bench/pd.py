"""What ``make demo-pd`` shows: prompts through servers that prefill, some that decode and a router, on loopback.

Each answer is compared with that of the server that decodes alone. ``--vllm-router`` puts vLLM's router in the place of
ours (``pip install vllm-router``). Everything that was started is stopped.
"""

import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.report import table
from ling3export.processes import LOOPBACK

RUNNER = [sys.executable, "-m", "ling3export.runners.cli"]
WAIT = 120.0  # seconds for a server to be there, and for an answer
PHASES = ("queue", "prefill", "save", "transfer", "decode")
HEAD = "".join(
    f"Question: {name} has {n} apples, buys {n + 3} and drops 2. How many now?\nAnswer: {n}+{n + 3}={2 * n + 3}\n"
    f"{2 * n + 3}-2={2 * n + 1}\n#### {2 * n + 1}\n\n"
    for n, name in enumerate(("Omar",), 7)
)
QUESTIONS = [f"Question: Hana has {n} apples, buys 8 and drops 6. How many now?\nAnswer:" for n in range(11, 19)]


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(WAIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def url_of(process: subprocess.Popen[str]) -> str:
    """What a server of ours prints once clients may connect."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line.startswith("http://"), f"a server ended: {line}"
    return line


def asked(url: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if body is not None else {}
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=WAIT) as answer:
        read: bytes = answer.read()
    return read


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", asked(url, "/metrics").decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def until_well(url: str) -> None:
    """Waits for a router that prints no address."""
    end = time.monotonic() + WAIT
    while True:
        try:
            asked(url, "/health")
            return
        except (OSError, urllib.error.URLError):
            assert time.monotonic() < end, f"{url}: nobody answers"
            time.sleep(0.1)


def vllm_router(prefill: list[str], decode: list[str]) -> tuple[list[str], str]:
    """vLLM's router before servers, and where it will listen."""
    with socket.create_server((LOOPBACK, 0)) as free, socket.create_server((LOOPBACK, 0)) as other:
        port, metrics = free.getsockname()[1], other.getsockname()[1]
    program = str(Path(sys.executable).parent / "vllm-router")
    command = [
        program, "--vllm-pd-disaggregation", *options("prefill", prefill), *options("decode", decode),
        "--kv-connector", "nixl", "--policy", "round_robin", "--host", LOOPBACK, "--port", str(port),
        "--prometheus-port", str(metrics),
    ]  # fmt: skip
    return command, f"http://{LOOPBACK}:{port}"


def options(name: str, urls: list[str]) -> list[str]:
    """``--name URL`` for each."""
    return [part for url in urls for part in (f"--{name}", url)]


def main(
    artifact: Path, carrier: str, outside: bool, prompts: int, replicas: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    """Starts, asks, prints and stops."""
    with ExitStack() as stack:
        serve = [*RUNNER, "serve", str(artifact), "--port", "0", "--transfer", carrier]
        if carrier == "file":
            serve += ["--transfer-folder", stack.enter_context(tempfile.TemporaryDirectory(prefix="ling3-pd-"))]
        roles = ["prefill"] * replicas[0] + ["decode"] * replicas[1]
        servers = [stack.enter_context(started([*serve, "--role", role])) for role in roles]
        urls = [url_of(server) for server in servers]
        prefill, decode = urls[: replicas[0]], urls[replicas[0] :]
        command, url = vllm_router(prefill, decode) if outside else (
            [*RUNNER, "route", *options("prefill", prefill), *options("decode", decode), "--port", "0"], ""
        )  # fmt: skip
        router = stack.enter_context(started(command))
        url = url or url_of(router)
        until_well(url)
        name = json.loads(asked(decode[0], "/v1/models"))["data"][0]["id"]
        phases: list[dict[str, float]] = []
        same = 0
        for question in QUESTIONS[:prompts]:
            body = {
                "model": name, "prompt": HEAD + question, "max_tokens": 24, "temperature": 0, "return_token_ids": True,
            }  # fmt: skip
            through = json.loads(asked(url, "/v1/completions", body))
            alone = json.loads(asked(decode[0], "/v1/completions", body))
            phases.append(through["kv_transfer_params"]["phases_ms"])
            same += through["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        cached, computed = (
            sum(metric(each, f"ling3_{what}_tokens_total") for each in prefill) for what in ("cached", "prompt")
        )
        loaded = sum(metric(each, 'ling3_transfer_total{what="loaded"}') for each in decode)
    last = phases[-1]
    middle = {each: statistics.median(one[each] for one in phases) for each in PHASES}
    print(f"{prompts} prompts through {'vllm-router' if outside else 'ling3-runner route'}, states over {carrier}\n")
    rows = [[each, f"{last[each]:.2f}", f"{middle[each]:.2f}"] for each in PHASES]
    print(table(["milliseconds", "last request", "median"], rows))
    print(f"\nstates taken {loaded:.0f}/{prompts}; the same answers as one server {same}/{prompts}")
    rate = cached / (cached + computed)
    print(f"hit rate of the servers that prefill: {rate:.0%} of {cached + computed:.0f} tokens")
    assert same == loaded == prompts
    return {"phases_ms": middle, "hit_rate": rate, "same": same, "loaded": loaded}
