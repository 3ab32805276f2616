"""A host of a worker of several hosts, killed with SIGKILL in mid-run, on a real Ray cluster in this machine.

``python -m tools.campaigns.ray_host_kills ONE TWO [LINES] [ROUNDS]``: ONE is an artifact for one process, TWO the same
for two hosts, such as the tests' micro-tp2 and micro-2x1. In each round a batch runs on a worker of two hosts; once a
third of its answers is there, host 0 or the other one is killed, in turn. The output has to be that of ONE, but for the
times: greedy tokens of float32.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support import ray_nodes

RUNNER = (sys.executable, "-m", "ling3export.runners.cli")
TOKENS, GIVE_UP = 6, 900  # tokens of an answer; seconds for a run
HOST_0, OTHER = "ray::_Host.work", "ray::_Host.follow"  # Ray names a process by what its actor does


def below(parent: int) -> dict[int, str]:
    """The command lines of all descendants of a process."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has ended
    ours = {parent}
    while more := {pid for pid, above in parents.items() if above in ours} - ours:
        ours |= more
    return {pid: names[pid] for pid in ours if pid in names}


def batch(artifact: str, source: Path, output: Path, on: list[object]) -> "subprocess.Popen[str]":
    """A run that has begun."""
    words = [*RUNNER, "batch", artifact, source, output, "--max-tokens", TOKENS, "--model", "m", "--check", "programs"]
    return subprocess.Popen(list(map(str, [*words, *on])), stderr=subprocess.PIPE, text=True)


def timeless(path: Path) -> str:
    """The answers without the times."""
    return re.sub(r'"created": \d+', "", path.read_text())


def killed(cluster: int, partial: Path, lines: int, which: str) -> int:
    """Kills a host once so many answers are there; how many there were."""
    end = time.monotonic() + GIVE_UP
    while time.monotonic() < end:
        count = partial.read_bytes().count(b"\n") if partial.exists() else 0
        victims = [pid for pid, name in below(cluster).items() if name.startswith(which)]
        if count >= lines and victims:
            os.kill(victims[0], signal.SIGKILL)
            return count
        time.sleep(0.02)
    raise TimeoutError(f"expected {lines} answers and a process {which}, found {count} and {victims}")


def main() -> None:
    """Prints a line for each round."""
    one, two, *numbers = sys.argv[1:]
    lines, rounds = (*map(int, numbers), *(320, 2)[len(numbers) :])
    with tempfile.TemporaryDirectory() as name, ray_nodes.cluster() as nodes:
        place = Path(name)
        source = place / "in.jsonl"
        source.write_text("".join(json.dumps({"prompt_ids": [1 + n % 50, 2, 3]}) + "\n" for n in range(lines)))
        assert batch(one, source, place / "one", []).wait(GIVE_UP) == 0
        for _ in range(3):  # one more than the worker has hosts
            nodes.add(engine=1)
        where = ["--on", f"ray://{nodes.address}", "--num-hosts", 2, "--resources", '{"engine": 1}']
        for number in range(rounds):
            which, output = (HOST_0, OTHER)[number % 2], place / f"two-{number}"
            began = time.perf_counter()
            with batch(two, source, output, where) as process:
                count = killed(nodes.pid, output.with_name(f"{output.name}.partial"), lines // 3, which)
                _, said = process.communicate(timeout=GIVE_UP)
            assert process.returncode == 0, said
            assert said.count("a worker is gone") == 1, said
            same = timeless(output) == timeless(place / "one")
            host = "host 0" if which == HOST_0 else "host 1"
            print(
                f"{host} killed after {count} of {lines} answers; the output is that of one process: {same}; "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
            assert same


if __name__ == "__main__":
    main()
