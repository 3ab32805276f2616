"""Python's stacks of all threads on stderr, by faulthandler: after a crash, after SIGUSR1, and when a start hangs."""

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager

SLOW_START = 60.0  # seconds: a start takes seconds, unless it compiles

_shown = False


@contextmanager
def shown() -> Iterator[None]:
    """For commands: within the block, a crash in native code, SIGUSR1 and a hanging start print the stacks."""
    global _shown
    if not faulthandler.is_enabled():
        faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2)
    _shown = True
    try:
        yield
    finally:
        _shown = False


@contextmanager
def if_slow(seconds: float = SLOW_START) -> Iterator[None]:
    """Prints the stacks once if the block takes longer. Does nothing outside of :func:`shown`.

    faulthandler has one timer for the whole process. It belongs to the program that imports us, not to us.
    """
    if not _shown:
        yield
        return
    faulthandler.dump_traceback_later(seconds, file=2)
    try:
        yield
    finally:
        expect_slow()


def expect_slow() -> None:
    """Ends the wait of :func:`if_slow`: the rest of the block compiles, which may take minutes."""
    if _shown:
        faulthandler.cancel_dump_traceback_later()
