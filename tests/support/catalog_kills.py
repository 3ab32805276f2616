"""Publications and pulls that are killed at random moments, and two publishers at once: what is left is whole.

``python tests/support/catalog_kills.py ARTIFACT COUNT [SEED]`` kills COUNT of each, and prints what became of them.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from builds import environment
from ling3export.artifacts.catalog.layout import Layout
from ling3export.artifacts.catalog.publish import Words, publish
from ling3export.artifacts.catalog.pull import resolve, verify

# Small blocks and parts, so that there are many moments.
SCRIPT = """
import sys
from pathlib import Path
from ling3export.artifacts.catalog import layout, oci, publish, pull
layout.BLOCK = publish.BLOCK = pull.BLOCK = 4096
oci.PART = 100_000
print("ready", flush=True)
what, folder, store, version = sys.argv[1:]
if what == "publish":
    publish.publish(Path(folder), layout.Layout(Path(store)), "toy", version, publish.Words())
else:
    (found,) = pull.resolve(layout.Layout(Path(store)), "toy", version)
    pull.pull(layout.Layout(Path(store)), found, Path(folder), Path(folder + ".blobs"))
"""


def started(*arguments: object) -> subprocess.Popen[str]:
    """``publish`` or ``pull``, a folder, a store and a version, in a process that has imported all that it needs."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *map(str, arguments)], env=environment({}), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed(process: subprocess.Popen[str], after: float) -> bool:
    """Kills a process after so many seconds; whether it was still running."""
    time.sleep(after)
    running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return running


def kill_publishers(toy: Path, folder: Path, count: int, rng: random.Random, span: float) -> Counter[str]:
    """Every version that the index has afterwards is whole; the next publication and ``gc`` leave nothing else."""
    found: Counter[str] = Counter()
    for number in range(count):
        store = Layout(folder / f"store-{number}")
        was = killed(started("publish", toy, store.folder, "1.0.0"), rng.random() * span)
        there = (store.folder / "index.json").exists() and bool(store.entries())
        if there:
            verify(store, resolve(store, "toy", "1.0.0")[0])
        found[f"{'killed' if was else 'ended'}, {'whole' if there else 'no version'}"] += 1
        publish(toy, store, "toy", "1.0.0", Words())
        store.gc()
        left = [path.name for path in (store.folder / "blobs/sha256").iterdir() if path.name.startswith(".")]
        assert not left and verify(store, resolve(store, "toy", None)[0]) > 0
        shutil.rmtree(store.folder)
    return found


def kill_pulls(toy: Path, folder: Path, count: int, rng: random.Random, span: float) -> Counter[str]:
    """The folder is there whole or not at all; the last pull goes on from all that the others left."""
    store, out, found = Layout(folder / "store"), folder / "out", Counter[str]()
    publish(toy, store, "toy", "1.0.0", Words())
    for _ in range(count):
        was = killed(started("pull", out, store.folder, "1.0.0"), rng.random() * span)
        there = out.exists()
        if there:
            assert contents(out) == contents(toy)
            shutil.rmtree(out)
            shutil.rmtree(f"{out}.blobs")
        found[f"{'killed' if was else 'ended'}, {'whole' if there else 'nothing'}"] += 1
    process = started("pull", out, store.folder, "1.0.0")
    assert process.communicate(timeout=300) == ("", "") and contents(out) == contents(toy)
    return found


def main(artifact: str, count: str, seed: str = "0") -> None:
    """Prints counts of what was found."""
    rng, span = random.Random(int(seed)), float(os.environ.get("SPAN", "0.3"))
    with tempfile.TemporaryDirectory() as folder:
        toy = Path(shutil.copytree(artifact, Path(folder, "x.ling3")))
        for what in (kill_publishers, kill_pulls):
            print(json.dumps({what.__name__: what(toy, Path(folder), int(count), rng, span)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
