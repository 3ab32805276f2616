"""Kills publications and pulls at random moments, and runs two publishers at once; no partial version may be visible.

``python -m tests.support.catalog_kills ARTIFACT COUNT [SEED]`` kills COUNT of each and prints counts of the outcomes.
The environment variable SPAN is the interval in seconds in which they are killed. It begins with the process, or with
AT=index at the last step of a publication, the change of the index.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ling3export.artifacts.catalog.layout import OciLayout, parse_store
from ling3export.artifacts.catalog.publish import Words, publish
from ling3export.artifacts.catalog.pull import verify
from ling3export.foundation.errors import CatalogError
from tests.support.builds import environment

# small blocks give many moments at which a process can be killed
SCRIPT = """
import sys
from pathlib import Path
from ling3export.artifacts.catalog import layout, publish, pull
layout.BLOCK = 4096
what, folder, where, version = sys.argv[1:]
store = layout.parse_store(where)
print("ready", flush=True)
enter = store.enter
def entered(*given):
    print("index", flush=True)
    return enter(*given)
store.enter = entered
if what == "publish":
    publish.publish(Path(folder), store, "toy", version, publish.Words())
else:
    pull.pull(store, store.find("toy", version), Path(folder))
"""
NONE = ("expected an OCI image layout, found No such file", "expected it in the store, found none")


def started(*arguments: object) -> subprocess.Popen[str]:
    """Starts ``publish`` or ``pull`` of a folder, a store and a version; returns once the process has its imports."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        env=environment({}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def contents(folder: Path) -> dict[str, bytes]:
    """Content of every file by its path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed(process: subprocess.Popen[str], after: float, line: str = "") -> bool:
    """Kills a process ``after`` seconds, or so long after its output ``line``; returns whether it was running."""
    assert process.stdout is not None
    assert not line or process.stdout.readline().strip() == line
    time.sleep(after)
    running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return running


def seen(store: OciLayout) -> bool:
    """Whether a reader finds the version. If it does, every byte of the version is read and its digest checked."""
    try:
        found = store.find("toy")
    except CatalogError as error:
        if not any(text in str(error) for text in NONE):
            raise
        return False
    return verify(store, found) > 0


@contextmanager
def reading(where: str, found: Counter[str]) -> Iterator[None]:
    """A thread that looks up the version until the block ends, and counts how often it was there.

    Raises:
        CatalogError: The thread read an incomplete version or index.
    """
    done, failed = threading.Event(), list[BaseException]()

    def read() -> None:
        store = parse_store(where)
        try:
            while not done.is_set():
                found[f"a reader saw {'it whole' if seen(store) else 'none'}"] += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failed:
        raise failed[0]


def kill_publishers(toy: Path, root: str, count: int, rng: random.Random, span: float) -> Counter[str]:
    """Every version in the index is complete; the next publication and ``gc`` remove everything else."""
    found: Counter[str] = Counter()
    for number in range(count):
        store = parse_store(where := f"{root}/store-{number}")
        process = started("publish", toy, where, "1.0.0")
        with reading(where, found):
            was = killed(process, rng.random() * span, os.environ.get("AT", ""))
        there = seen(store)
        found[f"{'killed' if was else 'ended'}, {'whole' if there else 'no version'}"] += 1
        assert publish(toy, store, "toy", "1.0.0", Words()).new is not there
        assert seen(store)
        store.gc()
        left = [path.name for path in (store.folder / "blobs/sha256").iterdir() if path.name.startswith(".")]
        assert not left and seen(store)
        shutil.rmtree(store.folder)
    return found


def kill_pulls(toy: Path, root: str, count: int, rng: random.Random, span: float) -> Counter[str]:
    """The folder is complete or absent; the last pull succeeds, whatever the killed ones left."""
    where, out, found = f"{root}/pulled", toy.with_name("out"), Counter[str]()
    publish(toy, parse_store(where), "toy", "1.0.0", Words())
    for _ in range(count):
        was = killed(started("pull", out, where, "1.0.0"), rng.random() * span)
        there = out.exists()
        if there:
            assert contents(out) == contents(toy)
            shutil.rmtree(out)
        found[f"{'killed' if was else 'ended'}, {'whole' if there else 'nothing'}"] += 1
    process = started("pull", out, where, "1.0.0")
    assert process.communicate(timeout=300) == ("", "") and contents(out) == contents(toy)
    return found


def main(artifact: str, count: str, seed: str = "0") -> None:
    rng, span = random.Random(int(seed)), float(os.environ.get("SPAN", "0.3"))
    with tempfile.TemporaryDirectory() as folder:
        toy = Path(shutil.copytree(artifact, Path(folder, "x.ling3")))
        for what in (kill_publishers, kill_pulls):
            print(json.dumps({what.__name__: what(toy, f"oci:{folder}", int(count), rng, span)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
