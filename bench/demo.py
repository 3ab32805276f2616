"""What ``make demo`` shows of a built demo artifact: an answer, its score on held-out problems, how fast it starts."""

import time
from pathlib import Path

from bench.inputs import ROOT, last_line, run
from bench.report import say, table
from bench.start import PREPARATION
from ling3export.compile.build import DEMO

RUNNER = "ling3export.runners.cli"
QUESTION = "Question: Hana has 17 apples, buys 8 and drops 6. How many now?\nAnswer:"
ANSWER_TOKENS = 21
RUN = ROOT / "build" / "demo-run"  # stays, since the evaluation names the report in it
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
    say("Two starts follow, of the artifact and under plain jit: the second compiles, for minutes on a busy machine")
    starts = {
        "artifact": last_line(run(["bench.start", "aot", artifact, DEMO])),
        "jit, cold": last_line(run(["bench.start", "jit", artifact, DEMO], JAX_ENABLE_COMPILATION_CACHE="false")),
    }
    assert starts["artifact"]["compiles"] == 0 and len({start["token"] for start in starts.values()}) == 1, starts
    seconds = {arm: start["seconds"] for arm, start in starts.items()}
    print("Start to first token, one start each\n")
    print(table(["seconds", *seconds], [[stage, *(each.get(stage) for each in seconds.values())] for stage in STAGES]))
    print(f"\nThe artifact starts {seconds['jit, cold']['whole'] / seconds['artifact']['whole']:.1f} times faster.")
