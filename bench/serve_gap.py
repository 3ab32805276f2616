"""What a flood of prompts that can never fit costs the others: /health and a running stream, with it and without."""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.inputs import artifact
from bench.report import machine, say, show, table
from bench.servers import served
from ling3export.compile.build import DEMO

OVERSIZE = 4_000_000  # bytes of a body that cannot fit

PHASES = ("before", "flood of texts", "between", "flood of lists", "after")
HEADERS = {"Content-Type": "application/json"}
# A text, and a list that is mostly structure: the longest to parse of all bodies of its size.
BODIES = {
    "flood of texts": lambda: json.dumps({"model": "m", "prompt": "a" * OVERSIZE}),
    "flood of lists": lambda: '{"model": "m", "prompt": [' + "[]," * (OVERSIZE // 3 - 20) + "[]]}",
}


class Watch:
    """Two clients that note the longest time in which nothing came: of /health, and between pieces of a stream.

    Attributes:
        longest: Seconds, by phase and client.
        counts: Answers of /health, and pieces.
    """

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._phase, self._over = "start", False
        self.longest: dict[str, dict[str, float]] = {}
        self.counts: dict[str, Counter[str]] = {}
        self._threads = [threading.Thread(target=each) for each in (self._health, self._stream)]
        for thread in self._threads:
            thread.start()

    def enter(self, phase: str) -> None:
        """What is noted from now on belongs to ``phase``."""
        self.longest[phase], self.counts[phase] = {"health": 0.0, "stream": 0.0}, Counter()
        self._phase = phase

    def end(self) -> None:
        """Ends the clients."""
        self._over = True
        for thread in self._threads:
            thread.join()

    def _note(self, client: str, seconds: float) -> None:
        if self._phase in self.longest:
            self.longest[self._phase][client] = max(self.longest[self._phase][client], seconds)
            self.counts[self._phase][client] += 1

    def _health(self) -> None:
        while not self._over:
            begun = time.perf_counter()
            connection = http.client.HTTPConnection(self._host, timeout=60)
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            connection.close()
            self._note("health", time.perf_counter() - begun)
            time.sleep(0.01)

    def _stream(self) -> None:
        ask = {"model": "m", "prompt": [1, 2], "max_tokens": 1500, "stream": True, "ignore_eos": True}
        while not self._over:
            connection = http.client.HTTPConnection(self._host, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(ask), HEADERS)
            answer = connection.getresponse()
            assert answer.status == 200
            answer.readline()
            last = time.perf_counter()
            while not self._over and (line := answer.readline()):
                if line != b"\n":
                    self._note("stream", time.perf_counter() - last)
                    last = time.perf_counter()
            connection.close()


def flood(url: str, phase: str, seconds: float, clients: int) -> dict[str, int]:
    """Clients that send a body that is refused, again and again; how they were answered."""
    host, body, answers = urlsplit(url).netloc, BODIES[phase](), Counter[str]()
    until = time.monotonic() + seconds

    def client() -> None:
        while time.monotonic() < until:
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.request("POST", "/v1/completions", body, HEADERS)
            answers[str(connection.getresponse().status)] += 1
            connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(answers)


def main(given: Path | None, clients: int, seconds: float, apart: bool) -> dict[str, Any]:
    """Measures, and prints.

    Args:
        given: Checkpoint; None for the demo.
        clients: Of the flood.
        seconds: Of each phase.
        apart: As `served` has it: what the server takes from the others is then told apart from what the flood's
            clients take of their processors.
    """
    source = (given or DEMO).resolve()
    folder = artifact(source, "serve-tp1", ["--paddings", "16,128,512", "--decode-paddings", "1,16,64", "--tp", 1])
    load, answers = machine(), {}
    with served(folder, apart=apart) as url:
        watch = Watch(url)
        time.sleep(2)
        for phase in PHASES:
            say(f"{phase}: {seconds:g} s")
            watch.enter(phase)
            if phase not in BODIES:
                time.sleep(seconds)
                continue
            command = [sys.executable, "-m", "bench.serve_gap", url, phase, str(seconds), str(clients)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            answers[phase] = json.loads(done.stdout)
        watch.end()
    result = {
        "benchmark": "serve-gap",
        "machine": load,
        "clients": clients,
        "seconds": seconds,
        "apart": apart,
        "answers": answers,
        "longest_s": watch.longest,
        "counts": watch.counts,
    }
    rows = [
        [
            phase,
            *(1e3 * watch.longest[phase][name] for name in ("health", "stream")),
            *(watch.counts[phase][name] for name in ("health", "stream")),
            answers.get(phase, ""),
        ]
        for phase in PHASES
    ]
    head = ["", "/health, longest ms", "stream, longest ms", "answers", "pieces", "flood's answers"]
    where = ", server and clients on processors of their own" if apart else ""
    show(f"{clients} clients that send {OVERSIZE:,} bytes to {source.name} at TP=1{where}", [table(head, rows)], result)
    return result


if __name__ == "__main__":
    print(json.dumps(flood(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))))
