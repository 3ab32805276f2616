"""Waits for threads and processes."""

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


def until(
    wanted: Callable[[], Value], *, of: "subprocess.Popen[Any] | None" = None, seconds: float = 120, pause: float = 0.01
) -> Value:
    """Calls ``wanted`` until its value is true, and returns the value.

    Args:
        wanted: The condition.
        of: A process that must not end earlier.
        seconds: Time after which the test fails; long, since a machine may be stalled for a while.
        pause: Seconds between two calls.
    """
    end = time.monotonic() + seconds
    while not (found := wanted()):
        assert of is None or of.poll() is None, of.communicate()
        assert time.monotonic() < end
        time.sleep(pause)
    return found
