"""The cached-compile smoke test, ``make smoke``: builds the demo through the cache and generates from every program.

    python -m tests.support.smoke            build, load, generate; programs of an earlier run with the same
                                             fingerprint must be reused.
    python -m tests.support.smoke --warm     the same, and it is an error if there was no such run.
    python -m tests.support.smoke --key      print the fingerprint: all that decides the programs, this processor too

LING3_SMOKE_CACHE (``.smoke-cache``) holds ``cache/``, which all fingerprints share, and for each fingerprint the
artifact and ``done.json`` with the tokens that the first run generated. A run that finds ``done.json`` must trace and
compile nothing, and generate the same tokens.
"""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.records import sha256_of
from ling3export.artifacts.schema import Manifest, Target
from ling3export.cache.cells import counts
from ling3export.cache.keys import cell_fields
from ling3export.checkpoint.reader import Checkpoint
from ling3export.compile.build import DEMO
from ling3export.foundation.phases import ON_LOGITS
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan

ROOT = Path(__file__).parents[2]
OPTIONS = Options(paddings=(16, 128), tp=16, max_running=32, context=1024)
COMMAND = (
    "--paddings",
    ",".join(map(str, OPTIONS.paddings)),
    "--tp",
    str(OPTIONS.tp),
    "--max-running",
    str(OPTIONS.max_running),
    "--context",
    str(OPTIONS.context),
)
PROMPT, TOKENS = [3, 1, 4, 1, 5, 9, 2, 6], 12


class Failed(Exception):
    """The smoke test found an error."""


def folder() -> Path:
    return Path(os.environ.get("LING3_SMOKE_CACHE") or ROOT / ".smoke-cache").absolute()


def fingerprint() -> str:
    config = Checkpoint.open(DEMO).config
    plan = make_plan(config, OPTIONS, "cpu")
    return sha256_of([cell_fields(config, plan, cell) for cell in plan.cells])[:16]


def build(artifact: Path) -> Manifest:
    """Builds the demo through the cache; returns its manifest."""
    command = [sys.executable, "-m", "ling3export.cli", "build", DEMO, artifact, "--force", *COMMAND]
    subprocess.run([*command, "--cache-dir", folder() / "cache"], check=True)
    return read_manifest(artifact)


def batches(prefill: list[int], decode: list[int]) -> list[list[list[int]]]:
    """Prompts that use every padding: each is one token or one sequence too large for the padding before."""
    lengths = [1, *(before + 1 for before in prefill[:-1])]
    together = [1, *(before + 1 for before in decode[:-1])]
    return [[(PROMPT * length)[:length]] for length in lengths] + [[PROMPT] * count for count in together]


def generate(artifact: Path, target: Target) -> dict[str, Any]:
    """Generates from every cell with prebuilt programs; returns the tokens and the runner's counters."""
    from ling3export.runners.engine.engine import Engine

    prefill, decode = (list(target.paddings(phase)) for phase in ("prefill", "decode"))
    with Engine(artifact, programs="prebuilt-only") as engine:
        done = [
            [each.token_ids for each in engine.generate(prompts, max_tokens=TOKENS, ignore_eos=True)]
            for prompts in batches(prefill, decode)
        ]
        return {"tokens": done, "stats": engine.stats()}


def check(built: dict[str, int], ran: dict[str, Any], target: Target, before: Any) -> None:
    """Raises Failed unless all is as it must be."""
    expected = {name for name, cell in target.cells.items() if cell.phase not in ON_LOGITS}
    called = {name for name, cell in ran["stats"]["cells"].items() if cell["calls"]}
    if missing := sorted(expected - called):
        raise Failed(f"cells: expected calls of every one, found none of {', '.join(missing)}")
    if ran["stats"]["compile_events"]:
        raise Failed(f"runner: expected 0 compile events, found {ran['stats']['compile_events']}")
    if any(len(tokens) != TOKENS for batch in ran["tokens"] for tokens in batch):
        raise Failed(f"runner: expected {TOKENS} tokens a sequence, found {ran['tokens']}")
    if any(left != right for batch in ran["tokens"] for left, right in pairwise(batch)):
        raise Failed(f"runner: expected the same tokens for the same prompt, found {ran['tokens']}")
    if before is None:
        return
    if wrong := {name: built[name] for name in ("compiled", "from_program_cache", "traces", "compiles") if built[name]}:
        raise Failed(f"second build: expected nothing traced and nothing compiled, found {wrong}")
    if ran["tokens"] != before["tokens"]:
        raise Failed(f"tokens: expected those of the first run, {before['tokens']}, found {ran['tokens']}")


def main(arguments: list[str]) -> None:
    """Runs the test and prints the result as JSON."""
    name = fingerprint()
    if arguments == ["--key"]:
        print(name)
        return
    place = folder() / name
    place.mkdir(parents=True, exist_ok=True)
    stamp = place / "done.json"
    before = json.loads(stamp.read_text()) if stamp.exists() else None
    if arguments == ["--warm"] and before is None:
        raise Failed(f"--warm: expected an earlier run of fingerprint {name}, found none, in {folder()}")
    manifest = build(place / "demo.ling3")
    (target,) = manifest.targets.values()
    built = counts(target.cells.values())
    ran = generate(place / "demo.ling3", target)
    check(built, ran, target, before)
    if before is None:
        stamp.write_text(json.dumps({"tokens": ran["tokens"]}))
    calls = {cell: row["calls"] for cell, row in ran["stats"]["cells"].items()}
    runner = {"compile_events": ran["stats"]["compile_events"], "calls": calls}
    print(json.dumps({"fingerprint": name, "warm": before is not None, "build": built, "runner": runner}))


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--warm"], ["--key"]):
        sys.exit(f"usage: {sys.argv[0]} [--warm | --key]")
    try:
        main(sys.argv[1:])
    except Failed as error:
        sys.exit(f"error: {error}")
