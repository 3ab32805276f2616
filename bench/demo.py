"""``make demo``: an answer of the demo artifact, its score, a conversation with a tool call, and its start-up time."""

import json
import re
import time
from pathlib import Path
from typing import Any

from bench.inputs import ROOT, last_line, run
from bench.report import say, table
from bench.servers import asked, served
from bench.start import PREPARATION
from ling3export.compile.build import DEMO
from tools.demo_data import TOOL

RUNNER = "ling3export.runners.cli"
QUESTION = "Question: Hana has 17 apples, buys 8 and drops 6. How many now?\nAnswer:"
ANSWER_TOKENS = 21
# numbers larger than the model can compute by itself
SPOKEN = "Hana has 63 apples, buys 85 and drops 96. How many now?"
RUN = ROOT / "build" / "demo-run.jsonl"  # kept for `eval report`
STAGES = ("imports", PREPARATION, "programs", "weights", "state", "first step", "whole")


def main(artifact: Path) -> None:
    """Answers, evaluates and starts, each in a process of its own; prints the evaluation's last line as it is."""
    artifact = artifact.resolve()
    answer = run([RUNNER, "generate", artifact, "--prompt", QUESTION, "--max-tokens", ANSWER_TOKENS])
    print(f"{QUESTION}{answer}", flush=True)
    RUN.parent.mkdir(exist_ok=True)
    began = time.monotonic()
    score = run([RUNNER, "eval", "run", artifact, RUN, "--suite", "demo", "--force"]).splitlines()[-1]
    print(f"{score}\nevaluated in {time.monotonic() - began:.1f} s, start included\n", flush=True)
    with served(artifact) as url:
        print(spoken(url), end="\n\n", flush=True)
    say("Two starts follow, of the artifact and under plain jit: the second compiles, for minutes on a busy machine")
    starts = {
        "artifact": last_line(run(["bench.start", "aot", artifact, DEMO])),
        "jit, cold": last_line(run(["bench.start", "jit", artifact, DEMO], JAX_ENABLE_COMPILATION_CACHE="false")),
    }
    assert starts["artifact"]["compiles"] == 0 and len({start["token"] for start in starts.values()}) == 1, starts
    seconds = {arm: start["seconds"] for arm, start in starts.items()}
    print("Start to first token, one start each\n")
    rows = [[stage, *(stages.get(stage) for stages in seconds.values())] for stage in STAGES]
    print(table(["seconds", *seconds], rows))
    print(f"\nThe artifact starts {seconds['jit, cold']['whole'] / seconds['artifact']['whole']:.1f} times faster.")


def spoken(url: str) -> str:
    """A question, the model's tool call, the tool's result and the answer, over OpenAI's protocol.

    Raises:
        SystemExit: The model called no tool.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": SPOKEN}]
    first = _answer(url, messages)
    if not first.get("tool_calls"):
        raise SystemExit(f"demo: expected a call of a tool, found {first['content']!r}")
    call = first["tool_calls"][0]
    expression = json.loads(call["function"]["arguments"])["expression"]
    total = sum(int(number) for number in re.findall(r"[+-]?\d+", expression))
    messages += [first, {"role": "tool", "tool_call_id": call["id"], "content": str(total)}]
    last = _answer(url, messages)["content"]
    return f"user: {SPOKEN}\nassistant: calculate({expression})\ntool: {total}\nassistant: {last}"


def _answer(url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "tools": [TOOL], "seed": 0, "max_tokens": 64}
    answer = json.loads(asked(url, "/v1/chat/completions", body))
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message
