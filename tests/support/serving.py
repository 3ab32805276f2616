"""`ling3-runner serve` as a process, and its application in this process, for tests that are clients."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2
import pytest

from ling3export.runners.engine.engine import Engine
from ling3export.runners.serve.app import Policy, application
from ling3export.runners.serve.run import bound, http_server
from ling3export.runners.text.tokenizer import TokenizerFiles

RUNNER = [sys.executable, "-m", "ling3export.runners.cli"]
WAIT = 60  # seconds, for operations that take a few
LATE = 20  # seconds, for operations that take fractions of one


class Server:
    """A server on a port that the system chose; use it in a ``with`` statement.

    Attributes:
        process: The server's process.
        url: The address that it printed.
    """

    def __init__(
        self,
        artifact: Path,
        *options: object,
        runner: Sequence[object] = RUNNER,
        environment: dict[str, str] | None = None,
        **variables: str,
    ) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed on leaving)
        command = [*runner, "serve", artifact, "--port", 0, *options]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            env=(environment or os.environ) | variables,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()  # printed when clients may connect
        assert self.url.startswith("http://127.0.0.1:"), self.said()

    def said(self) -> str:
        """The server's stderr."""
        self._stderr.seek(0)
        return self._stderr.read()

    def metrics(self, **headers: str) -> dict[str, float]:
        """The metrics by name and labels."""
        answer = httpx2.get(f"{self.url}/metrics", headers=headers)
        assert answer.status_code == 200
        lines = (line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def until(self, name: str, value: float, **headers: str) -> dict[str, float]:
        """Waits until a metric has a value; returns all metrics at that moment."""
        end = time.monotonic() + WAIT
        while (found := self.metrics(**headers)).get(name) != value:
            assert time.monotonic() < end, f"{name} is {found.get(name)}, not {value}"
            time.sleep(0.02)
        return found

    def stop(self) -> int:
        """Sends SIGTERM, as a supervisor does; returns the exit code."""
        self.process.terminate()
        return self.process.wait(WAIT)

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as ends:
            ends.callback(self._stderr.close)
            assert self.process.stdout is not None
            ends.callback(self.process.stdout.close)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def serving(
    app: Any, grace: float = LATE, connections: int = 512, listener: socket.socket | None = None
) -> Iterator[tuple[str, int]]:
    """Serves an application in this process and yields its address; the server is stopped at the end of the block.

    Args:
        app: The application.
        grace: Seconds that its calls have to end.
        connections: Most connections at once.
        listener: The listening socket; by default at a free port.
    """
    with bound("127.0.0.1", 0) if listener is None else contextlib.nullcontext(listener) as listener:
        listener.listen()
        server = http_server(app, connections, grace)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def data_lines(lines: Iterator[str]) -> Iterator[str]:
    """The data of server-sent events."""
    return (line.removeprefix("data: ") for line in lines if line)


def asked(
    engine: Engine, policy: Policy, path: str, body: Any = None, *, method: str = "POST", **headers: str
) -> httpx2.Response:
    """Sends one request to the application in this process; ``body`` is sent as JSON unless it is bytes."""
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} if content is not None else {}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}

    encoded = {name: value.encode("latin-1") for name, value in given.items()}
    return answered(application(engine, policy), method, path, content=content, headers=encoded)


def answered(app: Any, method: str, path: str, **how: Any) -> httpx2.Response:
    """Sends one request to an application in this process; ``how`` are arguments of httpx."""

    async def ask() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, **how)

    return asyncio.run(ask())


def error_of(message: str, kind: str, code: str) -> dict[str, Any]:
    """OpenAI's error object for an error that no field caused."""
    return {"message": message, "type": kind, "param": None, "code": code}


def prompting(monkeypatch: pytest.MonkeyPatch, template: str) -> Callable[[str], None]:
    """Gives models this chat template; returns a function that sets the rendered prompt, whatever the messages are."""

    def prompt(text: str) -> None:
        monkeypatch.setattr(TokenizerFiles, "template_text", template)
        monkeypatch.setattr(TokenizerFiles, "render_chat", lambda *_, **__: text)

    return prompt
