"""Starts a server's engine again after a failed step, a bounded number of times."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.load.loader import say

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine

WINDOW = 600.0  # seconds in which restarts are counted
PAUSE = 0.2  # seconds between two looks


@contextmanager
def supervised(engine: "Engine", restarts: int, report: Callable[[str], None] = say) -> Iterator[None]:
    """Within the block, a stopped engine is restarted at most ``restarts`` times in WINDOW seconds.

    An engine that stalled is restarted once its call has returned. Where a restart fails, or would be one too many,
    the engine stays stopped, and a line says so.
    """
    left = threading.Event()
    watch = threading.Thread(target=_watch, args=(engine, restarts, report, left), name="ling3-supervisor", daemon=True)
    if restarts:
        watch.start()
    try:
        yield
    finally:
        left.set()
        if restarts:
            watch.join()


def _watch(engine: "Engine", restarts: int, report: Callable[[str], None], left: threading.Event) -> None:
    done: deque[float] = deque(maxlen=restarts)
    refused = ""
    while not left.wait(PAUSE):
        if (error := engine.stopped) is None:
            continue
        if len(done) == restarts and time.monotonic() - done[0] < WINDOW:
            report(f"serve: {error.message}: it stays stopped after {restarts} restarts in {WINDOW:g} s")
            return
        try:
            failed = engine.restart()
        except EngineStopped as still:
            if still.message != refused:
                report(f"serve: {still.message}")
            refused = still.message
            continue
        done.append(time.monotonic())
        report(f"serve: {error.message}: restarted, {failed} requests failed")
