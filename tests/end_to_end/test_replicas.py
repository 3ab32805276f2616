"""Three replicas of the server with vllm-router before them; one gets kill -9 while many clients stream."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from ling3export.foundation.processes import free_port
from tests.support import toy_artifact
from tests.support.serving import WAIT, Server, data_lines

CLIENTS, TOKENS, PROMPTS = 6, 12, 10
BEFORE, BEHIND = 12, 24  # complete calls before a replica is killed, and after it
LONG = 150  # seconds, for operations of a few; the machine may be busy


@contextlib.contextmanager
def routed(policy: str, replicas: list[Server]) -> Iterator[str]:
    """The address of a router, once it sends calls to all replicas."""
    port = free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", port]
    command += ["--policy", policy, "--worker-urls", *(replica.url for replica in replicas)]
    command += ["--retry-max-retries", 30, "--health-failure-threshold", 1, "--health-check-timeout-secs", LONG]
    command += ["--health-check-interval-secs", 1, "--log-level", "error"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", free_port()]
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL) as process:
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + WAIT
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if httpx2.get(f"{url}/health").status_code == 200:
                        break
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


class Clients:
    """Streams one after the other from several threads, until it is stopped.

    Attributes:
        whole: The start time of each call that got all of its tokens, and whether they were right.
        broken: The start time of each other call, and the error that its client got.
    """

    def __init__(self, url: str, texts: Mapping[int, str]) -> None:
        self.url, self.texts, self.stop = url, texts, threading.Event()
        self.whole: list[tuple[float, bool]] = []
        self.broken: list[tuple[float, str]] = []

    def run(self, number: int) -> None:
        with httpx2.Client(timeout=LONG) as http:
            for turn in range(100_000):
                if self.stop.is_set():
                    return
                last = 1 + (number + turn) % PROMPTS
                began = time.monotonic()
                text, found = called(http, self.url, last)
                if found:
                    self.broken.append((began, found))
                    time.sleep(0.05)
                else:
                    self.whole.append((began, text == self.texts[last]))


def called(http: httpx2.Client, url: str, last: int) -> tuple[str, str]:
    """The streamed text for a prompt that ends in the token ``last``, and the error if there was one."""
    body = {"model": "toy", "prompt": [1, 2, last], "max_tokens": TOKENS, "temperature": 0, "stream": True}
    text = ""
    try:
        with http.stream("POST", f"{url}/v1/completions", json=body | {"ignore_eos": True}) as answer:
            if answer.status_code != 200:
                return text, f"status {answer.status_code}: {answer.read()[:200]!r}"
            for line in data_lines(answer.iter_lines()):
                if line == "[DONE]":
                    return text, ""
                text += json.loads(line)["choices"][0]["text"]
    except httpx2.TransportError as error:
        return text, type(error).__name__
    return text, "the end of the stream"


def until(condition: Callable[[], bool], clients: Clients) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, (len(clients.whole), clients.broken[:20])
        time.sleep(0.02)


@pytest.mark.extras
@pytest.mark.jit
def test_a_replica_that_is_killed_takes_its_running_streams_along_and_no_other_call():
    """With both policies: streams of the dead replica break off, and every later call is answered completely."""
    pytest.importorskip("vllm_router")
    artifact = toy_artifact.shared()
    with ThreadPoolExecutor(CLIENTS) as pool, contextlib.ExitStack() as stack:
        started = pool.map(lambda _: Server(artifact, "--model", "toy"), range(3))
        replicas = [stack.enter_context(server) for server in started]
        with httpx2.Client(timeout=LONG) as http:
            found = {last: called(http, replicas[0].url, last) for last in range(1, PROMPTS + 1)}
        assert {wrong for _, wrong in found.values()} == {""}
        texts = {last: text for last, (text, _) in found.items()}
        for policy in ("cache_aware", "round_robin"):
            with routed(policy, replicas) as url:
                clients = Clients(url, texts)
                stack.callback(clients.stop.set)  # the pool waits for its threads, even after a failed assertion
                running = [pool.submit(clients.run, number) for number in range(CLIENTS)]
                until(lambda clients=clients: len(clients.whole) >= BEFORE, clients)
                victim = replicas.pop(0)
                victim.process.send_signal(signal.SIGKILL)
                victim.process.wait(WAIT)
                gone = time.monotonic()
                before = len(clients.whole)
                until(lambda clients=clients, before=before: len(clients.whole) >= before + BEHIND, clients)
                clients.stop.set()
                for each in running:
                    each.result(WAIT)
                assert len(clients.broken) <= CLIENTS, clients.broken
                assert [found for began, found in clients.broken if began > gone] == []
                assert all(right for _, right in clients.whole)
                assert sum(began > gone for began, _ in clients.whole) >= BEHIND - CLIENTS
