"""What each of several hosts takes of the weights: ``python -m bench ranks [--hosts N]``, against loading all of them.

Each host is a process of ``ling3-runner generate`` with one device; its memory is that of the whole command. Beside it
a process that reads every weight file into memory and then splits off the slabs of host 0.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.inputs import ROOT, artifact
from bench.inputs import checkpoint as checkpoint_of
from bench.report import anonymous, machine, show, table
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.store import Store
from ling3export.foundation.processes import LOOPBACK, free_port
from ling3export.runners.load.weights import Weights

EVERY = 0.02  # seconds between two looks at a process
Peak = dict[str, int]


def seen(process: int) -> Peak:
    """Bytes of a process now: anonymous ones, and of weight files those that it has touched."""
    try:
        maps = Path(f"/proc/{process}/smaps").read_text()
    except OSError:  # it has ended
        maps = ""
    resident = re.findall(r"\.safetensors\n(?:.*\n)*?Rss:\s+(\d+)", maps)
    return {"anonymous": anonymous(process), "weights": 1024 * sum(map(int, resident))}


def peaks(commands: Sequence[tuple[list[object], dict[str, str]]]) -> list[Peak]:
    """The most that each of several processes had while all ran together."""
    inherited = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(list(map(str, command)), cwd=ROOT, env=inherited | more, stdout=subprocess.DEVNULL)
        for command, more in commands
    ]
    most: list[Peak] = [{"anonymous": 0, "weights": 0} for _ in processes]
    while any(process.poll() is None for process in processes):
        for process, peak in zip(processes, most, strict=True):
            for what, size in seen(process.pid).items():
                peak[what] = max(peak[what], size)
        time.sleep(EVERY)
    assert all(process.returncode == 0 for process in processes), [process.returncode for process in processes]
    return most


def whole(folder: Path) -> None:
    """Reads all weights into memory, then splits off those of host 0."""
    manifest = read_manifest(folder)
    (target,) = manifest.targets.values()
    index = manifest.weights.index
    store = Store(folder, index, copied=True)
    share = [
        store.view(name).reshape(len(index[name].sha256), -1)[start:stop].copy()
        for name, start, stop in target.slabs(0)
    ]
    print(sum(each.nbytes for each in share))


def main(given: Path | None, hosts: int) -> dict[str, Any]:
    """Measures and prints."""
    options = ["--target", f"cpu:{hosts}x1", "--paddings", 16, "--decode-paddings", 1, "--max-running", 2]
    folder = artifact(checkpoint_of(given, "full", 4), f"ranks-{hosts}", [*options, "--context", 512])
    manifest = read_manifest(folder)
    (target,) = manifest.targets.values()
    shares = [Weights(folder, manifest, target, host).nbytes for host in range(hosts)]
    stored = sum(manifest.weights.files.values())
    replicated = sum(
        manifest.weights.index[name].slab_bytes * len(manifest.weights.index[name].sha256)
        for name, _, stop in target.slabs(0)
        if stop is None
    )
    command = [
        sys.executable,
        "-m",
        "ling3export.runners.cli",
        "generate",
        folder,
        "--prompt-ids",
        "1,2,3",
        "--max-tokens",
        2,
    ]
    where = {"DIST_INIT_ADDR": f"{LOOPBACK}:{free_port()}", "NNODES": str(hosts)}
    ranks = peaks([(command, where | {"NODE_RANK": str(host)}) for host in range(hosts)])
    (naive,) = peaks([([sys.executable, "-m", "bench.ranks", folder], {})])
    most = stored // hosts + replicated + stored // 100
    rows = [
        [
            f"host {host}",
            share / 1e6,
            rank["weights"] / 1e6,
            most / 1e6,
            rank["anonymous"] / 1e6,
            rank["anonymous"] / naive["anonymous"],
        ]
        for host, (share, rank) in enumerate(zip(shares, ranks, strict=True))
    ]
    rows.append(["read whole, then split", stored / 1e6, stored / 1e6, "", naive["anonymous"] / 1e6, 1.0])
    head = ["MB", "its slabs", "touched", "at most", "anonymous memory", "of the last"]
    result = {
        "benchmark": "ranks",
        "machine": machine(),
        "hosts": hosts,
        "stored": stored,
        "replicated": replicated,
        "shares": shares,
        "ranks": ranks,
        "naive": naive,
        "bound": most,
    }
    show(f"Weights of each of {hosts} hosts, and its memory, of {stored / 1e6:,.0f} MB", [table(head, rows)], result)
    return result


if __name__ == "__main__":
    whole(Path(sys.argv[1]))
