"""A server under many clients that leave, break off and come too often: what they get, and how long it takes them.

Latencies under a chosen load are measured by ``ling3-runner bench serve``.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from bench.engine import DEMO
from bench.inputs import artifact
from bench.report import machine, say, show, table
from ling3export.artifacts.manifest import read_manifest
from ling3export.runners.bench_serving.metrics import Spread

LEAVES = 0.05  # of the clients' calls are left before their end
STREAMS = 0.5  # are streams
PAUSE = 0.2  # seconds that a client waits after 429
FAULTS = 0.2  # of the calls have a fault, if any have: see Load
OVERSIZE = 4_000_000  # bytes of a prompt that cannot fit
Served = TypeVar("Served")


class Load:
    """Clients that call again and again until the time is over.

    A call with a fault has a prompt that cannot fit (400, or 503 where too many come), or breaks off within its headers
    or its body (``dropped``).

    Attributes:
        answers: How many calls ended how: a status, ``left``, or the name of an error.
        seconds: Of each call that was answered whole.
        first: Of those that were streams, seconds until the first token's event.
        tokens: Generated for those that were answered whole.
    """

    def __init__(self, url: str, model: str, vocabulary: int, until: float, faults: float = 0.0) -> None:
        self.answers: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.first: list[float] = []
        self.tokens = 0
        self._url, self._model, self._vocabulary, self._until = url, model, vocabulary, until
        self._faults = faults

    async def run(self, clients: int) -> None:
        """Runs them."""
        limits = httpx2.Limits(max_connections=clients, max_keepalive_connections=clients)
        async with httpx2.AsyncClient(timeout=300, limits=limits) as http:
            await asyncio.gather(*(self._client(http, random.Random(number)) for number in range(clients)))

    async def _client(self, http: httpx2.AsyncClient, rng: random.Random) -> None:
        while time.perf_counter() < self._until:
            ask = {
                "model": self._model,
                "prompt": [rng.randrange(self._vocabulary) for _ in range(rng.randint(8, 128))],
                "max_tokens": rng.randint(8, 64),
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": rng.random() < STREAMS,
            }
            try:
                if rng.random() < self._faults:
                    await self._fault(http, rng)
                elif ask["stream"] and rng.random() < LEAVES / STREAMS:
                    await self._leave(http, ask)
                else:
                    await self._ask(http, ask)
            except httpx2.HTTPError as error:
                self.answers[type(error).__name__] += 1

    async def _ask(self, http: httpx2.AsyncClient, ask: dict[str, Any]) -> None:
        started, first, over = time.perf_counter(), 0.0, True
        async with http.stream("POST", self._url, json=ask) as answer:
            async for line in answer.aiter_lines():
                if ask["stream"] and line:
                    first, over = first or time.perf_counter() - started, line == "data: [DONE]"
        if answer.status_code == 429:
            self.answers["429"] += 1
            await asyncio.sleep(PAUSE)
            return
        self.answers[str(answer.status_code) if over else "cut short"] += 1
        if answer.status_code == 200 and over:
            self.seconds.append(time.perf_counter() - started)
            self.tokens += ask["max_tokens"]
            if ask["stream"]:
                self.first.append(first)

    async def _fault(self, http: httpx2.AsyncClient, rng: random.Random) -> None:
        if rng.random() < 0.5:
            ask = {"model": self._model, "prompt": "a" * OVERSIZE}
            self.answers[str((await http.post(self._url, json=ask)).status_code)] += 1
            return
        address = httpx2.URL(self._url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request += b"Content-Length: 1000\r\n\r\n{"
        writer.write(request[: rng.randrange(len(request) + 1)])
        await asyncio.sleep(rng.random())
        writer.close()
        self.answers["dropped"] += 1

    async def _leave(self, http: httpx2.AsyncClient, ask: dict[str, Any]) -> None:
        async with http.stream("POST", self._url, json=ask) as answer:
            if answer.status_code == 200:
                async for _ in answer.aiter_lines():
                    break
        self.answers["left" if answer.status_code == 200 else str(answer.status_code)] += 1


@contextmanager
def served(folder: Path, *options: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server of an artifact as the model ``m``, its address and its process; it ends with the block, in order."""
    command = [sys.executable, "-m", "ling3export.runners.cli", "serve", folder, "--port", 0, "--model", "m", *options]
    environment = {name: value for name, value in os.environ.items() if name != "LING3_API_KEY"}
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip(), server
    finally:
        server.terminate()
        server.wait(120)


@contextmanager
def beside(server: AbstractContextManager[Served], *, apart: bool) -> Iterator[Served]:
    """A server that starts with the block, and is called from it.

    Args:
        server: Starts it.
        apart: It has the first half of the processors for itself, and this process and those that it starts meanwhile
            have the other: else a client that computes much takes its time from the server that it measures.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = (len(cores) + 1) // 2
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        if apart:
            os.sched_setaffinity(0, cores[:half])
        found = stack.enter_context(server)
        if apart:
            os.sched_setaffinity(0, cores[half:] or cores)
        yield found


def counters(url: str) -> dict[str, str]:
    """A server's metrics by name and labels."""
    text = httpx2.get(f"{url}/metrics").text
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def measure(folder: Path, clients: int, seconds: float, max_requests: int, faults: bool) -> dict[str, Any]:
    """Starts a server, loads it, and ends it."""
    with served(folder, "--max-requests", max_requests) as (url, server):
        vocabulary = read_manifest(folder).vocab_size
        say(f"{clients} clients for {seconds:g} s at {url}")
        started = time.perf_counter()
        load = Load(f"{url}/v1/completions", "m", vocabulary, started + seconds, FAULTS if faults else 0.0)
        asyncio.run(load.run(clients))
        took = time.perf_counter() - started
        metrics = counters(url)
    every, first = Spread.of(load.seconds), Spread.of(load.first)
    return {
        "seconds": took,
        "answers": dict(load.answers),
        "tokens_per_second": load.tokens / took,
        "median_ms": every.median,
        "p99_ms": every.p99,
        "first_median_ms": first.median,
        "first_p99_ms": first.p99,
        "slots_free": [metrics["ling3_slots_free"], metrics["ling3_slots"]],
        "pages_free": [metrics["ling3_pages_free"], metrics["ling3_pages"]],
        "exit_code": server.returncode,
    }


def main(given: Path | None, clients: int, seconds: float, max_requests: int, tp: int, faults: bool) -> dict[str, Any]:
    """Measures, and prints.

    Raises:
        SystemExit: A call got neither its answer nor 429 (nor, of those with faults, their refusal), or something is
            still held at the end.
    """
    source = (given or DEMO).resolve()
    options = ["--paddings", "16,128,512", "--decode-paddings", "1,16,64", "--tp", tp]
    found = measure(artifact(source, f"serve-tp{tp}", options), clients, seconds, max_requests, faults)
    result = {
        "benchmark": "serve",
        "machine": machine(),
        "tp": tp,
        "clients": clients,
        "max_requests": max_requests,
        **found,
    }
    names = ("median_ms", "p99_ms", "first_median_ms", "first_p99_ms", "tokens_per_second")
    show(
        f"{clients} clients of {source.name} at TP={tp}, {max_requests} prompts at once, for {found['seconds']:.0f} s: "
        f"{found['answers']}",
        [table(names, [[found[name] for name in names]])],
        result,
    )
    expected = {"200", "429", "left", *(("400", "503", "dropped") if faults else ())}
    kept = all(free == every for free, every in (found["slots_free"], found["pages_free"]))
    if set(found["answers"]) - expected or found["exit_code"] or not kept:
        raise SystemExit("serve: expected answers and 429 alone, found others, or slots or pages that are not free")
    return result
