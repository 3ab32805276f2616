"""Runs seeded cases in a process of their own, so that a crash ends that process and not the run.

A target is a context manager that gets an empty folder and yields its case: a function of a ``Random`` that does one
thing with damaged input. A case passes if it returns, or if it raises an error of the project with a printable message.
It fails with any other exception, with a crash of the process, after LIMIT seconds (longer on a busy machine), or when
it needs more than MEMORY.
"""

import faulthandler
import importlib
import os
import random
import resource
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.processes import Child, Parent

LIMIT = 10.0  # seconds for a case
MEMORY = 4 << 30  # bytes of address space that cases may add to the process after its setup
Case = Callable[[random.Random], object]
Target = Callable[[Path], AbstractContextManager[Case]]
FAULT = "fault"  # the file in a target's folder to which the stacks of a crash or a hang are written
TABLE = "tests.fuzz.targets"  # the module whose TARGETS maps names to targets


class WrongResultError(Exception):
    """Damaged input was accepted with a wrong result: other tokens, a dead server, or an escape sequence."""


@dataclass(frozen=True)
class Failure:
    """A failed case.

    Attributes:
        target: The target's name.
        seed: The seed of the run.
        case: The number of the case.
        kind: ``traceback``, ``wrong``, ``abort`` or ``hang``.
        text: The exception, or the last output of the process.
    """

    target: str
    seed: int
    case: int
    kind: str
    text: str

    def __str__(self) -> str:
        again = f"make fuzz ARGS='--target {self.target} --seed {self.seed} --case {self.case}'"
        return f"{self.target}: seed {self.seed}, case {self.case}: {self.kind}\n{self.text}\nagain: {again}"


@dataclass
class Found:
    """The result of a run: the number of ``accepted`` and ``refused`` cases, and the failures."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def run(target: str, cases: Sequence[int], seed: int = 0, table: str = TABLE, limit: float = LIMIT) -> Found:
    """Runs cases of a target.

    A case's randomness depends only on target, seed and number, so it can be repeated alone.
    """
    found, left = Found(), list(cases)
    while left:
        with (
            tempfile.TemporaryDirectory(prefix="ling3-fuzz-") as folder,
            _worker(target, folder, table, limit) as child,
        ):
            while left:
                case = left.pop(0)
                child.send({"seed": f"{target} {seed} {case}"})
                reply = child.receive()
                if reply is None:
                    text = f"{child.ended()[1]}\n{Path(folder, FAULT).read_text()[:6000]}"
                    kind = "hang" if "\nTimeout (" in text else "abort"
                else:
                    kind, text = reply["kind"], reply["text"]
                found.counts[kind] += 1
                if kind not in ("accepted", "refused"):
                    found.failures.append(Failure(target, seed, case, kind, text))
                if reply is None:
                    break
            else:
                child.send({"seed": None})  # the target ends the processes that it started
                child.receive()
    return found


@contextmanager
def _worker(target: str, folder: str, table: str, limit: float) -> Iterator[Child]:
    with Child("tests.fuzz.harness", {"LING3_CACHE": f"{folder}/cache"}) as child:
        child.send({"table": table, "target": target, "folder": folder, "limit": limit})
        if child.receive() is None:
            raise RuntimeError(f"fuzz target `{target}`: expected it to start, found that it {child.ended()[1]}")
        yield child


IN_THREADS: list[str] = []  # exceptions in threads since the last case


def judged(case: Case, rng: random.Random) -> tuple[str, str]:
    """The verdict on a case, and the text of a failure."""
    try:
        case(rng)
    except Ling3Error as error:
        if all(line.isprintable() for line in str(error).split("\n")):
            return "refused", ""
        return "wrong", f"a message with control characters: {str(error)!r}"
    except WrongResultError as error:
        return "wrong", str(error)
    except BaseException:  # panics of Rust libraries do not inherit from Exception
        return "traceback", traceback.format_exc()[-4000:]
    return "accepted", ""


def note_thread(raised: threading.ExceptHookArgs) -> None:
    """Records an exception of a thread, which its caller does not see."""
    IN_THREADS.append("".join(traceback.format_exception(raised.exc_type, raised.exc_value, raised.exc_traceback)))


def patience(limit: float) -> float:
    """Seconds after which a case counts as a hang: ``limit`` times the number of processes that now share a core."""
    return limit * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def limit_memory() -> None:
    """Limits the memory that this process may add."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Runs cases for the parent process."""
    parent = Parent()
    job = parent.receive()
    target: Target = importlib.import_module(job["table"]).TARGETS[job["target"]][0]
    folder, threading.excepthook = Path(job["folder"]), note_thread
    with open(folder / FAULT, "w") as fault, target(folder) as case:
        faulthandler.enable(fault)
        limit_memory()
        parent.send({})
        while (seed := parent.receive()["seed"]) is not None:
            faulthandler.dump_traceback_later(patience(job["limit"]), exit=True, file=fault)
            kind, text = judged(case, random.Random(seed))
            faulthandler.cancel_dump_traceback_later()
            if IN_THREADS:
                kind, text = "traceback", IN_THREADS.pop()[-4000:]
            parent.send({"kind": kind, "text": text})
    parent.send({})


if __name__ == "__main__":
    importlib.import_module("tests.fuzz.harness").main()  # use the module that targets import: they raise its classes
