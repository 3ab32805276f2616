"""What Ray costs: ``batch`` by an engine of its own against ``batch --on ray`` with one replica, both in this machine.

``python -m tools.campaigns.ray_overhead ARTIFACT [LINES] [ROUNDS]``: each way answers LINES and four times as many, in
turn. What the second takes longer than the first is answering alone; the rest is start and end.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support import ray_nodes

RUNNER = (sys.executable, "-m", "ling3export.runners.cli")
TOKENS, MORE = 32, 4  # of an answer; times as many lines


def seconds(artifact: Path, source: Path, lines: int, on: list[str]) -> float:
    """Those of a whole command that answers the first lines of a file."""
    asked, output = source.with_name(f"{lines}.jsonl"), source.with_name("out.jsonl")
    asked.write_text("".join(source.read_text().splitlines(keepends=True)[:lines]))
    command = [*RUNNER, "batch", artifact, asked, output, "--force", "--max-tokens", TOKENS, "--check", "programs", *on]
    started = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Prints medians, and how many times the local engine's the cluster's are."""
    artifact, *numbers = sys.argv[1:]
    lines, rounds = (*map(int, numbers), *(200, 3)[len(numbers) :])
    ways: dict[str, list[str]] = {"one engine": []}
    with tempfile.TemporaryDirectory() as place, ray_nodes.cluster() as nodes:
        nodes.add(engine=1)
        ways["ray, one replica"] = ["--on", f"ray://{nodes.address}", "--resources", '{"engine": 1}']
        source = Path(place, "asked.jsonl")
        asked = ({"prompt_ids": [1 + n % 50, 2, 3 + n % 7] * 8} for n in range(MORE * lines))
        source.write_text("".join(json.dumps(each) + "\n" for each in asked))
        took: dict[tuple[str, int], list[float]] = {(way, many): [] for way in ways for many in (lines, MORE * lines)}
        for _ in range(rounds):
            for (way, many), found in took.items():
                found.append(seconds(Path(artifact), source, many, ways[way]))
    middle = {key: statistics.median(found) for key, found in took.items()}
    answering = {way: (middle[way, MORE * lines] - middle[way, lines]) / (MORE - 1) for way in ways}
    starting = {way: middle[way, lines] - answering[way] for way in ways}
    print(f"way, seconds of {lines} lines, of {MORE * lines}, of {lines} without start and end, of start and end")
    for way in ways:
        parts = middle[way, lines], middle[way, MORE * lines], answering[way], starting[way]
        print(way, *(f"{each:.2f}" for each in parts), sep=", ")
    one, other = ways
    print(f"answering, ray / one engine: {answering[other] / answering[one]:.3f}")


if __name__ == "__main__":
    main()
