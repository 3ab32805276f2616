"""``make demo-pd``: prompts through servers that prefill, servers that decode and a router, on loopback.

Each answer is compared with the answer of the decoding server without the others. ``--vllm-router`` uses vLLM's router
instead of ours (``pip install vllm-router``). All processes are stopped at the end.
"""

import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.report import table
from bench.server_process import RUNNER, ServerProcess
from bench.servers import asked, foreign, metric
from ling3export.foundation.processes import LOOPBACK, free_port

SCRIPT = Path(__file__).parents[1] / "deploy" / "prefill-decode.sh"
PHASES = ("queue", "prefill", "save", "transfer", "decode")
HEAD = "".join(
    f"Question: {name} has {n} apples, buys {n + 3} and drops 2. How many now?\nAnswer: {n}+{n + 3}={2 * n + 3}\n"
    f"{2 * n + 3}-2={2 * n + 1}\n#### {2 * n + 1}\n\n"
    for n, name in enumerate(("Omar",), 7)
)
QUESTIONS = [f"Question: Hana has {n} apples, buys 8 and drops 6. How many now?\nAnswer:" for n in range(11, 19)]


def vllm_router(prefill: list[str], decode: list[str]) -> tuple[list[str], str]:
    """vLLM's router for these servers, and the address where it will listen."""
    port, metrics = free_port(), free_port()
    program = str(Path(sys.executable).parent / "vllm-router")
    command = [
        program,
        "--vllm-pd-disaggregation",
        *options("prefill", prefill),
        *options("decode", decode),
        "--kv-connector",
        "nixl",
        "--policy",
        "round_robin",
        "--host",
        LOOPBACK,
        "--port",
        str(port),
        "--prometheus-port",
        str(metrics),
    ]
    return command, f"http://{LOOPBACK}:{port}"


def options(name: str, urls: list[str]) -> list[str]:
    """``--name URL`` for each."""
    return [part for url in urls for part in (f"--{name}", url)]


def main(
    artifact: Path, carrier: str, outside: bool, prompts: int, replicas: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    """Starts the servers, sends the prompts, prints the result and stops the servers."""
    with ExitStack() as stack:
        settings = ["--transfer", carrier]
        if carrier == "file":
            settings += ["--transfer-folder", stack.enter_context(tempfile.TemporaryDirectory(prefix="ling3-pd-"))]
        if outside:
            serve = [*RUNNER, "serve", artifact, "--port", "0", *settings]
            roles = ["prefill"] * replicas[0] + ["decode"] * replicas[1]
            servers = [stack.enter_context(ServerProcess(role, [*serve, "--role", role], shown=True)) for role in roles]
            urls = [server.address() for server in servers]
            url = stack.enter_context(foreign(*vllm_router(urls[: replicas[0]], urls[replicas[0] :]), shown=True))
        else:
            variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PORT": "0"}
            variables |= {"PREFILL": str(replicas[0]), "DECODE": str(replicas[1])}
            script = stack.enter_context(
                ServerProcess(SCRIPT.name, [SCRIPT, artifact, *settings], variables, shown=True)
            )
            *urls, url = (script.address() for _ in range(sum(replicas) + 1))
        prefill, decode = urls[: replicas[0]], urls[replicas[0] :]
        name = json.loads(asked(decode[0], "/v1/models"))["data"][0]["id"]
        phases: list[dict[str, float]] = []
        same = 0
        for question in QUESTIONS[:prompts]:
            body = {
                "model": name,
                "prompt": HEAD + question,
                "max_tokens": 24,
                "temperature": 0,
                "return_token_ids": True,
            }
            through = json.loads(asked(url, "/v1/completions", body))
            alone = json.loads(asked(decode[0], "/v1/completions", body))
            phases.append(through["kv_transfer_params"]["phases_ms"])
            same += through["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        cached, computed = (
            sum(metric(server, f"ling3_{what}_tokens_total") for server in prefill) for what in ("cached", "prompt")
        )
        loaded = sum(metric(server, "ling3_transfer_total", what="loaded") for server in decode)
        first_tokens = sum(metric(server, "ling3_first_token_seconds_sum") for server in prefill)
    last = phases[-1]
    middle = {phase: statistics.median(one[phase] for one in phases) for phase in PHASES}
    print(f"{prompts} prompts through {'vllm-router' if outside else 'ling3-runner route'}, states over {carrier}\n")
    rows = [[phase, f"{last[phase]:.2f}", f"{middle[phase]:.2f}"] for phase in PHASES]
    print(table(["milliseconds", "last request", "median"], rows))
    print(f"\nstates taken {loaded:.0f}/{prompts}; the same answers as one server {same}/{prompts}")
    rate = cached / (cached + computed)
    print(f"hit rate of the servers that prefill: {rate:.0%} of {cached + computed:.0f} tokens")
    assert same == loaded == prompts
    reported = sum(one["queue"] + one["prefill"] for one in phases) / 1e3
    assert abs(reported - first_tokens) < 1e-3 * prompts, (reported, first_tokens)  # P's own measurement
    return {"phases_ms": middle, "hit_rate": rate, "same": same, "loaded": loaded}
