"""Faults of an attention process or of an FFN worker, with real processes: how each ends the other, and what is left.

``python -m tools.campaigns.ffn_faults ARTIFACT [COUNT [FAULT…]]`` injects each COUNT times and prints a table. ARTIFACT
was built with ``--afd``.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ling3export.runners.ffn.segment import FOLDER, PREFIX

RUNNER = (sys.executable, "-m", "ling3export.runners.cli")
LIMIT = 4.0  # seconds of a wait that is given, as --timeout, --ffn-timeout or --wait
GRACE = 10.0  # seconds that a busy machine takes to end a process besides
LATEST = 300.0  # seconds within which anything has to happen


class Fault(NamedTuple):
    """What happens to which side, and how the other one has to end.

    Attributes:
        victim: 0 is the worker, 1 the attention process.
        signal: What it gets once both have met; None where it is never started.
        code: The other side's exit code.
        said: What its last lines hold.
        within: Seconds that it may take, beside GRACE.
        worker: Options of ``ffn-worker``.
        attention: Options of ``generate``.
    """

    victim: int
    signal: signal.Signals | None
    code: int
    said: str
    within: float = 1.0
    worker: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()


def seconds(option: str) -> tuple[str, str]:
    return option, f"{LIMIT:g}"


FAULTS = {
    "worker killed": Fault(0, signal.SIGKILL, 1, "found its process gone"),
    "worker ended (SIGTERM)": Fault(0, signal.SIGTERM, 1, "SIGTERM came"),
    "worker stands still": Fault(0, signal.SIGSTOP, 1, "found no answer", LIMIT, (), seconds("--ffn-timeout")),
    "no worker": Fault(0, None, 1, "expected an FFN worker within", LIMIT, (), seconds("--ffn-timeout")),
    "attention killed": Fault(1, signal.SIGKILL, 1, "expected a live process, found none"),
    "attention stands still": Fault(1, signal.SIGSTOP, 1, "to publish within", LIMIT, seconds("--timeout")),
    "attention never comes": Fault(1, None, 1, "found them missing", LIMIT, seconds("--wait")),
}


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + LATEST
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def inject(artifact: Path, fault: Fault, name: str) -> float:
    """Seconds from the signal to the other side's end; how it ended is checked, and that no segment is left."""
    commands = [
        [*RUNNER, "ffn-worker", artifact, "--context", name, "--check", "programs", *fault.worker],
        [
            *RUNNER,
            "generate",
            artifact,
            "--ffn",
            name,
            "--prompt-ids",
            "1,2,3",
            "--max-tokens",
            "900",
            "--ignore-eos",
            "--check",
            "programs",
            *fault.attention,
        ],
    ]
    segment, both = FOLDER / f"{PREFIX}{name}", list[subprocess.Popen[str] | None]([None, None])
    try:
        for side, command in enumerate(commands):
            if fault.signal is not None or side != fault.victim:
                both[side] = subprocess.Popen(
                    list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            if side == 0 and both[0] is not None:
                until(segment.exists, "a segment")
        other, started = both[1 - fault.victim], time.monotonic()
        assert other is not None
        if fault.signal is not None:
            until(lambda: not segment.exists(), "both to meet")  # then its name is removed
            time.sleep(1)  # some steps
            started, victim = time.monotonic(), both[fault.victim]
            assert victim is not None and victim.poll() is None and other.poll() is None
            victim.send_signal(fault.signal)
        _, errors = other.communicate(timeout=LATEST)
        took = time.monotonic() - started
        assert other.returncode == fault.code and fault.said in errors, (other.returncode, errors)
        if fault.signal is signal.SIGTERM:
            assert both[0] is not None and both[0].wait(LATEST) == 0
    finally:
        for process in both:
            if process is not None:
                process.kill()
                process.wait()
    assert not segment.exists(), segment
    return took


def main() -> None:
    """Prints, for each fault, how many ended as they have to, and the longest time."""
    artifact, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    print("fault, ended as they have to, longest s, limit s beside an exit")
    for what in sys.argv[3:] or FAULTS:
        fault = FAULTS[what]
        took = [inject(artifact, fault, f"faults-{os.getpid()}-{number}") for number in range(count)]
        late = sum(each > fault.within + GRACE for each in took)
        print(f"{what}, {count - late} of {count}, {max(took):.1f}, {fault.within:g}", flush=True)


if __name__ == "__main__":
    main()
