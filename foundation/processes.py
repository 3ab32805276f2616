"""Child processes of this package: how they start, and the one pipe to each."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import IO, Any, NoReturn

import ling3export
from ling3export.foundation.errors import ArtifactError, Ling3Error, MisfitError

# Settings of jax that a process of ours may inherit. All others could change what is built without a trace in the
# fingerprint: JAX_ENABLE_X64, JAX_DEFAULT_MATMUL_PRECISION, JAX_DEBUG_NANS, …
INHERITED = frozenset({"JAX_NUMPY_DTYPE_PROMOTION", "JAX_TRACEBACK_FILTERING"})
SHOWN = 1000  # characters of a dead child's stderr in a message
LOOPBACK = "127.0.0.1"
START_TIMEOUT = 120.0  # seconds for all processes of a target of several hosts to start, on a busy machine


@dataclass(frozen=True)
class Failure:
    """The reason why a piece of work failed, in a form that goes through a pipe and into a file."""

    error: str
    hint: str | None = None
    kind: str | None = None  # the name of the error's class; None if a process died

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        if isinstance(error, Ling3Error):
            return cls(error.message, error.hint, type(error).__name__)
        return cls(f"{type(error).__name__}: {error}")


class Child:
    """A process of this package at the other end of a pipe that carries one JSON object a line, both ways.

    The child and the processes that it starts end when its stdin does, so none outlives this process; leaving the
    ``with`` block kills them.

    Args:
        module: Runs as ``python -m``, and talks through :class:`Parent`.
        variables: Additional environment variables.
        shown: Its stderr is ours; otherwise the end of it is kept for :meth:`ended`.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(
        self, module: str, variables: Mapping[str, str] = MappingProxyType({}), *, shown: bool = False
    ) -> None:
        # A file, because a pipe that nobody reads would fill up and block the child.
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if shown else self._errors,
            text=True,
            env=environment() | dict(variables),
            process_group=0,  # with the processes that it starts
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self.kill()
        with contextlib.suppress(OSError):  # what a dead child has not read cannot be flushed
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one message; that the child is dead shows when its reply is received."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """The next message; None once the child has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line.endswith("\n") else None

    def ended(self) -> tuple[int, str]:
        """Waits for the end: the return code, and ``was killed by SIGKILL: `` with the end of the child's stderr."""
        code = self._process.wait()
        self._errors.seek(0)
        stderr = self._errors.read()[-SHOWN:].strip() or "nothing was printed"
        return code, f"{ending(code)}: {stderr}"


class Parent:
    """The other end of :class:`Child`, in the process that it started: messages from stdin, replies to stdout.

    From now on all other writes to stdout go to stderr. This process ends with stdin, at once and in the middle of its
    work: the process that started it has all replies, or is gone.
    """

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._messages: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._messages.put(line)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    def receive(self) -> dict[str, Any]:
        return dict(json.loads(self._messages.get()))

    def send(self, message: Mapping[str, Any]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()


def answer(work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Does one job for the process that started this one; :func:`replied` is the other end."""
    parent = Parent()
    job = parent.receive()
    try:
        parent.send(work(job))
    except Ling3Error as error:
        parent.send({"refused": str(error), "misfit": isinstance(error, MisfitError)})


def replied(child: Child, failure: str) -> dict[str, Any]:
    """The result of a child's one job.

    Args:
        child: Runs :func:`answer`, and has its job.
        failure: What an error says before the reason.

    Raises:
        MisfitError: The job ended with one.
        ArtifactError: The job ended with any other error of ours, or the child with none.
    """
    reply = child.receive()
    if reply is None:
        raise ArtifactError(f"{failure}: a process that {child.ended()[1]}")
    if "refused" in reply:
        raise (MisfitError if reply["misfit"] else ArtifactError)(f"{failure}: {reply['refused']}")
    return reply


def command(module: str, *arguments: str) -> list[str]:
    """Runs ``module`` with this Python; files of the working directory (a user's json.py) are not importable."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Ours without the user's settings of jax; a child finds this package as we did, installed or a bare checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_") or name in INHERITED}
    paths = [*(path for path in sys.path if path), str(Path(ling3export.__file__).parents[1])]
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def leave(code: object) -> NoReturn:
    """Ends this process with a SystemExit's code after its threads and exit functions.

    Python's finalization and the destructors of libraries do not run. jaxlib 0.11.2 on cpu ended some processes by
    SIGABRT or SIGSEGV there, after everything had been printed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as an interpreter does
    atexit._run_exitfuncs()
    status = code if isinstance(code, int) else int(code is not None)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except ValueError:  # closed
            pass
        except OSError:  # its reader has gone, or the disk is full
            status = 120  # Python's own code for it
    os._exit(status)


def free_port() -> int:
    """A port of this machine's loopback device that was free a moment ago."""
    with contextlib.closing(socket.create_server((LOOPBACK, 0))) as server:
        return int(server.getsockname()[1])


def ending(code: int) -> str:
    """A return code in words: ``ended with code 1`` or ``was killed by SIGKILL``."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
