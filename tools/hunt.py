"""Starts a command again and again, and keeps what is left of a start that dies: ``python -m tools.hunt ARTIFACT OUT``.

Each start is ``ling3-runner generate`` with nine prompts in one batch, on one host or on several of this machine, with
faulthandler and core files. OUT/starts.jsonl gets a line a start; starts of an earlier call count, so a hunt may go on.
A start fails that ends with another code than 0, prints other tokens than the first one, or takes longer than its
deadline. Its folder stays: what each host said, its core file, and the stacks that gdb finds in it (where gdb is
installed), or, of a start that hangs, the stacks of the living process. Exits with 1 if any start failed.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ling3export.foundation.processes import free_port

ROOT = Path(__file__).parents[1]
STACKS = ["-batch", "-ex", "set pagination off", "-ex", "thread apply all bt"]
PROMPTS = [[2, *range(40, 40 + length)] for length in (1, 3, 5, 8, 13, 20, 33, 60, 100)]


def stacks(folder: Path, *what: object) -> None:
    """Writes the stacks of all threads of a core file, or of a process, to ``folder``."""
    if gdb := shutil.which("gdb"):
        done = subprocess.run([gdb, *STACKS, *map(str, what)], capture_output=True, text=True, check=False)
        (folder / f"stacks.{Path(str(what[-1])).name}").write_text(done.stdout + done.stderr)


def start(artifact: Path, folder: Path, prompts: Path, hosts: int, deadline: float) -> dict[str, Any]:
    """Starts the command once, as so many processes; returns their codes, their tokens and the seconds they took."""
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "ling3export.runners.cli",
        "generate",
        str(artifact),
        "--prompt-file",
        str(prompts),
    ]
    command += ["--max-tokens", "12", "--ignore-eos", "--json"]
    environment = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(ROOT)}
    if hosts > 1:
        environment |= {"DIST_INIT_ADDR": f"127.0.0.1:{free_port()}", "NNODES": str(hosts)}
    began, processes = time.monotonic(), []
    for host in range(hosts):
        place = folder / str(host)
        place.mkdir()  # also where the kernel leaves a core file
        with open(place / "out", "wb") as out, open(place / "err", "wb") as err:
            more = {"NODE_RANK": str(host)} if hosts > 1 else {}
            processes.append(subprocess.Popen(command, cwd=place, env=environment | more, stdout=out, stderr=err))
    codes: list[int | None] = []
    for host, process in enumerate(processes):
        try:
            codes.append(process.wait(max(0.0, began + deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            stacks(folder / str(host), "-p", process.pid)
            codes.append(None)
    for process in processes:
        process.kill()
        process.wait()
    for core in folder.glob("*/core*"):
        stacks(core.parent, sys.executable, core)
    lines = (folder / "0/out").read_text().split("\n")[:-1]  # a host that dies may leave half a line
    tokens = [json.loads(line)["token_ids"] for line in lines]
    return {"codes": codes, "tokens": tokens, "seconds": round(time.monotonic() - began, 2), "load": os.getloadavg()[0]}


def main() -> int:
    """Hunts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--starts", type=int, default=500, help="how many more [500]")
    parser.add_argument("--hosts", type=int, default=1, help="processes of a start [1]")
    parser.add_argument("--deadline", type=float, default=300, help="seconds after which a start hangs [300]")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    given.out.mkdir(parents=True, exist_ok=True)
    prompts, log = given.out.resolve() / "prompts.jsonl", given.out / "starts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in PROMPTS))
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for _ in range(given.starts):
        folder = given.out.resolve() / f"{len(done):04d}"
        found = start(given.artifact.resolve(), folder, prompts, given.hosts, given.deadline)
        wanted = done[0]["tokens"] if done else found["tokens"]
        found["ok"] = set(found["codes"]) == {0} and len(wanted) == len(PROMPTS) and found["tokens"] == wanted
        done.append(found)
        with open(log, "a") as lines:
            lines.write(json.dumps(found) + "\n")
        if found["ok"]:
            shutil.rmtree(folder)
    failed = [number for number, each in enumerate(done) if not each["ok"]]
    half = sorted(each["seconds"] for each in done)[len(done) // 2]
    print(f"{len(done)} starts on {given.hosts} hosts, {len(failed)} failed: {failed}; median {half} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
