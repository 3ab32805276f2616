"""Faults of one of two hosts: the errors that the hosts print, and the time until all have ended."""

import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ling3export.foundation.processes import free_port
from tests.support.builds import environment

START_TIMEOUT, HOST_TIMEOUT = 12, 4
STATED = 10  # seconds beyond the timeout of the phase, as in docs/hosts.md
SLOWED = """
import sys, time
from ling3export.runners.cli.main import main
from ling3export.runners.hosts.channel import Channel
take, left = Channel.take, [int(sys.argv.pop(1))]
def slowed(self, number=0):
    left[0] -= 1
    if left[0] == 0:
        print("slowed", file=sys.stderr, flush=True)
        time.sleep(float(3600))
    return take(self, number)
Channel.take = slowed
main()
"""


class Fault(NamedTuple):
    """A fault of one host at one moment.

    Attributes:
        kind: ``killed``, ``stopped``, ``slowed`` or ``partitioned``.
        phase: ``starting`` (before the hosts meet), ``loading`` or ``running`` (while they take steps).
        victim: Number of the host; a partition cuts the link between both.
        wait: Seconds after the beginning of the phase; for a slowed host, the number of the step.
    """

    kind: str
    phase: str
    victim: int
    wait: float


class End(NamedTuple):
    """How the hosts ended.

    Attributes:
        seconds: From the fault until every process had ended. For a stopped host: from its continuation, if that is
            later.
        said: The last error of each host.
        wrong: Deviations from docs/hosts.md.
    """

    seconds: float
    said: list[str]
    wrong: list[str]


class Link:
    """A proxy in front of host 0 that can stop forwarding while its connections stay open until ``close``."""

    def __init__(self, port: int) -> None:
        self._there = ("127.0.0.1", port)
        self._cut, self._over = threading.Event(), threading.Event()
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port = int(self._sockets[0].getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Stops forwarding."""
        self._cut.set()

    def close(self) -> None:
        """Closes every connection."""
        self._over.set()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                near, _ = self._sockets[0].accept()
            except OSError:
                return
            self._sockets.append(near)
            try:
                far = socket.create_connection(self._there)
            except OSError:
                near.close()
                continue
            self._sockets.append(far)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while part := one.recv(1 << 16):
                if self._cut.is_set():
                    self._over.wait()
                other.sendall(part)
        with suppress(OSError):
            other.shutdown(socket.SHUT_WR)


class _Pair:
    """``ling3-runner generate`` on two hosts."""

    def __init__(self, folder: Path, artifact: Path, fault: Fault) -> None:
        prompts = folder / "prompts.jsonl"
        prompts.write_text('{"prompt_ids": [1, 2, 3]}\n' * 8)
        port = free_port()
        self.link = Link(port)
        self.logs = [folder / f"host{number}" for number in range(2)]
        self.processes = []
        for number, log in enumerate(self.logs):
            slow = fault.kind == "slowed" and number == 1
            address = self.link.port if number and fault.kind == "partitioned" else port
            program = ["-c", SLOWED, int(fault.wait)] if slow else ["-m", "ling3export.runners.cli"]
            command = [
                sys.executable, *program, "generate", artifact, "--prompt-file", prompts, "--max-tokens", 1000,
                "--ignore-eos",
            ]  # fmt: skip
            place = {
                "DIST_INIT_ADDR": f"127.0.0.1:{address}", "NNODES": 2, "NODE_RANK": number,
                "LING3_START_TIMEOUT": START_TIMEOUT, "LING3_HOST_TIMEOUT": HOST_TIMEOUT,
                "LING3_SECRET": "of-these-two-hosts",
            }  # fmt: skip
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [str(part) for part in command],
                        env=environment({name: str(value) for name, value in place.items()}),
                        stdout=subprocess.DEVNULL,
                        stderr=file,
                    )
                )

    def until(self, number: int, text: str) -> bool:
        """Waits until a host prints ``text`` or ends; returns whether it printed it."""
        while text not in self.logs[number].read_text():
            if self.processes[number].poll() is not None:
                return False
            time.sleep(0.01)
        return True


@contextmanager
def _pair(artifact: Path, fault: Fault) -> Iterator[_Pair]:
    with tempfile.TemporaryDirectory() as folder:
        pair = _Pair(Path(folder), artifact, fault)
        try:
            yield pair
        finally:
            for process in pair.processes:
                process.kill()
                process.wait()
            pair.link.close()


def inject(artifact: Path, fault: Fault) -> End:
    """Runs two hosts, injects the fault, and waits for their end."""
    with _pair(artifact, fault) as pair:
        awaited = {"starting": "waiting for", "loading": "are there", "running": "following host 0"}[fault.phase]
        number = 1 if fault.phase == "running" else fault.victim
        there = pair.until(number, "slowed" if fault.kind == "slowed" else awaited)
        if fault.kind != "slowed":
            time.sleep(fault.wait)
        running = there and all(process.poll() is None for process in pair.processes)
        begun = time.monotonic()
        victim = pair.processes[fault.victim]
        if fault.kind == "partitioned":
            pair.link.cut()
        elif fault.kind != "slowed":
            victim.send_signal(signal.SIGKILL if fault.kind == "killed" else signal.SIGSTOP)
        limit = (START_TIMEOUT if fault.phase == "starting" else HOST_TIMEOUT) + STATED
        seconds = _ended([each for each in pair.processes if each is not victim or fault.kind != "stopped"], begun)
        if fault.kind == "stopped":
            again = time.monotonic()
            victim.send_signal(signal.SIGCONT)
            seconds = max(seconds, _ended([victim], again))
        texts = [log.read_text() for log in pair.logs]
        codes = [process.poll() for process in pair.processes]
    wrong = [] if running else ["a host ended before the fault"]
    wrong += [f"{seconds:.1f} s, not {limit}"] if seconds > limit else []
    for number, (text, code) in enumerate(zip(texts, codes, strict=True)):
        if fault.kind == "killed" and number == fault.victim:
            wrong += [] if code == -signal.SIGKILL else [f"host {number} ended with {code}"]
        elif code != 1 or not CLEAR.search(text) or "Traceback" in text:
            wrong.append(f"host {number} ended with {code}: {text[-600:]}")
    return End(seconds, [_last(text) for text in texts], wrong)


# an error that names a host and, after a wait, the time
CLEAR = re.compile(
    r"^error: (?:host \d: (?:expected its process to run, found that it ended|no sign of life for \S+ s|"
    r"took none of its steps for \S+ s|gave no part of a step for \S+ s|expected it at \S+ within \S+ s, found .+)|"
    r"hosts: expected 2 within \S+ s, found no word of host 1|host \d ended: .+)",
    re.MULTILINE,
)


def _ended(processes: list["subprocess.Popen[bytes]"], begun: float) -> float:
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
    return time.monotonic() - begun


def _last(text: str) -> str:
    errors = re.findall("^error: (.*)", text, re.MULTILINE)
    return errors[-1] if errors else ""
