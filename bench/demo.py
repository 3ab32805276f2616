"""What ``make demo`` shows of a built demo artifact: a text, its score on held-out problems, and how fast it starts."""

import tempfile
import time
from pathlib import Path
from typing import Any

from bench.inputs import last_line, run
from bench.report import machine, show, table
from bench.startup import PREPARATION
from ling3export.build import DEMO

QUESTION = "Question: Hana has 17 apples, buys 8 and drops 6. How many now?\nAnswer:"
STAGES = (PREPARATION, "programs", "weights", "state", "first step", "whole")


def main(artifact: Path) -> dict[str, Any]:
    """Answers, evaluates and starts, each in a process of its own; prints the evaluation's last line as it is."""
    artifact = artifact.resolve()
    answer = run(
        ["ling3export.runners.cli", "generate", artifact, "--prompt", QUESTION, "--max-tokens", 24]
    )  # fmt: skip
    print(f"{QUESTION}{answer}")
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = ["ling3export.runners.cli", "eval", "run", artifact, Path(folder) / "run", "--suite", "demo"]
        score = run(command).splitlines()[-1]
        seconds = time.monotonic() - began
    starts = {
        "artifact": last_line(run(["bench.start", "aot", artifact, DEMO])),
        "jit, cold": last_line(run(["bench.start", "jit", artifact, DEMO], JAX_ENABLE_COMPILATION_CACHE="false")),
    }
    found = {arm: start["seconds"] for arm, start in starts.items()}
    assert starts["artifact"]["compiles"] == 0 and len({start["token"] for start in starts.values()}) == 1, starts
    whole = {arm: each["whole"] for arm, each in found.items()}
    result = {
        "benchmark": "demo", "machine": machine(), "score": score, "evaluation_seconds": seconds, "seconds": found,
        "whole_ratio": whole["jit, cold"] / whole["artifact"],
    }  # fmt: skip
    print(f"{score}\nevaluated in {seconds:.1f} s, start-up included")
    rows = [[stage, *(each.get(stage) for each in found.values())] for stage in STAGES]
    show("Start to first token, one start each", [table(["seconds", *found], rows)], result)
    return result
