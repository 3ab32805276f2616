"""Our servers and others' that a benchmark starts and calls; each ends with its block."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench.report import say
from bench.server_process import RUNNER, ServerProcess

WAIT = 180.0  # seconds until a server listens, and until it answers


@contextmanager
def served(folder: Path, *options: object, apart: bool = False) -> Iterator[str]:
    """Serves an artifact as the model ``m``; gives the server's address.

    Args:
        folder: The artifact.
        options: Further options of the command.
        apart: The server runs on the first half of the processors; this process and its new children use the other
            half. Otherwise a client that computes much would slow the server.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = (len(cores) + 1) // 2
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        if apart:
            os.sched_setaffinity(0, cores[:half])
        words = [*RUNNER, "serve", folder, "--port", 0, "--model", "m", *options]
        url = stack.enter_context(ServerProcess("server", words, shown=True)).address()
        if apart:
            os.sched_setaffinity(0, cores[half:] or cores)
        yield url


@contextmanager
def foreign(
    command: Sequence[object], url: str, variables: Mapping[str, str] = MappingProxyType({}), *, shown: bool = False
) -> Iterator[str]:
    """Starts another project's server, which prints no address, and waits until its ``/health`` answers."""
    say(f"$ {' '.join(map(str, command))}")
    apart = {"PYTHONPATH": ""} | dict(variables)  # it has its own packages
    with ServerProcess(Path(str(command[0])).name, command, apart, shown=shown, tells=False) as server:
        end = time.monotonic() + WAIT
        while True:
            try:
                asked(url, "/health")
                break
            except (OSError, urllib.error.URLError):
                if server.process.poll() is not None or time.monotonic() > end:
                    raise server.missing() from None
                time.sleep(0.1)
        yield url


def asked(url: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    """The body of a server's answer to a GET, or to a POST of a JSON object."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=WAIT) as answer:
        read: bytes = answer.read()
    return read


def metric(url: str, name: str, **labels: str) -> float:
    """A value in a server's ``/metrics``; 0 if it is missing."""
    families = text_string_to_metric_families(asked(url, "/metrics").decode())
    samples = (sample for family in families for sample in family.samples)
    return next((row.value for row in samples if row.name == name and row.labels == labels), 0.0)
