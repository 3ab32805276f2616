"""Processes that a build starts and stops, and how a signal stops the build itself."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import ling3export

# Settings of jax that a process of ours may inherit. All others could change what is built without a trace in the
# fingerprint: JAX_ENABLE_X64, JAX_DEFAULT_MATMUL_PRECISION, JAX_DEBUG_NANS, …
INHERITED = frozenset({"JAX_NUMPY_DTYPE_PROMOTION", "JAX_TRACEBACK_FILTERING"})


def command(module: str, *arguments: str) -> list[str]:
    """Runs ``module`` with this Python; what lies in the working directory (a user's json.py) is not importable."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Ours without the user's settings of jax; a child finds this package as we did, installed or a bare checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_") or name in INHERITED}
    paths = [*(path for path in sys.path if path), str(Path(ling3export.__file__).parents[1])]
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def ending(code: int) -> str:
    """How a process ended, from its return code: ``ended with code 1`` or ``was killed by SIGKILL``."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


@contextmanager
def unwinding() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP end this process as an exception does: children end, folders are removed.

    A signal that is ignored (nohup) stays ignored; a second one too, for ``timeout`` sends each twice. Exits with
    128 + the signal's number.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
