"""Faults of one end of a transfer, at random moments: what the other end counts, and how long it takes.

``python -m tests.support.transfer_faults COUNT [SEED]`` injects each COUNT times and prints a table.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ling3export.runners.transfer.backend import Source
from ling3export.runners.transfer.objects import HEADER, Key, state_abi
from tests.support import transfers
from tests.support.transfers import LAYOUT, backend, keys, same, segment, write

DEADLINE = 2.0  # seconds that a reader has
GRACE = 5.0  # seconds more that a busy machine may take
TRANSFER = "0" * 32
WRITER = """
import sys, time
from tests.support import transfers
key = transfers.keys(40, salt=sys.argv[1])[-1]
where = transfers.backend("shm", None)
part = where.create(key)
for layer in range(int(sys.argv[2])):
    part.write(layer, {name: array[layer] for name, array in transfers.random_arrays(key).items()})
if sys.argv[2] == "3":
    part.finish()
print("written", flush=True)
time.sleep(100)
"""
HOLDER = """
import sys, time
from tests.support import transfers
from ling3export.runners.hosts.rendezvous import HEAD
from ling3export.runners.transfer.tcp import OBJECT
where = transfers.backend("tcp", None)
key = transfers.keys(40, salt=sys.argv[1])[-1]
transfers.write(where, key)
where.offer("0" * 32, [key])
def half(caller, transfer, part, parts, names):
    memory = where._offers[transfer].objects[names[0]]
    caller.sendall(HEAD.pack(OBJECT, memory.nbytes))
    caller.sendall(memory.data[:memory.nbytes // 2])
    time.sleep(100)
if sys.argv[2] == "half":
    where._give = half
print(where.port, flush=True)
time.sleep(100)
"""


class Outcome(NamedTuple):
    """What a fault came to.

    Attributes:
        reason: What was counted.
        seconds: How long the reader took.
        wrong: What is not as it should be.
        left: Names of segments that gc would leave.
    """

    reason: str
    seconds: float
    wrong: str
    left: list[str]


class Case(NamedTuple):
    """What an injector works with."""

    rng: random.Random
    folder: Path
    stack: ExitStack

    def end(self, name: str, limit: int = transfers.LIMIT):
        return self.stack.enter_context(closing(backend(name, self.folder, limit, DEADLINE)))

    def process(self, code: str, *words: str) -> tuple[subprocess.Popen, str]:
        """A process of the other end, and the line that it prints."""
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        self.stack.callback(lambda: (process.kill(), process.wait(), process.stdout.close()))
        return process, process.stdout.readline().strip()


def writer_killed(case: Case) -> tuple[Callable[[], bool], object, str]:
    """A writer dies with a part of the layers written; the reader has begun to wait or not."""
    salt = transfers.fresh_salt()
    process, _ = case.process(WRITER, salt, str(case.rng.randint(0, 2)))
    key = keys(40, salt)[-1]
    case.stack.callback(transfers.remove, [key])
    if case.rng.random() < 0.5:
        threading.Timer(case.rng.uniform(0, 0.5), process.kill).start()
    else:
        process.kill()
        process.wait()
    reader = case.end("shm")
    return lambda: reader.fetch([key], None, time.monotonic() + DEADLINE) == [None], reader, "writer_gone"


def flipped(name: str) -> Callable[[Case], tuple[Callable[[], bool], object, str]]:
    def inject(case: Case) -> tuple[Callable[[], bool], object, str]:
        """One byte of the payload is another one; the object is a miss, and can be written again."""
        end, key, source = case.end(name), keys(40)[-1], None
        assert write(end, key)
        at, bit = case.rng.randrange(LAYOUT.nbytes(key)), 1 << case.rng.randrange(8)
        if name == "tcp":
            end.offer(TRANSFER, [key])
            source = Source("127.0.0.1", end.port, TRANSFER)
            end._offers[TRANSFER].objects[key.name][HEADER.size + at] ^= bit
        else:
            path = segment(key) if name == "shm" else case.folder / f"{key.name}.safetensors"
            with open(path, "r+b") as file:
                place = file.seek(0, 2) - LAYOUT.nbytes(key) + at
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ bit]))

        def read() -> bool:
            missed = end.fetch([key], source, time.monotonic() + DEADLINE) == [None]
            if name == "tcp":
                return missed
            return missed and write(end, key, 5) and same(key, end.fetch([key], None, time.monotonic() + 9)[0], 5)

        return read, end, "corrupt"

    return inject


def full(case: Case) -> tuple[Callable[[], bool], object, str]:
    """All room is taken by an object that another process is writing: a new one is not taken, and that one not lost."""
    salt = transfers.fresh_salt()
    case.process(WRITER, salt, "1")
    key = keys(40, salt)[-1]
    case.stack.callback(transfers.remove, [key])
    end = case.end("shm", segment(key).stat().st_size + case.rng.randrange(HEADER.size))
    other = keys()[case.rng.randrange(3)]
    return lambda: not write(end, other) and segment(key).exists() and not segment(other).exists(), end, "full"


def other_state(case: Case) -> tuple[Callable[[], bool], object, str]:
    """An object of another artifact lies under the name that is wanted; it is not ours to remove."""
    end, name = case.end("shm"), case.rng.choice(("shm", "file"))
    end = case.end(name)
    key = keys(40)[-1]
    theirs = replace(key, state_abi=state_abi({"weights": case.rng.randrange(1 << 30)}))
    assert write(end, theirs)
    if name == "shm":
        os.rename(segment(theirs), segment(key))
    else:
        os.rename(case.folder / f"{theirs.name}.safetensors", case.folder / f"{key.name}.safetensors")
    case.stack.callback(transfers.remove, [key, theirs])
    return lambda: end.fetch([key], None, time.monotonic() + DEADLINE) == [None], end, "other_state"


def pulled_twice(case: Case) -> tuple[Callable[[], bool], object, str]:
    """Two pull the same transfer, at once or one after the other: one gets it."""
    holder, readers, key = case.end("tcp"), [case.end("tcp") for _ in range(2)], keys(40)[-1]
    assert write(holder, key)
    holder.offer(TRANSFER, [key])
    source, found = Source("127.0.0.1", holder.port, TRANSFER), [None, None]

    def pull(number: int) -> None:
        found[number] = readers[number].fetch([key], source, time.monotonic() + DEADLINE)[0]

    def both() -> bool:
        threads = [threading.Thread(target=pull, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
            if wait:
                thread.join()
        for thread in threads:
            thread.join()
        counts.update(readers[0].counts + readers[1].counts)
        return sorted(same(key, each) for each in found) == [False, True] and counts["hit"] == 1

    wait, counts = case.rng.random() < 0.5, Counter()
    return both, type("Both", (), {"counts": counts})(), "refused"


def stranger(case: Case) -> tuple[Callable[[], bool], object, str]:
    """Somebody who does not know the protocol calls, and says something, nothing, or too much; others are served."""
    holder, reader, key = case.end("tcp"), case.end("tcp"), keys(40)[-1]
    assert write(holder, key)
    holder.offer(TRANSFER, [key])
    peers = [
        case.stack.enter_context(socket.create_connection(("127.0.0.1", holder.port), 5))
        for _ in range(case.rng.randint(1, 5))
    ]
    for peer in peers:
        with suppress(OSError):
            peer.sendall(case.rng.randbytes(case.rng.choice((0, 1, 100, 100_000))))
        if case.rng.random() < 0.7:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_WR)

    def served() -> bool:
        source = Source("127.0.0.1", holder.port, TRANSFER)
        whole = same(key, reader.fetch([key], source, time.monotonic() + DEADLINE)[0])
        until = time.monotonic() + DEADLINE + GRACE
        while holder.counts["stranger"] < len(peers) and time.monotonic() < until:
            time.sleep(0.01)
        return whole and holder.counts["stranger"] == len(peers)

    return served, holder, "stranger"


def holder_gone(how: str) -> Callable[[Case], tuple[Callable[[], bool], object, str]]:
    def inject(case: Case) -> tuple[Callable[[], bool], object, str]:
        """The other end is killed before or while it sends, or is stopped."""
        salt = transfers.fresh_salt()
        process, port = case.process(HOLDER, salt, "half" if how == "killed while sending" else "")
        reader, key = case.end("tcp"), keys(40, salt)[-1]
        if how == "killed":
            process.kill()
            process.wait()
        elif how == "stopped":
            process.send_signal(signal.SIGSTOP)
        else:
            threading.Timer(case.rng.uniform(0.2, 0.8), process.kill).start()
        source = Source("127.0.0.1", int(port), TRANSFER)
        reason = "timeout" if how == "stopped" else "peer_gone"
        return lambda: reader.fetch([key], source, time.monotonic() + DEADLINE) == [None], reader, reason

    return inject


FAULTS: dict[str, Callable[[Case], tuple[Callable[[], bool], object, str]]] = {
    "writer killed mid-payload": writer_killed,
    "flipped byte, shm": flipped("shm"),
    "flipped byte, file": flipped("file"),
    "flipped byte, tcp": flipped("tcp"),
    "full shm budget": full,
    "object of another state_abi": other_state,
    "id pulled twice": pulled_twice,
    "stranger on the port": stranger,
    "other end killed": holder_gone("killed"),
    "other end killed while sending": holder_gone("killed while sending"),
    "other end stopped": holder_gone("stopped"),
}


def orphan(seed: int, ready: bool) -> Key:
    """A segment whose writer was killed, behind a part of it or when it was ready."""
    with ExitStack() as stack:
        salt = transfers.fresh_salt()
        Case(random.Random(seed), Path(), stack).process(WRITER, salt, "3" if ready else "1")
    return keys(40, salt)[-1]


def inject(name: str, seed: int, folder: Path) -> Outcome:
    """One fault."""
    before = {path.name for path in transfers.FOLDER.glob(f"{transfers.own_prefix()}*")}
    with ExitStack() as stack:
        act, end, reason = FAULTS[name](Case(random.Random(f"{name} {seed}"), folder, stack))
        begun = time.monotonic()
        right = act()
        seconds = time.monotonic() - begun
        counts = dict(end.counts)
    wrong = "" if right and counts.get(reason) else f"{name}, seed {seed}: right {right}, counted {counts}"
    after = {path.name for path in transfers.FOLDER.glob(f"{transfers.own_prefix()}*")}
    return Outcome(reason, seconds, wrong, sorted(after - before))


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print("| fault | as it should be | counted | longest |\n|---|---|---|---|")
    for name in FAULTS:
        with tempfile.TemporaryDirectory(prefix="transfer-faults-") as folder:
            found = [inject(name, seed, Path(folder)) for seed in range(first, first + count)]
        good = sum(not (each.wrong or each.left) for each in found)
        longest = max(each.seconds for each in found)
        print(f"| {name} | {good} of {count} | {found[0].reason} | {longest:.2f} s |", flush=True)
        for each in found:
            if each.wrong or each.left:
                print(each, file=sys.stderr)


if __name__ == "__main__":
    main()
